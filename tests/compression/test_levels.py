"""Levels that masked uploads of few bits consist of: unbiased, cut off as rarely as stated, and no wrap-around."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp import RunConfig
from fedrp.algorithms.client_side import own_words
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.servers import SERVERS
from fedrp.compression.levels import bound_of, cut_share, from_levels, to_levels
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ProtocolError, WireError
from fedrp.mechanisms.base import AtClient, AtServer
from fedrp.mechanisms.shared_grid import SharedGrid

COINS = [own_words(functools.partial(SecretKey, bytes([client]) * 32)) for client in range(200)]
SIZE = 2048


def heavy_tailed(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(3).standard_t(4, size).astype(np.float32)


@pytest.mark.parametrize("steps", [1, 2, 5, 255])
def test_rounding_is_unbiased_and_errors_of_clients_are_independent(steps: int) -> None:
    """The mean over K clients has 1/K of the squared error of one, which is the stated one; nothing is cut off."""
    vector, count = heavy_tailed(), len(COINS)
    deviation = np.linalg.norm(vector) / math.sqrt(SIZE)
    bound = 6 * deviation
    found = np.array([from_levels(to_levels(vector, bound, steps, coins)[0], 1, bound, steps) for coins in COINS])
    single = np.square(found - vector).sum(axis=1).mean()
    step = 2 * bound / steps
    stated = {1: bound**2 - deviation**2, 255: step**2 / 6}
    if steps in stated:
        assert single / SIZE == pytest.approx(stated[steps], rel=0.03)
    assert single / SIZE <= step**2 / 4
    assert np.square(found.mean(axis=0) - vector).sum() * count / single == pytest.approx(1, abs=0.2)


def test_coins_that_clients_share_are_noticed() -> None:
    """What the test above would say then."""
    vector, bound = heavy_tailed(), 6.0
    found = np.array([from_levels(to_levels(vector, bound, 1, COINS[0])[0], 1, bound, 1) for _ in range(20)])
    single = np.square(found - vector).sum(axis=1).mean()
    assert np.square(found.mean(axis=0) - vector).sum() * 20 / single > 15


@pytest.mark.parametrize(("steps", "stated"), [(1, 0.0455), (2, 0.0196), (10, 0.0019)])
def test_as_many_numbers_are_cut_off_as_stated(steps: int, stated: float) -> None:
    """Two-sided tails of a standard normal at 2, 2.333 and 3.107 deviations (tables of the normal distribution)."""
    size = 1 << 18
    vector = heavy_tailed(size)
    _, cut = to_levels(vector, bound_of(float(np.linalg.norm(vector)), size, steps), steps, COINS[0])
    assert cut_share(steps) == pytest.approx(stated, abs=5e-5)
    assert cut == pytest.approx(stated * size, abs=5 * math.sqrt(stated * size))


def test_a_vector_of_zeros_and_what_is_not_finite() -> None:
    levels, cut = to_levels(np.zeros(100, np.float32), 0.0, 4, COINS[0])
    assert (levels == 2).all()
    assert cut == 0
    assert not from_levels(levels, 1, 0.0, 4).any()
    with pytest.raises(WireError, match="not finite"):
        to_levels(np.array([1, np.nan], np.float32), 1.0, 4, COINS[0])


# --- sums ------------------------------------------------------------------------------------------------------------


def grid_of(clients: int, bits: float, **changes: object) -> SharedGrid:
    given = {"algorithm": "fedrp-subspace", "clients": clients, "bits": bits, "secure_aggregation": True, **changes}
    (mechanism,) = Pipeline.of(resolved(RunConfig(**given), 61_706), SERVERS["fedrp-subspace"]).mechanisms
    assert isinstance(mechanism, SharedGrid)
    return mechanism


def at_client(number: int, cohort: Cohort, previous: np.ndarray | None, told: list[str] | None = None) -> AtClient:
    def normals(*_: object) -> np.ndarray:
        raise AssertionError("there is no noise here")

    warn = pytest.fail if told is None else told.append
    return AtClient(previous, len(cohort.clients), normals, COINS[number % len(COINS)], warn, cohort)


def everyone(clients: int) -> Cohort:
    return Cohort(tuple(range(clients)), (1,) * clients)


@pytest.mark.parametrize(("clients", "bits", "width"), [(100, 1, 8), (128, 1, 8), (129, 1, 9), (100, 2, 9), (3, 1, 3)])
def test_a_word_has_the_bits_that_a_sum_needs(clients: int, bits: float, width: int) -> None:
    assert grid_of(clients, bits).width == width


@given(
    clients=st.integers(3, 300),
    bits=st.sampled_from([1.0, 2.0, 3.0, 8.0, 16.0]),
    sign=st.sampled_from([-1, 1]),
    share=st.floats(0.01, 1),
)
def test_no_sum_wraps_around_whatever_clients_send(clients: int, bits: float, sign: int, share: float) -> None:
    """All at the same end of the range, and far beyond it; also in cohorts that are smaller than configured."""
    cohort = everyone(max(3, round(share * clients)))
    mechanism, count = grid_of(clients, bits), len(cohort.clients)
    vector = from_levels(np.full(8, 1 if sign > 0 else 0, np.uint32), 1, 1.0, 1)  # spread: all of them +1, or all -1
    previous = np.append(np.zeros(8), 1.0).astype(np.float32)  # the mean norm was 1
    told: list[str] = []
    sent = [mechanism.client(50 * vector, at_client(c, cohort, previous, told)) for c in range(3)]
    exact = sum(int(upload[0]) for upload in (*sent, *[sent[0]] * (count - 3)))
    assert exact < 2**mechanism.width
    total = np.sum([*sent, *[sent[0]] * (count - 3)], axis=0, dtype=np.uint32)
    made = mechanism.server(total, AtServer(previous, count, count, cohort))
    steps = (2**mechanism.width - 1) // count
    assert steps >= 2**bits - 1
    np.testing.assert_allclose(made[:8], bound_of(1.0, 8, steps) * vector, rtol=1e-4)
    assert made[8] == pytest.approx(min(64.0, 50 * np.linalg.norm(vector)), rel=1e-3)  # told as it is
    assert any("8 of 8 numbers were cut off before masking" in text for text in told)


def test_the_mean_is_that_of_the_vectors_and_the_norm_is_told() -> None:
    """The range of the second round is made of the first one's norms; that of the first of each client's own."""
    clients, rng = 100, np.random.default_rng(0)
    mechanism, cohort = grid_of(clients, 8.0, secure_range=99.0), everyone(clients)
    previous = None
    for scale in (1.0, 1.2):
        common = rng.normal(size=SIZE)
        vectors = [(scale * (common + 0.5 * rng.normal(size=SIZE))).astype(np.float32) for _ in range(clients)]
        sent = [mechanism.client(v, at_client(c, cohort, previous)) for c, v in enumerate(vectors)]
        made = mechanism.server(np.sum(sent, axis=0, dtype=np.uint32), AtServer(previous, clients, clients, cohort))
        true = np.mean(vectors, axis=0)
        assert np.linalg.norm(made[:SIZE] - true) < 0.03 * np.linalg.norm(true)
        assert made[SIZE] == pytest.approx(np.mean([np.linalg.norm(v) for v in vectors]), rel=1e-4)
        previous = made


def test_differences_are_not_measured_by_the_model_before_them() -> None:
    cohort = everyone(3)
    mechanism = SharedGrid(grid_of(3, 8.0).config, differences=True)
    model, previous = np.ones(64, np.float32), np.zeros(0, np.float32)
    for first, vector in ((True, model), (False, 1e-3 * model)):
        before = None if first else previous
        sent = [mechanism.client(vector, at_client(c, cohort, before)) for c in range(3)]
        previous = mechanism.server(np.sum(sent, axis=0, dtype=np.uint32), AtServer(before, 3, 3, cohort))
        np.testing.assert_allclose(previous[:64], vector, rtol=0.1)
    assert previous[64] == pytest.approx(8e-3, rel=1e-3)


@pytest.mark.parametrize("spoiled", [0, 7, -1])
def test_a_sum_that_is_none_of_levels_is_refused(spoiled: int) -> None:
    cohort, mechanism = everyone(5), grid_of(5, 1.0)
    vectors = [heavy_tailed(64) for _ in range(5)]
    total = np.sum([mechanism.client(v, at_client(c, cohort, None)) for c, v in enumerate(vectors)], axis=0)
    context = AtServer(None, 5, 5, cohort)
    total = total.astype(np.uint32)
    mechanism.server(total, context)
    total[spoiled] += 1
    with pytest.raises(ProtocolError, match="none of levels"):
        mechanism.server(total, context)


@pytest.mark.parametrize("norm", [np.nan, -1.0, np.inf])
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
    previous = np.append(np.zeros(64), norm).astype(np.float32)
    with pytest.raises(ProtocolError, match="names a norm of"):
        grid_of(5, 1.0).client(heavy_tailed(64), at_client(0, everyone(5), previous))


def test_a_norm_beyond_the_range_is_cut_off_and_told() -> None:
    told: list[str] = []
    mechanism = grid_of(5, 1.0, secure_range=0.5)
    mechanism.client(heavy_tailed(64), at_client(0, everyone(5), None, told))
    assert "is beyond 0.5 and was cut off before masking: raise secure_range" in told[0]


# --- with noise ------------------------------------------------------------------------------------------------------

NOISED = list(itertools.product([3, 10, 100, 5000], [0.3, 1.0, 8.0], ["shared", "local"]))


@pytest.mark.parametrize(("clients", "noise", "who"), NOISED)
def test_noised_words_have_the_bits_that_their_largest_sum_needs(clients: int, noise: float, who: str) -> None:
    """All clients at one end of the range, in cohorts of all sizes: exactly what they sent comes back."""
    config = resolved(
        RunConfig(
            algorithm="fedrp-subspace", clients=clients, sampling="poisson", participation=0.9, noise_multiplier=noise,
            dp_noise=who, clip=0.3, bits=1.0, secure_aggregation=True, quorum=0.9,
        ),
        61_706,
    )  # fmt: skip
    mechanism = Pipeline.of(config, SERVERS["fedrp-subspace"]).mechanisms[-1]
    assert mechanism.width < 32
    for count in {3, max(3, clients // 2), clients}:
        cohort = everyone(count)
        scale = mechanism.scale(None, cohort)
        assert scale is not None
        for sign in (-1, 1):
            one = mechanism.client(np.full(4, sign * 1e9), at_client(0, cohort, None, []))
            total = one * np.uint32(count) & np.uint32(2**mechanism.width - 1)
            made = mechanism.server(total, AtServer(None, count, 1.0, cohort))
            steps = round(scale.bound / scale.step)
            np.testing.assert_allclose(made, sign * count * steps * scale.step, rtol=1e-6)


def test_few_bits_of_noise_cost_less_than_a_word_and_no_epsilon() -> None:
    """A share of the noise is at least 8 steps; rounding costs next to nothing (docs/privacy-proofs.md, section 5)."""
    given = {"algorithm": "fedrp-subspace", "clients": 100, "dp_epsilon": 4.0, "secure_aggregation": True}
    full, few = (resolved(RunConfig(**given, bits=bits), 61_706) for bits in (32.0, 1.0))
    assert full.noise_multiplier == few.noise_multiplier
    widths = [Pipeline.of(config, SERVERS["fedrp-subspace"]).mechanisms[-1].width for config in (full, few)]
    assert widths[0] == 32
    assert widths[1] <= 17


def test_where_participation_is_hidden_the_grid_stays_fine() -> None:
    """Coarse rounding errors add up to a variance that tells how many took part."""
    given = {"algorithm": "fedavg-dp", "clients": 300, "sampling": "poisson", "participation": 0.3, "quorum": 1.0}
    config = resolved(RunConfig(**given, noise_multiplier=1.0, secure_aggregation=True, bits=1.0), 61_706)
    mechanism = Pipeline.of(config, SERVERS["fedavg-dp"]).mechanisms[-1]
    scale = mechanism.scale(None, everyone(300))
    assert scale is not None
    assert scale.step <= config.clip / math.sqrt(300) / 4096
    assert 17 < mechanism.width < 32
