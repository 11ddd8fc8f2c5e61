"""The privacy-loss distribution of one projected release, on a grid.

Under the larger norm the loss is L = c s^2 - m ln q with s chi distributed: the *growing* direction, density w(L). Over
several rounds the norm may grow in one and shrink in the next, so a composition needs one pair that dominates both
directions. It has losses w(l) at l > 0, e^-l w(l) at -l, and the rest of the mass at 0
(docs/privacy-proofs.md, Lemma 3).
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.privacy.chi import log_chi_density

FloatArray = npt.NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_BUCKETS_PER_DEVIATION = 200


class LossGrid(NamedTuple):
    """Probabilities of the losses (lowest + k) * interval, and of an infinite loss."""

    interval: float
    lowest: int
    probabilities: FloatArray
    infinite: float
    pessimistic: bool


def dominating_losses(rows: int, ratio: float, tail: float) -> LossGrid:
    """Losses of the pair that dominates both directions, rounded upwards; losses of probability `tail` become infinite.

    Each bucket's mass is split between its two ends so that both probabilities of the pair are kept ("connect the
    dots", Doroshenko et al. 2022): the hockey-stick curve is the chord above the true one, exact at the grid points.

    Guarantees: its hockey-stick divergence is never below `exact_delta`, alone or composed.
    """
    interval = _interval(rows, ratio)
    reach = math.sqrt(rows) + math.sqrt(2 * math.log(1 / tail))  # P[s > sqrt(m) + t] <= e^(-t^2/2)
    count = math.ceil(_loss_at(reach, rows, ratio) / interval)
    mass, upper_share = _buckets(rows, ratio, interval, 0, count)
    positive = np.append(0.0, upper_share)
    positive[1:-1] += (mass - upper_share)[1:]
    negative = positive[:0:-1] * np.exp(-interval * np.arange(count, 0, -1))
    zero = max(0.0, 1 - tail - positive.sum() - negative.sum())
    probabilities = np.concatenate([negative, [zero], positive[1:]])
    probabilities[probabilities < 1e-200] = 0.0  # 1e-190 in all, far inside the slack of `tail`
    return LossGrid(interval, -count, probabilities, tail, True)


def growing_losses(rows: int, ratio: float, tail: float) -> LossGrid:
    """Losses of the growing direction, rounded downwards; losses of probability `tail` at either end are left out.

    Guarantees: its hockey-stick divergence is never above `exact_delta`, alone or composed.
    """
    interval = _interval(rows, ratio)
    spread = math.sqrt(2 * math.log(1 / tail)) + 1  # E s >= sqrt(m) - 1
    first = math.floor(_loss_at(max(0.0, math.sqrt(rows) - spread), rows, ratio) / interval) + 1
    count = math.ceil(_loss_at(math.sqrt(rows) + spread, rows, ratio) / interval) - first
    mass, _ = _buckets(rows, ratio, interval, first, count)
    mass[mass < 1e-200] = 0.0
    return LossGrid(interval, first, mass, 0.0, False)


def _buckets(rows: int, ratio: float, interval: float, first: int, count: int) -> tuple[FloatArray, FloatArray]:
    """Mass of each bucket (low, low + interval]; its part E[1 - e^(low - L)] / (1 - e^-interval) for the upper end."""
    rate = ratio * (1 + ratio / 2)
    edges = np.sqrt((interval * np.arange(first, first + count + 1) + rows * math.log1p(ratio)) / rate)
    half_widths = np.diff(edges)[:, None] / 2
    s = edges[:-1, None] + half_widths * (1 + _NODES)
    mass = np.exp(log_chi_density(s, rows)) * _WEIGHTS * half_widths
    above = rate * (s - edges[:-1, None]) * (s + edges[:-1, None])  # L - low
    return mass.sum(axis=1), (mass * np.expm1(-above)).sum(axis=1) / math.expm1(-interval)


def _loss_at(s: float, rows: int, ratio: float) -> float:
    return ratio * (1 + ratio / 2) * s**2 - rows * math.log1p(ratio)


def _interval(rows: int, ratio: float) -> float:
    return ratio * (1 + ratio / 2) * math.sqrt(2 * rows) / _BUCKETS_PER_DEVIATION
