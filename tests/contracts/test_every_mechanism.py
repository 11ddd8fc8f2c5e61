"""What every mechanism promises: sizes, bounds, an unbiased mean, and a way back at the server."""

import importlib
import inspect
import math
import pkgutil
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp import RunConfig, mechanisms
from fedrp.algorithms.client_side import own_normals, own_words
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.server_side import ServerSide, full_vector, mean_only
from fedrp.algorithms.servers import SERVERS
from fedrp.config import Resolved
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.clip import Clip
from fedrp.mechanisms.difference import Difference
from fedrp.mechanisms.fixed_point import FixedPoint
from fedrp.mechanisms.noise import Noise, grid_step
from fedrp.mechanisms.record_sum import RecordSum
from fedrp.mechanisms.shared_grid import SharedGrid

CLIENTS, SIZE, C = 12, 50, 0.7
KEY = SecretKey(bytes(range(32)))
CALL = Cohort(tuple(range(CLIENTS)), (1,) * CLIENTS)


def config_of(**changes: object) -> Resolved:
    """A resolved config with clip and noise."""
    private = {"clip": C, "noise_multiplier": 0.4, "quorum": 1.0, "server_momentum": 0.0, "algorithm": "fedavg-dp"}
    return Resolved.of(RunConfig(**{"clients": CLIENTS, "lr": 0.1, **private, **changes}))


def clip_of(**changes: object) -> Mechanism:
    return Clip(config_of(**changes))


def noise_of(**changes: object) -> Mechanism:
    config = config_of(**changes)
    return Noise(config, Clip(config))


def sums_of(**changes: object) -> tuple[Mechanism, Mechanism]:
    """What a round of one sum of single records' gradients is made by, where a site has up to 100."""
    summed = {"dp_unit": "record", "dp_noise": "shared", "batch_size": 100, "secure_aggregation": True}
    config = config_of(**summed, **changes)
    return RecordSum(config), Noise(config, RecordSum(config))


def fixed_point_of(**changes: object) -> Mechanism:
    return FixedPoint(config_of(secure_aggregation=True, **changes))


def fixed_point_after_noise(**changes: object) -> Mechanism:
    config = config_of(secure_aggregation=True, **changes)
    clip = Clip(config)
    return FixedPoint(config, (clip, Noise(config, clip)))


def shared_grid_of(bits: float = 1.0, differences: bool = False, **changes: object) -> SharedGrid:
    return SharedGrid(config_of(secure_aggregation=True, noise_multiplier=0.0, bits=bits, **changes), differences)


ADAPTIVE = {"clip_quantile": 0.5}
EVERY: dict[str, Mechanism] = {
    "clip": clip_of(),
    "adaptive clip": clip_of(**ADAPTIVE),
    "shared noise": noise_of(),
    "local noise": noise_of(dp_noise="local"),
    "noise on votes": noise_of(**ADAPTIVE),
    "no noise": noise_of(noise_multiplier=0.0),
    "sum of records": sums_of()[0],
    "noise on a sum of records": sums_of()[1],
    "difference": Difference(),
    "fixed point": fixed_point_of(),
    "fixed point after noise": fixed_point_after_noise(),
    "shared grid": shared_grid_of(),
    "shared grid of differences": shared_grid_of(4.0, differences=True),
}
over_every_mechanism = pytest.mark.parametrize("mechanism", EVERY.values(), ids=EVERY)


def context_of(number: int = 0, previous: np.ndarray | None = None) -> AtClient:
    own = KEY.derive(f"client {number}")
    normals, words = own_normals(lambda: own), own_words(lambda: own)
    return AtClient(previous, CLIENTS, normals, words, warn=lambda _text: None, cohort=CALL)


def updates(count: int = CLIENTS, scale: float = 0.05) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [(scale * rng.normal(size=SIZE)).astype(np.float32) for _ in range(count)]


