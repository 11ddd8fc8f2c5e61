"""Files of the server's state: a head that is replaced, and one per completed round that is written once."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.crypto.epochs import Complaint, Dealt
from fedrp.crypto.sizes import split
from fedrp.errors import SiteError
from fedrp.protocol.server_state import MaskEntry, Server
from fedrp.protocol.wire import Payload
from fedrp.storage.codec import (
    Field,
    OtherVersionError,
    Stored,
    hexadecimal,
    number,
    numbers,
    of_record,
    packed,
    read,
    to_record,
)

HEAD_FILE = "head.safetensors"
ROUNDS_FOLDER = "rounds"
EARLIER_FILE = "server.safetensors"  # of versions that wrote all rounds into one file

# --- the head --------------------------------------------------------------------------------------------------------


HEAD_FIELDS = {
    "round": number("round"),
    "participants": numbers("cohort"),
    "left_out": numbers("left_out"),
    "roster": hexadecimal("roster"),
    "weights": numbers("weights"),
    "last_seen": numbers("last_seen"),
    "differing": Field("differing", sorted, frozenset),
    "mask_keys": Field(
        "mask_keys",
        lambda keys: {client: [entry.known, entry.signed.hex()] for client, entry in keys.items()},
        lambda listed: {int(client): MaskEntry(known, bytes.fromhex(key)) for client, (known, key) in listed.items()},
    ),
    "complaints": Field("complaints", list, lambda listed: tuple(Complaint(*complaint) for complaint in listed)),
}


def packed_head(server: Server) -> bytes:
    """What changes, the envelopes of the open round, and which completed rounds have files; as a safetensors file."""
    done = completed(server)
    about = {
        "state": to_record(server, HEAD_FIELDS),
        "stored": len(done),
        "keys": _spans(round_ for round_ in server.dealt if round_ in done),
        "aggregates": _spans(server.aggregates),
    }
    still_open = {round_: dealt for round_, dealt in server.dealt.items() if round_ not in done}
    return _packed(server.run, _Content(about, still_open, {}))


def load_server(server: Server, folder: Path, rounds: Path) -> Server:
    """The server as the head in `folder` and the files in `rounds` tell of it.

    Raises:
        SiteError: a file is damaged or missing, or belongs to another run or version.
    """
    head = folder / HEAD_FILE
    if not head.exists() and (folder / EARLIER_FILE).exists():
        raise OtherVersionError.of(folder / EARLIER_FILE)
    about, dealt, aggregates = _read(head, server.run)
    state = of_record(about["state"], HEAD_FIELDS, head)
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
    return dataclasses.replace(server, dealt=dealt, aggregates=aggregates, **state)


def stored_rounds(head: Path, run: bytes) -> int:
    """How many completed rounds, the set-up among them, a head tells of."""
    return int(_read(head, run).about["stored"]) if head.exists() else 0


# --- completed rounds ------------------------------------------------------------------------------------------------


def packed_rounds(server: Server, stored: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of the rounds that were completed after the first `stored`."""
    for round_ in completed(server)[stored:]:
        dealt = {round_: server.dealt[round_]} if round_ in server.dealt else {}
        aggregates = {round_: server.aggregates[round_]} if round_ in server.aggregates else {}
        if dealt or aggregates:
            yield _file_name(round_), _packed(server.run, _Content({}, dealt, aggregates))


def forget_rounds(server: Server, folder: Path) -> None:
    """Remove the files of rounds that no client can still need, and what a kill has left behind."""
    needed = {_file_name(round_) for round_ in (*server.dealt, *server.aggregates)}
    for path in folder.iterdir():
        if path.name not in needed:
            with contextlib.suppress(OSError):  # it does no harm, and is tried again after the next round
                path.unlink()


def completed(server: Server) -> range:
    """The rounds whose keys and aggregates do not change any more: none before there is an aggregate."""
    return range(server.round + 1 if server.aggregates else 0)


def _file_name(round_: int) -> str:
    return f"{round_:06d}.safetensors"


# --- files -----------------------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """What a file of the server tells."""

    about: Mapping[str, Any]
    dealt: dict[int, Dealt]
    aggregates: dict[int, Payload]


def _packed(run: bytes, content: _Content) -> bytes:
    about, dealt, aggregates = content
    arrays: dict[str, npt.NDArray[Any]] = {f"aggregate {round_}": vector for round_, vector in aggregates.items()}
    for round_, (_, envelopes) in dealt.items():
        arrays[f"envelopes {round_}"] = np.frombuffer(b"".join(envelopes), np.uint8).reshape(len(envelopes), -1)
    dealers = {round_: dealer for round_, (dealer, _) in dealt.items()}
    return packed(run, Stored({**about, "dealers": dealers}, arrays))


def _read(path: Path, run: bytes) -> _Content:
    about, arrays = read(path, run)
    dealt = {int(round_): _dealt(dealer, arrays[f"envelopes {round_}"]) for round_, dealer in about["dealers"].items()}
    vectors = {name.removeprefix("aggregate "): array for name, array in arrays.items() if name.startswith("aggregate")}
    return _Content(about, dealt, {int(round_): vector for round_, vector in vectors.items()})


def _dealt(dealer: int, envelopes: npt.NDArray[np.uint8]) -> Dealt:
    count, size = envelopes.shape
    return Dealt(dealer, tuple(split(envelopes.tobytes(), size, count, "envelopes")))


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
