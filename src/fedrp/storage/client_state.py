"""Files of clients' states: one client's at a site, those of a whole group in a simulation."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedrp.algorithms.client_side import ClientState
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.protocol.client_state import Client, Envelope
from fedrp.storage.codec import Field, Stored, hexadecimal, number, numbers, of_record, packed, read, to_record

PLAIN_FIELDS = {
    "index": number("client"),
    "round": number("round"),
    "since": number("since"),
    "envelopes": Field(
        "envelopes",
        lambda envelopes: {round_: [envelope.dealer, envelope.sealed.hex()] for round_, envelope in envelopes.items()},
        lambda listed: {int(round_): Envelope(dealer, bytes.fromhex(key)) for round_, (dealer, key) in listed.items()},
    ),
    "call": Field(
        "cohort",
        lambda call: call and [list(call.clients), list(call.weights)],
        lambda listed: listed and Cohort(*map(tuple, listed)),
    ),
    "transcript": hexadecimal("transcript"),
    "left_out": numbers("left_out"),
    "dealt": number("dealt"),
    "taken": number("taken"),
    "begun": number("begun"),
    "asked": hexadecimal("asked"),
}
ARRAY_FIELDS = ("state", "last", "mask_keys", "reply")


def packed_clients(run: bytes, clients: Iterable[Client]) -> bytes:
    """The states of clients as a file. No opened key is in it; an array that clients share is in it once."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    names: dict[int, str] = {}

    def put(array: npt.NDArray[Any]) -> str:
        name = names.setdefault(id(array), str(len(names)))
        arrays.setdefault(name, array)  # which also keeps its id from being given to another one
        return name

    records = []
    for client in clients:
        found = {
            "state": client.state or (),
            "last": () if client.last is None else (client.last,),
            "mask_keys": (client.mask_keys,),
            "reply": (np.frombuffer(client.reply, np.uint8),) if client.reply else (),
        }
        named = {field: [put(array) for array in found[field]] for field in ARRAY_FIELDS}
        records.append({"plain": to_record(client, PLAIN_FIELDS), "arrays": named})
    return packed(run, Stored({"clients": records}, arrays))


def read_clients(path: Path, run: bytes) -> list[Client]:
    """The inverse of `packed_clients`.

    Raises:
        SiteError: the file is damaged or missing, or belongs to another run or version.
    """
    about, arrays = read(path, run)
    clients = []
    for record in about["clients"]:
        state, last, mask_keys, reply = ([arrays[name] for name in record["arrays"][field]] for field in ARRAY_FIELDS)
        client = Client(
            **of_record(record["plain"], PLAIN_FIELDS, path),
            state=ClientState(*state) if state else None,
            last=last[0] if last else None,
            mask_keys=mask_keys[0],
            reply=reply[0].tobytes() if reply else b"",
        )
        clients.append(client)
    return clients
