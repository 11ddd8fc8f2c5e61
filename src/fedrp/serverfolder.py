"""The folder of a deployed server: enough to go on after a kill at any moment.

    STORE/run.json             run id and config
          server.safetensors   all that the server knows between two rounds, see `fedrp.coordinator.Coordinator`
          served.json          which clients have the last model, once the run is over
          status.json          how things are
          log.jsonl            what happened, a line per event
          lock                 held while the server runs

It holds no key, no model, no matrix.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedrp.config import RunConfig, to_json
from fedrp.coordinator import Complaint, Coordinator, Dealt, MaskEntry
from fedrp.errors import ConfigError, SiteError
from fedrp.files import locked, write_atomically
from fedrp.status import append_line, read_status, write_status
from fedrp.wire import RUN_ID_BYTES


@dataclass(frozen=True)
class ServerFolder:
    """One run at the server."""

    root: Path
    run: bytes

    @classmethod
    @contextmanager
    def open(cls, root: Path, config: RunConfig) -> Iterator["ServerFolder"]:
        """A new run with a new, random run id, or the run that was begun in `root` with the same config.

        A second server is kept away meanwhile, from before the run id is read or made: there is one for a store.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SiteError(f"cannot use the store {root}: {error.strerror}") from None
        with locked(root / "lock", patience=5.0):
            yield cls(root, _run_id(root, json.loads(to_json(config))))

    def load(self, server: Coordinator) -> Coordinator:
        """The server as of the last `save`; `server` itself if there was none.

        Raises:
            SiteError: the file is damaged, or belongs to another run.
        """
        if not self._state_file.exists():
            return server
        try:
            return unpacked_server(server, self._state_file)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise SiteError(f"{self._state_file} is damaged ({error}): restore it, or give another store") from None

    def save(self, server: Coordinator) -> None:
        """Write the server's state. Until this returns, the old one stands."""
        write_atomically(self._state_file, packed_server(server))

    def served(self) -> frozenset[int]:
        """The clients that have got the last model, in any sitting."""
        try:
            return frozenset(map(int, json.loads(self._served_file.read_text())))
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError, TypeError) as error:
            raise SiteError(f"{self._served_file} is damaged ({error}): remove it") from None

    def keep_served(self, clients: frozenset[int]) -> None:
        """Write which clients have the last model."""
        write_atomically(self._served_file, json.dumps(sorted(clients)).encode())

    def report(self, changes: Mapping[str, object]) -> None:
        """Bring the status file up to date."""
        write_status(self.root, {**read_status(self.root), **changes})

    def log(self, event: str, details: Mapping[str, object]) -> None:
        """Add a line to the log."""
        append_line(self.root / "log.jsonl", {"event": event, **details})

    @property
    def _state_file(self) -> Path:
        return self.root / "server.safetensors"

    @property
    def _served_file(self) -> Path:
        return self.root / "served.json"


def _run_id(root: Path, settings: dict[str, Any]) -> bytes:
    """The id of the run in `root`, which is begun now if there is none."""
    known = root / "run.json"
    if not known.exists():
        run = os.urandom(RUN_ID_BYTES)
        write_atomically(known, json.dumps({"run": run.hex(), "config": settings}, indent=2).encode())
        return run
    try:
        begun = json.loads(known.read_text())
        run = bytes.fromhex(begun["run"])
        differing = next((name for name in settings if begun["config"].get(name) != settings[name]), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SiteError(f"{known} is damaged ({error}): give another store") from None
    if differing is not None:
        was = begun["config"].get(differing)
        raise ConfigError(
            f"{root} holds a run with {differing}={was}, not {settings[differing]}: "
            "go on with the same settings, or give another store"
        )
    return run


def packed_server(server: Coordinator) -> bytes:
    """All that the server knows, as a safetensors file."""
    arrays = {str(round_): aggregate for round_, aggregate in server.aggregates.items()}
    dealt = {round_: [d.dealer, [e.hex() for e in d.envelopes]] for round_, d in server.dealt.items()}
    state = {
        "round": server.round,
        "participants": server.participants,
        "last_seen": server.last_seen,
        "differing": sorted(server.differing),
        "dealt": dealt,
        "mask_keys": {client: [entry.known, entry.signed.hex()] for client, entry in server.mask_keys.items()},
        "complaints": server.complaints,
        "left_out": server.left_out,
        "roster": server.roster.hex(),
        "weights": server.weights,
    }
    return save(arrays, {"run": server.run.hex(), "state": json.dumps(state)})


def unpacked_server(server: Coordinator, path: Path) -> Coordinator:
    """The server as it was when `packed_server` made the file at `path`."""
    with safe_open(path, framework="numpy") as file:
        if file.metadata()["run"] != server.run.hex():
            raise SiteError(f"{path} belongs to another run: put it back where it came from, or give another store")
        state = json.loads(file.metadata()["state"])
        aggregates = {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    dealt = {int(r): Dealt(dealer, tuple(map(bytes.fromhex, e))) for r, (dealer, e) in state["dealt"].items()}
    return dataclasses.replace(
        server,
        round=state["round"],
        participants=tuple(state["participants"]),
        last_seen=tuple(state["last_seen"]),
        differing=frozenset(state["differing"]),
        aggregates=aggregates,
        dealt=dealt,
        mask_keys={int(c): MaskEntry(known, bytes.fromhex(s)) for c, (known, s) in state["mask_keys"].items()},
        complaints=tuple(Complaint(*complaint) for complaint in state["complaints"]),
        left_out=tuple(state["left_out"]),
        roster=bytes.fromhex(state["roster"]),
        weights=tuple(state["weights"]),
    )
