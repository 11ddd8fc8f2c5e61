"""What each algorithm reaches where the answer is known, and the noise of those that add some."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from torch import nn

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.client_side import Participant, Step, own_normals
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, for_each, methods, require_used
from fedrp.compression.grid import Scale
from fedrp.config import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ConfigError, DivergenceError, ProtocolError, WireError
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import Examples
from fedrp.means import weighted_sum
from fedrp.mechanisms.clip import Clip
from fedrp.mechanisms.fixed_point import FixedPoint
from fedrp.privacy.events import Adjacency, Adversary
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.ledger import statements
from fedrp.privacy.noise import rounding_delta, update_noise_multiplier
from fedrp.protocol import server as server_side
from fedrp.protocol.server_state import MaskEntry, new_server
from fedrp.protocol.wire import SERVER, Kind, Message, encode
from fedrp.rng import RunSeed
from fedrp.testing.contracts import DATA, KEYS, PARAMETERS, Round
from helpers import NOISY, Federation, TinyNet, blobs, clipped_and_noised, tiny_config

WITHOUT_NOISE = {"noise_multiplier": 0.0, "clip": 1e6}


def pipeline_of(config: Resolved) -> Pipeline:
    return Pipeline.of(config, ALGORITHMS[config.algorithm].server)


def scale_of(config: Resolved, previous: np.ndarray | None, call: Cohort) -> Scale:
    """How an upload becomes whole numbers, where it is masked."""
    return FixedPoint(config, ALGORITHMS[config.algorithm].server.mechanisms(config)).scale(previous, call)


def config_of(name: str, **changes: object) -> Resolved:
    private = WITHOUT_NOISE if name == "fedavg-dp" else {}
    return resolved(tiny_config(name, **{"clients": len(DATA), **private, **changes}), PARAMETERS)


def test_the_order_of_uploads_is_irrelevant() -> None:
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=40).astype(np.float32) for _ in range(6)]
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    straight, backwards = weighted_sum(vectors, weights, 21.0), weighted_sum(vectors[::-1], weights[::-1], 21.0)
    np.testing.assert_allclose(straight, backwards, rtol=2e-7, atol=1e-7)


class Line(nn.Linear):
    """Linear regression: 5 weights and a constant."""

    def __init__(self) -> None:
        super().__init__(5, 1)


def regression() -> tuple[Task, np.ndarray]:
    """Clients that disagree, and the w that minimises the mean of their losses."""
    rng = np.random.default_rng(3)
    sources, A, b = [], np.zeros((6, 6)), np.zeros(6)
    for _ in range(3):
        x = rng.normal(0, 1, (24, 5))
        y = x @ rng.normal(0, 1, 5) + rng.normal() + 0.1 * rng.normal(size=24)
        sources.append((torch.tensor(x, dtype=torch.float32), torch.tensor(y[:, None], dtype=torch.float32)))
        design = np.hstack([x, np.ones((24, 1))])
        A += design.T @ design / 24
        b += design.T @ y / 24
    near = lambda outputs, targets: ((outputs - targets).abs() < 1).float()  # noqa: E731
    return Task(Line, sources, sources[0], nn.functional.mse_loss, near), np.linalg.solve(A, b)


def solve(**changes: object) -> float:
    """How far the delivered model ends from the optimum."""
    task, optimum = regression()
    base = RunConfig(clients=3, batch_size=24, momentum=0.0, grad_clip=0.0)
    return float(np.abs(simulate(dataclasses.replace(base, **changes), task).model - optimum).max())


def test_fedavg_with_one_local_step_is_gradient_descent_and_finds_the_optimum() -> None:
    assert solve(algorithm="fedavg", rounds=75, lr=0.2) < 1e-6


def test_fedavg_with_many_local_steps_ends_beside_the_optimum_less_so_with_small_steps() -> None:
    far, near = (solve(algorithm="fedavg", rounds=40, local_epochs=4, lr=lr) for lr in (0.2, 0.05))
    assert 1e-3 < near < far / 2


def test_fedadmm_finds_the_optimum_although_clients_disagree_and_take_many_steps() -> None:
    assert solve(algorithm="fedadmm", rounds=75, local_epochs=3, lr=0.2, rho=1.0) < 1e-6


@pytest.mark.parametrize(("rule", "middle"), [("mean", np.mean), ("median", np.median)])
def test_fedadmm_ends_where_the_aggregate_of_the_gradients_is_zero(rule: str, middle: Callable[..., Any]) -> None:
    """Its fixed points have w_i = zbar and y_i = -gradient, so the server's rule makes zero of the duals."""
    task, _ = regression()
    base = RunConfig(algorithm="fedadmm", clients=3, batch_size=24, momentum=0.0, grad_clip=0.0, aggregation=rule)
    weights = simulate(dataclasses.replace(base, rounds=75, local_epochs=3, lr=0.2, rho=1.0), task).model
    gradients = []
    for x, y in task.train:
        design = np.hstack([x.numpy(), np.ones((len(x), 1))])
        gradients.append(design.T @ (design @ weights - y.numpy()[:, 0]) / len(x))
    assert np.abs(middle(gradients, axis=0)).max() < 1e-6
    assert np.abs(gradients).max() > 0.1


