"""The mean of all clients' models, after the last round: what it is, what it costs, who sees what."""

import dataclasses
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fedrp import RunConfig, Stop, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import method_of
from fedrp.errors import ConfigError
from fedrp.learning.task import Task
from fedrp.means import trimmed_mean
from fedrp.mechanisms.delivery import delivery
from fedrp.privacy.events import Adversary, NonPrivate
from fedrp.privacy.ledger import statements
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.simulation.result import RunResult
from fedrp.types import Packets
from helpers import Federation, tiny_config, tiny_task

PARAMETERS = 83
BOUND = 4 * 16 * 64 / (2**31 - 5) / 2 + 1e-7  # half a step for each of four clients, and float32


def models_of(config: RunConfig, task: Task) -> list[np.ndarray]:
    """Each client's own model after the last round."""
    run = Federation(dataclasses.replace(config, deliver="client"), task)
    for _ in range(config.rounds):
        run.round()
    return list(run.final_models().values())


@pytest.mark.parametrize("secure", [False, True])
def test_the_delivered_model_is_the_mean_but_for_rounding(secure: bool, task: Task) -> None:
    config = tiny_config("fedrp", projection="sign", rotation="haar", secure_aggregation=secure, deliver="average")
    run = Federation(config, task)
    for _ in range(config.rounds):
        run.round()
    own = [client.state.model for client in run.clients.values() if client.state]
    assert not np.array_equal(own[0], own[1])
    run.take_keys(run.deliver(server_side.request_key(run.server, 0)))
    run.round()
    delivered = list(run.final_models().values())
    assert {model.tobytes() for model in delivered} == {delivered[0].tobytes()}
    np.testing.assert_allclose(delivered[0], np.mean(own, axis=0, dtype=np.float64), rtol=0, atol=BOUND)


@pytest.mark.parametrize("algorithm", ["fedrp", "fwc"])
def test_the_simulation_delivers_what_its_clients_hold_on_average(algorithm: str, task: Task) -> None:
    config = tiny_config(
        algorithm, deliver="average", **({"projection": "sign", "rotation": "haar"} if algorithm == "fedrp" else {})
    )
    result = simulate(config, task)
    one = simulate(dataclasses.replace(config, deliver="client"), task)
    assert result.as_json()["accuracy_average"] == one.as_json()["accuracy_average"]
    assert result.as_json()["accuracy_client_mean"] == one.as_json()["accuracy_client_mean"]
    assert result.loss == pytest.approx(one.as_json()["loss_average"], abs=1e-5)
    assert result.history[-1]["accuracy"] == result.history[-1]["accuracy_average"]
    assert not np.array_equal(result.model, one.model)
    if algorithm == "fedrp":
        mean = np.mean(models_of(config, task), axis=0, dtype=np.float64)
        np.testing.assert_allclose(result.model, mean, rtol=0, atol=BOUND)


def test_printed_fedrp_delivers_the_mean_unless_it_would_cost_a_promise() -> None:
    base = tiny_config("fedrp", deliver=None)
    for changes, expected in (
        ({}, "average"),
        ({"ball": 0.1}, "client"),
        ({"aggregation": "median"}, "client"),
        ({"projection": "sign"}, "client"),
        ({"projection": "sign", "dim": 3}, "average"),
        ({"projection": "sign", "secure_aggregation": True}, "average"),
        ({"clients": 2}, "client"),
        ({"clients": 201}, "client"),
        ({"deliver": "client"}, "client"),
        ({"ball": 0.1, "deliver": "average"}, "average"),
    ):
        assert resolved(dataclasses.replace(base, **changes), PARAMETERS).deliver == expected
    assert resolved(tiny_config("fwc"), PARAMETERS).deliver == "client"


def test_what_cannot_be_averaged_is_refused(task: Task) -> None:
    with pytest.raises(ConfigError, match="deliver=average is not valid for clients=2: 3 are needed"):
        simulate(tiny_config("fedrp", clients=2, deliver="average"), task)
    with pytest.raises(ConfigError, match=r"deliver=average is not safe for projection='sign' with dim=12: .*6\.92 is"):
        simulate(tiny_config("fedrp", projection="sign", deliver="average"), task)
    with pytest.raises(ConfigError, match="deliver=average does nothing with algorithm 'fedavg': leave it out"):
        simulate(tiny_config("fedavg", deliver="average"), task)
    with pytest.raises(ConfigError, match="unknown deliver 'averages', did you mean 'average'"):
        tiny_config("fedrp", deliver="averages")
    with pytest.raises(ConfigError, match="rounds=65535: it takes one more, use 65534"):
        resolved(tiny_config("fedrp", rounds=65_535, deliver="average"), PARAMETERS)


