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
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedrp.config import RunConfig, to_json
from fedrp.crypto.sizes import split
from fedrp.errors import ConfigError, SiteError, first_line
from fedrp.files import locked, write_atomically
from fedrp.protocol.server_state import Complaint, Coordinator, Dealt, MaskEntry
from fedrp.protocol.wire import RUN_ID_BYTES
from fedrp.storage.status import append_line, read_status, write_status
from fedrp.types import Vector

HEAD_FILE = "head.safetensors"
ROUNDS_FOLDER = "rounds"
_EARLIER_FILE = "server.safetensors"  # of versions that wrote all rounds into one file

_Arrays = dict[str, npt.NDArray[Any]]


class _OtherVersionError(SiteError):
    """A file that this version cannot read, and that no copy would put right."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is of another version of fedrp: finish its run with that one, or begin a new one")


@dataclass(frozen=True)
class ServerFolder:
    """One run at the server."""

    root: Path
    run: bytes

    @classmethod
    @contextlib.contextmanager
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
            SiteError: a file is damaged or missing, or belongs to another run or version.
        """
        if not self._head.exists() and not (self.root / _EARLIER_FILE).exists():
            return server
        try:
            return load_server(server, self.root, self._rounds)
        except _OtherVersionError:
            raise
        except SiteError as error:
            raise SiteError(f"{error}: put the latest copy of the store back, or give another store") from None

    def save(self, server: Coordinator) -> None:
        """Write the server's state. Until this returns, the old one stands."""
        stored = _stored_rounds(self._head, server.run)
        more = len(_completed(server)) > stored
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


# --- the head --------------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """How a field of `Coordinator` is written as JSON, and read."""

    pack: Callable[[Any], object]
    unpack: Callable[[Any], Any]


_TUPLE = _Field(list, tuple)
_HEAD_FIELDS = {
    "round": _Field(int, int),
    "participants": _TUPLE,
    "left_out": _TUPLE,
    "roster": _Field(bytes.hex, bytes.fromhex),
    "weights": _TUPLE,
    "last_seen": _TUPLE,
    "differing": _Field(sorted, frozenset),
    "mask_keys": _Field(
        lambda keys: {client: [entry.known, entry.signed.hex()] for client, entry in keys.items()},
        lambda keys: {int(client): MaskEntry(known, bytes.fromhex(key)) for client, (known, key) in keys.items()},
    ),
    "complaints": _Field(list, lambda complaints: tuple(Complaint(*complaint) for complaint in complaints)),
}


def packed_head(server: Coordinator) -> bytes:
    """What changes, the envelopes of the open round, and which completed rounds have files; as a safetensors file."""
    completed = _completed(server)
    about = {
        "state": {name: field.pack(getattr(server, name)) for name, field in _HEAD_FIELDS.items()},
        "stored": len(completed),
        "keys": _spans(round_ for round_ in server.dealt if round_ in completed),
        "aggregates": _spans(server.aggregates),
    }
    still_open = {round_: dealt for round_, dealt in server.dealt.items() if round_ not in completed}
    return _packed(server.run, _Content(about, still_open, {}))


def load_server(server: Coordinator, folder: Path, rounds: Path) -> Coordinator:
    """The server as the head in `folder` and the files in `rounds` tell of it.

    Raises:
        SiteError: a file is damaged or missing, or belongs to another run or version.
    """
    head = folder / HEAD_FILE
    if not head.exists() and (folder / _EARLIER_FILE).exists():
        raise _OtherVersionError(folder / _EARLIER_FILE)
    about, dealt, aggregates = _read(head, server.run)
    if about["state"].keys() != _HEAD_FIELDS.keys():
        raise _OtherVersionError(head)
    keys, vectors = _numbers(about["keys"]), _numbers(about["aggregates"])
    for round_ in sorted(keys | vectors):
        path = rounds / _file_name(round_)
        found = _read(path, server.run)
        try:
            if round_ in keys:
                dealt[round_] = found.dealt[round_]
            if round_ in vectors:
                aggregates[round_] = found.aggregates[round_]
        except KeyError:
            raise SiteError(f"{path} is damaged (it is not that of round {round_})") from None
    state = {name: field.unpack(about["state"][name]) for name, field in _HEAD_FIELDS.items()}
    return dataclasses.replace(server, dealt=dealt, aggregates=aggregates, **state)


