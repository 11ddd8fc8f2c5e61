"""A client's state between two messages, what it has on its premises, and what it works with."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.client_side import ClientState
from fedrp.algorithms.servers import wire_tag
from fedrp.algorithms.table import ALGORITHMS
from fedrp.config import RunConfig, settings_digest, settled
from fedrp.crypto.masks import NO_PEERS, PeerKeys
from fedrp.crypto.roster import Roster
from fedrp.crypto.sealing import Entropy, Identity, MaskKey, Place
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Call
from fedrp.errors import ConfigError, ProtocolError
from fedrp.learning.initial import public_initial, secret_initial
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, Loss
from fedrp.learning.sequential import make_trainer
from fedrp.learning.trainer import Trainer
from fedrp.projection.families import Projection, make_projection
from fedrp.protocol.limits import from_server
from fedrp.protocol.wire import Limits
from fedrp.rng import RunSeed
from fedrp.types import Vector


class Envelope(NamedTuple):
    """A sealed round key as it came, and who dealt it."""

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
    envelopes: Mapping[int, Envelope] = field(default_factory=dict)
    call: Call | None = None  # of the last round, where uploads are masked
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
    taken: int = 0  # in how many rounds it took part


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

    config: RunConfig  # resolved
    run: bytes
    roster: Roster  # pinned: nothing that the server says can change it
    trainer: Trainer
    project: Callable[[SecretKey], Projection]  # the matrix of a round key
    initial: Callable[[SecretKey | None], Vector]  # the first model, from the initial secret or the public seed

    @property
    def algorithm(self) -> Algorithm:
        """The functions of the configured algorithm."""
        return ALGORITHMS[self.config.algorithm]

    @property
    def tag(self) -> int:
        """The projection's code on the wire."""
        return wire_tag(self.config)

    @property
    def upload_size(self) -> int:
        """How many numbers a client sends in a round."""
        return self.algorithm.server.upload_size(self.config, self.trainer.model.layout.size)

    @functools.cached_property
    def settings(self) -> bytes:
        """What every transcript begins with: settings too reach a client through the server."""
        return settings_digest(self.config)

    @functools.cached_property
    def limits(self) -> Limits:
        """What is taken in one packet."""
        return from_server(self.config, self.upload_size)


def make_workbench(
    config: RunConfig,
    run: bytes,
    roster: Roster,
    factory: ModelFactory,
    loss: Loss,
    device: torch.device,
    projection_memory: int,
) -> Workbench:
    """A workbench for one process. Its clients share matrices (of the last two rounds) and the initial model."""
    if len(roster.members) != config.clients:
        raise ConfigError(f"clients={config.clients}, but the roster has {len(roster.members)} clients")
    seed = RunSeed(config.seed)
    trainer = make_trainer(factory, loss, device, seed)
    size = trainer.model.layout.size

    @functools.lru_cache(maxsize=2)
    def project(key: SecretKey) -> Projection:
        return make_projection(settled(config.projection), key, size, config.dim, projection_memory)

    @functools.lru_cache(maxsize=1)
    def initial(key: SecretKey | None) -> Vector:
        return public_initial(factory, seed) if key is None else secret_initial(factory, key)

    return Workbench(config, run, roster, trainer, project, initial)


def weight_of(bench: Workbench, site: Site) -> int:
    """A client's weight in averages."""
    return len(site.data.y) if bench.config.weighting == "samples" else 1


def place_of(bench: Workbench, round_: int, dealer: int, recipient: int) -> Place:
    """Where an envelope belongs, which its seal and its signature are bound to."""
    return Place(bench.run, round_, dealer, recipient, bench.tag, bench.roster.digest, bench.config.sealing)


def opened_key(bench: Workbench, client: Client, site: Site, round_: int) -> SecretKey | None:
    """The key of a round, opened from its envelope; None where the algorithm has no secrets."""
    if not bench.algorithm.server.round_keys:
        return None
    if round_ not in client.envelopes:
        raise ProtocolError(f"client {client.index} has no sealed key for round {round_}")
    dealer, sealed = client.envelopes[round_]
    return site.identity.open(sealed, place_of(bench, round_, dealer, client.index))
