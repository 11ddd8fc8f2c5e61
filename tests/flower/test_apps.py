"""On Flower: the simulator's results, one exchange a round, and a server that learns nothing."""

import dataclasses
import inspect
import json
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import load_file

from fedrp import simulate
from fedrp.algorithms.table import ALGORITHMS, BASELINES
from fedrp.cli import cli, main
from fedrp.crypto.roster import load_identity
from fedrp.errors import ConfigError, FedRPError
from fedrp.flower.client_app import client_app, make_client_app
from fedrp.flower.messages import FINISH, HELLO, ROUND, RefusedError, packet_of, question, site_of
from fedrp.flower.server_app import parameter_count
from fedrp.flower.settings import Pacing, require_agreed, run_settings
from fedrp.flower.task import ClientContext, LocalTask
from fedrp.learning.initial import secret_initial
from fedrp.learning.layout import ModelFactory, built, layout_of
from fedrp.learning.zoo import MODELS
from fedrp.privacy.assumptions import SIMULATED
from fedrp.projection.families import make_projection
from fedrp.protocol import wire
from fedrp.protocol.server_state import Server
from fedrp.protocol.wire import Kind
from fedrp.reporting.runs import read_runs
from fedrp.simulation.courses import seeded_coins
from fedrp.simulation.measures import delivering_client
from fedrp.storage.server import ServerFolder
from fedrp.testing.local import local_run
from fedrp.testing.relay import Relay
from flower_helpers import FIRST_NODE, FlowerFederation, tiny_load
from helpers import ROOT, FrozenNet, TinyNet, all_windows, round_keys, tiny_config, tiny_task, windows

SECRET = [name for name, algorithm in ALGORITHMS.items() if algorithm.server.round_keys]
CASES = [
    *((name, projection, secure) for name in SECRET for projection in ("sign", "gaussian") for secure in (False, True)),
    *((name, None, secure) for name in ALGORITHMS if name not in SECRET for secure in (False, True)),
]


# --- the same as in the simulator ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "projection", "secure"), CASES)
def test_same_config_and_seed_give_the_same_model(
    name: str, projection: str | None, secure: bool, tmp_path: Path
) -> None:
    run = FlowerFederation(tmp_path, tiny_config(name, projection=projection, secure_aggregation=secure))
    run.run()
    result = run.simulated()
    tolerance = 1e-6 if projection == "gaussian" else 0.0
    delivered = run.model(delivering_client(run.config))
    np.testing.assert_allclose(delivered, result.model, rtol=0, atol=tolerance)
    if ALGORITHMS[name].delivers == "consensus":
        for client in range(4):
            np.testing.assert_allclose(run.model(client), result.model, rtol=0, atol=tolerance)
            assert run.status(client)["accuracy"] == pytest.approx(result.accuracy, abs=1e-3)
    assert run.store()["finished"]
    assert run.store()["missing"] == []


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedavg-dp"])
def test_shared_noise_for_records_is_that_of_the_simulator(name: str, tmp_path: Path) -> None:
    shared = {"dp_unit": "record", "dp_noise": "shared", "secure_aggregation": True, "batch_size": 40, "clip": 1.0}
    run = FlowerFederation(tmp_path, tiny_config(name, noise_multiplier=2.0, **shared))
    run.run()
    result = run.simulated()
    for client in range(4):
        np.testing.assert_array_equal(run.model(client), result.model)


