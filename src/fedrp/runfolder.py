"""The folder of a run: what is written while it goes on, so that a kill at any moment loses at most one round.

A checkpoint is a folder that appears by a rename, complete or not at all. Metrics of a round are written before its
checkpoint; on resuming, lines beyond the checkpoint are dropped.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file

from fedrp.config import RunConfig, to_json
from fedrp.coordinator import Coordinator
from fedrp.errors import ConfigError, DataError
from fedrp.files import is_full, unwritable, writing
from fedrp.host import Hosts
from fedrp.models import Layout
from fedrp.result import RoundRecord, RunResult
from fedrp.serverfolder import packed_server, unpacked_server
from fedrp.training import Examples

CONFIG_FILE = "config.json"
COMPARISON_FILE = "compare.json"
_TASK_FILE = "task.json"
_PREFIX = "round-"


class Fingerprint(NamedTuple):
    """What a run was started with that its config only has a name for, as SHA-256 sums in hex."""

    data: str  # of all clients, and the test set
    model: str  # names and shapes of its parameters

    @classmethod
    def of(cls, clients: Iterable[Examples], test: Examples, layout: Layout) -> "Fingerprint":
        """Read every example once."""
        data = hashlib.sha256()
        for tensor in (tensor for part in (*clients, test) for tensor in part):
            data.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            data.update(tensor.detach().cpu().contiguous().numpy())
        names = json.dumps([(name, *shape) for name, shape in zip(layout.names, layout.shapes, strict=True)])
        return cls(data.hexdigest(), hashlib.sha256(names.encode()).hexdigest())


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder, and what to do with them."""

    root: Path

    @classmethod
    def open(cls, root: Path, config: RunConfig, task: Fingerprint, resume: bool) -> "RunFolder":
        """Start a new run folder, or take up one with the same config, data and model.

        Raises:
            ConfigError: the folder holds a run and `resume` was not asked for, or that run had another config,
                other data or another model.
            SiteError: the disk is full.
        """
        folder = cls(root)
        known = folder._config_file
        if known.exists():
            if not resume:
                raise ConfigError(f"{root} already holds a run: add --resume to go on with it, or give another --out")
            _require_same(root, _read_json(known), json.loads(to_json(config)))
            folder._require_task(task)
        else:  # the config last: a folder that has one holds a run
            _begin(root, _TASK_FILE, json.dumps(task._asdict(), indent=2))
            _begin(root, CONFIG_FILE, to_json(config))
        if folder.checkpoint() is None:  # killed in the first round: it begins anew
            with writing(root):
                folder._metrics_file.unlink(missing_ok=True)
        return folder

    def _require_task(self, task: Fingerprint) -> None:
        path = self.root / _TASK_FILE
        known = _read_json(path) if path.exists() else {}  # earlier versions did not keep it
        if known.get("model", task.model) != task.model:
            raise ConfigError(
                f"{self.root} was started with another model: resume with that one, or give another --out"
            )
        if known.get("data", task.data) != task.data:
            raise ConfigError(f"{self.root} was started with other data: resume with the same, or give another --out")

    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = sorted(path for path in self._checkpoints.glob(f"{_PREFIX}*") if path.suffix != ".partial")
        return complete[-1] if complete else None

    def save(self, server: Coordinator, hosts: Hosts, record: RoundRecord) -> None:
        """Write a round: its metrics, then its checkpoint; then remove older checkpoints.

        Raises:
            SiteError: the disk is full, or the folder not writable any more. The last checkpoint is still there.
        """
        with writing(self.root):
            with self._metrics_file.open("a") as lines:
                lines.write(json.dumps(record.as_json()) + "\n")
            target = self._checkpoints / f"{_PREFIX}{server.round:06d}"
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            hosts.save(partial)
            (partial / "server.safetensors").write_bytes(packed_server(server))
            partial.rename(target)
            for old in self._checkpoints.glob(f"{_PREFIX}*"):
                if old != target:
                    shutil.rmtree(old)

    def load(self, server: Coordinator, hosts: Hosts) -> tuple[Coordinator, list[RoundRecord]]:
        """Server and clients as of the newest checkpoint, and the records up to it."""
        checkpoint = self.checkpoint()
        if checkpoint is None:
            raise DataError(f"{self.root} holds no complete checkpoint")
        try:
            server = unpacked_server(server, checkpoint / "server.safetensors")
            hosts.load(checkpoint)
            lines = self._metrics_file.read_text().splitlines()[: server.round]
            records = [RoundRecord.from_json(json.loads(line)) for line in lines]
            if len(records) < server.round:
                raise DataError(f"{self._metrics_file.name} has {len(records)} lines")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, DataError) as error:
            raise DataError(f"the checkpoint {checkpoint} cannot be read ({error}): remove {self.root}") from None
        with writing(self.root):
            _write_atomically(self._metrics_file, "".join(line + "\n" for line in lines))
        return server, records

    def finish(self, result: RunResult, layout: Layout) -> None:
        """Write the result and the delivered model, with the model's own parameter names."""
        views = layout.views(torch.from_numpy(result.model.copy()))
        tensors = {name: view.numpy() for name, view in zip(layout.names, views, strict=True)}
        model = self.root / "model.safetensors"
        with writing(self.root):
            partial = _partial(model)
            save_file(tensors, partial)
            os.replace(partial, model)
            _write_atomically(self.root / "result.json", json.dumps(result.as_json(), indent=2))

    @property
    def _config_file(self) -> Path:
        return self.root / CONFIG_FILE

    @property
    def _metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def _checkpoints(self) -> Path:
        return self.root / "checkpoint"


