"""The folder of a deployed client: all it keeps between two messages, in one file that is always complete.

    STATE/RUN/run.json            settings of the run and the site's weight in it, as they were at the first message
              state.safetensors   the client's state, see `fedrp.silo.Silo`; no opened key is in it
              status.json         how things are, for people and monitors
              log.jsonl           what happened, a line per event
              model.safetensors   the delivered model, once the run is over
              lock                held while a message is worked on

RUN is the run id: a client that meets an old run again still knows how far it went, and refuses to do a round twice,
or one with other settings than those that it was told of first: privacy is accounted for these.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from safetensors.torch import save as packed

from fedrp.algorithms.base import ClientState
from fedrp.config import RunConfig, to_json
from fedrp.errors import ConfigError, DataError, SiteError
from fedrp.files import locked, refuse_link, write_atomically
from fedrp.models import State
from fedrp.silo import Silo
from fedrp.status import append_line, read_status, write_status

_FORMAT = "fedrp site state 1"


@dataclass(frozen=True)
class SiteFolder:
    """One run at one site."""

    root: Path
    run: bytes

    @classmethod
    def open(cls, state: Path, run: bytes) -> "SiteFolder":
        """The folder of a run below the site's state folder; made if it is not there."""
        root = state / run.hex()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SiteError(f"cannot use the state folder {state}: {error.strerror}") from None
        return cls(root, run)

    def lock(self, patience: float = 600.0) -> AbstractContextManager[None]:
        """Keep other processes away from this folder; waits for one that is at work."""
        return locked(self.root / "lock", patience)

    def settle(self, config: RunConfig, weight: int) -> None:
        """Tie the run id to its settings and to this site's weight, for good, with the first message.

        Raises:
            ConfigError: this run began with other settings here.
            DataError: it began with another weight here.
            SiteError: what it began with cannot be read.
        """
        path, settings = self.root / "run.json", json.loads(to_json(config))
        if not path.exists() and not self._state_file.exists():
            write_atomically(path, json.dumps({"config": settings, "weight": weight}, indent=2).encode())
            return
        try:
            begun = json.loads(path.read_text())
            known, known_weight = dict(begun["config"]), int(begun["weight"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SiteError(f"{path} is damaged ({error}): let this site sit the run out") from None
        for name in settings:
            if known.get(name) != settings[name]:
                raise ConfigError(
                    f"run {self.run.hex()} began with {name}={known.get(name)} here, not {settings[name]}: "
                    "other settings need a run of their own, with another store"
                )
        if known_weight != weight:
            raise DataError(
                f"run {self.run.hex()} began with {known_weight} examples here, now there are {weight}: "
                "with weighting=samples they must stay the same to the end of the run, put them back"
            )

    def load(self, index: int) -> Silo:
        """The state of client `index`; a new one before the first message.

        Raises:
            SiteError: the file is damaged, or belongs to another run or client.
        """
        refuse_link(self._state_file)
        if not self._state_file.exists():
            return Silo(index)
        try:
            with safe_open(self._state_file, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise SiteError(f"{self._state_file} is not a state file of this version of fedrp")
                if metadata["run"] != self.run.hex():
                    raise SiteError(f"{self._state_file} belongs to another run: put it back where it came from")
                record = json.loads(metadata["silo"])
                fields = [file.get_tensor(name) for name in record["state"]]
                reply = file.get_tensor("reply").tobytes()
            silo = Silo.of_record(record, ClientState(*fields) if fields else None, reply)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise SiteError(f"{self._state_file} is damaged ({error}): restore it from a backup") from None
        if silo.index != index:
            raise SiteError(f"{self._state_file} belongs to client {silo.index}, this is client {index}")
        return silo

    def save(self, silo: Silo) -> None:
        """Write the state. Until this returns, the old one stands."""
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.ascontiguousarray(array)
            for name, array in zip(ClientState._fields, silo.state or (), strict=False)
        }
        record = {**silo.record(), "state": list(arrays)}
        arrays["reply"] = np.frombuffer(silo.reply, np.uint8)
        metadata = {"format": _FORMAT, "run": self.run.hex(), "silo": json.dumps(record)}
        write_atomically(self._state_file, save(arrays, metadata))

    def deliver(self, model: State) -> Path:
        """Write the delivered model, as its module's `state_dict` names it."""
        path = self.root / "model.safetensors"
        write_atomically(path, packed(model))
        return path

    def status(self) -> dict[str, Any]:
        """What `report` wrote last."""
        return read_status(self.root)

    def report(self, changes: Mapping[str, object]) -> None:
        """Bring the status file up to date."""
        write_status(self.root, {**self.status(), **changes})

    def log(self, event: str, details: Mapping[str, object]) -> None:
        """Add a line to the log."""
        append_line(self.root / "log.jsonl", {"event": event, **details})

    @property
    def _state_file(self) -> Path:
        return self.root / "state.safetensors"