def test_fwc_does_not_find_it() -> None:
    assert solve(algorithm="fwc", rounds=30, lr=0.2) > 0.1


# --- what is particular ----------------------------------------------------------------------------------------------


def test_fwc_sends_no_bytes(task: Task) -> None:
    crossed: list[object] = []
    result = simulate(tiny_config("fwc"), task, tap=lambda sent, replies: crossed.extend([sent, replies])).as_json()
    assert crossed == []
    assert [result[f"bytes_{name}"] for name in ("up", "down", "keys_up", "keys_down")] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
def test_projected_algorithms_send_m_numbers(name: str, task: Task) -> None:
    result = simulate(tiny_config(name, dim=20), task).as_json()
    assert result["bytes_up"] == 28 + 4 * 20


def test_fedadmm_sends_what_its_equations_say() -> None:
    """y_i <- y_i + rho (w_i - zbar), sent: w_i + y_i / rho. Also where some were not heard, so that sum y_i != 0."""
    run = Round(config_of("fedadmm", rho=0.5))
    first = run.newcomers()
    uploads = run.upload(first)
    consensus = run.aggregate(uploads[:2])
    second = [Participant(upload.state, [Step(None, consensus)]) for upload in uploads]
    for before, after in zip(uploads, run.upload(second, 2), strict=True):
        dual = before.state.carry + 0.5 * (before.state.model - consensus)
        assert np.abs(dual).max() > 1e-4
        np.testing.assert_allclose(after.state.carry, dual, atol=1e-7)
        np.testing.assert_allclose(after.vector, after.state.model + dual / 0.5, atol=1e-7)


def test_fedavg_with_momentum_carries_on_the_last_step_of_the_common_model() -> None:
    """Hsu et al. 2019: v <- beta v + mean - w, w <- w + v; the first v is that of round 2."""
    run = Round(config_of("fedavg", server_momentum=0.7))
    participants, model, velocity = run.newcomers(), None, np.float32(0)
    for round_ in (1, 2, 3, 4):
        uploads = run.upload(participants, round_)
        mean = np.mean([upload.vector for upload in uploads], axis=0)
        participants = run.returning(uploads, round_)
        if model is not None:
            velocity = np.float32(0.7) * velocity + mean - model
            mean = model + velocity
        model = run.past[0]
        np.testing.assert_allclose(model, mean, atol=1e-6)
    assert np.abs(velocity).max() > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_private_fedavg_is_the_subspace_mode_with_a_signed_permutation(momentum: float) -> None:
    """One mechanism: with m = n, `sign` renames and flips coordinates, which neither clipping nor SGD can tell."""
    models = []
    private = {"noise_multiplier": 0.0, "clip": 0.05, "server_momentum": momentum}
    for name, projection in (("fedavg-dp", None), ("fedrp-subspace", "sign")):
        run = Round(config_of(name, dim=PARAMETERS, projection=projection, **private))
        participants = run.newcomers()
        for round_ in (1, 2, 3):
            participants = run.returning(run.upload(participants, round_), round_)
            last = run.algorithm.client.finish(run.local(round_), participants[0])
        models.append(last.model)
    np.testing.assert_allclose(*models, atol=1e-6)
    assert np.linalg.norm(models[0] - public_initial(TinyNet, RunSeed(0))) > 0.1


def test_a_penalty_too_strong_for_the_step_size_is_refused_with_a_better_one() -> None:
    with pytest.raises(ConfigError, match=r"rho=100 is not stable.*use rho=[0-9.e-]+$") as caught:
        resolved(tiny_config("fedrp", rho=100.0), PARAMETERS)
    better = float(str(caught.value).rpartition("=")[2])
    assert resolved(tiny_config("fedrp", rho=better), PARAMETERS).rho == better


