"""Printed FedRP within bounds: a ball that no update leaves, a floor that no norm falls below, and what is claimed."""

import dataclasses
import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import nn

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.client_side import Local, Participant, Step
from fedrp.algorithms.projection_bounds import summed_release
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, methods
from fedrp.cli import main
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError, PrivacyError
from fedrp.learning.initial import secret_initial
from fedrp.learning.norm_floor import initial_norm_floor, with_norm_floor
from fedrp.learning.objective import Objective, Stack
from fedrp.privacy.bounds import EpsilonInterval, bound
from fedrp.privacy.events import Adjacency, Adversary, Composed, ProjectedRelease
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import headline, statements
from fedrp.privacy.projection_mechanism import exact_epsilon
from fedrp.projection.families import make_projection
from fedrp.projection.rotation import make_rotation
from helpers import Federation, TinyNet, tiny_config, tiny_task

PARAMETERS = 83
RADIUS = 0.25
FEDRP = ALGORITHMS["fedrp"]


def key(number: int) -> SecretKey:
    return SecretKey(number.to_bytes(32, "big"))


def norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def bounded_config(**changes: object) -> RunConfig:
    config = tiny_config("fedrp", **{"clients": 1, "projection": "gaussian", "ball": RADIUS, **changes})
    return resolved(with_norm_floor(config, TinyNet), PARAMETERS)


def ledger_of(config: RunConfig) -> dict[Adversary, Guarantee]:
    return {item.adversary: item for item in statements(FEDRP.releases(config), config.dp_delta)}


