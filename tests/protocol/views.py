"""What a server has got in a run, and what it can make of it by brute force: for few clients and short vectors."""

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from fedrp.algorithms.client_side import ClientState, Local, Participant, Upload
from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression.coding import MaskedWords
from fedrp.config import RunConfig
from fedrp.crypto.masks import Masker
from fedrp.crypto.sealing import Identity
from fedrp.crypto.secret import SecretKey
from fedrp.protocol import wire
from fedrp.protocol.client_state import Client
from fedrp.protocol.server_state import Server
from fedrp.protocol.wire import Kind
from fedrp.simulation.identities import SimulatedEntropy
from fedrp.storage.client_state import PLAIN_FIELDS, packed_clients, read_clients
from fedrp.storage.codec import to_record
from fedrp.types import Vector, Words

_RUN = b"a run of tests.."

Coefficients = npt.NDArray[np.int8]


class DeployedNoise(NamedTuple):
    """Secrets that repeat, for the same tests everywhere; but noise as a deployed client draws it."""

    simulated: SimulatedEntropy
    identity: Identity

    def secret(self, purpose: str, *indices: int) -> SecretKey:
        return self.simulated.secret(purpose, *indices)

    def noise(self, run: bytes, round_: int, packet: bytes) -> SecretKey:
        return self.identity.noise_key(run, round_, packet)


# --- states of clients and servers -----------------------------------------------------------------------------------


def contents(client_state: Client) -> tuple[object, ...]:
    """All that a client keeps, to be compared: also what changed in place would show."""
    arrays = [
        *(client_state.state or ()),
        client_state.mask_keys,
        *([] if client_state.last is None else [client_state.last]),
    ]
    return (
        json.dumps(to_record(client_state, PLAIN_FIELDS)),
        client_state.reply,
        *(array.tobytes() for array in arrays),
    )


def server_contents(server: Server) -> dict[str, object]:
    """All that a server knows, to be compared: also what changed in place would show."""
    known = {field.name: getattr(server, field.name) for field in dataclasses.fields(server)}
    aggregates = {round_: vector.tobytes() for round_, vector in server.aggregates.items()}
    return known | {"aggregates": aggregates, "dealt": dict(server.dealt), "mask_keys": dict(server.mask_keys)}


def restarted(client_state: Client) -> Client:
    """The client after its process ended: what was written, read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        path.write_bytes(packed_clients(_RUN, [client_state]))
        (again,) = read_clients(path, _RUN)
    return again


# --- what was really uploaded ----------------------------------------------------------------------------------------


class Made(NamedTuple):
    """What a client's upload was made of, as its own code saw it."""

    words: Words | None  # before masks; None where there are none
    prepared: tuple[object, ...]  # all but its data and its noise that it depends on, as far as the algorithm remembers


@dataclass
class Watch:
    """Looks over the shoulder of one client at a time: what it applied, and what it hid under masks."""

    memory: str
    applied: dict[int, tuple[object, ...]] = field(default_factory=dict)  # client -> all steps since its first model
    fresh: bool = False
    steps: tuple[object, ...] = ()
    key: object = None
    words: Words | None = None

    def forget(self) -> None:
        self.fresh, self.steps, self.key, self.words = False, (), None, None

    def made(self, client: int, round_: int) -> Made:
        """What the upload was made of that the client has just sent; from now on it is part of its past."""
        before = () if self.fresh else self.applied.get(client, ())
        when = round_ if self.memory == "own" else 0
        past = (*before, *((when, step) for step in self.steps))
        self.applied[client] = past
        return Made(self.words, (past[-1:] if self.memory == "aggregate" else past, self.key))


@contextmanager
def watched(config: RunConfig) -> Iterator[Watch]:
    """Watch the clients of this process. Nothing that they do changes."""
    algorithm, mask = ALGORITHMS[config.algorithm], Masker.masked
    watch = Watch(algorithm.server.memory)

    def start(config: RunConfig, initial: Vector) -> ClientState:
        watch.fresh = True
        return algorithm.client.init(config, initial)

    def round_(local: Local, clients: list[Participant]) -> list[Upload]:
        (client,) = clients
        watch.steps = tuple(
            (key and key.reveal(), None if aggregate is None else aggregate.tobytes())
            for key, aggregate, _ in client.history
        )
        watch.key = local.key and local.key.reveal()
        return algorithm.client.round(local, clients)

    def masked(masker: Masker, words: Words) -> Words:
        watch.words = words.copy()
        return mask(masker, words)

    with pytest.MonkeyPatch.context() as patch:
        side = dataclasses.replace(algorithm.client, init=start, round=round_)
        patch.setitem(ALGORITHMS, config.algorithm, dataclasses.replace(algorithm, client=side))
        patch.setattr(Masker, "masked", masked)
        yield watch


