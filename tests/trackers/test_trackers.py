"""Trackers hold every round of real runs exactly once, also of runs that were cut off; read back by their own means."""

import dataclasses
import json
import logging
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import fedrp
from fedrp import trackers
from fedrp.cli import main
from fedrp.cli.common import read_settings
from fedrp.errors import ConfigError
from fedrp.simulation.measures import RoundModel
from fedrp.simulation.result import RoundRecord
from fedrp.trackers.tracker import Tracker
from helpers import environment, tiny_config, tiny_task

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

ROUNDS = 4


class Kept(NamedTuple):
    """What a tracker holds of a run."""

    rounds: Mapping[str, list[tuple[int, float]]]  # of each metric
    settings: Mapping[str, str]
    texts: Mapping[str, str]


def of_tensorboard(folder: Path) -> Kept:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of what it purges
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    rounds = {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    rows = [line.strip("| ").split(" | ") for line in texts.pop("settings").splitlines()[2:]]
    return Kept(rounds, dict(rows), texts)


def of_mlflow(folder: Path, store: Path | None = None) -> Kept:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(store or folder / "mlflow").absolute().as_uri())
    run = client.get_run(json.loads((folder / "mlflow.json").read_text())["run"])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    rounds = {name: [(item.step, item.value) for item in items] for name, items in history.items()}
    assert run.info.status in ("FINISHED", "KILLED")
    return Kept(rounds, run.data.params, run.data.tags)


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data, position, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _checksum, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_run(path: Path) -> list["Record"]:
    """The records of a sitting that is over; wandb's own process may still be writing them."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(600):
        records = [Record.FromString(raw) for raw in wandb_records(path)]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} was never finished")


def of_wandb(folder: Path) -> Kept:
    rounds: dict[str, list[tuple[int, float]]] = {}
    settings: dict[str, str] = {}
    texts: dict[str, str] = {}
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # one run, however many sittings
    for path in files:
        for record in wandb_run(path):
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            step = int(values.pop("_step", "0"))
            for name, value in values.items():
                if not name.startswith("_"):
                    rounds.setdefault(name, []).append((step, float(value)))
            for config in (record.config, record.run.config):
                settings |= {item.key: str(json.loads(item.value_json)) for item in config.update if item.key}
            texts |= {item.key: item.value_json for item in record.summary.update if item.key}
    return Kept(rounds, settings, texts)


class Kind(NamedTuple):
    open: Callable[[Path], Tracker]
    read: Callable[[Path], Kept]


KINDS = {
    "tensorboard": Kind(trackers.tensorboard, of_tensorboard),
    "mlflow": Kind(trackers.mlflow, of_mlflow),
    "wandb": Kind(trackers.wandb, of_wandb),
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of this process wants to leave the machine fails."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        local = self.family == socket.AF_UNIX or (isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1"))
        assert local, f"a tracker connects to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def assert_complete(kept: Kept, result: fedrp.RunResult) -> None:
    """Every number of every round, once, in order."""
    for name in ("accuracy", "loss", "bytes_up_total", "bytes_down_total", "bytes_keys_up_total", "seconds"):
        expected = [(line["round"], line[name]) for line in result.history]
        assert [step for step, _ in kept.rounds[name]] == [step for step, _ in expected], name
        if name != "seconds":  # a round that is done again takes another time
            assert [value for _, value in kept.rounds[name]] == pytest.approx([value for _, value in expected]), name
    assert (kept.settings["algorithm"], kept.settings["clients"]) == ("fedavg", "4")
    assert float(kept.settings["lr"]) == pytest.approx(result.config.lr)
    assert "against whoever gets the final model: no guarantee" in kept.texts["privacy"]
    assert "RunResult fedavg" in kept.texts["result"]


CONFIG = tiny_config("fedavg", dim=None, rounds=ROUNDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_tracked(name: str, tmp_path: Path) -> None:
    seen: list[int] = []
    with KINDS[name].open(tmp_path) as tracker:
        both = trackers.together(tracker, lambda record, _model: seen.append(record.round))
        result = fedrp.simulate(CONFIG, tiny_task(), on_round=both)
        tracker.finish(result)
    assert seen == [1, 2, 3, 4]
    assert_complete(KINDS[name].read(tmp_path), result)


class CutError(Exception):
    """As a crash."""


def cut_after(round_: int) -> Callable[[RoundRecord, RoundModel], None]:
    def callback(record: RoundRecord, _model: RoundModel) -> None:
        if record.round == round_:
            raise CutError

    return callback


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_was_cut_off_goes_on_without_a_gap_or_a_double(name: str, told: bool, tmp_path: Path) -> None:
    """Cut after a round that is saved in the run folder, and that the tracker knows of or not."""
    kind, task = KINDS[name], tiny_task()
    with kind.open(tmp_path) as tracker:
        callbacks = (tracker, cut_after(2)) if told else (cut_after(2), tracker)
        with pytest.raises(CutError):
            fedrp.simulate(CONFIG, task, out=tmp_path, on_round=trackers.together(*callbacks))
    with kind.open(tmp_path) as tracker:
        result = fedrp.simulate(CONFIG, task, out=tmp_path, resume=True, on_round=tracker)
        tracker.finish(result)
    assert_complete(kind.read(tmp_path), result)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_round_that_was_written_but_not_noted_is_no_double(name: str, tmp_path: Path) -> None:
    """As after a kill between the two."""
    kind, task, state = KINDS[name], tiny_task(), tmp_path / f"{name}.json"
    with kind.open(tmp_path) as tracker, pytest.raises(CutError):
        fedrp.simulate(CONFIG, task, out=tmp_path, on_round=trackers.together(tracker, cut_after(2)))
    state.write_text(json.dumps(json.loads(state.read_text()) | {"round": 1}))
    with kind.open(tmp_path) as tracker:
        result = fedrp.simulate(CONFIG, task, out=tmp_path, resume=True, on_round=tracker)
        tracker.finish(result)
    assert_complete(kind.read(tmp_path), result)


def test_a_run_may_be_tracked_from_the_middle_and_be_given_more_rounds(tmp_path: Path) -> None:
    """What came before is taken from the run folder; a summary is not written twice."""
    task = tiny_task()
    fedrp.simulate(dataclasses.replace(CONFIG, rounds=2), task, out=tmp_path)
    for rounds in (3, 3, ROUNDS):
        with trackers.tensorboard(tmp_path) as tracker:
            config = dataclasses.replace(CONFIG, rounds=rounds)
            result = fedrp.simulate(config, task, out=tmp_path, resume=True, on_round=tracker)
            tracker.finish(result)
    assert_complete(of_tensorboard(tmp_path), result)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [item.step for item in events.Tensors("privacy/text_summary")] == [3, 4]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    with trackers.tensorboard(tmp_path) as tracker:
        fedrp.simulate(dataclasses.replace(CONFIG, rounds=1), tiny_task(), on_round=tracker)
    for config, message in (
        (dataclasses.replace(CONFIG, rounds=1), "is of another run"),
        (dataclasses.replace(CONFIG, rounds=1, seed=1), "of a run with another seed"),
    ):
        with trackers.tensorboard(tmp_path) as tracker, pytest.raises(ConfigError, match=message):
            fedrp.simulate(config, tiny_task(), on_round=tracker)
    (tmp_path / "tensorboard.json").write_text("{")
    with trackers.tensorboard(tmp_path) as tracker, pytest.raises(fedrp.FedRPError, match="remove it to track anew"):
        fedrp.simulate(CONFIG, tiny_task(), on_round=tracker)


def test_one_of_several_callbacks_can_stop_a_run() -> None:
    seen: list[int] = []
    stop = trackers.together(
        lambda record, _model: fedrp.Stop if record.round == 2 else None,
        lambda record, _model: seen.append(record.round),
    )
    assert len(fedrp.simulate(CONFIG, tiny_task(), on_round=stop).records) == 2
    assert seen == [1, 2]


def test_metrics_may_be_called_anything(tmp_path: Path) -> None:
    task = dataclasses.replace(tiny_task(), metrics={"p@5 %": lambda outputs, targets: 0.5})
    with trackers.mlflow(tmp_path) as tracker:
        tracker.finish(fedrp.simulate(dataclasses.replace(CONFIG, rounds=1), task, on_round=tracker))
    assert of_mlflow(tmp_path).rounds["p_5 _"] == [(1, 0.5)]


# --- on the command line ---------------------------------------------------------------------------------------------


def small(images: Path, out: Path) -> list[str]:
    return ["--dataset", f"npz:{images}", "--clients", "2", "--rounds", "2", "--out", str(out), "--json"]


def test_the_command_line_tracks_and_resumes(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-user")
    log = ["--log", "tensorboard", "--log", "mlflow,wandb"]
    main(["run", *small(images, out), *log])
    main(["run", "--resume", "--out", str(out), "--rounds", "3", "--json", *log])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in KINDS.values():
        kept = kind.read(out)
        assert kept.rounds["accuracy"] == [
            (line["round"], pytest.approx(line["accuracy"])) for line in result["history"]
        ]
        assert kept.settings["dataset"] == f"npz:{images}"
    for path in out.rglob("*"):
        assert not path.is_file() or b"a-secret-of-the-user" not in path.read_bytes(), path


def test_a_file_of_settings_may_list_trackers(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('log = ["mlflow", "tensorboard"]\n')
    assert read_settings(tmp_path / "my.toml", {})[2].log == "mlflow,tensorboard"
    assert read_settings(tmp_path / "my.toml", {"log": "wandb"})[2].log == "wandb"


def test_a_comparison_has_one_store(images: Path, tmp_path: Path) -> None:
    main(["compare", *small(images, tmp_path), "--algorithms", "fedavg,fwc", "--log", "mlflow,tensorboard"])
    for name in ("fedavg", "fwc"):
        assert of_mlflow(tmp_path / name, tmp_path / "mlflow").settings["algorithm"] == name
        assert len(of_tensorboard(tmp_path / name).rounds["accuracy"]) == 2


@pytest.mark.parametrize(
    ("log", "message"),
    [("tensorbord", "tensorboard, mlflow, wandb"), ("mlflow,mlflow", "twice"), ("wandb", "pip install 'fedrp[wandb]'")],
)
def test_trackers_that_cannot_be_used_are_refused_before_training(
    log: str,
    message: str,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        main(["run", *small(images, tmp_path / "run"), "--log", log])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_without_a_tracker_none_is_loaded(images: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from fedrp.cli import main; main(sys.argv[1:]);"
        "assert not {'mlflow', 'wandb', 'tensorboard'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", program, "run", *small(images, tmp_path / "run")]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
