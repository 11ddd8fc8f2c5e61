"""Bounded vectors: a clip and a ball that cannot be left, and the records that say so."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrp.errors import ConfigError
from fedrp.privacy.sensitivity import (
    Basis,
    ball_sensitivity,
    clip_to_norm,
    measured_norm_floor,
    project_to_ball,
)

TYPES = st.sampled_from([np.float32, np.float64])
BOUNDS = st.floats(-20, 20).map(lambda power: 10**power)


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    kind = draw(TYPES)
    width = 32 if kind is np.float32 else 64
    return draw(arrays(kind, st.integers(0, 40), elements=st.floats(width=width)))  # NaN and infinity included


def norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


@given(vectors(), BOUNDS)
def test_a_clipped_vector_is_never_longer_than_the_bound(vector: np.ndarray, bound: float) -> None:
    before = vector.copy()
    clipped = clip_to_norm(vector, bound)
    assert norm(clipped) <= bound
    assert clipped.dtype == vector.dtype
    assert clipped.shape == vector.shape
    np.testing.assert_array_equal(vector, before)


@given(st.integers(1, 2000), st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 2**32))
def test_clipping_keeps_short_vectors_and_the_direction_of_long_ones(
    size: int, scale: float, log_bound: float, seed: int
) -> None:
    vector = (10**scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)
    bound = 10**log_bound
    clipped = clip_to_norm(vector, bound)
    if norm(vector) <= bound:
        np.testing.assert_array_equal(clipped, vector)
    else:
        assert norm(clipped) == pytest.approx(bound, rel=1e-6)
        np.testing.assert_allclose(clipped / bound, vector / norm(vector), atol=1e-6)


@pytest.mark.parametrize(
    ("vector", "bound"),
    [
        ([0.0, 0.0], 1.0),
        ([3.0, 4.0], 0.0),
        ([math.nan, 1.0], 1.0),
        ([math.inf, 1.0], 1.0),
        ([-math.inf, math.nan], 1.0),
    ],
)
def test_the_table_of_edge_cases(vector: list[float], bound: float) -> None:
    assert clip_to_norm(np.array(vector), bound).tolist() == [0.0, 0.0]


def test_huge_and_tiny_numbers_neither_overflow_nor_vanish() -> None:
    assert norm(clip_to_norm(np.full(4, 1e300), 2.0)) == pytest.approx(2.0, rel=1e-6)
    assert norm(clip_to_norm(np.full(4, 1e-200), 1e-210)) == pytest.approx(1e-210, rel=1e-6)


@pytest.mark.parametrize("bound", [-1.0, math.inf, math.nan])
def test_a_bound_is_finite_and_not_negative(bound: float) -> None:
    with pytest.raises(ConfigError, match="bound="):
        clip_to_norm(np.ones(2), bound)


@given(vectors(), st.integers(0, 2**32), st.floats(-6, 6), st.floats(-8, 8))
def test_the_ball_cannot_be_left(vector: np.ndarray, seed: int, log_center: float, log_radius: float) -> None:
    center = (10**log_center * np.random.default_rng(seed).normal(size=vector.shape)).astype(vector.dtype)
    radius = 10**log_radius
    inside = project_to_ball(vector, center, radius)
    assert norm(inside.astype(np.float64) - center.astype(np.float64)) <= radius
    assert inside.dtype == vector.dtype


def test_the_ball_bounds_any_two_vectors_over_all_rounds() -> None:
    rng = np.random.default_rng(5)
    center = rng.normal(size=300).astype(np.float32)
    record = ball_sensitivity(0.25)
    one = other = center
    for _ in range(50):  # two worlds drift apart as they like
        one = project_to_ball(one + rng.normal(size=300).astype(np.float32), center, 0.25)
        other = project_to_ball(other - rng.normal(size=300).astype(np.float32), center, 0.25)
        assert norm(one.astype(np.float64) - other.astype(np.float64)) <= record.bound == 0.5
    assert record.basis is Basis.ENFORCED


def test_inside_the_ball_nothing_changes() -> None:
    center = np.linspace(-1, 1, 9, dtype=np.float32)
    near = center + np.float32(1e-3)
    np.testing.assert_array_equal(project_to_ball(near, center, 1.0), near)
    np.testing.assert_array_equal(project_to_ball(near, center, 0.0), center)
    np.testing.assert_array_equal(project_to_ball(np.full(9, np.nan, np.float32), center, 1.0), center)


def test_records_name_their_basis() -> None:
    measured = measured_norm_floor(5.0, 1.0)
    assert measured is not None
    assert measured.bound == 4.0
    assert measured.basis is Basis.ESTIMATED
    assert measured_norm_floor(1.0, 1.0) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: project_to_ball(np.ones(2), np.ones(3), 1.0),
        lambda: project_to_ball(np.ones(2), np.array([np.nan, 1.0]), 1.0),
    ],
)
def test_impossible_balls_are_refused(call: object) -> None:
    with pytest.raises(ConfigError):
        call()  # type: ignore[operator]
