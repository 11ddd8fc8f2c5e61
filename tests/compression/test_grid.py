"""The grid on which uploads are summed: exact up to the stated error, and never an overflow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedrp.compression import grid
from fedrp.compression.grid import Scale
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import WireError


@settings(deadline=None)
@given(
    arrays(np.float32, (5, 3), elements=st.floats(-70, 70, width=32)),
    st.lists(st.integers(1, 1000), min_size=5, max_size=5),
    st.sampled_from([1e-3, 8.0, 64.0]),
)
def test_the_mean_is_exact_up_to_the_stated_error_and_never_wraps(
    vectors: np.ndarray, weights: list[int], bound: float
) -> None:
    call = Cohort(tuple(range(5)), tuple(weights))
    scale = grid.finest(bound, call)
    step = scale.step
    encoded = [grid.encode(v, scale, w) for v, w in zip(vectors, weights, strict=True)]
    total = np.zeros(3, np.uint32)
    for part, _ in encoded:
        total += part
    mean = grid.decode(total, sum(weights), step)
    true = np.average(np.clip(vectors.astype(np.float64), -bound, bound), axis=0, weights=weights)
    assert np.abs(mean - true).max() <= 5 * step / (2 * sum(weights)) + 2e-7 * bound
    assert sum(cut for _, cut in encoded) == (np.abs(vectors.astype(np.float64)) > bound).sum()


@pytest.mark.parametrize("clients", [3, 100, 1000])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sum_does_not_overflow(clients: int, sign: int) -> None:
    call = Cohort(tuple(range(clients)), (7,) * clients)
    scale = grid.finest(64.0, call)
    one, _ = grid.encode(np.full(4, sign * 64, np.float32), scale, 7)
    total = np.sum([one] * clients, axis=0, dtype=np.uint32)
    np.testing.assert_allclose(grid.decode(total, 7 * clients, scale.step), sign * 64, rtol=1e-6)


def test_the_stated_error_of_a_hundred_clients() -> None:
    assert grid.finest(64.0, Cohort(tuple(range(100)), (1,) * 100), grid.HEADROOM).step / 2 < 2.4e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(WireError, match="not finite"):
        grid.encode(np.array([1, bad], np.float32), Scale(64.0, 1e-6), 1)