# --- what a server has -----------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A sum of uploads that the server knows: in it all masks cancel."""

    clients: tuple[int, ...]
    factors: tuple[int, ...]


@dataclass
class View:
    """All that has reached a server, and how each upload was made."""

    uploads: dict[tuple[int, int], wire.Message] = field(default_factory=dict)  # (round, client)
    corrections: dict[tuple[int, int], wire.Message] = field(default_factory=dict)
    deals: dict[tuple[int, int], wire.Message] = field(default_factory=dict)
    made: dict[tuple[int, int], Made] = field(default_factory=dict)

    def take(self, client: int, reply: bytes, watch: Watch) -> None:
        """Keep a reply. A second one that differs is one too many."""
        for message in wire.decode(reply):
            place = (message.round, client)
            if message.kind is Kind.UPLOAD:
                first = self.uploads.setdefault(place, message)
                assert first == message, f"two uploads of client {client} for round {message.round}"
                if place not in self.made:
                    self.made[place] = watch.made(client, message.round)
            elif message.kind is Kind.CORRECTION:
                first = self.corrections.setdefault(place, message)
                assert first == message, f"two answers of client {client} to a recovery of round {message.round}"
            elif message.kind is Kind.DEAL:
                first = self.deals.setdefault(place, message)
                assert first == message, f"client {client} dealt two keys for round {message.round}"

    def require_sums_apart(self, round_: int, told_alike: bool = True) -> list[Known]:
        """The smallest sums of a round that the server knows, once they are known to single out nobody.

        Any two are of different clients or of the same ones; each is of two clients at least, who were told the same
        (but for models that are averaged after rounds without masks, where clients may have missed some).
        """
        sums = self._sums(round_)
        for known in sums:
            assert len(known.clients) > 1, f"round {round_} tells the upload of a single client: {known}"
            assert len(set(known.factors)) == 1, f"round {round_} tells a difference of uploads: {known}"
            prepared = {self.made[round_, client].prepared for client in known.clients}
            assert len(prepared) == 1 or not told_alike, (
                f"round {round_} sums clients that were told different things: {known}"
            )
        for one, other in itertools.combinations({known.clients for known in sums}, 2):
            assert not set(one) & set(other), f"round {round_} tells sums that overlap: {one} and {other}"
        return sums

    def _sums(self, round_: int) -> list[Known]:
        """All sums with factors -1, 0 and 1 in which masks cancel, but for those that are made of smaller ones."""
        sent = {c: m for (r, c), m in sorted(self.uploads.items()) if r == round_}
        helped = [m for (r, _), m in sorted(self.corrections.items()) if r == round_]
        plain = [self.made[round_, client].words for client in sent]
        if not sent or any(words is None for words in plain):
            return []
        factors = _factors(len(sent) + len(helped))
        width, none = next(iter(sent.values())).width, np.zeros_like(plain[0])
        seen = np.stack([_lifted(_words(m, none.size), width) for m in (*sent.values(), *helped)])
        truth = np.stack([_lifted(words, width) for words in (*plain, *[none] * len(helped))])
        rest = seen - truth  # what is left of a combination is nothing where all masks cancel
        found = factors[~(factors.astype(np.uint32) @ rest[:, :2]).any(axis=1)]
        found = found[~(found.astype(np.uint32) @ rest).any(axis=1)]
        clients = tuple(sent)
        supports = {}
        for row in found[:, : len(clients)]:
            if row.any():
                chosen = tuple(c for c, factor in zip(clients, row, strict=True) if factor)
                supports.setdefault(chosen, Known(chosen, tuple(int(factor) for factor in row if factor)))
        return [k for c, k in supports.items() if not any(set(other) < set(c) for other in supports)]


_WHOLE = 2  # words of 32 bits after those of few


def _words(message: wire.Message, count: int) -> Words:
    if not message.width:
        return message.payload.view(np.uint32)
    return MaskedWords(count, message.width, _WHOLE).decode(message.payload, b"")


def _lifted(words: Words, width: int) -> Words:
    """Words of few bits times a power of two, so that sums modulo 2^32 tell those modulo 2^width."""
    if not width:
        return words
    return np.concatenate([words[:-_WHOLE] << np.uint32(32 - width), words[-_WHOLE:]])


@functools.lru_cache(maxsize=16)
def _factors(count: int) -> Coefficients:
    """All rows of -1, 0 and 1, but for their negatives."""
    rows = np.array(list(itertools.product((-1, 0, 1), repeat=count)), np.int8)
    return rows[len(rows) // 2 + 1 :]
