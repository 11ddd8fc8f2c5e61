"""Few bits: centroids, packing, an unbiased code with errors that average out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp import RunConfig
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.servers import SERVERS
from fedrp.compression import trellis
from fedrp.compression.coding import (
    Halves,
    MaskedWords,
    WithExact,
    aggregate_coding_of,
    place_of,
    upload_coding_of,
)
from fedrp.compression.eden import Eden, Trellis
from fedrp.compression.lloyd_max import centroids
from fedrp.compression.packing import pack, packed_bytes, unpack
from fedrp.compression.spread import gathered, spread
from fedrp.errors import ConfigError, WireError

# Max (1960), table I: centroids of a standard normal, and the mean squared error that they leave.
# Of windows of the trellis: the value that the independent oracle gives, too.
KNOWN = {(8, 1): 0.4668416976928711, (8, 4): -2.3439884185791016, (12, 2): 0.9144010543823242}
PUBLISHED = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
# EDEN: squared error in units of the squared norm, for a vector that is spread evenly.
ERRORS = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}


def places(count: int) -> list[bytes]:
    return [place_of(bytes(16), 1, client) for client in range(count)]


def heavy_tailed(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, size).astype(np.float32)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_centroids_are_the_published_ones(bits: int) -> None:
    found = centroids(bits)
    np.testing.assert_allclose(found[2 ** (bits - 1) :], PUBLISHED[bits], atol=5e-4)
    np.testing.assert_array_equal(found, -found[::-1])
    digits = {1: [0.79788], 2: [0.45278, 1.51042]}.get(bits)  # sqrt(2 / pi); to five digits in the papers on EDEN
    if digits:
        np.testing.assert_allclose(found[2 ** (bits - 1) :], digits, atol=6e-6)


@given(st.integers(1, 32), st.integers(0, 300), st.integers(0, 2**32))
def test_packed_numbers_come_back(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, count, np.uint64).astype(np.uint32)
    data = pack(numbers, bits)
    assert data.size == packed_bytes(count, bits) == -(-bits * count // 8)
    np.testing.assert_array_equal(unpack(data, bits, count), numbers)


def test_packed_numbers_have_one_form() -> None:
    data = pack(np.array([1, 2, 3], np.uint32), 3)
    assert data.tolist() == [0b11_010_001, 0]
    for wrong in (np.array([0b11_010_001, 2], np.uint8), data[:1], np.append(data, np.uint8(0))):
        with pytest.raises(WireError, match="packed numbers"):
            unpack(wrong, 3, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100, 1000])
def test_spreading_is_orthogonal_and_can_be_undone(size: int) -> None:
    vector = heavy_tailed(size)
    there = spread(vector, b"place")
    assert np.linalg.norm(there) == pytest.approx(np.linalg.norm(vector), rel=1e-5)
    np.testing.assert_allclose(gathered(there, b"place"), vector, atol=1e-5)


def test_spreading_leaves_no_large_number() -> None:
    one = np.zeros(1000, np.float32)
    one[777] = 1.0
    assert np.abs(spread(one, b"place")).max() < 6 / np.sqrt(1000)


@pytest.mark.parametrize("bits", ERRORS)
def test_the_error_of_the_code_is_the_published_one(bits: int) -> None:
    vector, coding = heavy_tailed(4096), Eden(4096, bits)
    found = [coding.decode(coding.encode(vector, place), place) for place in places(60)]
    error = np.mean([np.square(each - vector).sum() for each in found]) / np.square(vector).sum()
    assert error == pytest.approx(ERRORS[bits], rel=0.02)


@pytest.mark.parametrize(
    ("window", "bits", "worst"), [(8, 1, 1.3), (8, 2, 1.4), (8, 4, 1.65), (12, 1, 1.16), (12, 4, 1.3)]
)
def test_a_trellis_comes_close_to_the_bound_of_any_code(window: int, bits: int, worst: float) -> None:
    """No code of b bits has an error below 4^-b of a normal vector (Shannon 1959), unbiased 1 / (4^b - 1) of it."""
    vector, coding = heavy_tailed(4064), Eden(4064, bits, Trellis(window))
    found = [coding.decode(coding.encode(vector, place), place) for place in places(4)]
    error = np.mean([np.square(each - vector).sum() for each in found]) / np.square(vector).sum()
    least = 1 / (4**bits - 1)
    assert least < error < worst * least
    assert error < 0.75 * ERRORS[bits]


def test_a_search_finds_the_closest_string_of_all() -> None:
    """All 2^10 strings of ten bits tried one by one."""
    numbers = np.random.default_rng(5).standard_normal(10).astype(np.float32)
    for bits in (1, 2):
        count = 10 // bits
        strings = (np.arange(2**10, dtype=np.uint32)[:, None] >> np.arange(0, 10, bits, dtype=np.uint32)) % 2**bits
        errors = [np.square(trellis.decoded(each, 12, bits) - numbers[:count]).sum() for each in strings]
        np.testing.assert_array_equal(trellis.search(numbers[:count], 12, bits), strings[int(np.argmin(errors))])


def searched_plainly(numbers: np.ndarray, window: int, bits: int) -> np.ndarray:
    """Viterbi's search with NumPy, whole windows at a time."""
    ways, values = 2**bits, trellis.values(window, bits)
    errors = np.full(2**window, np.inf, np.float32)
    errors[0] = 0
    chosen = []
    for at, number in enumerate(numbers):
        before = errors.reshape(ways, -1)
        chosen.append(before.argmin(0))
        shortest = before.min(0) - (before.min() if at % 16 == 0 else 0)
        errors = np.repeat(shortest, ways) + (values * values - 2 * values * number)
    codes, place = [], int(errors.argmin())
    for best in reversed(chosen):
        codes.append(place % ways)
        place = place // ways + int(best[place // ways]) * 2 ** (window - bits)
    return np.array(codes[::-1], np.uint32)


