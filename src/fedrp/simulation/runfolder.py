"""The folder of a run: what is written while it goes on, so that a kill at any moment loses at most one round.

A checkpoint is a folder that appears by a rename, complete or not at all, with the SHA-256 sums of what belongs to it.
What the server keeps of completed rounds is beside it, a file per round that is written once, see
`fedrp.storage.server_state`. Metrics of a round are written before its checkpoint; on resuming, lines beyond the
checkpoint are dropped.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as packed

from fedrp.config.run import Resolved
from fedrp.config.toml import to_json
from fedrp.errors import ConfigError, DataError, SiteError
from fedrp.files import (
    SHARED,
    append_durably,
    beginning,
    locked,
    replace_file,
    sha256_of,
    sync_folder,
    write_content,
    writing,
)
from fedrp.learning.layout import Layout
from fedrp.learning.objective import Examples
from fedrp.learning.pixels import Pixels, floats
from fedrp.protocol.server_state import Server
from fedrp.reporting.records import RoundRecord
from fedrp.simulation.population import End, Population
from fedrp.simulation.result import RunResult
from fedrp.storage.begun import more_rounds, require_extensible, require_same_settings, settings_of
from fedrp.storage.server_state import (
    HEAD_FILE,
    ROUNDS_FOLDER,
    forget_rounds,
    load_server,
    packed_head,
    packed_rounds,
)

CONFIG_FILE = "config.json"
_TASK_FILE = "task.json"
_RESULT_FILE = "result.json"
_MODEL_FILE = "model.safetensors"
_LAST_FILE = "last.safetensors"  # beside it, where it is that of the best round
_SUMS_FILE = "sums.json"
_PREFIX = "round-"
_BLOCK = 4096  # examples whose sum is taken at once
RESUME = "resume with the same"


class Fingerprint(NamedTuple):
    """What a run was started with that its config only has a name for, as SHA-256 sums in hex."""

    data: str  # of all clients, and the test set
    model: str  # names and shapes of its parameters

    @classmethod
    def of(cls, clients: Iterable[Examples], test: Examples, layout: Layout) -> "Fingerprint":
        """Read every example once."""
        data = hashlib.sha256()
        for tensor in (tensor for part in (*clients, test) for tensor in part):
            # Of pixels the numbers that they stand for, as folders of all versions have it; not of all at once.
            kind = torch.float32 if isinstance(tensor, Pixels) else tensor.dtype
            data.update(f"{kind}{tuple(tensor.shape)}".encode())
            for start in range(0, len(tensor), _BLOCK):
                block = floats(tensor[start : start + _BLOCK])
                data.update(block.detach().cpu().contiguous().numpy().data)
        names = json.dumps([(name, *shape) for name, shape in zip(layout.names, layout.shapes, strict=True)])
        return cls(data.hexdigest(), hashlib.sha256(names.encode()).hexdigest())


Files = Mapping[str, bytes]  # by name, to be kept with a checkpoint


class Progress(NamedTuple):
    """How far a run has come."""

    checkpoint: Path
    records: list[RoundRecord]
    seconds: float  # that it took, in all sittings together


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder, and what to do with them."""

    root: Path

    @classmethod
    @contextmanager
    def open(cls, root: Path, config: Resolved, task: Fingerprint, resume: bool) -> Iterator["RunFolder"]:
        """Start a new run folder, or take up one with the same config, data and model; keep other processes away.

        Raises:
            ConfigError: the folder holds a run and `resume` was not asked for, or that run had another config,
                other data or another model.
            SiteError: the disk is full, or another process is working in the folder.
        """
        with beginning(root):
            root.mkdir(parents=True, exist_ok=True)
        with locked(root / "lock", patience=1.0, required=False):
            yield cls(root)._begun(config, task, resume)

    def _begun(self, config: Resolved, task: Fingerprint, resume: bool) -> "RunFolder":
        root = self.root
        if self._config_file.exists():
            if not resume:
                raise ConfigError(
                    f"{root} already holds a run: go on with resume=True, or give another folder, out=..."
                )
            known, given = read_json(self._config_file, way_out(root)), settings_of(config)
            more = more_rounds(known, given)
            if more:
                require_extensible(config, known["rounds"], str(root))
            require_same_settings({**known, **more}, given, str(root), RESUME)
            self._require_task(task)
            if more:
                begin_folder(root, CONFIG_FILE, to_json(config))
        else:  # the config last: a folder that has one holds a run
            begin_folder(root, _TASK_FILE, json.dumps(task._asdict(), indent=2))
            begin_folder(root, CONFIG_FILE, to_json(config))
        if self.checkpoint() is None:  # killed in the first round: it begins anew
            if _finished(root):
                raise DataError(f"{root} has lost its checkpoint: {way_out(root)}")
            with writing(root):
                self._metrics_file.unlink(missing_ok=True)
        return self

    def _require_task(self, task: Fingerprint) -> None:
        known = read_json(self.root / _TASK_FILE, way_out(self.root))
        if known.get("model") != task.model:
            raise ConfigError(
                f"{self.root} was started with another model: resume with that one, or give another folder, out=..."
            )
        if known.get("data") != task.data:
            raise ConfigError(
                f"{self.root} was started with other data: resume with the same, or give another folder, out=..."
            )

    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint, sound or not."""
        return next(iter(self._complete()), None)

    def _complete(self) -> list[Path]:
        """All checkpoints that were written to their end, the newest first."""
        found = (path for path in self._checkpoints.glob(f"{_PREFIX}*") if path.suffix != ".partial")
        return sorted(found, reverse=True)

    def save(
        self,
        clients: Population[End],
        record: RoundRecord,
        seconds: float,
        files: Files,
        server: Server | None = None,
    ) -> None:
        """Write a round: its metrics, then its checkpoint; then remove older checkpoints.

        `seconds` are those of all rounds, `server` is there unless every client is alone; `files` are the caller's.

        Raises:
            SiteError: the disk is full, or the folder not writable any more. The last checkpoint is still there.
        """
        with writing(self.root):
            append_durably(self._metrics_file, json.dumps(record.as_json()))
            if server:
                self._rounds.mkdir(exist_ok=True)
                for name, data in packed_rounds(server, server.round - 1):
                    replace_file(self._rounds / name, data, SHARED)
            target = self._checkpoints / f"{_PREFIX}{record.round:06d}"
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            sums = clients.save(partial)
            for name, data in {**files, **({HEAD_FILE: packed_head(server)} if server else {})}.items():
                write_content(partial / name, data, SHARED)
                sums[name] = hashlib.sha256(data).hexdigest()
            metrics = sha256_of(self._metrics_file)
            told = {"seconds": seconds, "metrics": metrics, "files": sums}
            write_content(partial / _SUMS_FILE, json.dumps(told, indent=2).encode(), SHARED)
            sync_folder(partial)
            shutil.rmtree(target, ignore_errors=True)  # one that was damaged, and is made again
            partial.rename(target)
            sync_folder(self._checkpoints)
            for old in self._checkpoints.glob(f"{_PREFIX}*"):
                if old != target:
                    shutil.rmtree(old)
            if server:
                forget_rounds(server, self._rounds)

    def load(self, clients: Population[End]) -> Progress:
        """Have the clients go on after the newest sound checkpoint; the records up to it."""
        checkpoint = self._sound_checkpoint()
        with self._reading(checkpoint):
            clients.load(checkpoint)
            lines = self._lines(_round_of(checkpoint))
            records = [RoundRecord.from_json(json.loads(line)) for line in lines]
            seconds = float(json.loads((checkpoint / _SUMS_FILE).read_text())["seconds"])
        with writing(self.root):
            replace_file(self._metrics_file, "".join(lines).encode(), SHARED)
        return Progress(checkpoint, records, seconds)

    def load_server(self, server: Server, checkpoint: Path) -> Server:
        """The server as of a checkpoint."""
        with self._reading(checkpoint):
            return load_server(server, checkpoint, self._rounds)

    @contextmanager
    def _reading(self, checkpoint: Path) -> Iterator[None]:
        """What cannot be read gets one line that says how to go on."""
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError, DataError, SiteError) as error:
            raise self._unreadable(checkpoint, str(error)) from None

    def _sound_checkpoint(self) -> Path:
        """The newest one whose sums are right."""
        flaws = []
        for checkpoint in self._complete():
            flaw = self._flaw(checkpoint)
            if flaw is None:
                return checkpoint
            flaws.append((checkpoint, flaw))
        if not flaws:
            raise DataError(f"{self.root} holds no complete checkpoint")
        raise self._unreadable(*flaws[0])

    def _flaw(self, checkpoint: Path) -> str | None:
        try:
            sums = json.loads((checkpoint / _SUMS_FILE).read_text())
            for name, digest in sums["files"].items():
                if sha256_of(checkpoint / name) != digest:
                    return f"{name} is damaged"
            metrics = "".join(self._lines(_round_of(checkpoint)))
            if hashlib.sha256(metrics.encode()).hexdigest() != sums["metrics"]:
                return f"{self._metrics_file.name} is damaged"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            return str(error)
        return None

    def _lines(self, rounds: int) -> list[str]:
        """The metrics of the first rounds, a line each."""
        lines = self._metrics_file.read_text().splitlines(keepends=True)
        if len(lines) < rounds:
            raise DataError(f"{self._metrics_file.name} has {len(lines)} lines")
        return lines[:rounds]

    def _unreadable(self, checkpoint: Path, reason: str) -> DataError:
        return DataError(f"the checkpoint {checkpoint} cannot be read ({reason}): {way_out(self.root)}")

    def finish(self, result: RunResult, best: bool) -> None:
        """Write the result and the delivered model, as its module's `state_dict` names it; if it is the best, the last.

        What an earlier sitting delivered is replaced.
        """
        with writing(self.root):
            replace_file(self.root / _MODEL_FILE, packed(result.state), SHARED)
            if best:
                replace_file(self.root / _LAST_FILE, packed(result.last_state), SHARED)
            replace_file(self.root / _RESULT_FILE, json.dumps(result.as_json(), indent=2).encode(), SHARED)

    @property
    def _config_file(self) -> Path:
        return self.root / CONFIG_FILE

    @property
    def _metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def _rounds(self) -> Path:
        return self.root / ROUNDS_FOLDER

    @property
    def _checkpoints(self) -> Path:
        return self.root / "checkpoint"


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def begun_settings(root: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and for the rest the settings of the run in `root`.

    Raises:
        ConfigError: there is no run, or it was started with other settings than were given.
    """
    if not (root / CONFIG_FILE).exists():
        raise ConfigError(f"{root} holds no run to go on with: correct out, or leave out resume to start one")
    known = read_json(root / CONFIG_FILE, way_out(root))
    if "dp_epsilon" in given:  # what is kept is the noise that follows from it: it is found again, then compared
        known = {name: value for name, value in known.items() if name not in ("dp_epsilon", "noise_multiplier")}
    known |= more_rounds(known, given)  # whether it may have them is known when all settings are
    compared = {name: value for name, value in given.items() if name in known}
    require_same_settings(known, compared, str(root), RESUME)
    return {**known, **given}


# --- files ---------------------------------------------------------------------------------------------------------


def begin_folder(root: Path, name: str, text: str) -> None:
    """Make a folder with the file that says what it is."""
    with beginning(root):
        root.mkdir(parents=True, exist_ok=True)
        replace_file(root / name, text.encode(), SHARED)


def _finished(root: Path) -> bool:
    return (root / _RESULT_FILE).exists() and (root / _MODEL_FILE).exists()


def way_out(root: Path) -> str:
    """What to do about a run that cannot be gone on with."""
    if _finished(root):
        return f"{_MODEL_FILE} and {_RESULT_FILE} there are complete; start again in another folder, out=..."
    return f"remove {root} and start again"


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """What a file of a run holds; an error ends with what to do about it."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): {way_out}") from None
