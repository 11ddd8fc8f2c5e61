"""The server's side of the protocol: it relays envelopes that it cannot open and averages numbers it cannot read.

Explicit state (`Coordinator`) and pure functions from packets to packets. It never holds a key, a model or a matrix:
nothing in this file imports what could make one.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedrp import wire
from fedrp.aggregate import Vector
from fedrp.algorithms import ALGORITHMS, wire_tag
from fedrp.algorithms.base import Algorithm
from fedrp.config import RunConfig
from fedrp.errors import ProtocolError, QuorumError, WireError
from fedrp.rng import RunSeed
from fedrp.sealing import ENVELOPE_BYTES, PUBLIC_KEY_BYTES, split
from fedrp.wire import EMPTY, SERVER, Kind, Message, Payload

Packets = dict[int, bytes]  # client -> packet

DEFAULT_QUORUM = 0.5


class Dealt(NamedTuple):
    """The envelopes of one round key, one per client, and who dealt them."""

    dealer: int
    envelopes: tuple[bytes, ...]


@dataclass(frozen=True)
class Coordinator:
    """All that the server knows between two messages."""

    config: RunConfig  # resolved
    run: bytes
    upload_size: int
    round: int = 0  # the last round that was completed
    participants: tuple[int, ...] = ()  # of the open round
    last_seen: tuple[int, ...] = ()  # per client, the last round that it took part in
    differing: frozenset[int] = frozenset()  # clients whose copy of the common model is not everyone's
    aggregates: Mapping[int, Vector] = field(default_factory=dict)  # of rounds that someone may still need
    dealt: Mapping[int, Dealt] = field(default_factory=dict)

    @property
    def algorithm(self) -> Algorithm:
        """The functions of the configured algorithm."""
        return ALGORITHMS[self.config.algorithm]

    @property
    def tag(self) -> int:
        """The projection's code on the wire."""
        return wire_tag(self.config)


class RoundReport(NamedTuple):
    """What the server can say of a round."""

    participants: tuple[int, ...]
    refused: Mapping[int, str]  # client -> why its reply was not used
    consensus_bound: float | None = None  # no two participants' models are further apart, see `Algorithm.certify`


def new_coordinator(config: RunConfig, run: bytes, upload_size: int) -> Coordinator:
    """The server before anything has happened."""
    return Coordinator(config, run, upload_size, last_seen=(0,) * config.clients)


def invite(server: Coordinator, hellos: Packets) -> Packets:
    """The roster for everyone, made of their HELLOs; the first client is asked to deal the first two keys."""
    publics = [_only(server, hellos[client], Kind.HELLO, client).payload for client in range(server.config.clients)]
    if any(public.size != PUBLIC_KEY_BYTES for public in publics):
        raise ProtocolError("a client's public key has the wrong length")
    roster = _message(server, Kind.ROSTER, 0, wire.raw(b"".join(public.tobytes() for public in publics)))
    requests = [_message(server, Kind.DEAL_REQUEST, round_) for round_ in (0, 1)]
    return {client: wire.encode([roster, *(requests if client == 0 else [])]) for client in hellos}


def take_keys(server: Coordinator, replies: Packets) -> Coordinator:
    """The server with the envelopes that dealers sent, up to the next round's. A key that was dealt is not replaced."""
    dealt = dict(server.dealt)
    for client, packet in replies.items():
        for message in wire.messages_of(_checked(server, packet, client), Kind.DEAL):
            envelopes = split(message.payload.tobytes(), ENVELOPE_BYTES, server.config.clients, "envelopes")
            if message.round <= server.round + 1:
                dealt.setdefault(message.round, Dealt(client, tuple(envelopes)))
    return dataclasses.replace(server, dealt=dealt)


def open_round(server: Coordinator) -> tuple[Coordinator, Packets]:
    """Choose who takes part in the next round, and what each of them is sent."""
    round_ = server.round + 1
    participants = _sample(server, round_)
    if not server.algorithm.exchanges:
        return dataclasses.replace(server, participants=participants), dict.fromkeys(participants, b"")
    call = dataclasses.replace(_message(server, Kind.ROUND, round_), weight=len(participants))
    packets = {}
    for client in participants:
        messages = [*_news(server, client, round_), call]
        if client == _next_dealer(server, participants, round_):
            messages.append(_message(server, Kind.DEAL_REQUEST, round_ + 1))
        packets[client] = wire.encode(messages)
    return dataclasses.replace(server, participants=participants), packets


