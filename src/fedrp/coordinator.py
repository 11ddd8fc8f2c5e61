"""The server's side of the protocol: it relays envelopes that it cannot open and averages numbers it cannot read.

Explicit state (`Coordinator`) and pure functions from packets to packets. It never holds a key, a model or a matrix:
nothing in this file imports what could make one.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp import secure_sum, wire
from fedrp.aggregate import Vector, trimmed_mean, weighted_mean
from fedrp.algorithms import ALGORITHMS, wire_tag
from fedrp.algorithms.base import Algorithm
from fedrp.config import RunConfig
from fedrp.errors import DivergenceError, ProtocolError, QuorumError, WireError
from fedrp.sealing import ENVELOPE_BYTES, split
from fedrp.secure_sum import Call
from fedrp.wire import EMPTY, SERVER, Kind, Message, Payload

Packets = dict[int, bytes]  # client -> packet
Coins = npt.NDArray[np.float64]  # per client


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
    left_out: tuple[int, ...] = ()  # of the sum of the open round, where uploads are masked and some are missing
    roster: bytes = b""  # digest of the clients' roster, once one of them has said hello
    weights: tuple[int, ...] = ()  # per client, as it said hello; 0 for those who have not
    last_seen: tuple[int, ...] = ()  # per client, the last round that it took part in
    differing: frozenset[int] = frozenset()  # clients whose copy of the common model is not everyone's
    aggregates: Mapping[int, Vector] = field(default_factory=dict)  # of rounds that someone may still need
    digests: tuple[bytes, ...] = ()  # of the aggregates of all rounds, where uploads are masked
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
    nobody = (0,) * config.clients
    return Coordinator(config, run, upload_size, last_seen=nobody, weights=nobody)


def welcome(server: Coordinator, hellos: Packets) -> Coordinator:
    """The server once clients have said hello, at any time and in any number: their weights, and one roster for all.

    Raises:
        ProtocolError: a client has another roster than those before it, or another weight than it had.
    """
    roster, weights = server.roster, list(server.weights)
    for client, packet in sorted(hellos.items()):
        message = _only(server, packet, Kind.HELLO, client)
        digest = message.payload.tobytes()
        if roster and digest != roster:
            raise ProtocolError(f"client {client} has another roster than the others: compare 'fedrp roster show'")
        if client >= len(weights) or message.weight < 1:
            raise ProtocolError(f"client {client} is not one of {len(weights)}, or has no weight")
        if weights[client] not in (0, message.weight):  # uploads and masks of the open round were made with it
            raise ProtocolError(
                f"client {client} came back with weight {message.weight}, it had {weights[client]}: "
                "a run goes on with the data that it began with"
            )
        roster, weights[client] = digest, message.weight
    return dataclasses.replace(server, roster=roster, weights=tuple(weights))


def take_keys(server: Coordinator, replies: Packets) -> Coordinator:
    """The server with the envelopes that dealers sent, up to the next round's. A key that was dealt is not replaced."""
    dealt = dict(server.dealt)
    for client, packet in replies.items():
        for message in wire.messages_of(_checked(server, packet, client), Kind.DEAL):
            size = ENVELOPE_BYTES[server.config.sealing]
            envelopes = split(message.payload.tobytes(), size, server.config.clients, "envelopes")
            if message.round <= server.round + 1:
                dealt.setdefault(message.round, Dealt(client, tuple(envelopes)))
    return dataclasses.replace(server, dealt=dealt)


def open_round(server: Coordinator, coins: Coins) -> tuple[Coordinator, Packets]:
    """Who takes part in the next round, and what each of them is sent.

    `coins` are one number in [0, 1) per client, which must not depend on anything that was sent. They are not looked at
    for a round that was opened before: whoever was chosen stays chosen. So keep the returned server.
    """
    round_ = server.round + 1
    participants = server.participants or _chosen(server.config, coins)
    if not server.algorithm.exchanges:
        return dataclasses.replace(server, participants=participants), dict.fromkeys(participants, b"")
    listed = _call(server, participants).payload() if server.config.secure_aggregation else EMPTY
    call = dataclasses.replace(_message(server, Kind.ROUND, round_, listed), weight=len(participants))
    packets = {}
    for client in participants:
        messages = [*_news(server, client, round_), call]
        if client == _next_dealer(server, participants, round_):
            messages.append(_message(server, Kind.DEAL_REQUEST, round_ + 1))
        packets[client] = wire.encode(messages)
    return dataclasses.replace(server, participants=participants), packets


def recover(server: Coordinator, replies: Packets) -> tuple[Coordinator, Packets]:
    """What must still be asked before a round with these replies can be closed: mostly nothing.

    Only where uploads are masked and some are missing, those whose uploads are summed must help; their answers go into
    `close_round`. Keep the returned server: asked for once, the set of those left out stays.

    Raises:
        QuorumError: too few uploads. The round can be opened again, unless a recovery was begun.
    """
    if not server.config.secure_aggregation:
        return server, {}
    call = _call(server, server.participants)
    received = _received(server, replies)
    missing = [client for client in call.clients if client not in received.uploads]
    if not server.left_out and (not missing or _lost(server, received)):
        return server, {}
    try:
        left_out = server.left_out or secure_sum.choose_left_out(server.config, call, missing)
    except QuorumError as error:
        raise QuorumError(f"round {server.round + 1}: {error}{_reasons(received.refused)}") from None
    request = _message(server, Kind.RECOVER, server.round + 1, np.array(left_out, np.uint32))
    packets = {client: wire.encode([request]) for client in call.clients if client not in left_out}
    return dataclasses.replace(server, left_out=left_out), packets