@pytest.mark.parametrize(("window", "bits"), [(8, 1), (8, 2), (8, 3), (8, 4), (12, 1), (12, 6)])
def test_the_compiled_search_finds_the_codes_of_a_plain_one(window: int, bits: int) -> None:
    numbers = heavy_tailed(300, window + bits)
    np.testing.assert_array_equal(trellis.search(numbers, window, bits), searched_plainly(numbers, window, bits))


def test_values_of_the_trellis_are_the_same_everywhere() -> None:
    """Known answers: a decoder elsewhere must have these values, in this order."""
    codes = np.array([1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1], np.uint32)
    found = {(window, bits): trellis.decoded(codes, window, bits)[-1] for window, bits in ((8, 1), (8, 4), (12, 2))}
    assert found == KNOWN


@pytest.mark.parametrize(("window", "bits"), [(8, 1), (8, 4), (12, 2)])
def test_windows_that_follow_one_have_values_that_are_spread_evenly(window: int, bits: int) -> None:
    of_all = np.sort(trellis.values(window, bits))
    assert np.unique(of_all).size == 2**window
    place = np.searchsorted(of_all, trellis.values(window, bits)).reshape(-1, 2**bits)
    np.testing.assert_array_equal(np.diff(np.sort(place, axis=1), axis=1), 2 ** (window - bits))


def test_vectors_that_gain_by_it_are_searched_for() -> None:
    for coding_of, window, most in ((upload_coding_of, 8, 4), (aggregate_coding_of, 12, 6)):
        for bits in (1, 2, most):
            assert coding_of(128, bits) == Eden(128, bits, Trellis(window))
            assert coding_of(2**16, bits) == Eden(2**16, bits, Trellis(window))
        for size, width in ((127, 1), (2**16 + 1, 1), (4064, 0.5), (4064, most + 1)):
            assert coding_of(size, width) == Eden(size, width)
        assert coding_of(4064, 16) == Halves(4064)


UNBIASED = [
    *(Eden(2048, bits) for bits in (0.25, 0.5, 1, 2, 4)),
    *(Eden(256, 1, Trellis(window)) for window in (8, 12)),
]


@pytest.mark.parametrize("coding", UNBIASED)
def test_the_code_is_unbiased_and_errors_of_clients_are_independent(coding: Eden) -> None:
    """The mean over K places has 1/K of the squared error of one: neither a bias nor a common error is left."""
    vector = heavy_tailed(coding.size, 1)
    found = np.array([coding.decode(coding.encode(vector, place), place) for place in places(200)])
    single = np.square(found - vector).sum(axis=1).mean()
    assert np.square(found.mean(axis=0) - vector).sum() * 200 / single == pytest.approx(1, abs=0.2)