# --- bytes and what they tell ----------------------------------------------------------------------------------------


def recorded(config: RunConfig, task: Task) -> tuple[RunResult, list[tuple[Packets, Packets]]]:
    """A run, and all that crossed the wire."""
    seen: list[tuple[Packets, Packets]] = []
    return simulate(config, task, tap=lambda sent, replies: seen.append((sent, replies))), seen


def uploads_after(seen: list[tuple[Packets, Packets]], rounds: int) -> list[wire.Message]:
    messages = [message for _, replies in seen for reply in replies.values() for message in wire.decode(reply)]
    return [message for message in messages if message.kind is Kind.UPLOAD and message.round > rounds]


@pytest.mark.parametrize("algorithm", ["fedrp", "fwc"])
def test_bytes_of_the_exchange_are_counted_apart(algorithm: str, task: Task) -> None:
    result, seen = recorded(tiny_config(algorithm, deliver="average"), task)
    found, one = result.as_json(), simulate(tiny_config(algorithm, deliver="client"), task).as_json()
    assert found["delivery_participants"] == 4
    assert [len(m.payload) for m in uploads_after(seen, 3)] == [PARAMETERS] * 4
    assert found["bytes_delivery_up"] == 28 + 4 * PARAMETERS
    assert found["bytes_delivery_framing_up"] == 28
    assert found["bytes_delivery_down"] - found["bytes_delivery_framing_down"] >= 4 * PARAMETERS
    assert found["bytes_delivery_keys_down"] >= 28 + 4 * 100  # mask keys of four clients
    assert found["bytes_up"] == one["bytes_up"]  # of rounds alone
    assert one["bytes_delivery_up"] is one["delivery_participants"] is None


def test_a_model_looks_uniform_to_the_server(task: Task) -> None:
    """Also where the rounds have no masks. The sum alone is anything: it is that of the models."""
    _, seen = recorded(tiny_config("fedrp", clients=30, rounds=1, key_epoch=64, deliver="average"), task)
    uploads = uploads_after(seen, 1)
    words = np.concatenate([message.payload for message in uploads])
    assert words.dtype == np.uint32
    counts = np.bincount(words >> np.uint32(28), minlength=16)
    expected = words.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-square with 15 degrees: but for one in 10^5
    total = np.sum([message.payload for message in uploads], axis=0, dtype=np.uint32).view(np.int32)
    assert np.abs(total.astype(np.float64)).max() < 2**31 / 16  # sums of models are small in units of the range


def test_a_robust_average_needs_single_models_and_says_so(task: Task) -> None:
    config = tiny_config("fedrp", projection="sign", rotation="haar", aggregation="median", deliver="average")
    result, seen = recorded(config, task)
    single = [message.payload for message in uploads_after(seen, 3)]
    assert {payload.dtype.name for payload in single} == {"float32"}
    np.testing.assert_array_equal(result.model, trimmed_mean(single, 0.5))
    releases = {release.adversary: release.event for release in method_of(config).releases(result.config)}
    assert isinstance(releases[Adversary.SERVER], NonPrivate)


# --- privacy ---------------------------------------------------------------------------------------------------------


def test_no_epsilon_outlives_the_mean_of_models() -> None:
    for secure in (False, True):
        given = RunConfig(
            "fedrp", projection="gaussian", dim=2, rounds=1, ball=1e-4, norm_floor=1.0, secure_aggregation=secure
        )
        stated = {}
        for deliver in ("client", "average"):
            config = resolved(dataclasses.replace(given, deliver=deliver), PARAMETERS)
            found = statements(method_of(config).releases(config), config.dp_delta)
            stated[deliver] = [s for s in found if s.as_json()["epsilon"] is not None]
        assert stated["client"]
        assert not stated["average"]


def test_the_exchange_is_masked_whatever_the_rounds_are() -> None:
    config = resolved(
        tiny_config("fedrp", participation=0.5, bits=8.0, weighting="samples", deliver="average"), PARAMETERS
    )
    after = delivery(config)
    assert (after.secure_aggregation, after.participation, after.bits, after.weighting) == (True, 1.0, 32.0, "uniform")
    assert (after.rounds, after.before) == (config.rounds + 1, config)


