"""The projection mechanism: exact curve, the paper's bound, Renyi curve, privacy-loss distribution."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from fedrp.errors import ConfigError
from fedrp.privacy import projection_loss
from fedrp.privacy.bounds import bound
from fedrp.privacy.chi import log_chi_density
from fedrp.privacy.composition import advanced_epsilon, basic_epsilon, renyi_epsilon
from fedrp.privacy.events import Composed, ProjectedRelease
from fedrp.privacy.pld import composed_epsilon
from fedrp.privacy.projection_mechanism import (
    exact_delta,
    exact_epsilon,
    growing_log_delta,
    highest_order,
    paper_epsilon,
    renyi_divergence,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "privacy.json").read_text())

ROWS = st.integers(0, 60).map(lambda power: round(10 ** (power / 10)))  # 1 to 10^6
RATIOS = st.floats(-8, 2).map(lambda power: 10**power)
DELTAS = st.floats(-30, -0.05).map(lambda power: 10**power)


def shrinking_log_delta(epsilon: float, rows: int, ratio: float) -> float:
    """Logarithm of the hockey-stick divergence of norm r from norm q r, the direction that costs less.

    cdf(q^2 tau) - e^eps cdf(tau) with tau = (m ln q - eps) / c: the mean of 1 - e^(-rate (edge^2 - s^2)) over s < edge,
    by Gauss-Legendre panels that are narrow at the edge. The loss never exceeds m ln q.
    """
    rate = ratio * (1 + ratio / 2) / (1 + ratio) ** 2
    room = rows * math.log1p(ratio) - epsilon
    if room <= 0:
        return -math.inf
    edge = math.sqrt(room / rate)
    skip = max(0.0, edge - math.sqrt(rows) - 40)  # nearer to the edge the mass is negligible
    panels = skip + np.append(0, np.geomspace(1e-10, 1, 200) * min(edge - skip, 80))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    halves = np.diff(panels)[:, None] / 2
    offset = panels[:-1, None] + halves * (1 + nodes)
    excess = -np.expm1(-rate * offset * (2 * edge - offset)) * halves * weights
    return float(logsumexp(log_chi_density(edge - offset, rows), b=excess))


@pytest.mark.parametrize(
    ("rows", "ratio", "paper", "exact"),
    [(1000, 0.001, 1.23947, 0.14902), (10, 0.01, 0.64824, 0.22219)],
)
def test_the_published_values(rows: int, ratio: float, paper: float, exact: float) -> None:
    assert paper_epsilon(rows, ratio, 1e-5) == pytest.approx(paper, abs=5e-6)
    assert exact_epsilon(rows, ratio, 1e-5) == pytest.approx(exact, abs=5e-6)


@pytest.mark.parametrize("vector", VECTORS["projection_delta"][1:], ids=str)
def test_both_curves_match_60_digit_arithmetic(vector: list) -> None:
    epsilon, rows, ratio, growing, shrinking = vector
    got = growing_log_delta(float(epsilon), rows, float(ratio))
    assert got == pytest.approx(math.log(float(growing)), rel=1e-9, abs=1e-9)
    if shrinking is not None:
        got = shrinking_log_delta(float(epsilon), rows, float(ratio))
        assert got == pytest.approx(math.log(float(shrinking)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("vector", VECTORS["projection_epsilon"][1:], ids=str)
def test_epsilon_matches_60_digit_arithmetic(vector: list) -> None:
    rows, ratio, delta, epsilon = vector
    assert exact_epsilon(rows, float(ratio), float(delta)) == pytest.approx(float(epsilon), rel=1e-9)


@pytest.mark.parametrize("vector", VECTORS["renyi_one_row"][1:], ids=str)
def test_renyi_divergence_matches_quadrature(vector: list) -> None:
    order, ratio, divergence = (float(value) for value in vector)
    assert renyi_divergence(order, 1, ratio) == pytest.approx(float(divergence), rel=1e-9)
    assert renyi_divergence(order, 7, ratio) == pytest.approx(7 * float(divergence), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(ROWS, RATIOS, DELTAS)
def test_exact_is_never_above_the_paper_and_inverts_the_curve(rows: int, ratio: float, delta: float) -> None:
    epsilon = exact_epsilon(rows, ratio, delta)
    assert 0 <= epsilon <= paper_epsilon(rows, ratio, delta)
    if epsilon > 0:
        assert growing_log_delta(epsilon, rows, ratio) == pytest.approx(math.log(delta), rel=1e-8, abs=1e-8)
    else:
        assert exact_delta(0.0, rows, ratio) <= delta


@settings(max_examples=200, deadline=None)
@given(ROWS, RATIOS, st.floats(0, 12))
def test_growing_is_the_worse_direction(rows: int, ratio: float, deviations: float) -> None:
    epsilon = deviations * ratio * math.sqrt(2 * rows)
    assert shrinking_log_delta(epsilon, rows, ratio) <= growing_log_delta(epsilon, rows, ratio) + 1e-9


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_renyi_takes_the_larger_direction(ratio: float, fraction: float) -> None:
    order, q = 1 + fraction * (highest_order(ratio) - 1), 1 + ratio
    shrinking = math.log(q) + math.log(q**2 / (order * q**2 - (order - 1))) / (2 * (order - 1))
    assert renyi_divergence(order, 1, ratio) >= shrinking > 0
    assert renyi_divergence(highest_order(ratio), 1, ratio) == math.inf


@settings(max_examples=100, deadline=None)
@given(ROWS, RATIOS, DELTAS, st.floats(1.01, 10))
def test_epsilon_rises_with_ratio_and_rows_and_falls_with_delta(
    rows: int, ratio: float, delta: float, factor: float
) -> None:
    epsilon = exact_epsilon(rows, ratio, delta)
    assert exact_epsilon(rows, ratio * factor, delta) >= epsilon * (1 - 1e-9)
    assert exact_epsilon(math.ceil(rows * factor), ratio, delta) >= epsilon * (1 - 1e-9)
    assert exact_epsilon(rows, ratio, delta / factor) >= epsilon * (1 - 1e-9)


def test_real_projections_show_the_predicted_delta_and_no_other() -> None:
    """Distinguish w from w' = 1.2 w by z = A w alone. The false alarm rate of the test is below 1e-4 (4 deviations)."""
    rows, ratio, epsilon, draws = 12, 0.2, 1.0, 40_000
    rng = np.random.default_rng(20261115)
    w = rng.normal(size=6)

    def losses(vector: np.ndarray) -> np.ndarray:
        """ln of the density of z under norm q r over that under norm r."""
        matrices = rng.normal(scale=rows**-0.5, size=(draws, rows, len(w)))
        energy = ((matrices @ vector) ** 2).sum(axis=1) * rows / (w @ w)
        return energy / 2 * (1 - (1 + ratio) ** -2) - rows * math.log1p(ratio)

    grown, base = losses((1 + ratio) * w), losses(w)
    excess = np.maximum(0.0, 1 - np.exp(epsilon - grown))  # its mean is the hockey-stick divergence
    error = excess.std() / math.sqrt(draws)
    assert abs(excess.mean() - exact_delta(epsilon, rows, ratio)) < 4 * error
    assert abs(excess.mean() - exact_delta(epsilon, rows, ratio * 1.1)) > 4 * error
    assert abs(excess.mean() - exact_delta(epsilon * 1.1, rows, ratio)) > 4 * error
    shrunk = np.maximum(0.0, 1 - np.exp(epsilon + base))
    error = shrunk.std() / math.sqrt(draws)
    assert abs(shrunk.mean() - math.exp(shrinking_log_delta(epsilon, rows, ratio))) < 4 * error