def close_round(server: Coordinator, replies: Packets) -> tuple[Coordinator, RoundReport]:
    """Aggregate the uploads of the open round.

    Raises:
        QuorumError: too few of the participants sent a valid upload. The round can be opened again: clients that have
            done it already send the same upload once more.
    """
    round_ = server.round + 1
    if not server.algorithm.exchanges:
        return dataclasses.replace(server, round=round_, participants=()), RoundReport(server.participants, {})
    uploads: dict[int, Message] = {}
    refused: dict[int, str] = {}
    for client in sorted(replies):
        try:
            message = _only(server, replies[client], Kind.UPLOAD, client)
            if message.round != round_ or client not in server.participants or message.weight < 1:
                raise ProtocolError(f"upload for round {message.round}, expected round {round_}")
            wire.vector(message, server.upload_size)
            uploads[client] = message
        except (WireError, ProtocolError) as error:
            refused[client] = str(error)
    differing = _differing(uploads)
    for client in differing:
        refused[client] = "its copy of the common model differs; it will be told to rebuild it"
        del uploads[client]
    needed = max(1, math.ceil(len(server.participants) * (server.config.quorum or DEFAULT_QUORUM)))
    if len(uploads) < needed:
        reasons = "".join(f"; client {client}: {why}" for client, why in refused.items())
        raise QuorumError(f"round {round_}: {len(uploads)} valid uploads, {needed} needed{reasons}")
    vectors = [wire.vector(message, server.upload_size) for message in uploads.values()]
    weights = [float(message.weight) for message in uploads.values()]
    previous = server.aggregates.get(server.round)
    aggregate = server.algorithm.server_round(server.config, previous, vectors, weights)
    dealer = _next_dealer(server, server.participants, round_)
    seen = tuple(round_ if client in uploads else last for client, last in enumerate(server.last_seen))
    server = dataclasses.replace(
        server,
        round=round_,
        participants=(),
        last_seen=seen,
        differing=server.differing - set(uploads) | differing,
        aggregates={**server.aggregates, round_: aggregate},
    )
    if dealer in uploads or dealer in differing:  # a client whose model differs can still deal
        with contextlib.suppress(ProtocolError):  # envelopes that are none: `request_key` asks another client
            server = take_keys(server, {dealer: replies[dealer]})
    return _pruned(server), RoundReport(tuple(uploads), refused, server.algorithm.certify(server.config, vectors))


def request_key(server: Coordinator, attempt: int) -> Packets:
    """Ask another client for the key of the next round, if its dealer dropped out; nothing if the key is there."""
    round_ = server.round + 1
    if not server.algorithm.secret or round_ > server.config.rounds or round_ in server.dealt:
        return {}
    stand_in = (round_ + attempt) % server.config.clients
    return {stand_in: wire.encode([_message(server, Kind.DEAL_REQUEST, round_)])}


def finish(server: Coordinator, clients: tuple[int, ...]) -> Packets:
    """The last packets: what a client needs to end up with the consensus of all rounds so far."""
    if not server.algorithm.exchanges:
        return dict.fromkeys(clients, b"")
    done = _message(server, Kind.FINISH, server.round)
    return {client: wire.encode([*_news(server, client, server.round + 1), done]) for client in clients}


def _news(server: Coordinator, client: int, round_: int) -> list[Message]:
    """Aggregates and sealed keys that a client lacks for `round_`."""
    rebuild = client in server.differing
    last = 0 if rebuild else server.last_seen[client]
    first = last if server.algorithm.catch_up == "all" else max(last, round_ - 1)
    rounds = range(first if last else 0, round_ + 1)
    keys = [
        dataclasses.replace(
            _message(server, Kind.SEALED, past, wire.raw(server.dealt[past].envelopes[client])),
            sender=server.dealt[past].dealer,
        )
        for past in rounds
        if past in server.dealt and (past > last or last == 0)
    ]
    aggregates = [
        _message(server, Kind.AGGREGATE, past, server.aggregates[past])
        for past in range(max(first, 1), round_)
        if past in server.aggregates
    ]
    return [*([_message(server, Kind.REBUILD, round_)] if rebuild else []), *keys, *aggregates]


def _sample(server: Coordinator, round_: int) -> tuple[int, ...]:
    config = server.config
    rng = RunSeed(config.seed).generator("participants", round_)
    if config.sampling == "poisson":
        chosen = np.flatnonzero(rng.random(config.clients) < config.participation)
        return tuple(chosen.tolist()) or (int(rng.integers(config.clients)),)
    return tuple(sorted(rng.choice(config.clients, config.expected_participants, replace=False).tolist()))


def _differing(uploads: Mapping[int, Message]) -> frozenset[int]:
    """Clients whose fingerprint of the common model is not the most frequent one."""
    counts = Counter(message.fingerprint for message in uploads.values())
    common = counts.most_common(1)[0][0] if counts else wire.NO_FINGERPRINT
    return frozenset(client for client, message in uploads.items() if message.fingerprint != common)


def _next_dealer(server: Coordinator, participants: tuple[int, ...], round_: int) -> int | None:
    """Who deals the key of the next round: the clients take turns."""
    if not server.algorithm.secret or round_ >= server.config.rounds:
        return None
    return participants[round_ % len(participants)]


def _pruned(server: Coordinator) -> Coordinator:
    """Forget what no client can still need. Where missed rounds are replayed, all of them are kept."""
    if server.algorithm.catch_up == "all":
        return server
    keys = {r: d for r, d in server.dealt.items() if r >= server.round or (r == 0 and min(server.last_seen) == 0)}
    return dataclasses.replace(server, aggregates={server.round: server.aggregates[server.round]}, dealt=keys)


def _message(server: Coordinator, kind: Kind, round_: int, payload: Payload = EMPTY) -> Message:
    return Message(kind, server.run, round_, SERVER, payload, projection=server.tag)


def _checked(server: Coordinator, packet: bytes, client: int) -> list[Message]:
    messages = wire.decode(packet)
    for message in messages:
        if (message.run, message.sender, message.projection) != (server.run, client, server.tag):
            raise ProtocolError(f"{message.kind.name} of another run, sender or projection than client {client}'s")
    return messages


def _only(server: Coordinator, packet: bytes, kind: Kind, client: int) -> Message:
    found = wire.messages_of(_checked(server, packet, client), kind)
    if len(found) != 1:
        raise ProtocolError(f"client {client} sent {len(found)} {kind.name} messages, expected one")
    return found[0]
