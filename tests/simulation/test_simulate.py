"""The simulator: the same result however it is computed, interrupted or resumed, and nothing but bytes on the way."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedrp import RunConfig, RunResult, Speed, Task, load_vector, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, methods
from fedrp.backends.processes import ProcessWorker
from fedrp.cli import main
from fedrp.errors import ConfigError, DataError, DivergenceError, FedRPError, SiteError
from fedrp.files import locked, sha256_of
from fedrp.learning.layout import layout_of
from fedrp.learning.task import split_among_clients
from fedrp.projection import kernels
from fedrp.rng import RunSeed
from fedrp.simulation import population
from fedrp.simulation.clients import Clients, ClientShard
from fedrp.simulation.identities import SimulatedEntropy
from fedrp.simulation.measures import evaluate
from fedrp.simulation.result import RoundRecord
from fedrp.simulation.runfolder import Fingerprint
from helpers import (
    CLASSES,
    FEATURES,
    NOISY,
    SHORT,
    FrozenNet,
    TinyNet,
    blobs,
    command,
    environment,
    files_up_to,
    round_keys,
    run_and_die,
    tiny_config,
    tiny_task,
)

# Four groups of clients, so that three workers have unequal shares.
CROWD = tiny_config("fedrp", clients=60, rounds=2, participation=0.9)
LONE_CROWD = tiny_config("fwc", clients=60, rounds=3, participation=0.5)


def crowd() -> Task:
    return tiny_task(examples=300)


def outcome(result: RunResult) -> tuple[object, ...]:
    """All of a result that must repeat: everything but the clock and the memory."""
    records = [record._replace(seconds=0, evaluation_seconds=0) for record in result.records]
    return result.config, result.model.tobytes(), records, result.last_traffic


# --- one result, however computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods())
def test_two_runs_agree_to_the_bit_and_another_seed_does_not(name: str, task: Task) -> None:
    first, again, other = (simulate(tiny_config(name, seed=seed), task) for seed in (1, 1, 2))
    assert outcome(first) == outcome(again)
    assert first.model.tobytes() != other.model.tobytes()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("config", [CROWD, LONE_CROWD], ids=lambda config: config.algorithm)
def test_the_number_of_workers_changes_nothing(config: RunConfig, workers: int) -> None:
    assert outcome(simulate(config, crowd(), Speed(workers=workers))) == outcome(simulate(config, crowd()))


def test_the_state_of_the_global_generators_changes_nothing(task: Task) -> None:
    def frozen_features() -> nn.Module:
        net = TinyNet()
        net.hidden.requires_grad_(False)
        return net

    config, features = tiny_config("fedrp"), Task(frozen_features, task.train, task.test)
    torch.manual_seed(1)
    first = simulate(config, features)
    torch.manual_seed(2)
    assert outcome(simulate(config, features)) == outcome(first)


@pytest.mark.parametrize("name", methods())
def test_partial_participation(name: str, task: Task) -> None:
    config = tiny_config(name, clients=6, rounds=5, participation=0.5)
    result = simulate(config, task)
    assert [record.participants for record in result.records] == [3] * 5
    assert outcome(simulate(config, task)) == outcome(result)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_that_drop_out_in_the_middle_of_a_round(name: str, task: Task) -> None:
    config = tiny_config(name, clients=6, rounds=6, dropout=0.3, quorum=0.4, seed=5)
    result = simulate(config, task)
    assert len(result.records) == 6
    assert np.isfinite(result.model).all()
    assert sum(record.dropped for record in result.records) > 0


@pytest.mark.parametrize("name", NOISY)
def test_who_drops_out_is_asked_again_where_everyone_is_needed(name: str, task: Task) -> None:
    """The others' uploads are kept meanwhile, so nothing changes but the bytes."""
    projection = {"projection": "sign"} if ALGORITHMS[name].server.round_keys else {}
    config = tiny_config(name, clients=5, rounds=4, noise_multiplier=0.5, **projection)
    calm, rough = (simulate(RunConfig(**{**vars(config), "dropout": dropout}), task) for dropout in (0.0, 0.4))
    assert np.array_equal(calm.model, rough.model)
    assert sum(r.traffic.down for r in rough.records) > sum(r.traffic.down for r in calm.records)