@pytest.mark.parametrize("rows", [1, 10, 1000, 10_000])
@pytest.mark.parametrize("ratio", [1e-4, 1e-2, 0.5])
def test_one_round_of_the_loss_distribution_agrees_with_exact(rows: int, ratio: float) -> None:
    delta = 1e-6
    answer = bound("pld", ProjectedRelease(rows, ratio), delta)
    assert answer.upper == pytest.approx(answer.estimate, rel=0.01)
    assert answer.lower == pytest.approx(answer.estimate, rel=0.01)
    assert answer.lower <= exact_epsilon(rows, ratio, delta) <= answer.upper


@pytest.mark.parametrize(
    ("rows", "ratio", "rounds"), [(1, 0.01, 30), (10, 0.3, 5), (1000, 0.001, 30), (100, 1e-4, 300)]
)
def test_composition_brackets_the_closed_form_of_equal_rounds(rows: int, ratio: float, rounds: int) -> None:
    """T rounds that all grow by the same ratio are one release of T m rows; mixed directions may cost a little more."""
    answer = bound("pld", Composed(ProjectedRelease(rows, ratio), rounds), 1e-5)
    same_direction = exact_epsilon(rows * rounds, ratio, 1e-5)
    assert answer.lower <= same_direction <= answer.upper
    assert answer.lower > 0.95 * same_direction
    assert answer.upper < 1.10 * same_direction


