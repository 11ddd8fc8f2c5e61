"""A client's state between two messages, what it works with, and what it accepts of a packet: keys, once checked."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.client_side import ClientState
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.servers import wire_tag
from fedrp.algorithms.table import algorithm_at
from fedrp.config.run import Resolved
from fedrp.config.toml import settings_digest
from fedrp.crypto.masks import NO_PEERS, PeerKeys, merged_keys, peer_keys
from fedrp.crypto.roster import Roster
from fedrp.crypto.schedule import KeyRing, key_ring
from fedrp.crypto.sealing import Entropy, Identity, MaskKey, Place, verify
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.engines.choice import SEQUENTIAL, make_trainer
from fedrp.errors import ConfigError, ProtocolError
from fedrp.learning.initial import public_initial, secret_initial
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, Loss
from fedrp.learning.trainer import Trainer
from fedrp.mechanisms.delivery import stage
from fedrp.projection.families import Projection, make_projection
from fedrp.projection.rotation import Rotation, make_rotation
from fedrp.protocol import wire
from fedrp.protocol.limits import either, from_server
from fedrp.protocol.wire import Kind, Limits, Message
from fedrp.records.training import MICROBATCH
from fedrp.rng import RunSeed
from fedrp.types import Vector

_log = logging.getLogger(__name__)


class Envelope(NamedTuple):
    """The sealed secret of an epoch of round keys as it came, and who dealt it."""

    dealer: int
    sealed: bytes


@dataclass(frozen=True)
class Client:
    """All that a client keeps between two messages. Holds no opened key.

    Must be stored before a reply leaves: a client that forgets what it has sent can be made to send more.
    """

    index: int
    round: int = 0  # the last round that it took part in; 0 is the set-up. Never falls
    since: int = 0  # the round that `state` is of; falls to 0 when the client is told to rebuild its state
    state: ClientState | None = None
    envelopes: Mapping[int, Envelope] = field(default_factory=dict)  # by the first round of their epoch
    call: Cohort | None = None  # of the last round, where uploads are masked
    transcript: bytes = (
        b""  # digest of what its last masked upload was made from, see `fedrp.crypto.secure_aggregation`
    )
    # The last aggregate that it applied, where missed rounds are replayed.
    last: Vector | None = field(default=None, compare=False)
    # All clients' mask keys, once checked: never replaced.
    mask_keys: PeerKeys = field(default_factory=lambda: NO_PEERS, compare=False)
    left_out: tuple[int, ...] = ()  # in the recovery of the last round that it helped in; empty for none
    reply: bytes = b""  # to the last round, to be sent again if that is asked for again
    dealt: int = -1  # the highest round that it dealt a key for: one deal per round
    taken: int = 0  # in how many rounds it took part, or began to
    begun: int = 0  # the last one of them
    asked: bytes = b""  # digest of the packet that it was begun for


@dataclass(frozen=True)
class Site:
    """What a client has on its premises and never sends."""

    identity: Identity
    entropy: Entropy
    data: Examples
    mask_key: MaskKey | None = None  # of this run, where uploads are masked; erased when the run is over


@dataclass(frozen=True)
class Workbench:
    """What the clients of one process work with."""

    config: Resolved
    run: bytes
    roster: Roster  # pinned: nothing that the server says can change it
    trainer: Trainer
    project: Callable[[SecretKey], Projection]  # the matrix of a round key
    rotate: Callable[[SecretKey], Rotation]  # and its rotation
    initial: Callable[[SecretKey | None], Vector]  # the first model, from the initial secret or the public seed
    microbatch: int = MICROBATCH  # examples whose single gradients are in memory together, where records are protected

    @property
    def algorithm(self) -> Algorithm:
        """The functions of the configured algorithm."""
        return algorithm_at(self.config)

    def at(self, round_: int) -> "Workbench":
        """That of a round: after the last one there is another where models are averaged then."""
        config = stage(self.config, round_)
        return self if (config.before is None) == (self.config.before is None) else self._other

    @functools.cached_property
    def _other(self) -> "Workbench":
        config = self.config
        return dataclasses.replace(self, config=config.before or stage(config, config.rounds + 1))

    def written(self, round_: int) -> tuple[Pipeline, int]:
        """What makes the aggregate of a round, and its size."""
        bench = self.at(round_)
        return bench.pipeline, bench.aggregate_size

    @property
    def tag(self) -> int:
        """The projection's code on the wire."""
        return wire_tag(self.config)

    @functools.cached_property
    def context(self) -> bytes:
        """What stands for this run and its projection in messages."""
        return wire.context_of(self.run, self.tag)

    @property
    def upload_size(self) -> int:
        """How many numbers a client sends in a round."""
        return self.pipeline.upload_size(self.trainer.model.layout.size)

    @property
    def aggregate_size(self) -> int:
        """How many numbers it is sent of each round."""
        return self.pipeline.aggregate_size(self.trainer.model.layout.size)

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """What becomes of an update before it is sent."""
        return Pipeline.of(self.config, self.algorithm.server)

    @functools.cached_property
    def settings(self) -> bytes:
        """What every transcript begins with: settings too reach a client through the server."""
        return settings_digest(self.config.before or self.config)

    @functools.cached_property
    def limits(self) -> Limits:
        """What is taken in one packet."""
        after = self.at(self.config.rounds + 1)
        return either(*(from_server(bench.config, bench.aggregate_size) for bench in (self, after)))


