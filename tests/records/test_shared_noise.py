"""Shares of noise for records: a round is one masked sum of clipped gradients, which one record moves by at most C."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import nn

from fedrp import RunConfig, Speed, Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.statements import releases_of, stated
from fedrp.auditing.canary import Fault, audit
from fedrp.config import Resolved
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.objective import Examples, LocalSGD
from fedrp.learning.trainer import make_local_model
from fedrp.privacy.events import Adjacency, Adversary
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.total import total
from fedrp.records.steps import LocalSteps
from fedrp.records.training import RecordNoise, RecordTrainer
from fedrp.reporting.records import RoundRecord
from fedrp.rng import RunSeed
from fedrp.simulation.measures import OnRound

PARAMETERS, SITE = 83, 20  # of the model of tests, and of a site's records
SHARING = ["fedrp-subspace", "fedavg-dp"]


def config(algorithm: str = "fedrp-subspace", **changes: object) -> RunConfig:
    shared = {"dp_unit": "record", "dp_noise": "shared", "secure_aggregation": True, "batch_size": SITE, "lr": 0.5}
    given = {"algorithm": algorithm, "clients": 4, "rounds": 2, "dim": 12, "dp_epsilon": 4.0, **shared, **changes}
    return RunConfig(**given)


def run(settings: RunConfig, task: Task, on_round: OnRound | None = None) -> np.ndarray:
    return simulate(settings, task, Speed(workers=1), on_round=on_round).model


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"secure_aggregation": False}, "without masks the server sees single uploads, .* add secure_aggregation=True"),
        ({"local_epochs": 2}, "local_epochs=2 is several local steps"),
        ({"algorithm": "fedavg"}, "fedavg sends no sum of gradients, use fedrp-subspace or fedavg-dp"),
        ({"algorithm": "fedrp", "projection": "sign"}, "fedrp sends no sum of gradients"),
        ({"weighting": "samples"}, "weighting=samples counts records of some sites more"),
        ({"clip_quantile": 0.5}, "clip_quantile=0.5 moves each site's clip by itself"),
        ({"rotation": "haar"}, "rotation=haar rounds what one record must move by at most clip"),
        ({"algorithm": "fedavg-dp", "lr_schedule": "cosine"}, "adds up the sums of all rounds"),
        ({"secure_range": 8.0}, "secure_range=8.0 does nothing"),
        ({"dp_epsilon": None, "noise_multiplier": 1e-4, "batch_size": 10**6}, "too small to be rounded"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(changes: dict[str, object], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused) as error:
        resolved(config(**changes), PARAMETERS)
    assert "\n" not in str(error.value)


def test_a_site_that_would_take_several_steps_is_refused_before_the_first_round(task: Task) -> None:
    with pytest.raises(ConfigError, match="a site has 20 records, and batch_size=19 would take several local steps"):
        run(config(batch_size=SITE - 1), task)


# --- what is stated --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", SHARING)
def test_everyone_but_colluding_sites_is_covered(algorithm: str, task: Task) -> None:
    """The Gaussian mechanism over all rounds: no sampling, no amplification, whatever a site's size."""
    result = simulate(config(algorithm, rounds=3, partition="dirichlet:1", batch_size=80), task, Speed(workers=1))
    assert {item.adversary for item in result.privacy} == {adversary for adversary in Adversary if adversary.real}
    assert {item.adjacency for item in result.privacy} == {Adjacency.RECORD_ADD_REMOVE}
    for item in result.privacy:
        assert item.epsilon == pytest.approx(gaussian_epsilon(result.config.noise_multiplier, 1e-5, 3))
        assert 3.99 < item.epsilon <= 4.0
        curious = any("at most one curious client" in text for text in item.assumptions)
        assert curious == (item.adversary in (Adversary.SERVER_AND_CLIENT, Adversary.CLIENTS))
    assert {site["epsilon"] for site in result.sites} == {result.privacy[0].epsilon}
    assert len(result.sites) > 1


def test_only_rounds_that_a_site_may_take_part_in_are_counted() -> None:
    rarely = resolved(config(participation=0.5, clients=8, rounds=20), PARAMETERS)
    (seen, *_) = stated(rarely, [SITE])
    assert seen.epsilon == pytest.approx(gaussian_epsilon(rarely.noise_multiplier, 1e-5, 19))
    assert resolved(config(clients=8, rounds=20), PARAMETERS).noise_multiplier > rarely.noise_multiplier


def test_runs_add_up_as_all_that_protect_records_do() -> None:
    once, both = (
        resolved(config(rounds=rounds, noise_multiplier=6.0, dp_epsilon=None), PARAMETERS) for rounds in (5, 10)
    )
    spent = total([releases_of(once, [SITE])] * 2, Adversary.SERVER, 1e-5)
    (stated_once, *_) = stated(both, [SITE])
    assert spent.epsilon == pytest.approx(stated_once.epsilon, rel=1e-3)


def test_settings_come_back_from_what_is_stored() -> None:
    for changes in ({}, {"dp_epsilon": None, "noise_multiplier": 0.0}, {"quorum": 0.75, "bits": 8.0}):
        for algorithm in SHARING:
            found = resolved(config(algorithm, **({} if algorithm == "fedavg-dp" else changes)), PARAMETERS)
            assert Resolved.of(found.stored) == found == resolved(found.stored, PARAMETERS)


# --- the sum ---------------------------------------------------------------------------------------------------------


def slope() -> nn.Module:
    return nn.Linear(9, 1, bias=False)