def _stored_rounds(head: Path, run: bytes) -> int:
    """How many completed rounds, the set-up among them, a head tells of."""
    return int(_read(head, run).about["stored"]) if head.exists() else 0


# --- completed rounds ------------------------------------------------------------------------------------------------


def packed_rounds(server: Coordinator, stored: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of the rounds that were completed after the first `stored`."""
    for round_ in _completed(server)[stored:]:
        dealt = {round_: server.dealt[round_]} if round_ in server.dealt else {}
        aggregates = {round_: server.aggregates[round_]} if round_ in server.aggregates else {}
        if dealt or aggregates:
            yield _file_name(round_), _packed(server.run, _Content({}, dealt, aggregates))


def forget_rounds(server: Coordinator, folder: Path) -> None:
    """Remove the files of rounds that no client can still need, and what a kill has left behind."""
    needed = {_file_name(round_) for round_ in (*server.dealt, *server.aggregates)}
    for path in folder.iterdir():
        if path.name not in needed:
            with contextlib.suppress(OSError):  # it does no harm, and is tried again after the next round
                path.unlink()


def _completed(server: Coordinator) -> range:
    """The rounds whose keys and aggregates do not change any more: none before there is an aggregate."""
    return range(server.round + 1 if server.aggregates else 0)


def _file_name(round_: int) -> str:
    return f"{round_:06d}.safetensors"


# --- files -----------------------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """What a file of the server tells."""

    about: dict[str, Any]
    dealt: dict[int, Dealt]
    aggregates: dict[int, Vector]


def _packed(run: bytes, content: _Content) -> bytes:
    """A safetensors file with a sum of its own: a file that was changed is not believed."""
    about, dealt, aggregates = content
    arrays: _Arrays = {f"aggregate {round_}": aggregate for round_, aggregate in aggregates.items()}
    for round_, (_, envelopes) in dealt.items():
        arrays[f"envelopes {round_}"] = np.frombuffer(b"".join(envelopes), np.uint8).reshape(len(envelopes), -1)
    dealers = {round_: dealer for round_, (dealer, _) in dealt.items()}
    text = json.dumps({**about, "run": run.hex(), "dealers": dealers})
    return bytes(save(arrays, {"about": text, "sha256": _sum(text, arrays)}))


def _read(path: Path, run: bytes) -> _Content:
    try:
        with safe_open(path, framework="numpy") as file:
            text, told = file.metadata()["about"], file.metadata()["sha256"]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if told != _sum(text, arrays):
            raise SiteError(f"{path} is damaged (its sum is wrong)")
        about = json.loads(text)
    except FileNotFoundError:
        raise SiteError(f"{path} is missing") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SiteError(f"{path} is damaged ({first_line(error)})") from None
    if about["run"] != run.hex():
        raise SiteError(f"{path} belongs to another run")
    dealt = {int(round_): _dealt(dealer, arrays[f"envelopes {round_}"]) for round_, dealer in about["dealers"].items()}
    vectors = {name.removeprefix("aggregate "): array for name, array in arrays.items() if name.startswith("aggregate")}
    return _Content(about, dealt, {int(round_): vector for round_, vector in vectors.items()})


def _dealt(dealer: int, envelopes: npt.NDArray[np.uint8]) -> Dealt:
    count, size = envelopes.shape
    return Dealt(dealer, tuple(split(envelopes.tobytes(), size, count, "envelopes")))


def _sum(text: str, arrays: _Arrays) -> str:
    """The SHA-256 sum of what is in a file, in hex."""
    whole = hashlib.sha256(text.encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


def _spans(rounds: Iterable[int]) -> list[list[int]]:
    """Whole numbers as first and last ones of runs without a gap: mostly one or two, however many rounds there are."""
    spans: list[list[int]] = []
    for round_ in sorted(rounds):
        if spans and spans[-1][1] == round_ - 1:
            spans[-1][1] = round_
        else:
            spans.append([round_, round_])
    return spans


def _numbers(spans: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The inverse of `_spans`."""
    return frozenset(round_ for first, last in spans for round_ in range(first, last + 1))