@pytest.mark.parametrize("dim", [PARAMETERS + 1, 10**6])
@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
def test_a_dimension_above_the_number_of_parameters_is_refused(name: str, dim: int) -> None:
    with pytest.raises(ConfigError, match=f"dim={dim} .*{PARAMETERS} parameters"):
        resolved(tiny_config(name, dim=dim), PARAMETERS)


# --- fedavg-dp -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1e-3, 0.05, 50.0])
def test_updates_are_clipped_to_the_norm_bound(clip: float) -> None:
    free = Round(config_of("fedavg-dp"))
    bound = Round(config_of("fedavg-dp", clip=clip))
    clipped = 0
    for unbounded, upload in zip(free.upload(free.newcomers()), bound.upload(bound.newcomers()), strict=True):
        norm = np.linalg.norm(unbounded.vector)
        assert np.linalg.norm(upload.vector) <= clip * (1 + 1e-6)
        clipped += norm > clip
        factor = min(1.0, clip / norm)
        np.testing.assert_allclose(upload.vector, factor * unbounded.vector, rtol=1e-4, atol=1e-7)
    assert clipped == (0 if clip == 50 else 3)


def noise_of(name: str = "fedavg-dp", **changes: object) -> np.ndarray:
    """What three clients send who have learned nothing: their noise, (draws, clients, numbers)."""
    run = Round(config_of(name, lr=1e-30, clip=0.5, **changes))
    updates = [upload.vector for upload in run.algorithm.client.round(run.local(1), run.newcomers())]
    draws = []
    for draw in range(20):
        noises = [own_normals(functools.partial(KEYS[-1].derive, f"{draw} {client}")) for client in range(len(updates))]
        contexts = [run.context(client)._replace(normals=normals) for client, normals in enumerate(noises)]
        draws.append([run.pipeline.sent(*pair) for pair in zip(updates, contexts, strict=True)])
    return np.array(draws, np.float64)


def has_deviation(noise: np.ndarray, deviation: float) -> bool:
    """Whether independent normals have this standard deviation; a right answer is missed once in 500,000 times."""
    low, high = chi2.ppf([1e-6, 1 - 1e-6], noise.size)
    return bool(low < np.sum(noise**2) / deviation**2 < high)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize(
    ("dp_noise", "quorum", "arriving"), [("shared", 1.0, 2), ("shared", 0.6, 1), ("local", 0.5, 1)]
)
def test_the_noise_has_the_stated_deviation(name: str, dp_noise: str, quorum: float, arriving: int) -> None:
    """Shared: the quorum but for one, who may be curious, carries z C together. Local: each client does alone."""
    changes = {"noise_multiplier": 2.0, "dp_noise": dp_noise, "quorum": quorum, "dim": PARAMETERS}
    noise = noise_of(name, **changes)[:, :arriving].sum(axis=1)
    stated = 2.0 * 0.5
    assert has_deviation(noise, stated)
    assert not has_deviation(noise, stated * 2 / 3)
    assert not has_deviation(noise, stated * 3 / 2)


def test_noise_differs_between_clients_and_draws() -> None:
    noise = noise_of(noise_multiplier=2.0).reshape(60, PARAMETERS)
    correlations = np.corrcoef(noise) - np.eye(60)
    assert np.abs(correlations).max() < 6 / PARAMETERS**0.5


def test_the_server_divides_by_the_expected_number_of_clients_whoever_came() -> None:
    config = resolved(tiny_config("fedavg-dp", clients=10, participation=0.5), PARAMETERS)
    assert pipeline_of(config).divisor == 5
    assert pipeline_of(config_of("fedavg")).divisor is None


def test_a_target_epsilon_gives_a_noise_multiplier_that_keeps_it(task: Task) -> None:
    config = tiny_config("fedavg-dp", noise_multiplier=None, dp_epsilon=3.0, dp_delta=1e-3, dp_noise="local")
    result = simulate(config, task).as_json()
    assert 2.5 < result["epsilon"] <= 3.0
    assert result["delta"] == 1e-3
    assert result["noise_multiplier"] > 0