def test_one_place_for_all_is_noticed() -> None:
    """What the test above would say if clients shared their randomness."""
    vector, coding = heavy_tailed(2048, 1), Eden(2048, 1)
    found = np.array([coding.decode(coding.encode(vector, b"one"), b"one") for _ in range(20)])
    assert np.square(found.mean(axis=0) - vector).sum() > 0.5 * np.square(vector).sum()


@pytest.mark.parametrize("bits", [0.3, 1, 5, 8, 16, 32])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_every_width_has_its_size_and_refuses_another(bits: float, size: int) -> None:
    coding, vector = aggregate_coding_of(size, bits), heavy_tailed(size)  # 200: by a trellis
    payload = coding.encode(vector, b"place")
    assert payload.nbytes == coding.nbytes
    assert np.isfinite(coding.decode(payload, b"place")).all()
    assert not coding.decode(coding.encode(np.zeros(size, np.float32), b"place"), b"place").any()
    with pytest.raises(WireError):
        coding.decode(payload[:-1], b"place")


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e38])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    payload = Eden(100, 4).encode(heavy_tailed(100), b"place").copy()
    payload[:4] = np.array([scale], "<f4").view(np.uint8)
    with pytest.raises(WireError, match=r"scale|not finite"):
        Eden(100, 4).decode(payload, b"place")


def test_halves_are_exact_to_three_digits() -> None:
    vector = 1e-9 * heavy_tailed(500)
    np.testing.assert_allclose(Halves(500).decode(Halves(500).encode(vector, b""), b""), vector, atol=1e-3 * 1e-8)


@pytest.mark.parametrize(("nbytes", "expected"), [(32, (224, 1.0)), (512, (4064, 1.0)), (61_800, (61_706, 8.0))])
def test_a_budget_buys_numbers_first_and_then_bits(nbytes: int, expected: tuple[int, float]) -> None:
    config = resolved(RunConfig(algorithm="fedrp-subspace", bytes=nbytes), 61_706)
    assert (config.dim, config.bits, config.bits_down) == (*expected, expected[1])
    assert upload_coding_of(config.dim, config.bits).nbytes <= nbytes


MASKED = {"algorithm": "fedrp-subspace", "clients": 100, "secure_aggregation": True}


@pytest.mark.parametrize(
    ("changes", "nbytes", "expected"),
    [
        ({}, 512, (504, 1.0, 8.0)),  # 8 bits a number and two words of 32 bits; 8 down, a scale and a norm
        ({}, 4096, (4088, 1.0, 8.0)),
        ({"clients": 3}, 10**6, (61_706, 32.0, 32.0)),
        ({"noise_multiplier": 1.0}, 512, (240, 16.0, 16.0)),  # 17 bits a number
    ],
)
def test_a_budget_counts_what_masks_need(
    changes: dict[str, object], nbytes: int, expected: tuple[int, float, float]
) -> None:
    config = resolved(RunConfig(**{**MASKED, "bytes": nbytes, **changes}), 61_706)
    assert (config.dim, config.bits, config.bits_down) == expected
    pipeline = Pipeline.of(config, SERVERS[config.algorithm])

    def fits(dim: int) -> bool:
        wider = Pipeline.of(dataclasses.replace(config, dim=dim), SERVERS[config.algorithm])
        up = wider.upload_coding(wider.upload_size(61_706)).nbytes
        return up <= nbytes and wider.aggregate_coding(wider.aggregate_size(61_706)).nbytes <= nbytes

    assert fits(config.dim)
    assert config.dim == 61_706 or not fits(config.dim + 8)
    assert pipeline.upload_size(61_706) - pipeline.checks == pipeline.aggregate_size(61_706)


@given(st.integers(1, 32), st.integers(0, 40), st.integers(0, 3), st.integers(0, 2**32))
def test_masked_words_keep_the_bits_that_sums_need(width: int, few: int, whole: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, few + whole, np.uint32)
    coding = MaskedWords(few + whole, width, whole)
    payload = coding.encode(words, b"")
    back = coding.decode(payload, b"")
    assert payload.nbytes == coding.nbytes == packed_bytes(few, width) + 4 * whole
    np.testing.assert_array_equal(back[few:], words[few:])
    np.testing.assert_array_equal(back[:few], words[:few].astype(np.uint64) % 2**width)
    with pytest.raises(WireError):
        coding.decode(np.append(payload, np.uint8(0)), b"")