# --- clients and machines that fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_are_gone_at_the_end_are_left_out_of_the_mean(secure: bool, task: Task) -> None:
    run = Federation(
        tiny_config(
            "fedrp", clients=8, projection="sign", rotation="haar", secure_aggregation=secure, deliver="average"
        ),
        task,
    )
    for _ in range(3):
        run.round()
    run.take_keys(run.deliver(server_side.request_key(run.server, 0)))
    own = {client: state.state.model for client, state in run.clients.items() if state.state}
    replies = run.deliver(run.open())
    report = run.close({client: reply for client, reply in replies.items() if client not in (2, 5)})
    assert report.participants == (0, 1, 3, 4, 6, 7)
    mean = np.mean([own[client] for client in report.participants], axis=0, dtype=np.float64)
    for model in run.final_models().values():  # also of those who were gone
        np.testing.assert_allclose(model, mean, rtol=0, atol=2 * BOUND)


def test_dropouts_in_every_round_leave_a_mean(task: Task) -> None:
    result = simulate(
        tiny_config("fedrp", clients=8, dropout=0.3, projection="sign", rotation="haar", deliver="average"), task
    )
    assert result.delivery is not None
    assert 4 < result.delivery.participants < 8


def test_a_run_that_was_stopped_early_delivers_a_mean_too(task: Task) -> None:
    config = tiny_config("fedrp", projection="sign", rotation="haar", rounds=6, deliver="average")
    whole = simulate(dataclasses.replace(config, rounds=2), task)
    stopped = simulate(config, task, on_round=lambda record, _model: Stop if record.round == 2 else None)
    assert stopped.delivery is not None
    assert stopped.delivery.participants == 4
    np.testing.assert_allclose(stopped.model, whole.model, rtol=0, atol=BOUND)


def run_into(out: Path, rounds: int) -> None:
    config = tiny_config("fedrp", projection="sign", rotation="haar", rounds=rounds, key_epoch=64, deliver="average")
    simulate(config, tiny_task(), out=out, resume=True)


def killed_at(out: Path) -> None:
    """A run whose process is killed by the first upload of the exchange of models."""

    def tap(_sent: Packets, replies: Packets) -> None:
        for reply in replies.values():
            if any(message.round > 3 and message.kind is Kind.UPLOAD for message in wire.decode(reply)):
                os.kill(os.getpid(), signal.SIGKILL)

    simulate(tiny_config("fedrp", projection="sign", rotation="haar", deliver="average"), tiny_task(), out=out, tap=tap)


def test_a_kill_in_the_exchange_of_models_changes_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed_at, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = simulate(
        tiny_config("fedrp", projection="sign", rotation="haar", deliver="average"),
        tiny_task(),
        out=tmp_path / "run",
        resume=True,
    )
    again = simulate(
        tiny_config("fedrp", projection="sign", rotation="haar", deliver="average"),
        tiny_task(),
        out=tmp_path / "run",
        resume=True,
    )
    undisturbed = simulate(tiny_config("fedrp", projection="sign", rotation="haar", deliver="average"), tiny_task())
    assert resumed.model.tobytes() == again.model.tobytes() == undisturbed.model.tobytes()
    assert resumed.delivery is not None
    assert undisturbed.delivery is not None
    assert resumed.delivery.traffic == undisturbed.delivery.traffic


def test_more_rounds_can_follow_an_average(tmp_path: Path) -> None:
    run_into(tmp_path / "run", 2)
    run_into(tmp_path / "run", 4)
    whole = simulate(
        tiny_config("fedrp", projection="sign", rotation="haar", rounds=4, key_epoch=64, deliver="average"), tiny_task()
    )
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert all(np.array_equal(found[name], tensor) for name, tensor in whole.state.items())


def test_the_best_model_is_that_of_its_round(task: Task) -> None:
    result = simulate(
        tiny_config("fedrp", projection="sign", rotation="haar", rounds=5, lr=0.4, deliver="average"), task, keep="best"
    )
    assert result.accuracy == pytest.approx(max(line["accuracy"] for line in result.history), abs=1e-9)
    assert result.delivery is not None


def test_a_run_without_the_setting_is_one_that_delivered_a_client(tmp_path: Path) -> None:
    """As all folders of earlier versions are."""
    config = tiny_config("fedrp", projection="sign", rotation="haar", deliver="client")
    first = simulate(config, tiny_task(), out=tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    del stored["deliver"]
    path.write_text(json.dumps(stored))
    assert simulate(config, tiny_task(), out=tmp_path / "run", resume=True).model.tobytes() == first.model.tobytes()
    with pytest.raises(ConfigError, match="deliver=None, not average"):
        simulate(dataclasses.replace(config, deliver=None), tiny_task(), out=tmp_path / "run", resume=True)