@pytest.mark.parametrize("quantile", [0.3, 0.7])
@pytest.mark.parametrize("start", [0.2, 200.0])
def test_an_adaptive_clip_finds_the_quantile_of_the_norms(quantile: float, start: float) -> None:
    """Norms 1 .. 20: C ends between the two that the quantile lies between, give or take one, wherever it began."""
    config = tiny_config("fedavg-dp", clients=20, noise_multiplier=0.01, clip=start, clip_quantile=quantile)
    pipeline = pipeline_of(resolved(config, PARAMETERS))
    updates = [np.eye(1, PARAMETERS, dtype=np.float32)[0] * norm for norm in range(1, 21)]
    previous, bounds = None, []
    for round_ in range(120):
        noises = [KEYS[0].derive(f"{round_} {client}") for client in range(20)]
        pairs = zip(updates, noises, strict=True)
        sent = [clipped_and_noised(pipeline.config, update, noise, 20, previous) for update, noise in pairs]
        past = [] if previous is None else [previous]
        previous = pipeline.aggregate(past, np.mean(sent, axis=0, dtype=np.float32), 20.0)
        bounds.append(float(previous[-1]))
    assert 20 * quantile - 1 < np.median(bounds[60:]) < 20 * quantile + 2


def uploads_with_noise(update: np.ndarray, **changes: object) -> np.ndarray:
    config = resolved(tiny_config("fedavg-dp", clients=20, noise_multiplier=0.7, clip=0.3, **changes), PARAMETERS)
    return np.stack([clipped_and_noised(config, update, KEYS[0].derive(str(number)), 20) for number in range(200)])


@pytest.mark.parametrize("change", [{}, {"dp_noise": "local"}, {"clip_quantile": 0.5, "dp_noise": "local"}])
def test_which_numbers_can_be_sent_does_not_depend_on_the_update(change: dict[str, object]) -> None:
    """Float32 noise on float32 values has holes that tell, from one upload, whether the update was zero.

    Every number is a multiple of one power of two, far below the noise, and the lowest of its bits are uniform.
    """
    step = 2.0**-15 if change else 2.0**-17  # all of the noise is 0.7 * 0.3 = 2^-2.3, a share 2^-4.4
    real = np.random.default_rng(0).normal(size=PARAMETERS).astype(np.float32) / 30
    for update in (np.zeros_like(real), real):
        sent = uploads_with_noise(update, **change)
        assert (sent.astype(np.float32) == sent).all()  # so that it is still on the grid when it is sent
        numbers, votes = sent[:, :PARAMETERS], sent[:, PARAMETERS:]
        for part in (numbers, votes) if votes.size else (numbers,):
            steps = part / step
            assert (steps == np.rint(steps)).all()
            if part is numbers:
                assert chisquare(np.bincount(steps.ravel().astype(np.int64) % 16, minlength=16)).pvalue > 1e-4


def test_noise_that_is_to_be_masked_is_on_the_same_grid() -> None:
    zero = np.zeros(PARAMETERS, np.float32)
    assert np.array_equal(uploads_with_noise(zero, secure_aggregation=True), uploads_with_noise(zero))


HIDDEN = {"clients": 100, "participation": 0.4, "sampling": "poisson", "rounds": 5, "noise_multiplier": 0.8}


@pytest.mark.parametrize("change", [{}, {"secure_aggregation": True}, {"clip_quantile": 0.5}])
def test_no_bit_of_a_sum_tells_how_many_took_part(change: dict[str, object]) -> None:
    """Where participation is hidden, the number of participants must not show in the last bits of the model."""
    config = resolved(tiny_config("fedavg-dp", **HIDDEN, **change), PARAMETERS)
    steps = set()
    for participants in (20, 33, 60):  # of which each adds another share of the noise
        zero, noise = np.zeros(PARAMETERS, np.float32), KEYS[0].derive(str(participants))
        sent = clipped_and_noised(config, zero, noise, participants)
        steps.add(float(np.gcd.reduce((sent * 2.0**40).astype(np.int64))) * 2.0**-40)
        call = Cohort(tuple(range(participants)), (1,) * participants)
        steps.add(scale_of(config, None, call).step)
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("clients", "change"),
    [(3, {}), (100, {}), (10_000, {}), (100, {"clip_quantile": 0.5}), (1000, {"clip_quantile": 0.5})],
)
def test_no_sum_of_masked_noise_overflows(clients: int, change: dict[str, object]) -> None:
    config = resolved(
        tiny_config("fedavg-dp", clients=clients, noise_multiplier=0.2, secure_aggregation=True, **change), PARAMETERS
    )
    call = Cohort(tuple(range(clients)), (1,) * clients)
    bound, step = scale_of(config, None, call)
    assert clients * (bound / step + 0.5) < 2**31
    share = config.clip * config.noise_multiplier / math.sqrt(clients)
    assert step < share / 100