def make_workbench(
    config: Resolved,
    run: bytes,
    roster: Roster,
    factory: ModelFactory,
    loss: Loss,
    device: torch.device,
    projection_memory: int,
    engine: str = SEQUENTIAL,
    microbatch: int = MICROBATCH,
) -> Workbench:
    """A workbench for one process. Its clients share matrices (of the last two rounds) and the initial model."""
    if len(roster.entries) != config.clients:
        raise ConfigError(f"clients={config.clients}, but the roster has {len(roster.entries)} clients")
    seed = RunSeed(config.seed)
    trainer = make_trainer(factory, loss, device, seed, engine)
    size = trainer.model.layout.size

    @functools.lru_cache(maxsize=2)
    def project(key: SecretKey) -> Projection:
        return make_projection(config.projection, key, size, config.dim, projection_memory)

    @functools.lru_cache(maxsize=2)
    def rotate(key: SecretKey) -> Rotation:
        return make_rotation(config.rotation, key, config.dim)

    @functools.lru_cache(maxsize=1)
    def initial(key: SecretKey | None) -> Vector:
        return public_initial(factory, seed) if key is None else secret_initial(factory, key)

    return Workbench(config, run, roster, trainer, project, rotate, initial, microbatch)


def weight_of(bench: Workbench, site: Site) -> int:
    """A client's weight in averages."""
    return len(site.data.y) if bench.config.weighting == "samples" else 1


def place_of(bench: Workbench, round_: int, dealer: int, recipient: int) -> Place:
    """Where an envelope belongs, which its seal and its signature are bound to."""
    return Place(bench.run, round_, dealer, recipient, bench.tag, bench.roster.digest, bench.config.sealing)


def opened_keys(bench: Workbench, client: Client, site: Site) -> KeyRing:
    """The key of a round, from the client's envelopes, each opened once; None where the algorithm has no secrets.

    Throw it away with the work that it was made for.
    """
    if not bench.algorithm.server.round_keys:
        return lambda _round: None

    def opened(first: int) -> SecretKey:
        dealer, sealed = client.envelopes[first]
        return site.identity.open(sealed, place_of(bench, first, dealer, client.index))

    return key_ring(client.index, client.envelopes, opened, bench.config.key_epoch)


class Inbox(NamedTuple):
    """A packet, read once."""

    packet: bytes
    messages: list[Message]

    def of(self, kind: Kind) -> list[Message]:
        """The messages of a kind."""
        return wire.messages_of(self.messages, kind)

    @property
    def digest(self) -> bytes:
        """The hash of its bytes."""
        return hashlib.sha256(self.packet).digest()

    @property
    def call(self) -> Message | None:
        """What asks for a round."""
        found = self.of(Kind.ROUND)
        return found[-1] if found else None


def read_packet(bench: Workbench, packet: bytes) -> Inbox:
    """A packet of the server, decoded within the limits of this run."""
    return Inbox(packet, _accepted(bench, wire.decode(packet, bench.limits)))


def _accepted(bench: Workbench, messages: list[Message]) -> list[Message]:
    """The messages, once all of them are known to belong to this run and this projection."""
    for message in messages:
        if message.context != bench.context:
            raise ProtocolError(
                f"{message.kind.name} of round {message.round} belongs to another run, or was made for another "
                "projection: use the same fedrp version and projection everywhere"
            )
    return messages


def noted(bench: Workbench, client: Client, site: Site, inbox: Inbox) -> tuple[Client, Message | None]:
    """The client with the keys that it was given, each once it is checked; or what it complains about."""
    client = _with_mask_keys(bench, _restarted(bench, client, inbox), inbox)
    envelopes = dict(client.envelopes)
    for message in inbox.of(Kind.SEALED):
        envelope = Envelope(message.sender, message.payload.tobytes())
        known = envelopes.get(message.round)
        if message.round < client.since or envelope == known:
            continue
        if known is not None or message.round == client.since > 0:  # whose key it has, if from an earlier secret
            raise ProtocolError(
                f"client {client.index} was sent another key for round {message.round} than it has: refused"
            )
        if envelope.dealer >= len(bench.roster.entries):
            raise ProtocolError(
                f"the key of round {message.round} was dealt by client {envelope.dealer}, who is not in the roster"
            )
        place = place_of(bench, message.round, envelope.dealer, client.index)
        try:
            verify(envelope.sealed, bench.roster.entries[envelope.dealer].keys, place)
            site.identity.open(envelope.sealed, place)
        except ProtocolError as error:  # the dealer's fault or the server's: either way another key is needed
            _log.warning("client %d complains about the key of round %d: %s", client.index, message.round, error)
            fields = (bench.context, message.round, client.index, wire.EMPTY, envelope.dealer)
            return client, Message(Kind.COMPLAINT, *fields)
        envelopes[message.round] = envelope
    return dataclasses.replace(client, envelopes=envelopes), None


def _restarted(bench: Workbench, client: Client, inbox: Inbox) -> Client:
    """The client, set back to the start if it is told to rebuild its state, or if no round has had an outcome yet."""
    call = inbox.call
    if call is not None and call.round <= client.round:  # it has done that for this round before
        return client
    if bench.algorithm.server.memory == "history":
        anew = bool(inbox.of(Kind.REBUILD))
    else:  # elsewhere a client's own past would be lost, and a server could choose whose
        void = {message.round for message in inbox.of(Kind.VOID)}
        anew = call is not None and client.since > 0 and void.issuperset(range(1, call.round))
    if anew:
        return dataclasses.replace(client, since=0, state=None, envelopes={}, transcript=b"", last=None)
    return client


def _with_mask_keys(bench: Workbench, client: Client, inbox: Inbox) -> Client:
    """The client with the mask keys that it was given; each is checked once and never replaced."""
    for message in inbox.of(Kind.MASK_KEYS):
        told = peer_keys(message.payload.tobytes(), bench.roster, bench.run)
        client = dataclasses.replace(client, mask_keys=merged_keys(client.index, client.mask_keys, told))
    return client
