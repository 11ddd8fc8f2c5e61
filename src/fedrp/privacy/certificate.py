"""The consensus certificate (Theorem 1): from the uploaded projections, how far apart two clients' models can be.

The matrix of an upload is drawn after the models, so for each pair m ||z_i - z_j||^2 / ||w_i - w_j||^2 is chi-square
with m degrees of freedom. Where its lower tail is improbable, ||w_i - w_j|| cannot be much larger than ||z_i - z_j||.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv

from fedrp.errors import ConfigError
from fedrp.privacy import _checks
from fedrp.privacy.numerics import largest_distance

CERTIFICATE_CONFIDENCE = 0.95  # of the bound that is reported for a round


class ConsensusCertificate(NamedTuple):
    """Upper bounds on max_ij ||w_i - w_j||, each holding with probability at least `confidence`."""

    exact: float
    laurent_massart: float  # infinite where the inequality says nothing
    largest_projected: float  # max_ij ||z_i - z_j||
    pairs: int
    confidence: float


def consensus_certificate(projected: npt.ArrayLike, confidence: float) -> ConsensusCertificate:
    """The certificate for projections `projected` (K x m) made with one Gaussian matrix, entries N(0, 1/m).

    With beta = (1 - confidence) / pairs (union bound), d = max ||z_i - z_j||:

        exact            d sqrt(m / x), x the beta-quantile of chi-square with m degrees of freedom
        Laurent-Massart  d / sqrt(1 - eps), eps = 2 sqrt(ln(1/beta) / m), if that is below 1

    Guarantees: exact <= laurent_massart; scales with `projected`; the order of clients does not matter. Edge cases: one
    client or equal uploads give 0. The rounding of uploads is not covered: differences below it mean nothing.
    """
    matrix = np.asarray(projected, np.float64)
    if matrix.ndim != 2 or matrix.size == 0 or not np.isfinite(matrix).all():
        raise ConfigError(f"projected must be a finite K x m matrix, got shape={matrix.shape}")
    confidence = _checks.number("confidence", confidence, above=0, below=1)
    clients, rows = matrix.shape
    pairs = clients * (clients - 1) // 2
    if pairs == 0:
        return ConsensusCertificate(0.0, 0.0, 0.0, 0, confidence)
    largest = largest_distance(matrix)
    if largest == 0:
        return ConsensusCertificate(0.0, 0.0, 0.0, pairs, confidence)
    failure = (1 - confidence) / pairs
    quantile = 2 * float(gammaincinv(rows / 2, failure))
    shortfall = 2 * math.sqrt(math.log(1 / failure) / rows)
    loose = largest / math.sqrt(1 - shortfall) if shortfall < 1 else math.inf
    return ConsensusCertificate(largest * math.sqrt(rows / quantile), loose, largest, pairs, confidence)