def crowd(clients: int, clip: float, **changes: object) -> Resolved:
    config = tiny_config("fedavg-dp", clients=clients, clip=clip, noise_multiplier=1.0, rounds=30, **changes)
    return resolved(dataclasses.replace(config, secure_aggregation=True), PARAMETERS)


@pytest.mark.parametrize(
    ("clients", "clip", "change"), [(500_000, 1.0, {}), (400_000, 0.3, {}), (15_000, 1.0, {"clip_quantile": 0.5})]
)
def test_what_rounding_costs_is_stated_for_the_worst_clip_that_may_come(
    clients: int, clip: float, change: dict[str, object]
) -> None:
    """The step is a power of two: just above one, C has up to twice as coarse a grid as it needs."""
    config = crowd(clients, clip, **change)
    told = statements(ALGORITHMS["fedavg-dp"].releases(config), 1e-5)[0]
    (stated,) = [
        float(found[1]) for text in told.assumptions if (found := re.search(r"less than (\S+) to delta", text))
    ]
    call = Cohort(tuple(range(clients)), (1,) * clients)
    multiplier = update_noise_multiplier(1.0, clients / 20) if change else 1.0
    share = multiplier / math.sqrt(clients - 1)
    for clip_of_a_round in np.linspace(0.25, 1.0, 200, dtype=np.float32) if change else [clip]:
        aggregate = np.full(1, clip_of_a_round, np.float32)
        step = scale_of(config, aggregate, call).step
        assert rounding_delta(clip_of_a_round * share, step, clients, 10**6, 30, 10.0) <= stated


@pytest.mark.parametrize(("clients", "clip", "change"), [(500_000, 0.3, {}), (18_000, 1.0, {"clip_quantile": 0.5})])
def test_a_crowd_whose_grid_is_too_coarse_for_its_clip_is_refused(
    clients: int, clip: float, change: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"noise_multiplier=1 is too small to be rounded before masking: use more"):
        crowd(clients, clip, **change)


@pytest.mark.parametrize("clip", [0.0, -0.0, -0.3])
@pytest.mark.parametrize("name", ["fedavg-dp", "fedrp-subspace"])
def test_a_server_that_names_a_clip_that_is_none_gets_no_upload(name: str, clip: float) -> None:
    """With C = 0 there would be neither an update nor noise, and with a negative one no bound."""
    config = tiny_config(name, clients=12, noise_multiplier=0.5, clip=1.0, clip_quantile=0.5)
    run = Federation(config)
    run.round()
    aggregate = run.server.aggregates[1].copy()
    aggregate[-1] = clip
    run.server = dataclasses.replace(run.server, aggregates={1: aggregate})
    packets = run.open()
    with pytest.raises(ProtocolError, match=rf"the aggregate names a clip of {clip:g}: expected a positive, finite"):
        run.answer(3, packets[3])
    assert run.clients[3].round == 1


@pytest.mark.parametrize("clip", [math.inf, -math.inf, math.nan])
def test_a_clip_that_is_not_finite_is_refused(clip: float) -> None:
    """The wire refuses it too, whatever the algorithm."""
    config = resolved(tiny_config("fedavg-dp", clients=12, clip_quantile=0.5), PARAMETERS)
    with pytest.raises(ProtocolError, match=rf"names a clip of {clip:g}"):
        Clip(config).bound(np.full(3, clip, np.float32))
    message = Message(Kind.AGGREGATE, bytes(4), 1, SERVER, np.full(3, clip, np.float32))
    with pytest.raises(WireError, match="not finite"):
        encode([message])


def test_a_sum_of_multiples_does_not_tell_how_they_were_shared_out() -> None:
    rng = np.random.default_rng(3)
    few = rng.integers(-5000, 5000, (3, 1000))
    many = rng.integers(-5000, 5000, (37, 1000))
    many[-1] += few.sum(axis=0) - many.sum(axis=0)
    assert (few.sum(axis=0) == many.sum(axis=0)).all()
    one, other = (
        weighted_sum(list((part * 2.0**-14).astype(np.float32)), [1.0] * len(part), 40.0) for part in (few, many)
    )
    assert np.array_equal(one, other)