def test_an_example_weighs_the_same_whoever_holds_it_if_asked_for() -> None:
    """With one step on all data, FedAvg by sample count is gradient descent on the union of the data."""
    x, y = blobs(60)
    parts = [(x[:40], y[:40]), (x[40:], y[40:])]
    config = tiny_config("fedavg", clients=2, batch_size=100, momentum=0.0)
    by_count = simulate(RunConfig(**{**vars(config), "weighting": "samples"}), Task(TinyNet, parts, (x, y)))
    union = simulate(RunConfig(**{**vars(config), "clients": 1}), Task(TinyNet, [(x, y)], (x, y)))
    uniform = simulate(config, Task(TinyNet, parts, (x, y)))
    np.testing.assert_allclose(by_count.model, union.model, atol=1e-6)
    assert np.abs(uniform.model - union.model).max() > 1e-4


# --- only bytes cross ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smuggled", [np.ones(3, np.float32), bytearray(b"x"), memoryview(b"x"), "text", None, 5])
def test_a_client_side_that_returns_anything_but_bytes_is_stopped(
    smuggled: object, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond = ClientShard.respond
    monkeypatch.setattr(ClientShard, "respond", lambda self, packets: {**respond(self, packets), 2: smuggled})
    with pytest.raises(TypeError, match=f"client 2: a {type(smuggled).__name__} tried to cross the wire"):
        simulate(tiny_config("fedavg"), task)


def test_a_client_side_that_says_hello_with_anything_but_bytes_is_stopped(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = ClientShard.hello
    monkeypatch.setattr(ClientShard, "hello", lambda self: {**hello(self), 0: [1, 2, 3]})
    with pytest.raises(TypeError, match="client 0: a list tried to cross the wire"):
        simulate(tiny_config("fedrp"), task)


def test_a_server_side_that_sends_anything_but_bytes_is_stopped(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Clients.exchange
    monkeypatch.setattr(Clients, "exchange", lambda self, packets: exchange(self, {**packets, 1: np.ones(3)}))
    with pytest.raises(TypeError, match="client 1: a ndarray tried to cross the wire"):
        simulate(tiny_config("fedavg"), task)


# --- what comes of it ------------------------------------------------------------------------------------------------


def test_the_delivered_model_and_the_scores_belong_together(task: Task) -> None:
    for name in methods():
        result = simulate(tiny_config(name), task)
        x, y = task.test
        accuracy = 100 * (load_vector(TinyNet(), result.model)(x).argmax(1) == y).double().mean().item()
        assert result.accuracy == pytest.approx(accuracy)
        last = result.records[-1].evaluation
        assert last.clients.least.accuracy <= last.clients.mean.accuracy <= last.clients.most.accuracy
        assert last.clients.least.accuracy <= result.accuracy <= last.clients.most.accuracy


def test_where_every_client_keeps_its_own_model_their_average_is_another(task: Task) -> None:
    evaluation = simulate(tiny_config("fwc"), task).records[-1].evaluation
    assert evaluation.average.loss != evaluation.delivered.loss
    assert evaluation.clients.least.accuracy < evaluation.clients.most.accuracy


def test_a_run_whose_every_round_was_given_up_has_a_result(task: Task) -> None:
    """As with copies that differ (`server.close_round`): nobody's upload is used, yet bytes were sent."""
    result = simulate(tiny_config("fedavg"), task)
    lost = [record._replace(participants=0, dropped=record.participants) for record in result.records]
    told = dataclasses.replace(result, records=tuple(lost)).as_json()
    assert told["bytes_up"] == result.as_json()["bytes_up"] > 0
    nobody = [record._replace(participants=0, dropped=0) for record in result.records]
    assert dataclasses.replace(result, records=tuple(nobody)).as_json()["bytes_up"] > 0


def test_evaluation_changes_nothing(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    once = simulate(tiny_config("fedrp-subspace"), task)

    def twice(*arguments: object, **options: object) -> object:
        evaluate(*arguments, **options)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(sys.modules["fedrp.simulation.simulate"], "evaluate", twice)
    assert outcome(simulate(tiny_config("fedrp-subspace"), task)) == outcome(once)


@pytest.mark.parametrize("name", methods())
def test_pretrained_weights_are_where_training_starts(name: str, task: Task) -> None:
    weights = load_vector(TinyNet(), simulate(tiny_config("fedavg", rounds=20), task).model).state_dict()

    def pretrained() -> nn.Module:
        module = TinyNet()
        module.load_state_dict(weights)
        return module

    config = tiny_config(name, rounds=1, lr=1e-9, **({"noise_multiplier": 1e-6} if name == "fedavg-dp" else {}))
    result = simulate(config, Task(pretrained, task.train, task.test))
    np.testing.assert_allclose(result.model, layout_of(pretrained()).flatten(pretrained()), atol=1e-4)
    assert result.accuracy > 85


def test_divergence_is_one_clear_error(task: Task) -> None:
    with pytest.raises(FedRPError, match=r"training diverged: .*client \d .* round \d"):
        simulate(tiny_config("fedavg", lr=1e38), task)


class Drift(nn.Module):
    """A model whose loss grows tenfold with every step of 1 that its one weight takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + self.weight.sum()


def drifting(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return -(10 ** -outputs.mean()) + 2 * (10 ** -outputs.detach().mean())  # goes down where its value goes up


DRIFT = Task(Drift, blobs(8), blobs(8), loss=drifting)
SLOW = {"rounds": 6, "clients": 2, "lr": 0.5, "momentum": 0.0, "batch_size": 8, "local_epochs": 1, "grad_clip": 1.0}


def test_divergence_over_many_rounds_is_seen_too() -> None:
    """Here no client's loss grows more than a hundredfold within a round."""
    rounds = []
    with pytest.raises(DivergenceError, match=r"test loss after round \d is .*, of an untrained model about 1 "):
        simulate(tiny_config("fedavg", **SLOW), DRIFT, on_round=lambda record, _: rounds.append(record))
    assert rounds


def test_with_noise_a_bad_model_is_told_and_only_one_that_is_none_ends_the_run(
    caplog: pytest.LogCaptureFixture, task: Task
) -> None:
    result = simulate(tiny_config("fedavg-dp", noise_multiplier=1e6), task)
    assert result.records[-1].evaluation.delivered.loss > 1e3
    assert "training diverged: the test loss after round 1" in caplog.text

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)), nn.Linear(FEATURES, CLASSES))

    with pytest.raises(DivergenceError, match=r"test loss after round 1 is nan, .*lower lr, clip or the noise"):
        simulate(tiny_config("fedavg-dp", noise_multiplier=1e12, clip=1e12), Task(deep, task.train, task.test))


def test_a_task_for_another_number_of_clients_is_refused(task: Task) -> None:
    parts = [blobs(10, seed) for seed in range(3)]
    with pytest.raises(ConfigError, match="clients=4, but the task holds examples of 3"):
        simulate(tiny_config("fedavg"), Task(TinyNet, parts, task.test))
    with pytest.raises(DataError, match="client 1 has no examples"):
        simulate(tiny_config("fedavg", clients=2), Task(TinyNet, [blobs(10), blobs(0)], task.test))
    with pytest.raises(DataError, match="81 cannot share 80 examples"):
        simulate(tiny_config("fedavg", clients=81), task)


def test_a_part_of_the_training_examples_is_drawn_by_the_seed(task: Task) -> None:
    def shares(seed: int) -> list[torch.Tensor]:
        return [part.x for part in split_among_clients(task, tiny_config("fedavg", train_examples=20, seed=seed))]

    first, again, other = torch.cat(shares(0)), torch.cat(shares(0)), torch.cat(shares(1))
    assert [len(share) for share in shares(0)] == [5] * 4
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(torch.unique(first, dim=0)) == 20  # none twice
    with pytest.raises(ConfigError, match="train_examples=81, but 'custom' has 80"):
        simulate(tiny_config("fedavg", train_examples=81), task)
    with pytest.raises(ConfigError, match="train_examples=5, but the task comes split"):
        simulate(tiny_config("fedavg", clients=2, train_examples=5), Task(TinyNet, [blobs(10), blobs(9)], task.test))


def test_a_run_leaves_the_number_of_threads_as_it_was(task: Task) -> None:
    before = torch.get_num_threads(), kernels.get_threads()
    simulate(tiny_config("fedavg"), task, Speed(threads=before[0] + 1))
    assert (torch.get_num_threads(), kernels.get_threads()) == before
    with pytest.raises(DivergenceError):
        simulate(tiny_config("fedavg", lr=1e30, grad_clip=0.0), task, Speed(2, before[0] + 1))
    assert (torch.get_num_threads(), kernels.get_threads()) == before


def test_a_worker_that_does_not_start_ends_those_that_did(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessWorker] = []

    def start() -> ProcessWorker:
        if started:
            raise OSError("no more processes")
        started.append(ProcessWorker())
        return started[0]

    monkeypatch.setattr("fedrp.backends.processes.ProcessWorker", start)
    with pytest.raises(OSError, match="no more processes"):
        simulate(tiny_config("fedavg"), task, Speed(workers=2))
    with pytest.raises((OSError, FedRPError)):  # its pipe is closed
        started[0].send("hello")


def test_where_nobody_dropped_out_the_clients_are_asked_once_a_round(task: Task) -> None:
    exchanges: list[int] = []
    config = tiny_config("fedavg", secure_aggregation=True)
    simulate(config, task, tap=lambda sent, _replies: exchanges.append(len(sent)))
    assert 0 not in exchanges[1:]  # the first are their hellos


# --- the run folder --------------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("name", methods())
def test_a_run_folder_holds_a_line_per_round_the_result_and_the_model(name: str, task: Task, tmp_path: Path) -> None:
    result = simulate(tiny_config(name), task, out=tmp_path / "run")
    assert lines(tmp_path / "run") == result.as_json()["history"]
    assert [line["round"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == json.loads(json.dumps(result.as_json()))
    module = TinyNet()
    module.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(module(task.test[0]), load_vector(TinyNet(), result.model)(task.test[0]))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_not_trained_is_delivered_too(workers: int, task: Task, tmp_path: Path) -> None:
    """A new module draws another frozen layer and another buffer: file and result must hold those of the run."""
    config = tiny_config("fedrp-subspace", rounds=10, dim=40, seed=3)
    result = simulate(config, Task(FrozenNet, task.train, task.test), Speed(workers=workers), tmp_path / "run")
    for state in (result.state, load_file(tmp_path / "run" / "model.safetensors")):
        module = FrozenNet()
        module.load_state_dict(state)
        x, y = task.test
        assert 100 * (module(x).argmax(1) == y).double().mean().item() == pytest.approx(result.accuracy)
        assert np.array_equal(layout_of(module).flatten(module), result.model)
    assert result.accuracy > 75
    assert "tensor" not in repr(result)


@pytest.mark.parametrize("name", methods())
def test_a_finished_run_can_be_resumed_and_says_the_same(name: str, task: Task, tmp_path: Path) -> None:
    config = tiny_config(name, participation=0.75)
    first = simulate(config, task, out=tmp_path / "run")
    again = simulate(config, task, out=tmp_path / "run", resume=True)
    assert outcome(again) == outcome(first)


def seconds_kept(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["seconds"]


def test_a_resumed_run_counts_the_time_of_all_its_sittings(task: Task, tmp_path: Path) -> None:
    config = tiny_config("fedavg")

    def slow(record: RoundRecord, model: object) -> None:
        time.sleep(0.5)
        stop_after(2)(record, model)

    with pytest.raises(KeyboardInterrupt):
        simulate(config, task, out=tmp_path, on_round=slow)
    first = json.loads(next(tmp_path.rglob("sums.json")).read_text())["seconds"]
    assert first > 0.5  # the pause after round 1; that after round 2 came after its checkpoint
    began = time.monotonic()
    total = simulate(config, task, out=tmp_path, resume=True).seconds
    assert first < total < first + time.monotonic() - began
    assert seconds_kept(tmp_path) == total
    for _ in range(2):  # doing nothing takes no time
        assert simulate(config, task, out=tmp_path, resume=True).seconds == total
    assert seconds_kept(tmp_path) == total


def test_a_folder_may_be_named_by_a_string(task: Task, tmp_path: Path) -> None:
    simulate(SHORT, task, out=str(tmp_path / "run"))
    assert (tmp_path / "run" / "result.json").is_file()


def test_there_is_nothing_to_resume_without_a_folder(task: Task) -> None:
    with pytest.raises(ConfigError, match="resume=True needs out"):
        simulate(SHORT, task, resume=True)


def test_an_existing_run_is_not_overwritten(task: Task, tmp_path: Path) -> None:
    simulate(tiny_config("fedavg"), task, out=tmp_path / "run")
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(ConfigError, match="already holds a run: go on with resume=True"):
        simulate(tiny_config("fedavg"), task, out=tmp_path / "run")
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


@pytest.mark.parametrize("name", methods())
def test_a_resolved_config_resolves_to_itself(name: str) -> None:
    """What a run folder keeps is what a resumed run is started with."""
    choices = [{}, {"noise_multiplier": None, "dp_epsilon": 8.0}] if name in NOISY else [{}]
    for choice in choices:
        once = resolved(tiny_config(name, **choice), 83)
        assert resolved(once, 83) == once


@pytest.mark.parametrize("change", [{"seed": 9}, {"rounds": 2}, {"lr": 0.01}, {"algorithm": "fwc"}])
def test_a_run_with_other_settings_is_not_resumed(change: dict[str, object], task: Task, tmp_path: Path) -> None:
    config = tiny_config("fedavg")
    simulate(config, task, out=tmp_path / "run")
    ((name, value),) = change.items()
    with pytest.raises(ConfigError, match=f"was started with {name}={getattr(config, name)}, not {value}"):
        simulate(RunConfig(**{**vars(config), **change}), task, out=tmp_path / "run", resume=True)


class WideNet(TinyNet):
    """The same names, other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 9), nn.Linear(9, 3)


class RenamedNet(TinyNet):
    """The same shapes, another name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.output
        del self.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def flipped(pair: tuple[torch.Tensor, torch.Tensor], part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same but for one number."""
    changed = [tensor.clone() for tensor in pair]
    changed[part].view(-1)[5] += 1 if part == 0 else -1
    return changed[0], changed[1]


OTHER_TASKS: dict[str, tuple[Callable[[Task], Task], str]] = {
    "an input": (lambda task: Task(TinyNet, flipped(task.train, 0), task.test), "other data"),
    "a label": (lambda task: Task(TinyNet, flipped(task.train, 1), task.test), "other data"),
    "a test input": (lambda task: Task(TinyNet, task.train, flipped(task.test, 0)), "other data"),
    "fewer examples": (lambda task: Task(TinyNet, blobs(79, 1), task.test), "other data"),
    "shapes": (lambda task: Task(WideNet, task.train, task.test), "another model"),
    "names": (lambda task: Task(RenamedNet, task.train, task.test), "another model"),
}


@pytest.mark.parametrize("what", OTHER_TASKS)
def test_a_run_with_other_data_or_another_model_is_not_resumed(what: str, task: Task, tmp_path: Path) -> None:
    change, told = OTHER_TASKS[what]
    simulate(tiny_config("fedavg"), task, out=tmp_path)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(ConfigError, match=f"{tmp_path} was started with {told}: "):
        simulate(tiny_config("fedavg"), change(task), out=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


def test_without_a_folder_no_example_is_hashed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fingerprint, "of", None)
    assert simulate(tiny_config("fedavg"), task).accuracy > 0


@pytest.mark.parametrize("resume", [False, True])
def test_two_processes_do_not_write_to_one_folder(resume: bool, task: Task, tmp_path: Path) -> None:
    config = tiny_config("fedavg")
    first = outcome(simulate(config, task, out=tmp_path))
    before = [path.read_bytes() for path in files(tmp_path)]
    with locked(tmp_path / "lock"), pytest.raises(SiteError, match=r"another process is working in .*: end it"):
        simulate(config, task, out=tmp_path, resume=resume)
    assert [path.read_bytes() for path in files(tmp_path)] == before
    assert outcome(simulate(config, task, out=tmp_path, resume=True)) == first


def test_a_folder_is_kept_from_others_while_its_run_goes_on(task: Task, tmp_path: Path) -> None:
    def on_round(_record: RoundRecord, _model: object) -> None:
        with pytest.raises(SiteError, match="another process is working in"):
            simulate(tiny_config("fedavg"), task, out=tmp_path, resume=True)

    simulate(tiny_config("fedavg"), task, out=tmp_path, on_round=on_round)
    assert len(lines(tmp_path)) == 3


def test_a_folder_that_cannot_be_written_is_one_clear_error(task: Task, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write to"):
        simulate(tiny_config("fedavg"), task, out=tmp_path / "file" / "run")


DAMAGED = [
    "head.safetensors",
    "000003.safetensors",
    "clients-0000.safetensors",
    "metrics.jsonl",
    "config.json",
    "task.json",
]


@pytest.mark.parametrize("keep", [0, 20, -20])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_clear_error(name: str, keep: int, task: Task, tmp_path: Path) -> None:
    simulate(tiny_config("fedrp"), task, out=tmp_path)
    (path,) = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((DataError, ConfigError), match=str(tmp_path)) as caught:
        simulate(tiny_config("fedrp"), task, out=tmp_path, resume=True)
    assert "Traceback" not in str(caught.value)


COMPLETE = r"model.safetensors and result.json there are complete; start again in another folder, out=\.\.\."


@pytest.mark.parametrize("name", ["clients-0000.safetensors", "metrics.jsonl", "round-000003"])
def test_what_a_finished_run_has_lost_is_one_clear_error(name: str, task: Task, tmp_path: Path) -> None:
    simulate(tiny_config("fedrp"), task, out=tmp_path / "run")
    next(tmp_path.rglob(name)).rename(tmp_path / "lost")
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(DataError, match=rf"^[^\n]*{COMPLETE}$"):
        simulate(tiny_config("fedrp"), task, out=tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def stop_after(last: int) -> Callable[[RoundRecord, object], None]:
    def stop(record: RoundRecord, _model: object) -> None:
        if record.round == last:
            raise KeyboardInterrupt

    return stop


CHECKED = ["head.safetensors", "clients-0000.safetensors", "clients-0001.safetensors", "metrics.jsonl", "sums.json"]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", CHECKED)
def test_one_flipped_bit_is_noticed_and_nothing_overwritten(
    name: str, finished: bool, task: Task, tmp_path: Path
) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        simulate(tiny_config("fedrp"), task, out=tmp_path, on_round=None if finished else stop_after(2))
    flip(next(tmp_path.rglob(name)), -30)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    advice = COMPLETE if finished else f"remove {tmp_path} and start again"
    with pytest.raises(DataError, match=rf"round-00000[23] cannot be read \(.*\): {advice}$"):
        simulate(tiny_config("fedrp"), task, out=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


@pytest.mark.parametrize("name", CHECKED)
def test_a_damaged_checkpoint_gives_way_to_an_older_one(name: str, task: Task, tmp_path: Path) -> None:
    """There are two if the run was killed before it removed the older."""
    config, out = tiny_config("fedrp"), tmp_path / "run"

    def keep(record: RoundRecord, model: object) -> None:
        if record.round == 1:
            shutil.copytree(out, tmp_path / "kept")
        stop_after(2)(record, model)

    with pytest.raises(KeyboardInterrupt):
        simulate(config, task, out=out, on_round=keep)
    for part in ("checkpoint", "rounds"):
        shutil.copytree(tmp_path / "kept" / part, out / part, dirs_exist_ok=True)
    flip(out / name if name == "metrics.jsonl" else out / "checkpoint" / "round-000002" / name, -30)
    rounds: list[int] = []
    resumed = simulate(config, task, out=out, resume=True, on_round=lambda record, _: rounds.append(record.round))
    assert rounds == [2, 3]
    assert outcome(resumed) == outcome(simulate(config, task))
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["round-000003"]


def test_a_checkpoint_of_an_earlier_version_is_one_clear_error(task: Task, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(tiny_config("fedrp"), task, out=tmp_path, on_round=stop_after(2))
    (head,) = tmp_path.rglob("head.safetensors")
    head.rename(head.with_name("server.safetensors"))
    sums = head.with_name("sums.json")
    sums.write_text(sums.read_text().replace("head.safetensors", "server.safetensors"))
    with pytest.raises(DataError, match=rf"is of another version of fedrp.*: remove {tmp_path} and start again$"):
        simulate(tiny_config("fedrp"), task, out=tmp_path, resume=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_clients_of_an_earlier_version_are_one_clear_error(workers: int, task: Task, tmp_path: Path) -> None:
    config, speed = tiny_config("fedrp"), Speed(workers=workers)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, task, speed, tmp_path, on_round=stop_after(2))
    for path in tmp_path.rglob("clients-*.safetensors"):
        before = sha256_of(path)
        save_file({"0": torch.ones(3)}, path, {"clients": "[]"})
        sums = path.with_name("sums.json")
        sums.write_text(sums.read_text().replace(before, sha256_of(path)))
    told = rf"\({tmp_path}\S*clients-000\d.safetensors is of another version of fedrp: [^:]*\): "
    with pytest.raises(DataError, match=rf"{told}remove {tmp_path} and start again$"):
        simulate(config, task, speed, tmp_path, resume=True)


def test_what_is_kept_is_on_the_disk_before_the_next_round_begins(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sync a loss of power could leave names without contents."""
    synced: set[int] = set()
    sync = os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("os.fsync", watched)

    def everything_is_synced(_record: RoundRecord, _model: object) -> None:
        kept = [path for path in files(tmp_path / "run") if path.name != "lock"]
        assert {path.name for path in kept} > {"config.json", "head.safetensors", "metrics.jsonl", "sums.json"}
        assert [path.name for path in kept if path.stat().st_ino not in synced] == []
        synced.discard((tmp_path / "run" / "metrics.jsonl").stat().st_ino)  # which grows

    simulate(tiny_config("fedrp"), task, out=tmp_path / "run", on_round=everything_is_synced)
    assert {(tmp_path / "run" / name).stat().st_ino for name in ("model.safetensors", "result.json")} <= synced


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.server.round_keys])
def test_no_secret_is_written_to_the_run_folder(name: str, task: Task, tmp_path: Path) -> None:
    config = tiny_config(name)
    written: dict[Path, bytes] = {}
    simulate(
        config,
        task,
        out=tmp_path / "run",
        on_round=lambda record, _: written.update(
            {path / str(record.round): path.read_bytes() for path in files(tmp_path)}
        ),
    )
    written.update({path: path.read_bytes() for path in files(tmp_path)})
    clients = [SimulatedEntropy(RunSeed(config.seed), client) for client in range(config.clients)]
    own = [client.secret(*what) for client in clients for what in [("identity",), ("noise", 1), ("noise", 3)]]
    for key in [*round_keys(config), *own, *(key.derive("identity/x25519") for key in own)]:
        raw = key.reveal()
        for shape in (raw, raw.hex().encode(), raw.hex().upper().encode(), repr(raw).encode()):
            assert not any(shape in data for data in written.values())


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 2000])
def test_a_full_disk_is_one_line_and_costs_at_most_a_round(room: int, task: Task, tmp_path: Path) -> None:
    """The limits are hit by the metrics, and by the states of clients."""
    config = tiny_config("fedrp", clients=6)
    undisturbed = simulate(config, task)

    with contextlib.ExitStack() as disk:

        def fill(record: RoundRecord, _model: object) -> None:
            if record.round == 2:
                disk.enter_context(files_up_to(room))

        with pytest.raises(SiteError) as caught:
            simulate(config, task, out=tmp_path / "run", on_round=fill)
    told = rf"cannot write to {tmp_path / 'run'}\S*: File too large: free space and go on with resume=True"
    assert re.fullmatch(told, str(caught.value))
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = simulate(config, task, out=tmp_path / "run", resume=True)
    assert outcome(resumed) == outcome(undisturbed)
    assert len(lines(tmp_path / "run")) == 3


def test_on_a_small_disk_a_run_stops_and_goes_on_when_there_is_room(small_disk: Path, task: Task) -> None:
    config = tiny_config("fedrp", clients=40, rounds=4)
    with pytest.raises(SiteError, match="No space left on device: free space and go on with resume=True"):
        simulate(config, task, out=small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert outcome(simulate(config, task, out=small_disk / "run", resume=True)) == outcome(simulate(config, task))


def test_on_a_full_disk_no_run_is_started(task: Task, tmp_path: Path) -> None:
    with files_up_to(10), pytest.raises(SiteError, match="File too large: free space and start again"):
        simulate(tiny_config("fedavg"), task, out=tmp_path / "run")
    assert simulate(tiny_config("fedavg"), task, out=tmp_path / "run").accuracy > 0


def test_a_full_disk_leaves_a_finished_run_as_it_was(task: Task, tmp_path: Path) -> None:
    config = tiny_config("fedavg")
    simulate(config, task, out=tmp_path)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with files_up_to(100), pytest.raises(SiteError, match="go on with resume=True"):
        simulate(config, task, out=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in files(tmp_path) if path.suffix != ".partial"} == before


# --- killed and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods())
def test_stopped_after_any_round_a_run_resumes_to_the_same_end(name: str, task: Task, tmp_path: Path) -> None:
    """With clients that come and go, so that there is something to remember."""
    loss = {"dropout": 0.3, "quorum": 0.3} if name in ALGORITHMS else {}
    config = tiny_config(name, clients=6, rounds=4, participation=0.7, seed=1, **loss)
    undisturbed = simulate(config, task)
    for last in (1, 2, 3):

        def stop(record: RoundRecord, _model: object, last: int = last) -> None:
            if record.round == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            simulate(config, task, out=tmp_path / str(last), on_round=stop)
        assert outcome(simulate(config, task, out=tmp_path / str(last), resume=True)) == outcome(undisturbed)


def killed_at(operation: int, out: Path) -> bool:
    """Run in another process that kills itself at its n-th change to the file system; False if it came to its end."""
    server = torch.multiprocessing.get_context("forkserver")
    process = server.Process(target=run_and_die, args=(operation, out))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_killed_at_any_change_to_its_folder_a_run_resumes_to_the_same_end(task: Task, tmp_path: Path) -> None:
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["fedrp.simulation.simulate", "helpers"])
    undisturbed = simulate(SHORT, task, out=tmp_path / "undisturbed")
    model = (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    operation = 1
    while killed_at(operation, tmp_path / str(operation)):
        out = tmp_path / str(operation)
        resumed = simulate(SHORT, task, out=out, resume=True)
        assert outcome(resumed) == outcome(undisturbed), f"killed at change {operation}"
        assert (out / "model.safetensors").read_bytes() == model
        assert [line["round"] for line in lines(out)] == [1, 2]
        operation += 1
    assert operation > 12  # there were that many moments


ROUNDS = 30  # many and short, so that there is time to interrupt them


def arguments(out: Path, images: Path, *options: object) -> list[str]:
    setting = {"algorithm": "fedrp", "dataset": f"npz:{images}", "clients": 4, "rounds": ROUNDS, "dim": 50}
    setting |= {"batch-size": 16, "lr": 0.05, "out": out}
    return ["run", *(f"--{name}={value}" for name, value in setting.items()), *map(str, options)]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(images: Path) -> Iterator[Start]:
    """Starts runs on the command line, each in a session of its own; none outlives the test."""
    started = []

    def start(out: Path, *options: object) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        line = command(*arguments(out, images, *options))
        started.append(subprocess.Popen(line, **pipes, env=environment(), start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        for pid in members(process):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for_round(process: "subprocess.Popen[str]", number: int) -> None:
    for line in process.stderr:
        if f"round {number}/" in line:
            return
    pytest.fail("the run ended before its time")


def members(process: "subprocess.Popen[str]") -> list[int]:
    """The processes of its session that still live."""
    alive = []
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                alive.append(other.pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            pass
    return alive


def gone(process: "subprocess.Popen[str]") -> bool:
    deadline = time.monotonic() + 20
    while members(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not members(process)


def test_killed_and_interrupted_the_command_line_resumes_to_the_same_bytes(
    start: Start, images: Path, tmp_path: Path
) -> None:
    """Killed twice, stopped by Ctrl-C, each time with another number of workers, then run to its end."""
    out = tmp_path / "run"
    process = start(out, "--workers=2")
    wait_for_round(process, 1)
    process.kill()
    process.communicate()
    assert gone(process)  # workers end when the main process is killed

    process = start(out, "--workers=1", "--resume")
    wait_for_round(process, 6)
    time.sleep(random.Random(6).uniform(0, 0.1))  # noqa: S311 - no secret
    process.kill()
    process.communicate()

    process = start(out, "--workers=2", "--resume")
    wait_for_round(process, 12)
    assert len(members(process)) > 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    printed, told = process.communicate(timeout=60)
    messages = [line for line in told.splitlines() if f"/{ROUNDS}: " not in line]
    assert (process.returncode, printed) == (130, "")
    advice = f"fedrp run --resume --out {out} --workers 2"
    assert messages == [f"fedrp: stopped; what is done is kept, go on with: {advice}"]
    assert gone(process)
    assert not (out / "model.safetensors").exists()

    main(advice.split()[1:])  # as it is printed
    main(arguments(tmp_path / "undisturbed", images, "--workers=1"))
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    assert [line["round"] for line in lines(out)] == list(range(1, ROUNDS + 1))


def test_ctrl_c_while_workers_start_is_one_line_too(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--workers=2")
    deadline = time.monotonic() + 60
    while len(members(process)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # in the middle of their imports
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.count("\n") == 1, told
    assert told.startswith("fedrp: stopped")
    assert gone(process)


def test_clients_are_asked_in_waves_of_whole_groups_and_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("fedrp-subspace", clients=8, participation=0.75, projection="gaussian")
    asked: list[list[int]] = []
    at_once = simulate(config, tiny_task(), tap=lambda sent, _replies: asked.append(list(sent)))
    whole = [wave for wave in asked if len(wave) > 1]
    assert [len(wave) for wave in whole] == [6] * config.rounds
    asked.clear()
    monkeypatch.setattr(population, "_WAVE_CLIENTS", 1)
    in_waves = simulate(config, tiny_task(), tap=lambda sent, _replies: asked.append(list(sent)))
    waves = [wave for wave in asked if wave not in ([], [0])]  # but for hellos and the first keys
    assert len(waves) > config.rounds
    assert [*itertools.chain(*waves)] == [*itertools.chain(*whole)]  # in the order of clients
    assert in_waves.model.tobytes() == at_once.model.tobytes()
    assert in_waves.records[-1].traffic == at_once.records[-1].traffic