@pytest.mark.parametrize("changes", [{}, {"secure_aggregation": True}, {"aggregation": "median"}], ids=str)
def test_the_mean_of_final_models_is_that_of_the_simulator_and_everyone_has_it(
    changes: dict[str, object], tmp_path: Path
) -> None:
    given = {"projection": "sign", "rotation": "haar", "secure_aggregation": False, "deliver": "average", **changes}
    run = FlowerFederation(tmp_path, tiny_config("fedrp", **given))
    run.run()
    result = run.simulated()
    for client in range(4):
        np.testing.assert_array_equal(run.model(client), result.model)
        assert run.status(client)["accuracy"] == pytest.approx(result.accuracy, abs=1e-3)
        assert (run.status(client)["round"], run.status(client)["finished"]) == (3, True)
        assert not (run.folder(client) / "mask.key").exists()
    assert (run.store()["round"], run.store()["rounds"], run.store()["missing"]) == (3, 3, [])
    log = [json.loads(line) for line in (tmp_path / "store" / "log.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in log if line["event"] == "delivery"] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_is_killed_around_the_exchange_of_models_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"projection": "sign", "rotation": "haar", "deliver": "average"}
    run = FlowerFederation(tmp_path, tiny_config("fedrp", **given))
    real = ServerFolder.save

    def dying(folder: ServerFolder, server: Server) -> None:
        if when == "before" and server.round == 3 and server.participants:
            real(folder, server)
            raise KeyboardInterrupt  # the cohort is kept, nothing was sent
        if when == "after" and server.round == 4:
            raise KeyboardInterrupt  # all uploads are there, their sum is not kept
        real(folder, server)

    monkeypatch.setattr(ServerFolder, "save", dying)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    monkeypatch.setattr(ServerFolder, "save", real)
    run.run()
    result = run.simulated()
    for client in range(4):
        np.testing.assert_array_equal(run.model(client), result.model)


def largest(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return outputs.max()


def test_a_site_is_told_all_metrics_of_its_model(tmp_path: Path) -> None:
    def load(context: ClientContext) -> LocalTask:
        return dataclasses.replace(tiny_load(context), metrics={"largest": largest})

    run = FlowerFederation(tmp_path, tiny_config("fedavg"), load)
    run.run()
    result = simulate(run.config, dataclasses.replace(tiny_task(), metrics={"largest": largest}))
    for client in range(4):
        status = run.status(client)
        assert status["largest"] == pytest.approx(result.metrics["largest"], abs=1e-4)
        assert status["accuracy"] == pytest.approx(result.accuracy, abs=1e-3)
        assert status["loss"] == pytest.approx(result.loss, abs=1e-4)
    for name in status.keys() - {"largest"}:  # which a metric must not write over
        with pytest.raises(ConfigError, match=f"'{name}' is no name for a metric"):
            LocalTask(TinyNet, ([[0.0]], [0]), metrics={name: largest})


def test_all_sites_deliver_the_same_frozen_parts_as_the_simulator(tmp_path: Path) -> None:
    def load(context: ClientContext) -> LocalTask:
        return dataclasses.replace(tiny_load(context), model=FrozenNet)

    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", projection="sign", seed=5), load)
    run.run()
    task = dataclasses.replace(tiny_task(), model=FrozenNet)
    result = simulate(run.config, task)
    for client in range(4):
        state = load_file(run.folder(client) / "model.safetensors")
        assert state.keys() == result.state.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in result.state.items())
        module = FrozenNet()
        module.load_state_dict(state)
        right = (module(task.test[0]).argmax(1) == task.test[1]).double().mean().item()
        assert run.status(client)["accuracy"] == pytest.approx(100 * right)


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedavg"])
@pytest.mark.parametrize(
    "changes",
    [{"participation": 0.5}, {"weighting": "samples"}, {"sampling": "poisson"}, {"aggregation": "trimmed:0.25"}],
)
def test_partial_participation_weights_and_aggregation_are_those_of_the_simulator(
    name: str, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedrp.flower.driver._coins", seeded_coins)
    projection = {"projection": "sign"} if ALGORITHMS[name].server.round_keys else {}
    run = FlowerFederation(tmp_path, tiny_config(name, rounds=4, **projection, **changes))
    run.run()
    np.testing.assert_array_equal(run.model(0), run.simulated().model)


def test_a_deployed_server_draws_participants_that_no_seed_foretells(tmp_path: Path) -> None:
    chosen = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        run = FlowerFederation(tmp_path / place, tiny_config("fedavg", clients=6, participation=0.5, rounds=6))
        run.run()
        lines = (tmp_path / place / "store" / "log.jsonl").read_text().splitlines()
        chosen.append([entry["participants"] for entry in map(json.loads, lines) if entry["event"] == "round"])
        assert {len(participants) for participants in chosen[-1]} == {3}
    assert chosen[0] != chosen[1]  # but for one in 20^6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_one_exchange(name: str, tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config(name))
    run.run()
    for client in range(4):
        deals_first = client == 0 and ALGORITHMS[name].server.round_keys
        assert len(run.sent_to(client, HELLO)) == 1
        assert len(run.sent_to(client, ROUND)) == 3 + deals_first
        assert len(run.sent_to(client, FINISH)) == 1


def test_bytes_are_counted_alike_on_both_sides(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp"))
    run.run()
    log = [json.loads(line) for line in (tmp_path / "store" / "log.jsonl").read_text().splitlines()]
    rounds = [line for line in log if line["event"] == "round"]
    sites = [
        json.loads(line) for client in range(4) for line in (run.folder(client) / "log.jsonl").read_text().splitlines()
    ]
    for line in rounds:
        same = [site for site in sites if site["event"] == "round" and site["round"] == line["round"]]
        assert line["bytes_up"] == sum(site["bytes_up"] for site in same)
        assert line["bytes_down"] == sum(site["bytes_down"] for site in same)


# --- a run and its settings ------------------------------------------------------------------------------------------


def asked_by_hand(run: FlowerFederation, client: int, round_: int) -> Message:
    """A client's reply to a server that calls for a round, whatever rounds there are and without a HELLO."""
    known = bytes.fromhex(json.loads((run.root / "store" / "run.json").read_text())["run"])
    past = (
        [wire.Message(Kind.AGGREGATE, wire.context_of(known, 0), round_ - 1, wire.SERVER, np.zeros(83, np.float32))]
        if round_ > 1
        else []
    )
    call = wire.Message(Kind.ROUND, wire.context_of(known, 0), round_, wire.SERVER, wire.EMPTY, 4)
    with local_run():
        return run.answer(client, question(wire.encode([*past, call]), FIRST_NODE + client, ROUND, known, round_))


def test_a_run_keeps_its_settings_to_the_end_of_time(tmp_path: Path) -> None:
    """More rounds, without noise, under the id of a run that is accounted for: a server gets nothing."""
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp", noise_multiplier=2.0, rounds=2, dp_noise="local"))
    run.run()
    stated = run.status(1)["privacy"]
    run.run_config |= {"rounds": 50, "noise_multiplier": 0.0}
    with pytest.raises(RefusedError, match=r"^ConfigError$"):
        packet_of(asked_by_hand(run, 1, 3))
    assert "was started with rounds=2, not 50" in (tmp_path / "sites" / "site-1" / "failures.jsonl").read_text()
    assert (run.status(1)["round"], run.status(1)["privacy"]) == (2, stated)


def as_deployed(run: FlowerFederation) -> list[str]:
    """What a simulation of the run states, but for what is true of simulations alone."""
    stated = [str(statement) for statement in run.simulated().privacy]
    proved = [text for text in stated if text.startswith("epsilon")]
    assert proved
    assert all(text.endswith(f"; assuming that {SIMULATED}") for text in proved)
    return [text.removesuffix(f"; assuming that {SIMULATED}") for text in stated]


def test_a_site_states_its_privacy_and_settings_also_to_a_server_that_does_not_greet(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp", noise_multiplier=2.0, dp_noise="local"))
    with ServerFolder.open(tmp_path / "store", run.config):
        assert packet_of(asked_by_hand(run, 1, 1))
    assert run.status(1)["privacy"] == as_deployed(run)
    run.run_config |= {"noise_multiplier": 0.0}
    with pytest.raises(RefusedError, match=r"^ConfigError$"):
        packet_of(asked_by_hand(run, 1, 2))


def test_a_report_shows_the_rounds_of_a_site_and_of_the_server(tmp_path: Path) -> None:
    """A site knows how many were called, the server who came."""
    run = FlowerFederation(tmp_path, tiny_config("fedavg", rounds=2))
    run.run()
    for folder in (run.folder(1), tmp_path / "store"):
        main(["report", str(folder), "-o", str(tmp_path / "page.html")])
        (shown,) = read_runs([folder])
        assert [(line["round"], line["participants"]) for line in shown.history] == [(1, 4), (2, 4)]
        assert "<h1" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", [HELLO, ROUND])
def test_a_site_whose_weight_changed_sits_the_rest_of_the_run_out(kind: str, tmp_path: Path) -> None:
    """Uploads with another weight than announced would make a masked sum random."""
    grown: list[int] = []

    def load(context: ClientContext) -> LocalTask:
        task = tiny_load(context)
        x, y = task.train
        more = len(grown) if context.index == 1 else 0
        return dataclasses.replace(task, train=(torch.cat([x, x[:more]]), torch.cat([y, y[:more]])))

    run = FlowerFederation(tmp_path, tiny_config("fedavg", weighting="samples", rounds=2), load)
    refused: list[str] = []

    def reply(client: int, message: Message) -> Message:
        if client == 1 and message.metadata.message_type == ROUND and run.store().get("round") == 1:
            grown.append(client)
            again = Message(message.content, 101, kind, group_id=message.metadata.group_id)
            refused.append(next(iter(run.answer(client, again).content.config_records.values())).get("refused"))
        return run.answer(client, message)

    run.run(reply)
    assert set(refused) == {"DataError"}
    assert "now there are" in (tmp_path / "sites" / "site-1" / "failures.jsonl").read_text()
    assert run.store()["participants"] == [0, 2, 3]


# --- what the server learns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["gaussian", "sign", "hadamard"])
@pytest.mark.parametrize("name", SECRET)
def test_no_key_no_model_and_no_matrix_reaches_the_server(name: str, projection: str, tmp_path: Path) -> None:
    """All bytes that the server received in messages or has in its store."""
    run = FlowerFederation(tmp_path, tiny_config(name, projection=projection))
    run.run()
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    seen = all_windows([*run.received, *stored])
    keys = round_keys(run.config)
    for key in (*keys, *(key.derive("projection") for key in keys)):
        assert not windows(key.reveal()) & seen
        assert not windows(key.reveal().hex().encode()) & seen
    models = [run.model(client) for client in range(4)]
    for model in (*models, secret_initial(TinyNet, keys[0])):
        assert not windows(model.tobytes()) & seen
    units = np.eye(run.config.dim, dtype=np.float32)
    for key in keys:
        for row in make_projection(projection, key, models[0].size, run.config.dim).adjoint(units):
            assert not {part for part in windows(row.tobytes()) if part.count(0) <= 12} & seen  # zeros are everywhere
    for name_ in run.names:
        secret = (tmp_path / f"{name_}.key").read_text().split('secret = "')[1][:64]
        assert not windows(bytes.fromhex(secret)) & seen
        assert load_identity(tmp_path / f"{name_}.key").name == name_


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg"))
    run.run()
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert windows(run.model(0).tobytes()) <= all_windows([*run.received, *stored])


def test_a_site_is_told_what_is_private_against_whom_before_it_contributes(tmp_path: Path) -> None:
    bounded = tiny_config("fedrp", projection="gaussian", ball=0.25, rounds=1, secure_aggregation=True)
    run = FlowerFederation(tmp_path, bounded)
    stated: list[list[str]] = []

    def watched(client: int, message: Message) -> Message:
        if message.metadata.message_type == ROUND:
            stated.append(run.status(client)["privacy"])
        return run.answer(client, message)

    run.run(watched)
    expected = as_deployed(run)
    assert stated
    assert all(lines == expected for lines in stated)
    assert "epsilon" in expected[0]  # the norm floor is that of the model, as in the simulator


def test_what_goes_wrong_at_a_site_stays_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(context: ClientContext) -> LocalTask:
        if context.index == 2:
            raise ValueError("patient 4711 has no age")
        return tiny_load(context)

    run = FlowerFederation(tmp_path, tiny_config("fedavg"), broken, min_clients=3)
    run.run()
    said = repr([(m.content, m.metadata) for m in run.sent]) + caplog.text + repr(run.received)
    assert "4711" not in said
    told = "cannot take part: its `load` failed (LoadError; there 'fedrp status' says why)"
    assert f"site 'site-2' (node 102) {told}" in caplog.text
    assert run.store()["turned_away"] == {"site 'site-2' (node 102)": told}
    assert run.store()["sites"] == {"0": "site-0", "1": "site-1", "3": "site-3"}
    assert "patient 4711 has no age" in (tmp_path / "sites" / "site-2" / "failures.jsonl").read_text()
    assert run.store()["missing"] == [2]
    assert "without the last model: client 2; run again" in caplog.text
    capsys.readouterr()
    assert main_says(capsys, "status", str(tmp_path / "sites" / "site-2")).endswith(
        f"LoadError: patient 4711 has no age ({Path(__file__).name}:{line_of(broken, 'raise')} broken)\n"
    )
    (failed,) = json.loads(main_says(capsys, "status", "--json", str(tmp_path / "sites" / "site-2")))["failures"][-1:]
    assert failed["error"] == "LoadError"


def main_says(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def line_of(function: Callable[..., object], start: str) -> int:
    """The number of the first line of a function that starts with a word."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if line.strip().startswith(start))


@pytest.mark.parametrize("given", [None, 5, {}])
def test_a_load_that_gives_no_task_is_told_so(given: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(
        tmp_path, tiny_config("fedavg"), lambda c: given if c.index == 2 else tiny_load(c), min_clients=3
    )
    run.run()
    assert "site 'site-2' (node 102) cannot take part: its `load` failed" in caplog.text
    told = f"load gave a {type(given).__name__}: expected a LocalTask"
    assert told in (tmp_path / "sites" / "site-2" / "failures.jsonl").read_text()


def test_a_site_that_was_mended_is_no_longer_turned_away(tmp_path: Path) -> None:
    broken: list[int] = []

    def load(context: ClientContext) -> LocalTask:
        if context.index == 2 and not broken:
            broken.append(1)
            raise ValueError("the disk was not mounted")
        return tiny_load(context)

    run = FlowerFederation(tmp_path, tiny_config("fedavg"), load)
    run.run()
    assert (run.store()["turned_away"], run.store()["missing"]) == ({}, [])


@pytest.mark.parametrize("name", ["x" * 500, "two\nlines", "\x1b[31m", 5, None])
def test_a_name_that_a_hostile_site_gives_does_not_spoil_the_log(name: object) -> None:
    """What it says of itself is shown if it can be printed on one line."""
    record = {"packet": b"", **({} if name is None else {"site": name})}
    with local_run():
        reply = Message(RecordDict({"fedrp": ConfigRecord(record)}), 7, HELLO)
    assert site_of(reply) == ("x" * 60 if name == "x" * 500 else "")


def test_two_sites_with_masks_are_told_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg", clients=2, secure_aggregation=True))
    with pytest.raises(ConfigError, match=r"add clients, or do without masks.*secure-aggregation = false"):
        run.run()
    assert "2 participants a round are too few for secure aggregation: 3 are needed" in caplog.text


def test_a_site_whose_task_does_not_fit_together_does_not_join(tmp_path: Path) -> None:
    """The server does not hear of the labels that the line names."""

    def mistaken(context: ClientContext) -> LocalTask:
        task = tiny_load(context)
        x, y = task.train
        return LocalTask(task.model, (x, y + 4711), task.test) if context.index == 2 else task

    run = FlowerFederation(tmp_path, tiny_config("fedavg"), mistaken, min_clients=3)
    run.run()
    told = (tmp_path / "sites" / "site-2" / "failures.jsonl").read_text()
    assert "the model or loss does not take the training data: Target 471" in told
    assert "Target" not in repr(run.received)
    assert run.store()["missing"] == [2]


def test_a_refusal_is_a_bare_code(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg"))
    refusals: list[str] = []

    def spoiled(client: int, message: Message) -> Message:
        if client == 1 and message.metadata.message_type == ROUND:
            record = next(iter(message.content.config_records.values()))
            record["packet"] = b"x" + record["packet"][1:]
        reply = run.answer(client, message)
        try:
            packet_of(reply)
        except RefusedError as error:
            refusals.append(str(error))
        return reply

    run.run(spoiled)
    assert set(refusals) == {"WireError"}


# --- deployed secrets ------------------------------------------------------------------------------------------------


def test_a_deployed_app_draws_its_secrets_from_the_system(tmp_path: Path) -> None:
    """With the same settings two runs share nothing; and all clients of one run agree."""
    models = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        run = FlowerFederation(tmp_path / str(number), tiny_config("fedrp-subspace", projection="sign"))
        run.app = client_app(tiny_load)
        run.run()
        models.append(run.model(0))
        assert np.array_equal(run.model(0), run.model(3))
        assert not np.allclose(run.model(0), run.simulated().model)
    assert not np.allclose(*models)


def test_only_make_client_app_takes_a_source_of_secrets() -> None:
    assert client_app.__annotations__.keys() == {"load", "return"}
    assert "entropy" in make_client_app.__annotations__
    assert not {"entropy", "seeded"} & set(Pacing.__annotations__)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"algoritm": "fedavg"}, "did you mean 'algorithm'"),
        ({"rounds": "many"}, "rounds='many' is not valid"),
        ({"rounds": 0}, "rounds=0"),
        ({"dropout": 0.5}, "dropout=0.5 is for the simulator"),
        ({"round-timeout": 0}, "round_timeout=0.0"),
        ({"attempts": 0}, "attempts=0"),
        ({"min-clients": -1}, "min_clients=-1"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_settings(settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_have_the_names_of_the_command_line_and_auto_is_the_default() -> None:
    config, pacing = run_settings({"local-epochs": 3, "lr": "auto", "quorum": 1, "app-data": "x", "store": "here"})
    assert (config.local_epochs, config.lr, config.quorum, pacing.store) == (3, None, 1.0, "here")


def test_uploads_are_masked_unless_the_run_config_says_otherwise() -> None:
    assert run_settings({})[0].secure_aggregation
    assert not run_settings({"secure-aggregation": False})[0].secure_aggregation


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_not_deployed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(tmp_path, tiny_config(name))
    with pytest.raises(ConfigError, match=f"^algorithm '{name}' is for the simulator only"):
        run.run()
    assert not any(run.sent_to(client, HELLO) for client in range(4))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"store": ""}, "has no store"),
        ({"min-clients": 5}, "min_clients=5 is more than clients=4"),
        ({"aggregation": "median", "secure_aggregation": True}, "or use .*secure-aggregation = false in a Flower run"),
    ],
)
def test_a_server_that_cannot_work_says_so(changes: dict[str, object], told: str, tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg"))
    run.run_config |= changes
    with pytest.raises(ConfigError, match=told):
        run.run()


def test_a_server_says_first_what_noise_lets_the_run_learn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp", noise_multiplier=1000.0), start_timeout=0.1)
    with pytest.raises(FedRPError, match="0 sites online"):
        run.run(online=lambda: [])
    assert "fedrp: this model is expected to stay near chance" in caplog.text


def test_too_few_sites_is_one_clear_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg"), start_timeout=0.5)
    with pytest.raises(FedRPError, match=r"2 sites online after 0.5 s, 4 needed"):
        run.run(online=lambda: [0, 3])
    assert "waiting for sites: 2 of 4 online (client 0 ('site-0'), client 3 ('site-3'))" in caplog.text


def test_a_site_takes_part_only_in_what_it_agreed_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that changes the algorithm to one that shows it the model gets nothing from this site."""
    run = FlowerFederation(tmp_path, tiny_config("fedavg"), min_clients=3)
    agreed = tmp_path / "agreed.toml"
    agreed.write_text('algorithm = "fedrp-subspace"\nclients = 4\n')
    run.node_configs[101]["agreed"] = str(agreed)
    run.run()
    told = "its settings, or what it agreed to, are not those of this run (ConfigError; there 'fedrp status' says why)"
    assert f"site 'site-1' (node 101) cannot take part: {told}" in caplog.text
    reason = (tmp_path / "sites" / "site-1" / "failures.jsonl").read_text()
    assert "the run has algorithm=fedavg, this site agreed to fedrp-subspace" in reason
    assert run.store()["missing"] == [1]


DOCUMENTED = {
    **tomllib.loads((ROOT / "examples/flower-app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"],
    "rounds": 20,
}


@pytest.fixture
def agreed(tmp_path: Path) -> Path:
    """The file of docs/deploy.md."""
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    (tmp_path / "agreed.toml").write_text(text)
    return tmp_path / "agreed.toml"


def test_the_documented_agreement_fits_the_documented_run_however_it_trains(agreed: Path) -> None:
    require_agreed(agreed, DOCUMENTED)
    training = {"local-epochs": 5, "batch-size": 8, "lr": 0.3, "momentum": 0.1, "grad-clip": 0.0, "proximal": 0.1}
    require_agreed(agreed, {**DOCUMENTED, **training, "server-momentum": 0.1, "rho": 0.5, "seed": 7})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": "fedavg"}, "algorithm=fedavg, this site agreed to fedrp-subspace"),
        ({"rounds": 21}, "rounds=21, this site agreed to 20"),
        ({"secure-aggregation": False}, "secure_aggregation=False, which .* the default, True"),
        ({"dp-delta": 0.5}, "dp_delta=0.5, which .* the default, 1e-05"),
        ({"dp-epsilon": 1e6}, "dp_epsilon=1000000.0, which .* the default, auto"),
        ({"noise-multiplier": 0.0}, "noise_multiplier=0.0, which .* the default, auto"),
        ({"dp-noise": "local"}, "dp_noise=local"),
        ({"clip": 1e6}, "clip=1000000.0"),
        ({"clip-quantile": 0.9}, "clip_quantile=0.9"),
        ({"quorum": 0.1}, "quorum=0.1"),
        ({"participation": 0.5}, "participation=0.5"),
        ({"sampling": "poisson"}, "sampling=poisson"),
        ({"weighting": "samples"}, "weighting=samples"),
        ({"aggregation": "median"}, "aggregation=median, which .* the default, mean"),
        ({"sealing": "hybrid"}, "sealing=hybrid"),
        ({"secure-range": 1e9}, "secure_range="),
        ({"ball": 1e6}, "ball="),
        ({"ball": 1e6, "norm-floor": 1e-9}, "ball="),
        ({"sensitivity": 1e-9}, "sensitivity="),
        ({"dim": 61706}, "dim=61706"),
        ({"projection": "sign"}, "projection=sign"),
        ({"dataset": "npz:/home/others.npz"}, "dataset=npz:/home/others.npz"),
        ({"train-examples": 1}, "train_examples=1"),
    ],
)
def test_what_an_agreement_does_not_list_has_its_default(changes: dict[str, object], told: str, agreed: Path) -> None:
    with pytest.raises(ConfigError, match=f"the run has {told}"):
        require_agreed(agreed, {**DOCUMENTED, **changes})


def test_keys_of_the_app_are_agreed_to_as_well(agreed: Path) -> None:
    """They may choose the data that is used, so none is free."""
    run = {**DOCUMENTED, "app-data": "/data/ours"}
    with pytest.raises(ConfigError, match=r"app_data=/data/ours, which .* does not list: list it there"):
        require_agreed(agreed, run)
    agreed.write_text(agreed.read_text() + 'app-data = "/data/ours"\n')
    require_agreed(agreed, run)
    with pytest.raises(ConfigError, match=r"app_data=/data/others, this site agreed to /data/ours"):
        require_agreed(agreed, {**run, "app-data": "/data/others"})


def test_an_assumed_sensitivity_leaves_nothing_free(agreed: Path) -> None:
    """It is an assumption about training: with a larger step a record moves a model further."""
    agreed.write_text('algorithm = "fedrp"\nclients = 3\nrounds = 20\nsensitivity = 0.1\n')
    run = {**DOCUMENTED, "algorithm": "fedrp", "sensitivity": 0.1}
    require_agreed(agreed, run)
    with pytest.raises(ConfigError, match=r"lr=0.5, which .* the default, auto"):
        require_agreed(agreed, {**run, "lr": 0.5})


@pytest.mark.parametrize("name", MODELS)
def test_the_server_counts_parameters_without_holding_any(name: str) -> None:
    def build() -> object:
        return MODELS[name].build((3, 32, 32) if name not in ("lenet5", "cnn") else (1, 28, 28), 10)

    if name in ("vgg16", "resnet18"):
        assert parameter_count(build) > 10_000_000
    else:
        assert parameter_count(build) == layout_of(built(build)).size


def test_the_server_counts_a_pretrained_model_without_taking_its_weights() -> None:
    weights = FrozenNet().state_dict()
    built_here: list[torch.nn.Module] = []

    def pretrained() -> torch.nn.Module:
        built_here.append(FrozenNet())
        built_here[-1].load_state_dict(weights)
        return built_here[-1]

    assert parameter_count(pretrained) == 83  # and no warning
    assert all(tensor.is_meta for tensor in built_here[0].state_dict().values())


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: 1 // 0, "the model cannot be built: integer division or modulo by zero"),
        (lambda: None, "the model is built as a NoneType"),
        (TinyNet(), "the model is a TinyNet: give what builds it"),
    ],
)
def test_a_server_whose_model_is_none_says_so_in_one_line(model: ModelFactory, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parameter_count(model)


# --- after the end ---------------------------------------------------------------------------------------------------


def test_who_was_away_at_the_end_gets_the_model_when_the_app_is_run_again(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", projection="sign"))
    run.run(online=lambda: [0, 2, 3] if run.store().get("round") == 3 else range(4))
    assert run.store()["missing"] == [1]
    run.run()
    assert run.store()["missing"] == []
    assert np.array_equal(run.model(1), run.model(0))
    assert np.array_equal(run.model(1), run.simulated().model)


def test_the_status_command_shows_sites_and_server(tmp_path: Path) -> None:
    from click.testing import CliRunner

    run = FlowerFederation(tmp_path, tiny_config("fedrp"))
    run.run()
    for folder, expected in [("sites/site-1", {"role": "client", "name": "site-1"}), ("store", {"role": "server"})]:
        shown = CliRunner().invoke(cli, ["status", str(tmp_path / folder), "--json"])
        status = json.loads(shown.output.splitlines()[0])
        assert expected.items() <= status.items()
        assert {"run", "round", "rounds", "algorithm", "updated", "bytes_up", "bytes_down", "finished"} <= set(status)
        assert "finished" in CliRunner().invoke(cli, ["status", str(tmp_path / folder)]).output
        assert ("budget" in shown.output) == (folder != "store")  # tests/storage/test_site_ledger.py
    with pytest.raises(FedRPError, match="holds no status"):
        CliRunner().invoke(cli, ["status", str(tmp_path / "nowhere")], catch_exceptions=False)


def test_a_cable_counts_can_be_cut_and_mended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.settimeout(10)
        cable = Relay(far.getsockname()[1])

        def passed() -> bytes:
            with socket.create_connection(("127.0.0.1", cable.port), timeout=10) as near:
                near.sendall(b"hello")
                with far.accept()[0] as end:
                    end.settimeout(10)
                    return end.recv(100)

        assert passed() == b"hello"
        cable.cut()
        with pytest.raises(ConnectionError):
            passed()
        cable.mend()
        assert passed() == b"hello"
        cable.close()
    assert cable.bytes_up == 10