def test_with_hidden_participation_each_adversary_has_its_own_statement() -> None:
    config = resolved(tiny_config("fedavg-dp", secure_aggregation=True, **HIDDEN), PARAMETERS)
    told = {one.adversary: one for one in statements(ALGORITHMS["fedavg-dp"].releases(config), 1e-5)}
    fewest = 9  # of 100 coins of 0.4, in five rounds, but for 1e-11: 5 * binom.cdf(8, 100, 0.4) = 2.7e-12
    assert f"at least {fewest} clients take part" in str(told[Adversary.CLIENTS])
    known = 0.8 * math.sqrt(1 - 1 / fewest)
    for adversary, noise, hidden, neighbours in (
        (Adversary.SERVER, 0.8, False, Adjacency.CLIENT_ZEROED),
        (Adversary.SERVER_AND_CLIENT, known, False, Adjacency.CLIENT_ZEROED),
        (Adversary.CLIENTS, known, False, Adjacency.CLIENT_ZEROED),
        (Adversary.MODEL_HOLDER, 0.8, True, Adjacency.CLIENT_ADD_REMOVE),
    ):
        expected = gaussian_epsilon(noise, 1e-5, 5, 0.4, participation_hidden=hidden)
        assert told[adversary].epsilon == pytest.approx(expected, rel=1e-3)
        assert told[adversary].adjacency is neighbours


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_nothing_is_said_of_a_client_that_is_added_where_its_presence_shows(sampling: str) -> None:
    """In a sample of fixed size it takes another one's place, and the sum may change by 2 C."""
    config = resolved(tiny_config("fedavg-dp", clients=10, participation=0.5, sampling=sampling), PARAMETERS)
    assert {r.adjacency for r in ALGORITHMS["fedavg-dp"].releases(config)} == {Adjacency.CLIENT_ZEROED}


def test_a_delta_too_small_for_amplification_is_kept_without_it() -> None:
    config = resolved(
        tiny_config("fedavg-dp", **{**HIDDEN, "noise_multiplier": None, "dp_epsilon": 1.0, "dp_delta": 1e-14}),
        PARAMETERS,
    )
    told = statements(ALGORITHMS["fedavg-dp"].releases(config), 1e-14)
    (epsilon,) = (one.epsilon for one in told if one.adversary is Adversary.MODEL_HOLDER)
    assert epsilon == pytest.approx(1.0)


def test_an_adaptive_clip_that_the_noise_does_not_allow_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"clip_quantile=0\.5 needs more clients a round: with 3 .*fixed clip"):
        resolved(tiny_config("fedavg-dp", clients=3, noise_multiplier=5.0, clip_quantile=0.5), PARAMETERS)


def epsilon_against(adversary: Adversary, **changes: object) -> tuple[float | None, str]:
    """What is claimed, and the whole statement."""
    config = resolved(tiny_config("fedavg-dp", **changes), PARAMETERS)
    told = statements(ALGORITHMS["fedavg-dp"].releases(config), 1e-5)
    (statement,) = (one for one in told if one.adversary is adversary)
    return statement.epsilon, str(statement)


@pytest.mark.parametrize(("clients", "secure", "rate"), [(5, False, 0.05), (10, False, 0.1), (9, True, 0.2)])
def test_clients_who_are_added_to_too_few_are_counted(clients: int, secure: bool, rate: float) -> None:
    """The rate that is accounted for is the one with which the server's coins really choose a client."""
    changes = {"clients": clients, "participation": rate, "sampling": "poisson", "secure_aggregation": secure}
    config = resolved(tiny_config("fedavg-dp", dp_noise="local", **changes), PARAMETERS)
    (event,) = {release.event for release in ALGORITHMS["fedavg-dp"].releases(config)}
    server = new_server(config, bytes(16), PARAMETERS)
    greeted = {client: MaskEntry(1, b"") for client in range(clients)}
    server = dataclasses.replace(server, mask_keys=greeted)
    coins = np.random.default_rng(1).random((20_000, clients))
    chosen = sum(0 in server_side.open_round(server, drawn)[0].participants for drawn in coins)
    error = 4 * (event.event.rate * (1 - event.event.rate) / 20_000) ** 0.5
    assert abs(chosen / 20_000 - event.event.rate) < error
    assert abs(chosen / 20_000 - rate) > error