def close_round(
    server: Coordinator, replies: Packets, corrections: Packets | None = None
) -> tuple[Coordinator, RoundReport]:
    """Aggregate the uploads of the open round; `corrections` are the answers to `recover`.

    If uploads are too few only because clients' copies of the common model differ, the round is given up: its aggregate
    is that of empty uploads, the report names no participants, and those clients are told to rebuild their copy. (They
    must not send a second upload in one round: with the first one it would tell more than either.)

    Raises:
        QuorumError: too few of the participants sent a valid upload. The round can be opened again, for those who are
            `outstanding`.
        DivergenceError: the aggregate is not finite.
        ProtocolError: a copy differs although it was rebuilt, and without it the round is none.
    """
    round_ = server.round + 1
    if not server.algorithm.exchanges:
        return dataclasses.replace(server, round=round_, participants=()), RoundReport(server.participants, {})
    received = _received(server, replies)
    uploads, refused, differing = received
    for client in server.left_out:
        if uploads.pop(client, None):
            refused[client] = "left out, because a sum with it would tell the upload of the one who is missing"
    lost = not server.left_out and _lost(server, received)
    needed = secure_sum.needed(server.config, len(server.participants))
    if len(uploads) < needed and not lost:
        raise QuorumError(f"round {round_}: {len(uploads)} valid uploads, {needed} needed{_reasons(refused)}")
    if lost and differing & server.differing:
        raise ProtocolError(
            f"round {round_}: the copy of client {min(differing & server.differing)} differs although it was rebuilt: "
            "begin again with --projection sign if machines are unlike, or with a --quorum that can do without it "
            "(what these rounds have cost in privacy is spent)"
        )
    certified = None
    if lost:
        mean, weight = np.zeros(server.upload_size, np.float32), 0.0
    elif server.config.secure_aggregation:
        mean, weight = _unmasked(server, uploads, corrections or {})
    else:
        vectors = [wire.vector(message, server.upload_size) for message in uploads.values()]
        weights = [float(message.weight) for message in uploads.values()]
        share, weight = server.config.trimmed_share, sum(weights)
        if share:
            mean = trimmed_mean(vectors, share)
        else:
            mean = weighted_mean(vectors, weights, server.algorithm.divisor(server.config))
        certified = server.algorithm.certify(server.config, vectors)
    past = [server.aggregates[r] for r in (server.round, server.round - 1) if r in server.aggregates]
    aggregate = server.algorithm.server_round(server.config, past[0] if past else None, mean, weight)
    carried = server.algorithm.carried(server.config, past)
    if carried is not None:
        aggregate = aggregate + carried
    if not np.isfinite(aggregate).all():  # stored, it would stop every later sitting too
        raise DivergenceError(f"round {round_}: the clients' numbers are too large to be averaged: lower --lr")
    dealer = _next_dealer(server, server.participants, round_)
    seen = tuple(round_ if client in uploads else last for client, last in enumerate(server.last_seen))
    left_out = set(server.left_out)
    server = dataclasses.replace(
        server,
        round=round_,
        participants=(),
        left_out=(),
        last_seen=seen,
        differing=server.differing - set(uploads) | differing,
        aggregates={**server.aggregates, round_: aggregate},
        digests=(*server.digests, secure_sum.digest(aggregate)) if server.config.secure_aggregation else (),
    )
    if dealer is not None and dealer in {*uploads, *differing, *(left_out & set(replies))}:  # not summed, yet it deals
        with contextlib.suppress(ProtocolError, WireError):  # no envelopes: `request_key` asks another client
            server = take_keys(server, {dealer: replies[dealer]})
    return _pruned(server), RoundReport(() if lost else tuple(uploads), refused, certified)


def outstanding(server: Coordinator, replies: Packets) -> frozenset[int]:
    """The participants of the open round who have sent nothing that can be used, and nothing that never will be."""
    received = _received(server, replies)
    return frozenset(server.participants) - set(received.uploads) - received.differing


class _Received(NamedTuple):
    uploads: dict[int, Message]  # that can be used
    refused: dict[int, str]
    differing: frozenset[int]


