"""The consensus certificate: how far apart models are, from their projections."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedrp.errors import ConfigError
from fedrp.privacy.certificate import consensus_certificate

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "privacy.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["chi_square_quantile"][1:], ids=str)
def test_one_pair_is_certified_by_the_chi_square_quantile(vector: list) -> None:
    rows, probability, quantile = vector[0], float(vector[1]), float(vector[2])
    projected = np.zeros((2, rows))
    projected[1, 0] = 3.0
    certificate = consensus_certificate(projected, 1 - probability)
    assert certificate.exact == pytest.approx(3.0 * math.sqrt(rows / quantile), rel=1e-6)
    assert certificate.largest_projected == 3.0
    assert certificate.exact <= certificate.laurent_massart


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_coverage_of_one_pair_is_exactly_as_stated(rows: int) -> None:
    """The exact bound fails with probability 0.1, no more and no less; Laurent-Massart no more. 4 deviations."""
    draws, failure = 8000, 0.1
    rng = np.random.default_rng(rows)
    difference = np.array([0.0, 3.0, 4.0])  # of norm 5
    failures = {"exact": 0, "laurent_massart": 0, "shortened": 0}
    for projected in rng.normal(scale=rows**-0.5, size=(draws, rows, 3)) @ difference:
        certificate = consensus_certificate(np.stack([np.zeros(rows), projected]), 1 - failure)
        failures["exact"] += certificate.exact < 5
        failures["laurent_massart"] += certificate.laurent_massart < 5
        failures["shortened"] += 0.8 * certificate.exact < 5
    error = 4 * math.sqrt(failure * (1 - failure) / draws)
    assert abs(failures["exact"] / draws - failure) < error
    assert failures["laurent_massart"] / draws < failure + error
    assert failures["shortened"] / draws > failure + error  # the test can tell a bound that is 20 % too small


def test_coverage_of_all_pairs_together() -> None:
    rows, clients, draws, failure = 30, 6, 3000, 0.1
    rng = np.random.default_rng(11)
    models = rng.normal(size=(clients, 9))
    truth = max(np.linalg.norm(a - b) for a in models for b in models)
    missed = 0
    for matrix in rng.normal(scale=rows**-0.5, size=(draws, rows, 9)):
        missed += consensus_certificate(models @ matrix.T, 1 - failure).exact < truth
    assert missed / draws < failure + 4 * math.sqrt(failure * (1 - failure) / draws)


def test_scale_and_order_of_clients() -> None:
    projected = np.random.default_rng(2).normal(size=(5, 50))
    certificate = consensus_certificate(projected, 0.99)
    assert certificate.pairs == 10
    assert consensus_certificate(3 * projected, 0.99).exact == pytest.approx(3 * certificate.exact)
    assert consensus_certificate(projected[::-1], 0.99) == certificate
    assert consensus_certificate(projected, 0.999).exact > certificate.exact
    assert certificate.largest_projected < certificate.exact < certificate.laurent_massart


def test_nothing_to_tell_apart() -> None:
    assert consensus_certificate(np.ones((1, 4)), 0.9).exact == 0.0
    assert consensus_certificate(np.ones((3, 4)), 0.9).laurent_massart == 0.0


def test_few_rows_leave_laurent_massart_without_a_bound() -> None:
    certificate = consensus_certificate(np.array([[0.0], [1.0]]), 0.99)
    assert certificate.laurent_massart == math.inf
    assert math.isfinite(certificate.exact)


@pytest.mark.parametrize(("projected", "confidence"), [(np.ones(3), 0.9), ([[np.nan]], 0.9), (np.ones((2, 2)), 1.0)])
def test_bad_input_is_refused(projected: np.ndarray, confidence: float) -> None:
    with pytest.raises(ConfigError):
        consensus_certificate(projected, confidence)
