"""The joint view of clients who share one matrix, and the distances that protect them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.errors import ConfigError
from fedrp.privacy.composition import renyi_epsilon
from fedrp.privacy.joint_view import (
    _mixed_delta,
    _two_sided_delta,
    distances_from_gram,
    distances_to_span,
    joint_delta,
    joint_epsilon,
)
from fedrp.privacy.projection_mechanism import exact_delta, exact_epsilon, highest_order, renyi_divergence


@pytest.mark.parametrize(
    ("level", "up", "down"), [(0.0, 0.3, 0.2), (1.5, 0.3, 0.2), (0.7, 4.0, 0.01), (3.0, 0.05, 0.4)]
)
def test_two_rows_have_a_closed_form(level: float, up: float, down: float) -> None:
    """Chi-square with 2 degrees is exponential, so the difference of two is a Laplace-like law."""
    expected = math.exp(-level / (2 * up)) * up / (up + down) * 2 * up / (1 + 2 * up)
    assert _two_sided_delta(level, up, down, 2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("part", [0.0, 0.35, 0.8])
def test_the_reduction_to_two_scalars_matches_real_projections(part: float) -> None:
    """Three clients, one matrix: the divergence of all their projections, sampled, against the two-scalar formula."""
    rows, draws, epsilon = 6, 60_000, 0.8
    rng = np.random.default_rng(7)
    others = rng.normal(size=(2, 5))
    inside = others.T @ rng.normal(size=2)
    outside = np.linalg.qr(np.column_stack([others.T, rng.normal(size=5)]))[0][:, 2]
    change = 0.5 * (part * outside + math.sqrt(1 - part**2) * inside / np.linalg.norm(inside))
    before = np.vstack([others, others.T @ np.array([0.3, -1.0]) + 1.0 * outside])  # distance 1
    after = before + np.vstack([np.zeros((2, 5)), change])

    def log_density(view: np.ndarray, vectors: np.ndarray) -> np.ndarray:  # view: draws x rows x clients
        gram = vectors @ vectors.T / rows
        quadratic = np.einsum("drk,kl,drl->d", view, np.linalg.inv(gram), view)
        return -quadratic / 2 - rows / 2 * np.linalg.slogdet(gram)[1]

    matrices = rng.normal(scale=rows**-0.5, size=(draws, rows, 5))
    view = matrices @ after.T
    loss = log_density(view, after) - log_density(view, before)
    excess = np.maximum(0.0, 1 - np.exp(epsilon - loss))
    error = excess.std() / math.sqrt(draws)
    ratio, kappa = 0.5, distances_to_span(after)[2]
    assert kappa == pytest.approx(1 + part * ratio)
    total = math.hypot(kappa + 1, ratio * math.sqrt(1 - part**2))
    grown, shrunk = (total + ratio) / 2, (total - ratio) / 2
    level = epsilon + rows * math.log(kappa)
    formula = _two_sided_delta(level, (grown**2 - 1) / 2, (1 - shrunk**2) / 2, rows)
    assert abs(excess.mean() - formula) < 4 * error
    mixed = _mixed_delta(epsilon, rows, ratio, part)
    assert formula * (1 - 1e-9) <= mixed <= joint_delta(epsilon, rows, ratio) * (1 + 1e-9)
    assert abs(excess.mean() - exact_delta(epsilon, rows, ratio)) > 4 * error  # the straight change would tell more


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 10, 300]),
    st.floats(-3, 1).map(lambda power: 10**power),
    st.floats(-10, -0.5).map(lambda power: 10**power),
    st.sampled_from([0.1, 0.25, 0.75, 0.95]),
)
def test_the_straight_change_is_the_worst_at_small_delta(rows: int, ratio: float, delta: float, part: float) -> None:
    epsilon = exact_epsilon(rows, ratio, delta)
    assert _mixed_delta(epsilon, rows, ratio, part) <= exact_delta(epsilon, rows, ratio) * (1 + 1e-7)
    assert joint_epsilon(rows, ratio, delta) == epsilon


def test_at_large_delta_a_change_inside_the_span_can_tell_more() -> None:
    assert joint_delta(0.0, 1, 2.0) == pytest.approx(0.5, abs=1e-9)
    assert exact_delta(0.0, 1, 2.0) == pytest.approx(0.48433, abs=1e-5)
    epsilon = joint_epsilon(1, 2.0, 0.485)
    assert epsilon > exact_epsilon(1, 2.0, 0.485) == 0.0
    assert joint_delta(epsilon, 1, 2.0) == pytest.approx(0.485, rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.floats(-4, 1).map(lambda power: 10**power), st.floats(0.001, 0.999), st.floats(0, 1))
def test_renyi_of_any_change_is_at_most_that_of_the_straight_one(ratio: float, fraction: float, part: float) -> None:
    """The theorem behind composing the joint view, in both orders of the two data sets; one row."""
    order = 1 + fraction * (highest_order(ratio) - 1)
    kappa, inside = 1 + part * ratio, ratio**2 * (1 - part**2)
    straight = renyi_divergence(order, 1, ratio)
    room = order - (order - 1) * (kappa**2 + order * inside)
    forward = -math.log(kappa) - math.log(room) / (2 * (order - 1))
    room = order * kappa**2 - (order - 1) * (1 + order * inside)
    backward = (2 * order * math.log(kappa) - math.log(room)) / (2 * (order - 1))
    assert forward <= straight * (1 + 1e-6) + 1e-12
    assert backward <= straight * (1 + 1e-6) + 1e-12


def test_the_renyi_formulas_of_the_joint_view_are_those_of_two_gaussians() -> None:
    order, ratio, part = 1.7, 0.4, 0.3
    kappa, inside = 1 + part * ratio, ratio * math.sqrt(1 - part**2)
    covariance = np.array([[1.0, inside], [inside, inside**2 + kappa**2]])
    mixed = np.linalg.inv(order * np.linalg.inv(covariance) + (1 - order) * np.eye(2))
    log_integral = 0.5 * (np.linalg.slogdet(mixed)[1] - order * np.linalg.slogdet(covariance)[1])
    room = order - (order - 1) * (kappa**2 + order * inside**2)
    assert log_integral / (order - 1) == pytest.approx(-math.log(kappa) - math.log(room) / (2 * (order - 1)))
    mixed = np.linalg.inv(order * np.eye(2) + (1 - order) * np.linalg.inv(covariance))
    log_integral = 0.5 * (np.linalg.slogdet(mixed)[1] - (1 - order) * np.linalg.slogdet(covariance)[1])
    room = order * kappa**2 - (order - 1) * (1 + order * inside**2)
    backward = (2 * order * math.log(kappa) - math.log(room)) / (2 * (order - 1))
    assert log_integral / (order - 1) == pytest.approx(backward)


def test_the_joint_epsilon_is_between_exact_and_renyi() -> None:
    for rows, ratio, delta in [(10, 0.01, 1e-5), (1, 3.0, 0.6), (1000, 0.1, 1e-3)]:
        proved = renyi_epsilon(lambda order: renyi_divergence(order, rows, ratio), delta, highest_order(ratio))  # noqa: B023
        assert exact_epsilon(rows, ratio, delta) <= joint_epsilon(rows, ratio, delta) <= proved


@pytest.mark.parametrize(("clients", "size"), [(1, 4), (2, 3), (5, 40), (6, 6), (7, 5)])
def test_distances_match_least_squares(clients: int, size: int) -> None:
    vectors = np.random.default_rng(clients).normal(size=(clients, size))
    expected = []
    for index, vector in enumerate(vectors):
        others = np.delete(vectors, index, axis=0).T
        solution = np.linalg.lstsq(others, vector, rcond=None)[0] if others.size else np.zeros(0)
        expected.append(np.linalg.norm(vector - others @ solution))
    assert distances_to_span(vectors) == pytest.approx(expected, abs=1e-12)
    lowered = distances_from_gram(vectors @ vectors.T)
    assert np.all(lowered <= distances_to_span(vectors) * (1 + 1e-12))
    if clients < size:
        assert lowered == pytest.approx(expected, rel=1e-6)


def test_the_gram_matrix_never_overstates_a_small_distance() -> None:
    rng = np.random.default_rng(1)
    for scale in (1e-3, 1e-6, 1e-8, 1e-10):
        vectors = rng.normal(size=(4, 30))
        vectors[1] = vectors[0] + scale * vectors[1]
        assert np.all(distances_from_gram(vectors @ vectors.T) <= distances_to_span(vectors) * (1 + 1e-9))


def test_clients_that_agree_have_no_distance() -> None:
    same = np.ones((3, 8))
    assert np.all(distances_to_span(same) == 0)
    assert np.all(distances_from_gram(same @ same.T) == 0)
    assert distances_to_span(np.zeros((2, 3))).tolist() == [0.0, 0.0]
    assert distances_to_span([[3.0, 4.0]]).tolist() == [5.0]


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[np.nan, 1.0]], np.zeros((0, 3))])
def test_distances_refuse_what_is_no_matrix(bad: object) -> None:
    with pytest.raises(ConfigError, match="shape="):
        distances_to_span(bad)  # type: ignore[arg-type]


def test_a_gram_matrix_is_symmetric() -> None:
    with pytest.raises(ConfigError, match="symmetric"):
        distances_from_gram([[1.0, 0.5], [0.0, 1.0]])
    with pytest.raises(ConfigError, match="symmetric"):
        distances_from_gram([[1.0, 0.5]])