def test_sampling_amplifies_only_where_coins_practically_always_choose_enough() -> None:
    changes = {"sampling": "poisson", "rounds": 20, "noise_multiplier": 2.0}
    enough, said = epsilon_against(Adversary.MODEL_HOLDER, clients=100, participation=0.4, **changes)
    assert enough == pytest.approx(gaussian_epsilon(2.0, 1e-5, 20, 0.4, participation_hidden=True), rel=1e-6)
    assert "coins choose enough participants" in said
    few, said = epsilon_against(Adversary.MODEL_HOLDER, clients=20, participation=0.4, **changes)
    assert few == pytest.approx(gaussian_epsilon(2.0, 1e-5, 20, 0.4 + 0.6**20 / 20), rel=1e-6)
    assert "coins choose enough" not in said
    assert few > enough


def test_everyone_is_needed_only_where_noise_is_shared() -> None:
    shared, local = (resolved(tiny_config("fedavg-dp", dp_noise=noise), PARAMETERS) for noise in ("shared", "local"))
    assert (shared.quorum, local.quorum) == (1.0, 0.5)


@pytest.mark.parametrize("name", [name for name in methods() if name != "fedavg-dp"])
def test_without_noise_no_guarantee_is_claimed(name: str, task: Task) -> None:
    result = simulate(tiny_config(name), task).as_json()
    assert result["epsilon"] is None
    assert result["delta"] is None


def test_weights_by_sample_count_are_refused_where_privacy_rests_on_equal_ones() -> None:
    with pytest.raises(ConfigError, match="equal weights"):
        resolved(tiny_config("fedrp-subspace", noise_multiplier=0.5, weighting="samples"), PARAMETERS)


class FragileNet(TinyNet):
    """Gives NaN for large inputs, which are finite, as examples must be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * x.sum(1, keepdim=True).exp()


@pytest.mark.parametrize("name", ["fedavg-dp", "fedrp-subspace"])
def test_with_noise_a_client_whose_training_diverges_sends_noise_alone(name: str) -> None:
    """A run that stops would tell of that client's data what epsilon says that nobody can tell."""
    x, y = blobs(80, 1)
    parts = [Examples(x[client::4].clone(), y[client::4]) for client in range(4)]
    poisoned = [Examples(parts[0].x + 100, parts[0].y), *parts[1:]]
    config = tiny_config(name, noise_multiplier=0.5, clip=1.0, rounds=1, server_momentum=0.0)
    spoiled = simulate(config, Task(FragileNet, poisoned, blobs(60, 2)))
    with pytest.raises(DivergenceError):
        simulate(tiny_config("fedavg"), Task(FragileNet, poisoned, blobs(60, 2)))
    sound = simulate(config, Task(FragileNet, parts, blobs(60, 2)))
    assert np.isfinite(spoiled.model).all()
    moved = np.linalg.norm(spoiled.model - sound.model)
    assert 0 < moved <= 1.01 * config.clip / config.clients * (1 if name == "fedavg-dp" else (83 / 12) ** 0.5 * 3)


def test_shared_settings_are_given_to_those_who_use_them() -> None:
    shared = RunConfig(dropout=0.2, sealing="hybrid", rho=0.5)
    plain, secret, alone = for_each(shared, ("fedavg", "fedrp", "fwc"))
    assert (plain.dropout, plain.sealing, plain.rho) == (0.2, "x25519", None)
    assert (secret.dropout, secret.sealing, secret.rho) == (0.2, "hybrid", 0.5)
    assert (alone.dropout, alone.sealing, alone.rho) == (0.0, "x25519", None)
    for config in (plain, secret, alone):
        require_used(config)
    masked, alone = for_each(RunConfig(secure_range=9.0, secure_aggregation=True), ("fedavg", "fwc"))
    assert (masked.secure_range, alone.secure_range) == (9.0, 64.0)
    noised = RunConfig(secure_range=9.0, secure_aggregation=True, dp_epsilon=3.0)
    plain, private = for_each(noised, ("fedavg", "fedrp-subspace"))
    assert (plain.secure_range, private.secure_range) == (9.0, 64.0)
    with pytest.raises(ConfigError, match=r"secure_range=9\.0 does nothing .* secure_aggregation=True without noise"):
        require_used(dataclasses.replace(noised, algorithm="fedrp-subspace"))
    for config in for_each(RunConfig(secure_range=9.0), ("fedavg", "fwc")):
        with pytest.raises(ConfigError, match=r"secure_range=9\.0 does nothing"):
            require_used(config)
