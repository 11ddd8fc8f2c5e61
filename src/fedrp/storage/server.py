"""The folder of a deployed server: enough to go on after a kill at any moment.

    STORE/run.json             run id and config
          head.safetensors     all that changes with every message, and which rounds belong to it; replaced as a whole
          rounds/              one file per completed round: its envelopes and its aggregate, written once
          served.json          which clients have the last model, once the run is over
          status.json          how things are
          log.jsonl            what happened, a line per event
          lock                 held while the server runs

It holds no key, no model, no matrix. A save writes the rounds that were completed since the last one, then the head: it
costs the same in round 1,000 as in round 1. A round file that no head names yet (the server was killed in between) is
overwritten, one that is not needed any more is removed.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrp.config.run import Resolved
from fedrp.errors import SiteError
from fedrp.files import locked, write_atomically
from fedrp.protocol.server_state import Server
from fedrp.protocol.wire import RUN_ID_BYTES
from fedrp.storage.begun import require_same_settings, settings_of
from fedrp.storage.codec import OtherVersionError
from fedrp.storage.server_state import (
    EARLIER_FILE,
    HEAD_FILE,
    ROUNDS_FOLDER,
    completed,
    forget_rounds,
    load_server,
    packed_head,
    packed_rounds,
    stored_rounds,
)
from fedrp.storage.status import append_line, read_status, write_status


@dataclass(frozen=True)
class ServerFolder:
    """One run at the server."""

    root: Path
    run: bytes

    @classmethod
    @contextlib.contextmanager
    def open(cls, root: Path, config: Resolved) -> Iterator["ServerFolder"]:
        """A new run with a new, random run id, or the run that was begun in `root` with the same config.

        A second server is kept away meanwhile, from before the run id is read or made: there is one for a store.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SiteError(f"cannot use the store {root}: {error.strerror}") from None
        with locked(root / "lock", patience=5.0):
            yield cls(root, _run_id(root, settings_of(config)))

    def load(self, server: Server) -> Server:
        """The server as of the last `save`; `server` itself if there was none.

        Raises:
            SiteError: a file is damaged or missing, or belongs to another run or version.
        """
        if not self._head.exists() and not (self.root / EARLIER_FILE).exists():
            return server
        try:
            return load_server(server, self.root, self._rounds)
        except OtherVersionError:
            raise
        except SiteError as error:
            raise SiteError(f"{error}: put the latest copy of the store back, or give another store") from None

    def save(self, server: Server) -> None:
        """Write the server's state. Until this returns, the old one stands."""
        stored = stored_rounds(self._head, server.run)
        more = len(completed(server)) > stored
        if more:
            try:
                self._rounds.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise SiteError(f"cannot make {self._rounds}: {error.strerror}") from None
        for name, data in packed_rounds(server, stored):
            write_atomically(self._rounds / name, data)
        write_atomically(self._head, packed_head(server))
        if more:
            forget_rounds(server, self._rounds)

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
    def _head(self) -> Path:
        return self.root / HEAD_FILE

    @property
    def _rounds(self) -> Path:
        return self.root / ROUNDS_FOLDER

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
        known_settings = dict(begun["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SiteError(f"{known} is damaged ({error}): give another store") from None
    way_out = "go on with the same settings, or give another store"
    require_same_settings(known_settings, settings, f"the run in {root}", way_out)
    return run
