"""The server's state between two messages, and what all of its functions need of it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.server_side import ServerSide
from fedrp.algorithms.servers import server_side, wire_tag
from fedrp.compression.coding import Coding, Numbers, place_of
from fedrp.config.run import Resolved
from fedrp.crypto.epochs import Complaint, Dealt, covering, expired
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ProtocolError, WireError
from fedrp.mechanisms.delivery import masked_at_all, stage
from fedrp.protocol import wire
from fedrp.protocol.limits import from_client
from fedrp.protocol.wire import EMPTY, SERVER, Kind, Limits, Message, Payload
from fedrp.types import Packets


class Reply(NamedTuple):
    """A client's packet, read once."""

    messages: tuple[Message, ...]
    refused: str = ""  # why it cannot be used


Replies = Mapping[int, Reply]


class MaskEntry(NamedTuple):
    """A client's mask key of this run."""

    known: int  # the first round whose packets carry it
    signed: bytes  # see `fedrp.crypto.sealing.signed_mask_key`


@dataclass(frozen=True)
class Server:
    """All that the server knows between two messages."""

    settings: Resolved  # of the run
    run: bytes
    parameters: int  # of the model: a number is all that the server knows of it
    round: int = 0  # the last round that was completed
    participants: tuple[int, ...] = ()  # of the open round
    left_out: tuple[int, ...] = ()  # of the sum of the open round, where uploads are masked and some are missing
    roster: bytes = b""  # digest of the clients' roster, once one of them has said hello
    weights: tuple[int, ...] = ()  # per client, as it said hello; 0 for those who have not
    last_seen: tuple[int, ...] = ()  # per client, the last round that it took part in
    differing: frozenset[int] = frozenset()  # clients whose copy of the common model is not everyone's
    aggregates: Mapping[int, Payload] = field(default_factory=dict)  # as sent, of rounds that someone may still need
    dealt: Mapping[int, Dealt] = field(default_factory=dict)  # by the first round of their epoch
    mask_keys: Mapping[int, MaskEntry] = field(default_factory=dict)  # per client, where uploads are masked
    complaints: tuple[Complaint, ...] = ()  # that a round was given up for

    @functools.cached_property
    def config(self) -> Resolved:
        """The settings of the next round; after the last one those of the exchange of models, if there is one."""
        return stage(self.settings, self.round + 1)

    @property
    def algorithm(self) -> ServerSide:
        """The server side of the configured algorithm."""
        return server_side(self.config)

    @property
    def pipeline(self) -> Pipeline:
        """What becomes of the uploads of a round."""
        return Pipeline.of(self.config, self.algorithm)

    @property
    def upload_size(self) -> int:
        """How many numbers a client sends in the next round."""
        return self.pipeline.upload_size(self.parameters)

    @property
    def latest(self) -> int:
        """The last round that has an aggregate; 0 for none."""
        return max(self.aggregates, default=0)

    def aggregate_coding(self, round_: int) -> Coding:
        """How the aggregate of a round is written."""
        config = stage(self.settings, round_)
        pipeline = Pipeline.of(config, server_side(config))
        return pipeline.aggregate_coding(pipeline.aggregate_size(self.parameters))

    def decoded(self, round_: int, aggregate: Payload) -> Numbers:
        """The aggregate of a round, as every client reads it."""
        return self.aggregate_coding(round_).decode(aggregate, place_of(self.run, round_, SERVER))

    @functools.cached_property
    def context(self) -> bytes:
        """What stands for this run and its projection in messages."""
        return wire.context_of(self.run, wire_tag(self.settings))


def new_server(config: Resolved, run: bytes, parameters: int) -> Server:
    """The server before anything has happened."""
    nobody = (0,) * config.clients
    return Server(config, run, parameters, last_seen=nobody, weights=nobody)


def hellos_matter(server: Server) -> bool:
    """Whether anything depends on the clients' hellos: round keys, masks or weights."""
    settings = server.settings
    return server.algorithm.round_keys or masked_at_all(settings) or settings.weighting == "samples"


def read(server: Server, packets: Packets) -> dict[int, Reply]:
    """Clients' packets, decoded once, each with the reason if it cannot be used."""
    limits = from_client(server.config, server.upload_size)
    return {client: read_one(server, limits, client, packet) for client, packet in sorted(packets.items())}


def read_one(server: Server, limits: Limits, client: int, packet: bytes) -> Reply:
    """A client's packet, decoded once, with the reason if it cannot be used."""
    try:
        messages = wire.decode(packet, limits)
        for message in messages:
            if (message.context, message.sender) != (server.context, client):
                what = message.kind.name
                raise ProtocolError(f"{what} of another run, sender or projection than client {client}'s")
    except (WireError, ProtocolError) as error:
        return Reply((), str(error))
    return Reply(tuple(messages))


def cohort_of(server: Server, participants: tuple[int, ...]) -> Cohort:
    """The participants with the weights that they have in averages."""
    if server.config.weighting == "uniform":
        return Cohort(participants, (1,) * len(participants))
    weights = tuple(server.weights[client] for client in participants)
    if 0 in weights:
        raise ProtocolError(f"client {participants[weights.index(0)]} has not said hello: its weight is not known")
    return Cohort(participants, weights)


def distrusted(server: Server) -> frozenset[int]:
    """Clients that are not asked to deal any more; nobody, if that would be all."""
    dealers = frozenset(complaint.dealer for complaint in server.complaints)
    return dealers if len(dealers) < server.config.clients else frozenset()


def deals_due(server: Server, round_: int) -> tuple[int, ...]:
    """For which rounds secrets must still be dealt before `round_` can be opened; mostly for none.

    That is the set-up, until there is an aggregate, and `round_` itself if an epoch begins there: because the one
    before is over, or a client has complained about its secret.
    """
    if not server.algorithm.round_keys or round_ > server.config.rounds:
        return ()
    first = covering({0, *server.dealt}, round_) or 0
    dealer = server.dealt[first].dealer if first in server.dealt else None
    spoilt = any((c.round, c.dealer) == (first, dealer) for c in server.complaints)
    begins = first < round_ and (spoilt or expired(first, round_, server.config.key_epoch))
    set_up = 0 not in server.dealt and not server.aggregates
    return (*([0] if set_up else []), *([round_] if begins else []))


def next_dealer(server: Server, participants: tuple[int, ...], round_: int) -> int | None:
    """Who deals a secret that begins with the round after `round_`, if one is due: its participants take turns."""
    if round_ + 1 not in deals_due(server, round_ + 1):
        return None
    away = distrusted(server)
    trusted = [client for client in participants if client not in away]
    return trusted[round_ % len(trusted)] if trusted else None


def message_of(server: Server, kind: Kind, round_: int, payload: Payload = EMPTY) -> Message:
    """A message of the server."""
    return Message(kind, server.context, round_, SERVER, payload)


def only_message(reply: Reply, kind: Kind, client: int) -> Message:
    """The one message of a kind that a client's reply must hold."""
    if reply.refused:
        raise ProtocolError(reply.refused)
    found = wire.messages_of(reply.messages, kind)
    if len(found) != 1:
        raise ProtocolError(f"client {client} sent {len(found)} {kind.name} messages, expected one")
    return found[0]