def _received(server: Coordinator, replies: Packets) -> _Received:
    """The uploads among the replies, sorted into those that can be used and those that cannot."""
    round_, secure = server.round + 1, server.config.secure_aggregation
    uploads: dict[int, Message] = {}
    refused: dict[int, str] = {}
    for client in sorted(replies):
        try:
            message = _only(server, replies[client], Kind.UPLOAD, client)
            if message.round != round_ or client not in server.participants:
                raise ProtocolError(f"upload for round {message.round}, expected round {round_}")
            (wire.words if secure else wire.vector)(message, server.upload_size)
            if message.weight != _call(server, (client,)).weights[0]:
                raise ProtocolError(f"client {client} sent another weight than it said hello with")
            uploads[client] = message
        except (WireError, ProtocolError) as error:
            refused[client] = str(error)
    differing = _differing(server, uploads)
    for client in differing:
        refused[client] = "its copy of the common model differs; it will be told to rebuild it"
        del uploads[client]
    return _Received(uploads, refused, differing)


def _lost(server: Coordinator, received: _Received) -> bool:
    """Whether enough clients replied, but so many of their copies differ that the round needs those who cannot help."""
    without = len(received.differing)
    if server.config.secure_aggregation and without == 1:
        without = secure_sum.MIN_LEFT_OUT
    needed = secure_sum.needed(server.config, len(server.participants))
    hopeless = bool(without) and len(server.participants) - without < needed
    return hopeless and len(received.uploads) + len(received.differing) >= needed


def _unmasked(server: Coordinator, uploads: Mapping[int, Message], corrections: Packets) -> tuple[Vector, float]:
    """The weighted mean of masked uploads, and their weight."""
    call = _call(server, server.participants)
    if set(uploads) != set(call.clients) - set(server.left_out):
        raise QuorumError(f"round {server.round + 1}: masked uploads are incomplete, ask `recover` how to go on")
    total = np.zeros(server.upload_size, np.uint32)
    for client, message in uploads.items():
        total += wire.words(message, server.upload_size)
        if server.left_out:
            try:
                answer = _only(server, corrections.get(client, b""), Kind.CORRECTION, client)
                if answer.round != server.round + 1:
                    raise ProtocolError(f"a correction of round {answer.round}")
                total -= wire.words(answer, server.upload_size)
            except (WireError, ProtocolError) as error:
                raise QuorumError(
                    f"round {server.round + 1}: client {client} did not help to recover it ({error}): ask it again"
                ) from None
    previous = server.aggregates.get(server.round)
    step = server.algorithm.scale(server.config, previous, call).step
    weight = float(call.weight_of(uploads))
    return secure_sum.decode(total, server.algorithm.divisor(server.config) or weight, step), weight


def _call(server: Coordinator, participants: tuple[int, ...]) -> Call:
    """The participants with the weights that they have in averages."""
    if server.config.weighting == "uniform":
        return Call(participants, (1,) * len(participants))
    weights = tuple(server.weights[client] for client in participants)
    if 0 in weights:
        raise ProtocolError(f"client {participants[weights.index(0)]} has not said hello: its weight is not known")
    return Call(participants, weights)


def _reasons(refused: Mapping[int, str]) -> str:
    return "".join(f"; client {client}: {why}" for client, why in refused.items())


def request_key(server: Coordinator, attempt: int) -> Packets:
    """Ask a client for the keys that the next round needs and that are not there; nothing if they are.

    At first these are those of the set-up and of round 1, later those whose dealer dropped out. Count `attempt` up from
    0 until nothing is asked: each time it is the turn of the next client in the roster.
    """
    rounds = {0, 1} if server.round == 0 else {server.round + 1}
    lacking = sorted(r for r in rounds if r <= server.config.rounds and r not in server.dealt)
    if not server.algorithm.secret or not lacking:
        return {}
    first = 0 if server.round == 0 else server.round + 1
    requests = [_message(server, Kind.DEAL_REQUEST, round_) for round_ in lacking]
    return {(first + attempt) % server.config.clients: wire.encode(requests)}


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
    told = [_message(server, Kind.REBUILD, round_)] if rebuild else []
    missed = max(last, 1)
    if digests := server.digests[missed - 1 : max(first, 1) - 1]:
        told.append(_message(server, Kind.DIGESTS, missed, wire.raw(b"".join(digests))))
    return [*told, *keys, *aggregates]


def _chosen(config: RunConfig, coins: Coins) -> tuple[int, ...]:
    """Who takes part: those with the smallest coins, as many as are due."""
    count = config.expected_participants
    if config.sampling == "poisson":
        count = max(secure_sum.least_participants(config), int((coins < config.participation).sum()))
    return tuple(sorted(np.argsort(coins)[:count].tolist()))


def _differing(server: Coordinator, uploads: Mapping[int, Message]) -> frozenset[int]:
    """Clients whose fingerprint of the common model is not the most frequent one; all of them, if two are."""
    if server.algorithm.catch_up != "all":  # elsewhere clients do not make the common model themselves
        return frozenset()
    counts = Counter(message.fingerprint for message in uploads.values()).most_common(2)
    tied = len(counts) == 2 and counts[0][1] == counts[1][1]  # nobody knows who is right: all rebuild from the log
    return frozenset(client for client, message in uploads.items() if tied or message.fingerprint != counts[0][0])


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
    needed = (server.round, server.round - 1) if server.config.server_momentum else (server.round,)
    aggregates = {r: server.aggregates[r] for r in needed if r in server.aggregates}
    return dataclasses.replace(server, aggregates=aggregates, dealt=keys)


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