@st.composite
def any_update(draw: st.DrawFn) -> np.ndarray:
    """What training may return: anything of any size, also values that are no numbers."""
    vector = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=SIZE) * 10.0 ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        vector[draw(st.integers(0, SIZE - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return vector.astype(np.float32)


# --- each alone ------------------------------------------------------------------------------------------------------


def test_every_mechanism_of_the_package_is_under_test() -> None:
    names = [module.name for module in pkgutil.iter_modules(mechanisms.__path__, f"{mechanisms.__name__}.")]
    found = {
        kind
        for name in names
        for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if Mechanism in kind.__mro__[1:]
    }
    assert found == {type(mechanism) for mechanism in EVERY.values()}


@over_every_mechanism
def test_an_upload_has_as_many_numbers_as_stated_and_inputs_stay_as_they_are(mechanism: Mechanism) -> None:
    for update in updates():
        before = update.copy()
        update.setflags(write=False)
        upload = mechanism.client(update, context_of())
        assert upload.size == mechanism.size(SIZE)
        assert np.array_equal(update, before)
        upload.setflags(write=False)
        mechanism.server(upload, AtServer(None, CLIENTS, CLIENTS, CALL))


@over_every_mechanism
def test_a_mechanism_is_a_function_of_the_update_and_the_clients_own_normals(mechanism: Mechanism) -> None:
    update = updates()[0]
    one, again = (mechanism.client(update, context_of()) for _ in range(2))
    assert one.tobytes() == again.tobytes()


@pytest.mark.parametrize("mechanism", [noise_of(), noise_of(dp_noise="local")], ids=["shared", "local"])
def test_noise_is_unbiased(mechanism: Mechanism) -> None:
    """Along the update, the mean over many clients is the update and no multiple of it (within 5 deviations)."""
    draws, update = 400, updates(scale=0.09)[0].astype(np.float64)
    sent = np.stack([mechanism.client(update.astype(np.float32), context_of(number)) for number in range(draws)])
    factors = sent @ update / (update @ update)
    spread = factors.std() / math.sqrt(draws)
    assert spread < 0.05
    assert abs(factors.mean() - 1) < 5 * spread
    across = sent - update
    assert np.abs(across.mean(axis=0)).max() < 5 * across.std() / math.sqrt(draws)


def test_what_is_within_the_range_comes_back_from_whole_numbers() -> None:
    mechanism = FixedPoint(config_of(secure_aggregation=True))
    step = mechanism.scale(None, CALL).step
    words = [mechanism.client(update, context_of()) for update in updates()]
    back = mechanism.server(np.sum(words, axis=0, dtype=np.uint32), AtServer(None, CLIENTS, CLIENTS, CALL))
    np.testing.assert_allclose(back, np.mean(updates(), axis=0), atol=step / 2 + 1e-7)


def test_what_is_beyond_the_range_is_cut_off_and_told() -> None:
    told: list[str] = []
    mechanism = FixedPoint(config_of(secure_aggregation=True, secure_range=0.5))
    mechanism.client(np.array([0.1, 0.6, -7.0], np.float32), context_of()._replace(warn=told.append))
    assert told == ["2 of 3 numbers beyond +-0.5 were cut off before masking: raise secure_range"]


# --- sensitivity -----------------------------------------------------------------------------------------------------


def require_bounded(clip: Mechanism, update: np.ndarray) -> None:
    """A clip's promise, for one update."""
    upload = clip.client(update, context_of())
    assert np.linalg.norm(upload[:SIZE].astype(np.float64)) <= C
    assert all(abs(vote) == C / 2 for vote in upload[SIZE:])


@pytest.mark.parametrize("changes", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
@given(update=any_update())
def test_no_update_is_longer_than_the_clip(changes: dict[str, object], update: np.ndarray) -> None:
    require_bounded(clip_of(**changes), update)


def test_a_clip_that_clips_to_more_is_found() -> None:
    class Loose(Clip):
        def client(self, upload: Numbers, context: AtClient) -> Numbers:
            return 1.01 * super().client(upload, context)

    with pytest.raises(AssertionError):
        require_bounded(Loose(config_of()), np.ones(SIZE, np.float32))


@given(one=any_update(), other=any_update())
def test_with_the_same_noise_no_two_updates_are_further_apart_than_the_clip_allows(
    one: np.ndarray, other: np.ndarray
) -> None:
    """What is sent moves by 2 C at most, but for the grid, whose steps are 2^-12 of the noise."""
    config = config_of()
    pipeline = Pipeline.of(config, SERVERS["fedavg-dp"])
    sent = [pipeline.sent(update, context_of()).astype(np.float64) for update in (one, other)]
    assert np.linalg.norm(sent[0] - sent[1]) <= 2 * C + grid_step(config, C) * math.sqrt(SIZE)


# --- there and back --------------------------------------------------------------------------------------------------


def aggregate_of(config: Resolved, given: list[np.ndarray]) -> np.ndarray:
    """The first aggregate of these updates."""
    pipeline = Pipeline.of(config, SERVERS[config.algorithm])
    sent = [pipeline.sent(update, context_of(number)) for number, update in enumerate(given)]
    if config.secure_aggregation:
        return pipeline.aggregate([], np.sum(sent, axis=0, dtype=np.uint32), len(sent), CALL)
    mean = np.sum(sent, axis=0, dtype=np.float64) / (pipeline.divisor or len(sent))
    return pipeline.aggregate([], mean.astype(np.float32), len(sent))


def clipped_mean(given: list[np.ndarray]) -> np.ndarray:
    return np.mean([update * min(1.0, C / np.linalg.norm(update)) for update in given], axis=0)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_what_comes_back_without_noise_is_the_mean_of_the_clipped_updates(secure: bool, scale: float) -> None:
    given = updates(scale=scale)
    made = aggregate_of(config_of(noise_multiplier=0.0, secure_aggregation=secure), given)
    np.testing.assert_allclose(made, clipped_mean(given), atol=1e-6)


@pytest.mark.parametrize("changes", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
def test_masks_change_nothing_of_what_noise_leaves(changes: dict[str, object]) -> None:
    """Both lie on one grid, so the aggregates are the same bits; they are the mean of the updates, and noise."""
    plain, masked = (
        aggregate_of(config_of(secure_aggregation=secure, **changes), updates()) for secure in (False, True)
    )
    assert plain.size == SIZE + len(changes)
    assert np.array_equal(plain, masked)
    noise = plain[:SIZE] - clipped_mean(updates())
    assert 0.5 * 0.4 * C / CLIENTS < noise.std() < 2 * 0.4 * C / CLIENTS


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(("scale", "grows"), [(1.0, True), (1e-3, False)])
def test_the_last_number_of_an_adaptive_aggregate_is_the_next_clip(secure: bool, scale: float, grows: bool) -> None:
    config = config_of(secure_aggregation=secure, noise_multiplier=0.01, **ADAPTIVE)
    made = aggregate_of(config, updates(scale=scale))
    assert (made[-1] > C) == grows
    assert Clip(config).bound(made) == made[-1] <= Clip(config).largest_bound(1)
    assert Pipeline.of(config, SERVERS["fedavg-dp"]).update_of(made).size == SIZE


@pytest.mark.parametrize("changes", [{}, ADAPTIVE, {"noise_multiplier": 0.0}, {"dp_noise": "local"}])
def test_no_aggregate_of_honest_clients_is_beyond_the_stated_reach(changes: dict[str, object]) -> None:
    """All send the same long update; a sum of one client more would be beyond it where there is no noise."""
    config = config_of(**changes)
    same = [np.full(SIZE, 1.0, np.float32)] * CLIENTS
    made, reach = aggregate_of(config, same), Pipeline.of(config, SERVERS["fedavg-dp"]).reach(1, SIZE + len(changes))
    assert np.abs(made).max() <= reach.number
    assert np.linalg.norm(made) <= reach.norm * (1 + 1e-6)
    if changes == {"noise_multiplier": 0.0}:
        assert np.linalg.norm(made) * (CLIENTS + 1) / CLIENTS > reach.norm


# --- mechanisms to come ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded(Mechanism):
    """Rotates and pads to a power of two, into another type: as a quantiser would."""

    step: float = 2.0**-20

    def size(self, numbers: int) -> int:
        return 1 << math.ceil(math.log2(numbers))

    def client(self, upload: Numbers, _context: AtClient) -> Numbers:
        steps = np.zeros(self.size(upload.size), np.int64)
        steps[: upload.size] = np.rint(upload[::-1] / self.step)
        return steps.astype(np.uint32)

    def server(self, numbers: Numbers, context: AtServer) -> Numbers:
        return (numbers.view(np.int32)[:SIZE][::-1] * self.step / context.divisor).astype(np.float32)


def test_a_mechanism_may_change_the_length_and_the_type_of_an_upload() -> None:
    """The server undoes it: an aggregate has the length of an update, and what others tell behind it."""

    def named(config: Resolved) -> tuple[Mechanism, ...]:
        return (Clip(config), Padded())

    config = config_of(noise_multiplier=0.0)
    pipeline = Pipeline.of(config, ServerSide("aggregate", full_vector, mean_only, named))
    sent = [pipeline.sent(update, context_of()) for update in updates()]
    assert {(upload.dtype.name, upload.size) for upload in sent} == {("uint32", pipeline.upload_size(SIZE))}
    assert (pipeline.upload_size(SIZE), pipeline.aggregate_size(SIZE)) == (64, SIZE)
    made = pipeline.aggregate([], np.sum(sent, axis=0, dtype=np.uint32), CLIENTS)
    np.testing.assert_allclose(made, clipped_mean(updates()), atol=1e-6)


def test_without_a_mechanism_an_update_is_sent_as_it_is() -> None:
    pipeline = Pipeline.of(config_of(algorithm="fedavg", clip=None, noise_multiplier=None), SERVERS["fedavg"])
    update = updates()[0]
    assert pipeline.mechanisms == ()
    assert pipeline.sent(update, context_of()) is update
    assert pipeline.reach(1, SIZE) == Reach()


@pytest.mark.parametrize("mechanism", [noise_of(secure_aggregation=True), fixed_point_after_noise()])
def test_noise_goes_to_masks_on_its_own_grid(mechanism: Mechanism) -> None:
    """A power of two that depends on the config and C alone."""
    scale = mechanism.scale(None, CALL)
    assert scale is not None
    assert scale.step == grid_step(config_of(secure_aggregation=True), C)
    assert math.log2(scale.step) == int(math.log2(scale.step))