def own_output(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the input itself, so that records are gradients."""
    return outputs.mean()


@given(st.floats(1e-4, 1e4), st.sampled_from([0.0, 1e-3, 1.0, 1e6, 3e38, float("nan")]), st.integers(0, 2**31))
def test_one_record_moves_a_sites_sum_by_at_most_the_clip_and_nothing_is_rounded(
    clip: float, length: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    others, own = torch.randn(11, 9, generator=rng), torch.randn(1, 9, generator=rng) * length
    model = make_local_model(slope, own_output, torch.device("cpu"), RunSeed(0))
    noise = RecordNoise(LocalSteps(12, 12, 1, 1), clip, 5.0, 0.0, SecretKey(bytes(32)))
    start, sgd = np.zeros((1, 9), np.float32), LocalSGD(lr=1.0, momentum=0.0, batch_size=12, epochs=1)

    def summed(rows: torch.Tensor) -> np.ndarray:
        return RecordTrainer(model, [noise]).sums(start, [Examples(rows, torch.zeros(len(rows)))], sgd)[0]

    moved = summed(torch.cat([others, own])) - summed(others)
    assert np.linalg.norm(moved) <= clip
    assert np.array_equal(moved, summed(own))  # exactly: the same row, whatever it was added to


def flat(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    """A loss without a gradient, which leaves the noise."""
    return (0 * outputs).mean() + 1


def has_deviation(noise: np.ndarray, deviation: float) -> bool:
    """Whether independent normals have this standard deviation; a right answer is missed once in 500,000 times."""
    low, high = chi2.ppf([1e-6, 1 - 1e-6], noise.size)
    return bool(low < np.sum(noise**2) / deviation**2 < high)


@pytest.mark.parametrize(("dropout", "quorum"), [(0.0, 1.0), (0.3, 0.6)])
def test_masked_sums_carry_the_stated_noise_also_where_only_a_quorum_is_left(
    dropout: float, quorum: float, task: Task
) -> None:
    """Real clients and server. Shares make up for a curious client: all but one of the quorum carry z C together."""
    z, clip, clients, rounds = 3.0, 0.5, 5, 12
    settings = config(
        "fedavg-dp",
        clients=clients,
        rounds=rounds,
        dropout=dropout,
        quorum=quorum,
        lr=1.0,
        clip=clip,
        noise_multiplier=z,
        dp_epsilon=None,
        batch_size=16,
        server_momentum=0.0,  # else a step has part of the one before
    )
    task, models, arrived = dataclasses.replace(task, loss=flat), [], []

    def keep(record: RoundRecord, model: Callable[[], nn.Module]) -> None:
        models.append(torch.nn.utils.parameters_to_vector(model().parameters()).detach().double().numpy())
        arrived.append(record.participants)

    run(settings, task, keep)
    sums = -np.diff(np.stack(models), axis=0) * clients * 16  # a step is the mean over the expected sites, by 16
    least = int(np.ceil(clients * quorum))
    assert min(arrived[1:]) == least
    share = z * clip / np.sqrt(least - 1)
    scaled = np.concatenate([noise / np.sqrt(came) for noise, came in zip(sums, arrived[1:], strict=True)])
    assert has_deviation(scaled, share)
    assert not has_deviation(scaled, 0.75 * share)
    assert not has_deviation(scaled, 1.3 * share)


@pytest.mark.parametrize(
    ("algorithm", "changes", "plain"),
    [
        ("fedavg-dp", {"rounds": 3, "server_momentum": 0.0}, {"algorithm": "fedavg", "dim": None, "lr_rule": "fixed"}),
        ("fedrp-subspace", {"rounds": 4, "lr_schedule": "cosine", "server_momentum": 0.5}, {"rotation": "none"}),
    ],
)
def test_without_noise_and_clip_a_round_is_a_step_of_all_records(
    algorithm: str, changes: dict[str, object], plain: dict[str, object], task: Task
) -> None:
    """Learning rate, schedule and server momentum come after the sum, and give what plain training gives."""
    summed = config(algorithm, noise_multiplier=0.0, dp_epsilon=None, clip=50.0, lr=0.2, **changes)
    whole = dataclasses.replace(
        summed,
        dp_unit="client",
        dp_noise=None,
        noise_multiplier=None,
        clip=None,
        momentum=0.0,
        grad_clip=0.0,
        secure_aggregation=False,
        bits=None if algorithm == "fedavg-dp" else 32.0,
        bits_down=None,
        **plain,
    )
    one, other = run(summed, task), run(whole, task)
    before = run(dataclasses.replace(whole, lr=1e-9), task)
    assert np.abs(one - other).max() < 2e-5
    assert np.abs(one - before).max() > 1e-2


def test_results_depend_neither_on_workers_nor_on_the_engine(task: Task) -> None:
    runs = [
        simulate(config(), task, Speed(workers=workers, engine=engine)).model.tobytes()
        for workers, engine in ((1, "sequential"), (2, "stacked:2"))
    ]
    assert len(set(runs)) == 1


# --- audit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "trials", "refuted"), [(Fault.NONE, 60, False), (Fault.HALF_NOISE, 120, True)])
def test_the_audit_refutes_what_is_broken_and_nothing_else(fault: Fault, trials: int, refuted: bool) -> None:
    """The canary is a record: its gradient, clip and sum, masks, shares and the server are the real ones."""
    found = audit(config(clients=3, rounds=1, dim=6, dp_epsilon=8.0), trials, fault=fault, parameters=20)
    assert found.claim.adversary is Adversary.SERVER_AND_CLIENT
    assert found.claim.adjacency is Adjacency.RECORD_ADD_REMOVE
    assert found.bounds.epsilon > 0
    assert found.violated == refuted