def begun_settings(root: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and for the rest the settings of the run in `root`.

    Raises:
        ConfigError: there is no run, or it was started with other settings than were given.
    """
    if not (root / CONFIG_FILE).exists():
        raise ConfigError(f"{root} holds no run to go on with: correct --out, or leave out --resume to start one")
    known = _read_json(root / CONFIG_FILE)
    if "dp_epsilon" in given:  # what is kept is the noise that follows from it: it is found again, then compared
        known = {name: value for name, value in known.items() if name not in ("dp_epsilon", "noise_multiplier")}
    _require_same(root, known, {name: value for name, value in given.items() if name in known})
    return {**known, **given}


# --- several runs, compared ----------------------------------------------------------------------------------------


def begin_comparison(root: Path, algorithms: Sequence[str], shared: RunConfig, resume: bool) -> None:
    """Keep what a comparison was asked for, so that it can be resumed without asking again.

    Raises:
        ConfigError: there is one already, or a run of one of its algorithms, and `resume` was not asked for.
    """
    kept = [root / COMPARISON_FILE, *(root / name / CONFIG_FILE for name in algorithms)]
    if not resume and any(path.exists() for path in kept):
        raise ConfigError(f"{root} already holds a comparison: add --resume to go on with it, or give another --out")
    settings = {"algorithms": ",".join(algorithms), **dataclasses.asdict(shared)}
    _begin(root, COMPARISON_FILE, json.dumps(settings, indent=2))


def begun_comparison(root: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and for the rest the settings of the comparison in `root`. Algorithms may be added to it.

    Raises:
        ConfigError: there is none, or it was started with other settings than were given.
    """
    if not (root / COMPARISON_FILE).exists():
        if any(root.glob(f"*/{CONFIG_FILE}")):  # of an earlier version, which kept those of the runs only
            return dict(given)
        raise ConfigError(f"{root} holds no comparison to go on with: correct --out, or leave out --resume")
    known = _read_json(root / COMPARISON_FILE)
    _require_same(root, known, {name: given[name] for name in given if name in known and name != "algorithms"})
    return {**known, **given}


# --- files ---------------------------------------------------------------------------------------------------------


def _begin(root: Path, name: str, text: str) -> None:
    """Make a folder with the file that says what it is."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write_atomically(root / name, text)
    except OSError as error:
        if is_full(error):
            raise unwritable(root, error, "start again") from None
        raise ConfigError(f"cannot write to {root}: {error.strerror}") from None


def _require_same(root: Path, known: Mapping[str, object], asked: Mapping[str, object]) -> None:
    for name, value in asked.items():
        if known.get(name) != value:
            raise ConfigError(f"{root} was started with {name}={known.get(name)}, not {value}: resume with the same")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove {path.parent}") from None


def _write_atomically(path: Path, text: str) -> None:
    partial = _partial(path)
    partial.write_text(text)
    os.replace(partial, path)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