def test_the_dominating_losses_dominate_both_directions_everywhere() -> None:
    rows, ratio = 5, 0.2
    losses = projection_loss.dominating_losses(rows, ratio, 1e-12)
    values = losses.interval * (losses.lowest + np.arange(len(losses.probabilities)))
    assert losses.probabilities.min() >= 0
    assert losses.probabilities.sum() + losses.infinite == pytest.approx(1, abs=1e-9)
    for epsilon in (0.0, 0.01, 0.2, 1.0, 3.0):
        here = losses.infinite - losses.probabilities @ np.expm1(np.minimum(epsilon - values, 0))
        exact = exact_delta(epsilon, rows, ratio)
        assert exact <= here <= exact * 1.001 + 2e-12
        # At -epsilon the shrinking direction is the larger: 1 - e^-eps + e^-eps delta_growing(eps).
        below = losses.infinite - losses.probabilities @ np.expm1(np.minimum(-epsilon - values, 0))
        assert below >= -math.expm1(-epsilon) + math.exp(-epsilon) * exact - 1e-12


def test_the_optimistic_losses_stay_below() -> None:
    losses = projection_loss.growing_losses(5, 0.2, 1e-12)
    assert not losses.pessimistic
    assert composed_epsilon(losses, 1, 1e-5) <= exact_epsilon(5, 0.2, 1e-5)


def test_renyi_conversion_beats_no_exact_value_and_composes() -> None:
    for rounds in (1, 30):
        converted = renyi_epsilon(lambda order: rounds * renyi_divergence(order, 10, 0.01), 1e-5, highest_order(0.01))  # noqa: B023
        exact = exact_epsilon(10 * rounds, 0.01, 1e-5)
        assert exact < converted < 1.3 * exact


def test_basic_and_advanced_composition_by_hand() -> None:
    def flat(_delta: float) -> float:
        return 0.1

    assert basic_epsilon(flat, 30, 1e-5) == pytest.approx(3.0)
    drift = 100 * 0.1 * math.expm1(0.1)
    assert advanced_epsilon(flat, 100, 1e-5) == pytest.approx(math.sqrt(200 * math.log(2e5)) * 0.1 + drift)
    seen: list[float] = []
    basic_epsilon(lambda delta: seen.append(delta) or 0.0, 4, 1e-4)
    advanced_epsilon(lambda delta: seen.append(delta) or 0.0, 4, 1e-4)
    assert seen == [2.5e-5, 1.25e-5]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: exact_epsilon(0, 0.1, 1e-5), "rows=0"),
        (lambda: exact_epsilon(2.5, 0.1, 1e-5), "rows=2.5"),  # type: ignore[arg-type]
        (lambda: exact_epsilon(10, -0.1, 1e-5), "ratio=-0.1"),
        (lambda: exact_epsilon(10, math.nan, 1e-5), "ratio=nan"),
        (lambda: exact_epsilon(10, 0.1, 0.0), "delta=0.0"),
        (lambda: exact_epsilon(10, 0.1, 1), "delta=1.0"),
        (lambda: exact_delta(-1.0, 10, 0.1), "epsilon=-1.0"),
        (lambda: exact_epsilon(10, "small", 1e-5), "ratio='small'"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_named_in_one_line(call: object, named: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        call()  # type: ignore[operator]
    assert named in str(caught.value)


def test_integers_and_numpy_numbers_count_as_numbers() -> None:
    assert exact_epsilon(10, 1, 1e-5) == exact_epsilon(np.int64(10), 1.0, np.float64(1e-5))
    assert exact_epsilon(10, 0, 1e-5) == 0.0