def world(config: RunConfig, start: np.ndarray, results: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rounds in which training returns what an adversary wants it to: (model, upload) of each."""
    state = FEDRP.client.init(config, start)
    aggregate, seen = None, []
    for round_, result in enumerate(results, 1):

        def train(_start: Stack, _objective: Objective, result: np.ndarray = result) -> Stack:
            return result[None]

        def project(round_key: SecretKey) -> object:
            return make_projection("gaussian", round_key, PARAMETERS, config.dim)

        client = Participant(state, [Step(key(round_ - 1), aggregate)])

        def rotate(round_key: SecretKey) -> object:
            return make_rotation(config.rotation, round_key, config.dim)

        (upload,) = FEDRP.client.round(Local(config, key(round_), project, rotate, train), [client])
        state, aggregate = upload.state, upload.vector
        seen.append((state.model, upload.vector))
    return seen


# --- the ball --------------------------------------------------------------------------------------------------------


@st.composite
def updates(draw: st.DrawFn) -> np.ndarray:
    """What training may return: anything of any size, also values that are no numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vector = rng.normal(size=PARAMETERS) * 10.0 ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        vector[rng.integers(PARAMETERS)] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return vector.astype(np.float32)


@given(st.integers(0, 2**32), st.lists(st.tuples(updates(), updates()), min_size=1, max_size=5))
def test_no_update_leaves_the_ball_in_any_round(number: int, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Two worlds that differ in every update: never more than 2 R apart, never shorter than the floor."""
    config = bounded_config(rounds=5)
    start = secret_initial(TinyNet, key(number))
    worlds = [world(config, start, list(results)) for results in zip(*pairs, strict=True)]
    for (one, _), (other, _) in zip(*worlds, strict=True):
        for model in (one, other):
            assert norm(model.astype(np.float64) - start) <= RADIUS
            assert norm(model) >= config.norm_floor
        assert norm(one.astype(np.float64) - other.astype(np.float64)) <= 2 * RADIUS


def test_what_is_sent_is_the_projection_of_the_bounded_model() -> None:
    config = bounded_config()
    start = secret_initial(TinyNet, key(1))
    for round_, (model, upload) in enumerate(world(config, start, [start * 1e6, -start * 1e6]), 1):
        expected = make_projection("gaussian", key(round_), PARAMETERS, config.dim).forward(model)
        np.testing.assert_array_equal(upload, expected)
        assert norm(model - start) == pytest.approx(RADIUS, rel=1e-5)


def test_a_ball_that_training_stays_in_changes_nothing() -> None:
    plain = tiny_config("fedrp", projection="gaussian")
    wide = simulate(dataclasses.replace(plain, ball=1e3), tiny_task())
    np.testing.assert_array_equal(wide.model, simulate(plain, tiny_task()).model)


def test_in_a_real_run_every_client_stays_in_the_ball_and_resumes_there(tmp_path: object) -> None:
    config = tiny_config("fedrp", projection="gaussian", ball=0.05, clients=3, participation=0.67)
    federation = Federation(config)
    for _ in range(config.rounds):
        federation.round()
    starts = [
        client_state.state.carry[config.dim :] for client_state in federation.clients.values() if client_state.state
    ]
    for client_state in federation.clients.values():
        assert norm(client_state.state.model - starts[0]) == pytest.approx(0.05, rel=1e-4)
        np.testing.assert_array_equal(client_state.state.carry[config.dim :], starts[0])
    first = simulate(config, tiny_task(), out=tmp_path / "run")
    again = simulate(config, tiny_task(), out=tmp_path / "run", resume=True)
    assert again.model.tobytes() == first.model.tobytes()


# --- the norm floor --------------------------------------------------------------------------------------------------


def test_the_floor_of_the_start_is_public_and_neither_missed_nor_far_off() -> None:
    """A quantile that is passed by as many starts as it says (4 deviations), and one that none of them passes."""
    norms = np.array([norm(secret_initial(TinyNet, key(number))) for number in range(400)])
    assert (norms >= initial_norm_floor(TinyNet)).all()
    # Four tensors, each at its own quantile: a start is below the sum of them less often than stated.
    assert (norms < initial_norm_floor(TinyNet, 0.2)).mean() <= 0.2 + 4 * math.sqrt(0.2 * 0.8 / 400)
    assert initial_norm_floor(TinyNet, 0.5) > 0.8 * np.median(norms)
    assert initial_norm_floor(TinyNet, 0.5) < np.median(norms)


def test_the_floor_of_one_tensor_is_the_chi_square_quantile() -> None:
    floor = initial_norm_floor(lambda: nn.Linear(50, 8, bias=False), 0.01)
    template = secret_initial(lambda: nn.Linear(50, 8, bias=False), key(3))
    assert floor == pytest.approx(math.sqrt(chi2.ppf(0.01, 400) / 3 / 50), rel=0.05)  # U(-b, b): variance b^2 / 3
    assert norm(template) > floor


def test_what_is_given_counts_in_full_for_the_floor() -> None:
    weights = torch.linspace(-1, 1, 400).reshape(8, 50)

    def drawn() -> nn.Module:
        return nn.Linear(50, 8, bias=False)

    def pretrained() -> nn.Module:
        module = drawn()
        module.load_state_dict({"weight": weights})
        return module

    length = norm(weights.numpy())
    assert initial_norm_floor(pretrained) == pytest.approx(length, rel=2e-5)
    assert initial_norm_floor(pretrained) < norm(secret_initial(pretrained, key(1))) == length
    both = initial_norm_floor(lambda: nn.Sequential(pretrained(), drawn()), 0.02)
    assert both == pytest.approx(math.hypot(length, initial_norm_floor(drawn, 0.01)), rel=0.01)


def test_a_start_that_is_too_short_is_refused_whatever_the_data(task: Task) -> None:
    with pytest.raises(PrivacyError, match=r"norm_floor=50 does not hold with ball=0\.25.*nothing was sent"):
        simulate(tiny_config("fedrp", ball=RADIUS, norm_floor=50.0), task)


def test_without_a_ball_a_client_checks_what_it_is_about_to_send(task: Task) -> None:
    with pytest.raises(PrivacyError, match=r"shorter than norm_floor=50: it was not sent"):
        simulate(tiny_config("fedrp", sensitivity=0.01, norm_floor=50.0), task)
    config = bounded_config(ball=None, sensitivity=0.1, norm_floor=1.0)
    with pytest.raises(PrivacyError):
        world(config, secret_initial(TinyNet, key(1)), [np.full(PARAMETERS, math.nan, np.float32)])
    assert simulate(tiny_config("fedrp", sensitivity=0.01, norm_floor=0.1), task).accuracy > 0


# --- what is claimed -------------------------------------------------------------------------------------------------


def test_one_client_alone_is_what_the_theorem_is_about() -> None:
    config = bounded_config(rounds=1)
    statement = ledger_of(config)[Adversary.SERVER]
    ratio = 2 * RADIUS / config.norm_floor
    assert statement.epsilon == pytest.approx(exact_epsilon(config.dim, ratio, 1e-5))
    assert statement.adjacency is Adjacency.CLIENT_REPLACE
    text = str(statement)
    for part in ("the sensitivity is 0.5", "enforced by the code on every release", "round keys"):
        assert part in text
    assert Adversary.ONE_VECTOR not in ledger_of(config)
    assert headline(tuple(ledger_of(config).values())) is None  # there are others, who know the matrix


def test_rounds_are_composed() -> None:
    config = bounded_config(rounds=7)
    event = Composed(ProjectedRelease(config.dim, 2 * RADIUS / config.norm_floor), 7)
    answer = bound("pld", event, 1e-5)
    assert isinstance(answer, EpsilonInterval)
    assert ledger_of(config)[Adversary.SERVER].epsilon == pytest.approx(answer.upper)


def test_several_clients_have_no_guarantee_and_the_papers_view_is_labelled() -> None:
    """The server sees all vectors under one matrix; what holds for one of them alone is not quoted as the result."""
    ledger = ledger_of(bounded_config(clients=4))
    assert ledger[Adversary.SERVER].epsilon is None
    assert "distance to the span" in ledger[Adversary.SERVER].reason
    assert ledger[Adversary.ONE_VECTOR].epsilon == ledger_of(bounded_config())[Adversary.SERVER].epsilon
    assert "looks at one client's vector alone" in str(ledger[Adversary.ONE_VECTOR])
    assert headline(tuple(ledger.values())) is None
    assert simulate(tiny_config("fedrp", ball=RADIUS), tiny_task()).as_json()["epsilon"] is None


def test_one_participant_a_round_is_seen_alone_too() -> None:
    one = ledger_of(bounded_config(clients=4, participation=0.25))
    assert one[Adversary.SERVER].epsilon == ledger_of(bounded_config())[Adversary.SERVER].epsilon
    coins = ledger_of(bounded_config(clients=4, participation=0.25, sampling="poisson"))  # sometimes two of them
    assert coins[Adversary.SERVER].epsilon is None


@pytest.mark.parametrize("changes", [{"ball": None}, {"projection": "sign"}, {"ball": 100.0}])
def test_without_bounds_or_a_gaussian_matrix_there_is_no_guarantee(changes: dict[str, object]) -> None:
    ledger = ledger_of(bounded_config(**changes))
    assert all(item.epsilon is None for item in ledger.values())


def test_an_assumed_sensitivity_is_labelled_and_about_records() -> None:
    statement = ledger_of(bounded_config(ball=None, sensitivity=0.01, norm_floor=1.0))[Adversary.SERVER]
    assert statement.epsilon is not None
    assert statement.adjacency is Adjacency.RECORD_REPLACE
    for part in ("given by the user, not checked", "neither neighbour stops", "secret histories"):
        assert part in str(statement)


def test_weights_tell_how_many_records_a_client_has() -> None:
    statement = ledger_of(bounded_config(weighting="samples"))[Adversary.SERVER]
    assert statement.adjacency is Adjacency.RECORD_REPLACE


def test_the_sum_of_many_is_worth_more_in_one_round_only() -> None:
    once, often = bounded_config(clients=5, rounds=1), bounded_config(clients=5, rounds=3)
    ratio = 2 * RADIUS / once.norm_floor
    assert summed_release(once, 5) == Composed(ProjectedRelease(once.dim, ratio / 5), 1)
    assert summed_release(often, 5) == Composed(ProjectedRelease(often.dim, ratio), 3)
    assert summed_release(bounded_config(ball=None, sensitivity=0.1, norm_floor=1.0), 5).ratio is None


def test_with_masks_the_server_has_the_sum_and_a_guarantee() -> None:
    once = ledger_of(bounded_config(clients=4, rounds=1, secure_aggregation=True, quorum=1.0))
    ratio = 2 * RADIUS / bounded_config().norm_floor
    assert once[Adversary.SERVER].epsilon == pytest.approx(exact_epsilon(12, ratio / 4, 1e-5))
    assert Adversary.ONE_VECTOR not in once  # nobody has that view
    fewer = ledger_of(bounded_config(clients=4, rounds=1, secure_aggregation=True))  # three may be summed
    assert fewer[Adversary.SERVER].epsilon == pytest.approx(exact_epsilon(12, ratio / 3, 1e-5))
    often = ledger_of(bounded_config(clients=4, rounds=7, secure_aggregation=True))
    assert often[Adversary.SERVER].epsilon == ledger_of(bounded_config(rounds=7))[Adversary.SERVER].epsilon
    assert "discards unread" in str(often[Adversary.SERVER])


def test_with_masks_and_few_bits_nothing_is_claimed_of_the_sum() -> None:
    """A sum of coarsely rounded projections is no function of the projected sum, and norms are told."""
    few = ledger_of(bounded_config(clients=4, rounds=1, secure_aggregation=True, quorum=1.0, bits=8.0))
    assert few[Adversary.SERVER].epsilon is None


def test_the_others_can_move_the_sum_in_later_rounds() -> None:
    """Why `summed_release` forgets the factor: balls of five clients, all of them moved, against a sum five times as
    long. The ratio of norms is that of one client."""
    start = secret_initial(TinyNet, key(4)).astype(np.float64)
    outward = start * (1 + RADIUS / norm(start))
    inward = start * (1 - RADIUS / norm(start))
    floor = norm(start) - RADIUS
    together = norm(5 * outward) / norm(5 * inward)
    alone = norm(4 * inward + outward) / norm(5 * inward)
    assert together == pytest.approx(1 + 2 * RADIUS / floor)
    assert alone == pytest.approx(1 + 2 * RADIUS / (5 * floor))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"ball": 0.0}, "ball=0.0"),
        ({"sensitivity": -1.0}, "sensitivity=-1.0"),
        ({"norm_floor": math.inf, "ball": 1.0}, "norm_floor=inf"),
        ({"ball": 1.0, "sensitivity": 1.0}, "either ball or sensitivity"),
        ({"norm_floor": 1.0}, "norm_floor=1 alone bounds nothing"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(settings_: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings_)


@pytest.mark.parametrize("name", [name for name, method in methods().items() if "ball" not in method.settings])
def test_a_bound_that_an_algorithm_does_not_keep_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"ball=1.0 does nothing with algorithm '{name}': leave it out, or use fedrp$"
    ):
        resolved(tiny_config(name, ball=1.0), PARAMETERS)


def test_the_command_line_reports_a_floor_that_does_not_hold(
    images: object, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--algorithm=fedrp", f"--dataset=npz:{images}", "--clients=2", "--rounds=1", "--dim=5", "--workers=1"]
    with pytest.raises(SystemExit) as caught:
        main(["run", *options, "--ball=1", "--norm-floor=99", f"--out={tmp_path / 'run'}"])
    assert caught.value.code == 7
    assert "norm_floor=99 does not hold with ball=1" in capsys.readouterr().err


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_masked_clients_with_state_of_their_own_all_take_part(sampling: str) -> None:
    """Only those who took part in the same rounds are summed: with samples that would soon be nobody."""
    with pytest.raises(ConfigError, match=r"participation=0\.1 is not valid for masked fedrp: .*use participation=1"):
        bounded_config(clients=100, participation=0.1, sampling=sampling, secure_aggregation=True)


def test_a_floor_that_protects_nothing_is_no_guarantee_and_no_failure() -> None:
    config = tiny_config("fedrp", projection="gaussian", ball=0.5, norm_floor=1e-9, clients=1, rounds=1)
    alone = simulate(config, tiny_task()).privacy
    assert all(statement.epsilon is None for statement in alone)
    assert any("1e+09 times its norm floor" in str(statement.reason) for statement in alone)


def test_what_cannot_be_stated_is_found_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def stated(*_given: object, simulated: bool) -> None:
        assert simulated
        raise ConfigError("there is no such statement")

    monkeypatch.setattr(importlib.import_module("fedrp.simulation.simulate"), "stated", stated)
    rounds: list[object] = []
    with pytest.raises(ConfigError, match="no such statement"):
        simulate(tiny_config("fedrp"), tiny_task(), on_round=lambda record, _: rounds.append(record))
    assert rounds == []