def test_a_number_that_is_told_is_exact_beside_few_bits() -> None:
    coding, vector = WithExact(Eden(100, 1), 2), np.append(heavy_tailed(100), np.float32([0.1, 7e-9]))
    payload = coding.encode(vector, b"place")
    assert payload.nbytes == coding.nbytes == Eden(100, 1).nbytes + 8
    np.testing.assert_array_equal(coding.decode(payload, b"place")[100:], vector[100:])
    payload[-4:] = np.array([np.nan], "<f4").view(np.uint8)
    with pytest.raises(WireError, match="not finite"):
        coding.decode(payload, b"place")
    with pytest.raises(WireError, match="bytes"):
        coding.decode(payload[:-1], b"place")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 9.0}, "bits=9.0 is not valid: expected 1 to 8, 16, 32"),
        ({"bytes": 4}, "bytes=4 is too few: dim=1 takes 5"),
        ({"bits": 0.5, "secure_aggregation": True}, "bits=0.5 is not valid for masked uploads: use 1, and a smaller"),
        (
            {"bits": 1.0, "secure_aggregation": True, "weighting": "samples"},
            "masked uploads of few bits: weights would",
        ),
        (
            {"bytes": 99, "secure_aggregation": True, "weighting": "samples"},
            "masked uploads of few bits: weights would",
        ),
        ({"bytes": 9, "secure_aggregation": True, "clients": 500}, "bytes=9 is too few: dim=1 takes 10"),
        ({"bytes": 99, "clip_quantile": 0.5, "noise_multiplier": 1.0}, "clip_quantile tells one exact number"),
        ({"bits": 1.0, "clip_quantile": 0.5, "noise_multiplier": 1.0}, "clip_quantile tells one exact number"),
    ],
)
def test_what_few_bits_cannot_do_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(RunConfig(**{"algorithm": "fedrp-subspace", "clients": 100, **changes}), 61_706)


LENET = 61_706


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4064, 1.0, 1.0)),  # 512 bytes each way, of which 4 are the scale
        ({"bits": 4.0}, (4064, 4.0, 4.0)),
        ({"bits_down": 32.0}, (4064, 1.0, 32.0)),
        ({"dim": 1000}, (1000, 32.0, 32.0)),  # as it was before there were few bits
        ({"dim": 1000, "bits": 2.0}, (1000, 2.0, 32.0)),
        ({"bytes": 512}, (4064, 1.0, 1.0)),
        ({"bytes": 512, "dim": 1000}, (1000, 4.0, 4.0)),
        ({"bytes": 512, "bits": 8.0}, (508, 8.0, 8.0)),
        ({"dp_epsilon": 5.0}, (1000, 32.0, 32.0)),  # noise: docs/results.md
        ({"noise_multiplier": 1.0, "clip_quantile": 0.5}, (1000, 32.0, 32.0)),
        ({"secure_aggregation": True}, (4064, 1.0, 1.0)),
        ({"secure_aggregation": True, "weighting": "samples"}, (1000, 32.0, 32.0)),  # weighted sums are exact
        ({"algorithm": "fedrp"}, (1000, 32.0, 32.0)),  # as printed
        ({"algorithm": "fedrp", "bytes": 512}, (4064, 1.0, 1.0)),
    ],
)
def test_dimension_and_bits_follow_a_budget_unless_they_are_given(
    given: dict[str, object], expected: tuple[int, float, float]
) -> None:
    config = resolved(RunConfig(**{"clients": 100, **given}), LENET)
    assert (config.dim, config.bits, config.bits_down) == expected
    assert resolved(config.stored, LENET) == config  # as a run that is resumed reads it


@pytest.mark.parametrize("given", [{}, {"dp_epsilon": 5.0}, {"secure_aggregation": True}, {"algorithm": "fedrp"}])
def test_no_default_is_more_than_the_model_has(given: dict[str, object]) -> None:
    assert resolved(RunConfig(**{"clients": 100, **given}), 482).dim == 482


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bytes": 100, "dim": 1000}, "bytes=100 is too few: dim=1000 takes 129"),
        ({"bytes": 100, "dim": 50, "bits": 32.0}, "bytes=100 is too few: dim=50 takes 200"),
        ({"bytes": 512, "clip_quantile": 0.5, "noise_multiplier": 1.0}, "clip_quantile tells one exact number"),
    ],
)
def test_a_budget_that_is_too_small_for_what_is_given_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(RunConfig(**{"clients": 100, **given}), LENET)
