"""What protects each record of a site: clip, coins and noise of every local step, and what all of them are worth."""

import dataclasses
import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedrp import RunConfig, Speed, Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.config import Resolved
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective, Stack
from fedrp.learning.trainer import LocalModel, make_local_model
from fedrp.privacy.events import Adjacency
from fedrp.projection.families import make_projection
from fedrp.records.promise import protection, site_plans
from fedrp.records.steps import LocalSteps
from fedrp.records.training import RecordNoise, RecordTrainer, clipped_rows, sampled
from fedrp.rng import RunSeed

SIZE = 40
KEY = SecretKey(bytes(range(32)))
ONE_STEP = LocalSGD(lr=1.0, momentum=0.0, batch_size=64, epochs=1)


def slope() -> nn.Module:
    return nn.Linear(SIZE, 1, bias=False)


def own_output(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the input itself, so that records are gradients."""
    return outputs.mean()


def model() -> LocalModel:
    return make_local_model(slope, own_output, torch.device("cpu"), RunSeed(0))


def records(x: torch.Tensor) -> Examples:
    return Examples(x, torch.zeros(len(x)))


def noise(
    steps: LocalSteps, z: float, clip: float = 1.0, secret: SecretKey = KEY, quantile: float = 0.0
) -> RecordNoise:
    return RecordNoise(steps, clip, z, quantile, secret)


def moved(data: Examples, own: RecordNoise, objective: Objective = PLAIN, microbatch: int = 7) -> Stack:
    """The noised sum of a single step."""
    start = np.zeros((1, SIZE if objective.project is None else 8), np.float32)
    reached = RecordTrainer(model(), [own], microbatch).train(start, [data], [0], 1, ONE_STEP, objective)
    return -reached[0].astype(np.float64) * own.steps.expected


# --- one record ------------------------------------------------------------------------------------------------------


@given(
    st.floats(1e-4, 1e4),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6, 1e25, 3e38, math.inf, math.nan]),
    st.integers(0, 2**31),
)
def test_a_record_moves_the_sum_by_no_more_than_the_clip(clip: float, length: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    others, own = torch.randn(11, SIZE, generator=rng), torch.randn(1, SIZE, generator=rng) * length
    full = noise(LocalSteps(12, 12, 1, 1), 0.0, clip)
    with_it, without = moved(records(torch.cat([others, own])), full), moved(records(others), full)
    assert np.isfinite(with_it).all()
    assert np.linalg.norm(with_it - without) <= clip * (1 + 12 * 2.0**-22)  # the mean is rounded to float32


@given(st.integers(1, 60), st.floats(1e-8, 1e8), st.integers(0, 2**31))
def test_rows_are_cut_to_the_clip_and_sums_are_exact(count: int, clip: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy((rng.normal(size=(count, 9)) * 10.0 ** rng.uniform(-40, 38, (count, 1))).astype(np.float32))
    cut, _ = clipped_rows(rows, clip)
    assert float(torch.linalg.vector_norm(cut, dim=1, dtype=torch.float64).max()) <= clip
    order = torch.from_numpy(rng.permutation(count))
    one, other = (part.sum(dim=0, dtype=torch.float64) for part in (cut, cut[order]))
    assert torch.equal(one, other)
    short = torch.linalg.vector_norm(rows, dim=1) < clip * 0.999
    assert torch.allclose(cut[short], rows[short], rtol=0, atol=clip * 2.0**-23)


def test_gradients_are_projected_one_by_one_before_they_are_cut() -> None:
    """Cut after the sum, or before the projection, the result would be another."""
    matrix = make_projection("sign", KEY, SIZE, 8)
    data = records(torch.randn(9, SIZE, generator=torch.Generator().manual_seed(3)) * 4)
    operator = matrix.on(torch.device("cpu"))
    objective = Objective(
        lambda _theta, g, _rows: g, lambda theta, _rows: operator.adjoint(theta), project=operator.forward
    )
    found = moved(data, noise(LocalSteps(9, 9, 1, 1), 0.0), objective)
    each = matrix.forward(data.x.numpy())
    wanted = (each / np.maximum(1.0, np.linalg.norm(each, axis=1, keepdims=True))).sum(axis=0)
    assert found == pytest.approx(wanted, abs=1e-5)


# --- coins and noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.97])
def test_each_record_is_drawn_by_a_coin_of_its_own(rate: float) -> None:
    count, draws = 200, 400
    hits = np.zeros((draws, count))
    for draw in range(draws):
        hits[draw, sampled(KEY.derive(f"draw {draw}"), count, rate)] = 1
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(hits.mean() - rate) < 4 * deviation / math.sqrt(count * draws)
    # Sizes of batches vary as those of independent coins do: shuffled batches of a fixed size would not.
    assert hits.sum(axis=1).var() == pytest.approx(count * rate * (1 - rate), rel=0.35)
    between = np.corrcoef((hits[:, :8] + 1e-9 * np.arange(draws)[:, None]).T)
    assert np.abs(between[~np.eye(8, dtype=bool)]).max() < 5 / math.sqrt(draws)


def test_all_records_are_drawn_where_the_batch_takes_all() -> None:
    assert sampled(KEY, 7, 1.0).tolist() == list(range(7))
    assert sampled(KEY, 0, 0.5).tolist() == []


@pytest.mark.parametrize(("z", "clip", "batch"), [(1.0, 1.0, 10), (0.5, 0.2, 40), (3.0, 7.0, 100)])
def test_the_noise_has_the_stated_deviation(z: float, clip: float, batch: int) -> None:
    steps = LocalSteps(100, batch, 1, 1)
    data = records(torch.zeros(100, SIZE))
    keys = [KEY.derive(f"run {number}") for number in range(60)]
    once = dataclasses.replace(steps, epochs=1)
    drawn = []
    for key in keys:  # zero gradients leave the noise; steps add up
        start = np.zeros((1, SIZE), np.float32)
        reached = RecordTrainer(model(), [noise(once, z, clip, key)]).train(start, [data], [0], 1, ONE_STEP)
        drawn.append(reached[0])
    variance = np.square(np.stack(drawn), dtype=np.float64).mean()
    count = len(keys) * SIZE
    assert variance == pytest.approx(once.of_a_round * (z * clip / steps.expected) ** 2, rel=5 * math.sqrt(2 / count))


def test_noise_comes_from_the_secret_alone() -> None:
    data = records(torch.zeros(20, SIZE))
    own = noise(LocalSteps(20, 20, 1, 1), 1.0)
    assert np.array_equal(moved(data, own), moved(data, own))
    assert not np.array_equal(moved(data, own), moved(data, own._replace(secret=KEY.derive("other"))))


def test_a_batch_without_records_is_noise_alone() -> None:
    steps = LocalSteps(1000, 1, 1, 1)  # a thousand steps, most of them without a record
    start = np.zeros((1, SIZE), np.float32)
    empty = records(torch.ones(0, SIZE))
    reached = RecordTrainer(model(), [noise(steps, 1.0)]).train(start, [empty], [0], 1, ONE_STEP)
    assert np.isfinite(reached).all()
    assert reached.any()


def test_the_clip_follows_a_quantile_of_the_norms() -> None:
    """Gradients of norm 0.01: with C = 1 the sum of a step is small, with a C that follows it the noise shrinks."""
    data = records(torch.full((4000, SIZE), 0.01 / math.sqrt(SIZE)))
    steps = LocalSteps(4000, 400, 4, 1)
    start = np.zeros((1, SIZE), np.float32)
    far = {
        q: np.linalg.norm(
            RecordTrainer(model(), [noise(steps, 1.0, quantile=q)]).train(
                start, [data], [0], 1, ONE_STEP._replace(lr=1.0)
            )[0]
            - start[0]
            + 0.01 / math.sqrt(SIZE) * steps.of_a_round
        )
        for q in (0.0, 0.5)
    }
    assert far[0.5] < 0.7 * far[0.0]


def test_an_adaptive_clip_pays_for_its_count() -> None:
    own = noise(LocalSteps(1000, 100, 1, 1), 2.0, quantile=0.5)
    assert 1 / own.sum_noise**2 + 1 / (2 * own.count_noise) ** 2 == pytest.approx(1 / 2.0**2)


# --- what it is worth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "rounds", "z"),
    [
        (6000, 256, 1, 30, 1.8),
        (1000, 256, 1, 30, 4.0),
        (6000, 64, 2, 10, 1.0),
        (500, 500, 1, 20, 6.0),
        (90, 64, 1, 3, 1.0),
    ],
)
def test_epsilon_is_that_of_an_accountant_of_its_own(size: int, batch: int, epochs: int, rounds: int, z: float) -> None:
    steps = LocalSteps(size, batch, epochs, rounds)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    one = dp_accounting.PoissonSampledDpEvent(min(1, batch / size), dp_accounting.GaussianDpEvent(z))
    accountant.compose(dp_accounting.SelfComposedDpEvent(one, rounds * epochs * math.ceil(size / batch)))
    assert steps.epsilon(z, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)
    assert steps.noise_for(steps.epsilon(z, 1e-5), 1e-5) == pytest.approx(z, rel=2e-3)


@pytest.mark.parametrize(("epsilon", "size", "batch"), [(0.5, 300, 32), (3.0, 6000, 256), (8.0, 100, 100)])
def test_the_noise_keeps_the_target(epsilon: float, size: int, batch: int) -> None:
    steps = LocalSteps(size, batch, 1, 5)
    z = steps.noise_for(epsilon, 1e-5)
    assert 0.99 * epsilon < steps.epsilon(z, 1e-5) <= epsilon


def test_no_noise_promises_nothing() -> None:
    steps = LocalSteps(100, 10, 1, 1)
    assert steps.epsilon(0.0, 1e-5) == math.inf
    assert steps.epsilon(1e-6, 1e-5) == math.inf


# --- runs ------------------------------------------------------------------------------------------------------------


def config(algorithm: str = "fedrp-subspace", **changes: object) -> RunConfig:
    given = {"dp_unit": "record", "dp_epsilon": 4.0, "lr": 0.5, "momentum": 0.5} | changes
    return RunConfig(**{"algorithm": algorithm, "clients": 4, "rounds": 2, "batch_size": 8, "dim": 12, **given})


ALGORITHMS = ["fedrp-subspace", "fedavg", "fedrp", "fedavg-dp"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_states_what_each_record_is_promised(algorithm: str, task: Task) -> None:
    result = simulate(config(algorithm), task, Speed(workers=1))
    stated = [item for item in result.privacy if item.adjacency is Adjacency.RECORD_ADD_REMOVE]
    assert len(stated) == 4
    assert all(3.9 < item.epsilon <= 4.0 for item in stated)
    told = result.as_json()
    assert told["epsilon"] == stated[0].epsilon == told["epsilon_by_unit"]["record"]
    assert max(site["epsilon"] for site in told["sites"]) == pytest.approx(told["epsilon"])
    assert sum(site["sites"] for site in told["sites"]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ball": 0.5, "norm_floor": 2.0}, "ball=0.5 does not go with dp_unit=record"),
        ({"sensitivity": 0.5, "norm_floor": 2.0}, "sensitivity=0.5 does not go with dp_unit=record"),
        ({"clip": 1e-30}, "clip=1e-30 is too small for records"),
    ],
)
def test_what_would_tell_of_records_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(config("fedrp", **changes), 83)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_depend_neither_on_workers_nor_on_the_engine(algorithm: str, task: Task) -> None:
    runs = [
        simulate(config(algorithm), task, Speed(workers=workers, engine=engine))
        for workers, engine in ((1, "sequential"), (2, "sequential"), (1, "stacked:2"))
    ]
    assert len({run.model.tobytes() for run in runs}) == 1


def test_microbatches_change_memory_alone(task: Task) -> None:
    one, other = (simulate(config(), task, Speed(workers=1, microbatch=size)).model for size in (1, 32))
    assert np.abs(one - other).max() < 1e-4


def test_one_noise_for_all_states_the_worst_site(task: Task) -> None:
    result = simulate(config(noise_multiplier=1.5, dp_epsilon=None, partition="dirichlet:0.5"), task, Speed(workers=1))
    told = result.as_json()
    assert len(told["sites"]) > 1
    assert {site["noise_multiplier"] for site in told["sites"]} == {1.5}
    assert told["epsilon"] == pytest.approx(max(site["epsilon"] for site in told["sites"]), rel=1e-6)


def test_both_units_are_promised_together(task: Task) -> None:
    given = {"dp_unit": "both", "dp_epsilon": 9.0, "record_epsilon": 4.0}
    told = simulate(config(**given), task, Speed(workers=1)).as_json()
    assert 3.9 < told["epsilon_by_unit"]["record"] <= 4.0
    by = {(item["adversary"], item["adjacency"][4:10]): item["epsilon"] for item in told["privacy"]}
    assert by["whoever gets the final model", "client"] == pytest.approx(9.0, rel=1e-3)
    assert by["the server alone, honest but curious", "client"] is None  # shared noise without masks
    assert 3.9 < by["the server alone, honest but curious", "record"] <= 4.0


def test_divergence_stops_nobody(task: Task) -> None:
    result = simulate(config(lr=1e6, noise_multiplier=5.0, dp_epsilon=None), task, Speed(workers=1))
    assert len(result.records) == 2


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"dp_delta": 1e-14}, "too small for records"),
        ({"dp_unit": "both"}, "dp_unit=both and record_epsilon go together"),
        ({"record_clip": 1.0}, "with dp_unit=record give clip"),
        ({"dp_unit": "patient"}, "unknown dp_unit 'patient'"),
        ({"algorithm": "fedadmm"}, "does nothing with algorithm 'fedadmm'"),
        ({"algorithm": "fwc"}, "does nothing with algorithm 'fwc'"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(changes: dict[str, object], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused) as error:
        resolved(config(**changes), 83)
    assert "\n" not in str(error.value)


def test_rounds_that_a_site_may_take_part_in_are_counted() -> None:
    rarely = resolved(config(participation=0.5, rounds=20), 83)
    assert protection(rarely, 30).steps.rounds == 19  # more come once in a million runs, and are refused
    assert protection(resolved(config(rounds=20), 83), 30).steps.rounds == 20


def test_settings_come_back_from_what_is_stored() -> None:
    for changes in ({}, {"dp_epsilon": None, "noise_multiplier": 0.0}, {"dp_unit": "both", "record_epsilon": 2.0}):
        found = resolved(config(**changes), 83)
        assert Resolved.of(found.stored) == found == resolved(found.stored, 83)


def test_local_training_has_defaults_of_its_own_where_records_are_protected() -> None:
    """Chosen on images held out of the training set: docs/results.md."""
    plain, own = (resolved(RunConfig(algorithm="fedavg", dp_unit=unit), 99) for unit in ("client", "record"))
    assert (plain.batch_size, plain.momentum, plain.lr_schedule) == (64, 0.9, "constant")
    assert (own.batch_size, own.momentum, own.lr_schedule, own.lr_rule) == (256, 0.5, "cosine", "fixed")
    assert own.lr == 10 * plain.lr
    assert (plain.server_momentum, own.server_momentum) == (0.0, 0.5)
    given = {"batch_size": 64, "momentum": 0.0, "lr_schedule": "constant", "lr": 0.3, "server_momentum": 0.0}
    kept = resolved(RunConfig(algorithm="fedavg", dp_unit="record", **given), 99)
    assert {name: getattr(kept, name) for name in given} == given
    assert resolved(kept.stored, 99) == kept


def test_plans_need_no_noise_for_records_elsewhere() -> None:
    assert site_plans(resolved(RunConfig(algorithm="fedavg"), 83), [3]) == []


def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(task: Task, tmp_path: Path) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    whole = simulate(config(), task, Speed(workers=1))
    with pytest.raises(KeyboardInterrupt):
        simulate(config(), task, Speed(workers=1), out=tmp_path / "run", on_round=cut_off)
    resumed = simulate(config(), task, Speed(workers=1), out=tmp_path / "run", resume=True)
    assert resumed.model.tobytes() == whole.model.tobytes()
