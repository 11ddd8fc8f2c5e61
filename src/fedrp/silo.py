"""The client's side of the protocol: bytes in, bytes out, and a state that can be saved between any two messages.

`respond` serves any number of clients that live in one process (a deployment has one), so that they can be trained
together. It opens sealed round keys only while it works; what it keeps are the envelopes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fedrp import wire
from fedrp.algorithms import ALGORITHMS, wire_tag
from fedrp.algorithms.base import Algorithm, ClientState, Local, Participant, Step, Upload
from fedrp.config import RunConfig, settled
from fedrp.errors import ProtocolError
from fedrp.models import ModelFactory, Vector, public_initial, secret_initial
from fedrp.projection import Projection, make_projection
from fedrp.rng import RunSeed
from fedrp.sealing import PUBLIC_KEY_BYTES, Entropy, Identity, binding, seal_to_all, split
from fedrp.secret import SecretKey
from fedrp.training import Examples, LocalSGD, Loss, Objective, Stack, Trainer, make_trainer
from fedrp.wire import Kind, Message


class Envelope(NamedTuple):
    """A sealed round key as it came, and who dealt it."""

    dealer: int
    sealed: bytes


@dataclass(frozen=True)
class Silo:
    """All that a client keeps between two messages. Holds no opened key."""

    index: int
    round: int = 0  # the last round that it took part in; 0 is the set-up
    state: ClientState | None = None
    roster: tuple[bytes, ...] = ()
    envelopes: Mapping[int, Envelope] = field(default_factory=dict)
    reply: bytes = b""  # to the last round, to be sent again if that is asked for again


@dataclass(frozen=True)
class Site:
    """What a client has on its premises and never sends."""

    identity: Identity
    entropy: Entropy
    data: Examples


@dataclass(frozen=True)
class Workbench:
    """What the clients of one process work with."""

    config: RunConfig  # resolved
    run: bytes
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


def make_workbench(
    config: RunConfig, run: bytes, factory: ModelFactory, loss: Loss, device: torch.device, projection_memory: int
) -> Workbench:
    """A workbench for one process. Its clients share matrices (of the last two rounds) and the initial model."""
    seed = RunSeed(config.seed)
    trainer = make_trainer(factory, loss, device, seed)

    @functools.lru_cache(maxsize=2)
    def project(key: SecretKey) -> Projection:
        return make_projection(settled(config.projection), key, trainer.layout.size, config.dim, projection_memory)

    @functools.lru_cache(maxsize=1)
    def initial(key: SecretKey | None) -> Vector:
        return public_initial(factory, seed) if key is None else secret_initial(factory, key)

    return Workbench(config, run, trainer, project, initial)


def hello(bench: Workbench, index: int, site: Site) -> bytes:
    """A client's first packet: its public key."""
    message = Message(Kind.HELLO, bench.run, 0, index, wire.raw(site.identity.public), projection=bench.tag)
    return wire.encode([message])


def respond(
    bench: Workbench, silos: Sequence[Silo], sites: Sequence[Site], packets: Sequence[bytes]
) -> list[tuple[Silo, bytes]]:
    """Each client's new state and reply to its packet.

    Guarantees: pure but for the clients' own entropy; inputs are not changed; a packet that is refused (`WireError`,
    `ProtocolError`) changes nothing.
    """
    inboxes = [_accepted(bench, wire.decode(packet)) for packet in packets]
    silos = [_noted(silo, inbox) for silo, inbox in zip(silos, inboxes, strict=True)]
    rounds = [_round_of(bench, silo, inbox) for silo, inbox in zip(silos, inboxes, strict=True)]
    answered = [round_ == silo.round and silo.reply != b"" for silo, round_ in zip(silos, rounds, strict=True)]
    training = [position for position, round_ in enumerate(rounds) if round_ is not None and not answered[position]]
    uploads: dict[int, Upload] = {}
    for round_ in {rounds[p] for p in training}:  # one, but where clients never talk and so count for themselves
        together = [p for p in training if rounds[p] == round_]
        chosen = [silos[p] for p in together], [sites[p] for p in together], [inboxes[p] for p in together]
        uploads |= dict(zip(together, _train(bench, round_ or 0, *chosen), strict=True))
    return [
        (silo, silo.reply) if answered[p] else _reply(bench, silo, sites[p], inboxes[p], uploads.get(p))
        for p, silo in enumerate(silos)
    ]


def _accepted(bench: Workbench, messages: list[Message]) -> list[Message]:
    """The messages, once all of them are known to belong to this run and this projection."""
    for message in messages:
        if message.run != bench.run:
            raise ProtocolError(f"{message.kind.name} of round {message.round} belongs to another run")
        if message.projection != bench.tag:
            raise ProtocolError(
                f"{message.kind.name} of round {message.round} was made for another projection: "
                "use the same fedrp version and --projection everywhere"
            )
    return messages


def _noted(silo: Silo, inbox: list[Message]) -> Silo:
    """The silo after it has put away what it was given: the roster and sealed keys."""
    if wire.messages_of(inbox, Kind.REBUILD):
        silo = Silo(silo.index, roster=silo.roster)
    envelopes = {m.round: Envelope(m.sender, m.payload.tobytes()) for m in wire.messages_of(inbox, Kind.SEALED)}
    rosters = wire.messages_of(inbox, Kind.ROSTER)
    roster = silo.roster
    if rosters:
        data = rosters[-1].payload.tobytes()
        roster = tuple(split(data, PUBLIC_KEY_BYTES, len(data) // PUBLIC_KEY_BYTES, "roster"))
    return dataclasses.replace(silo, roster=roster, envelopes={**silo.envelopes, **envelopes})


def _train(
    bench: Workbench, round_: int, silos: Sequence[Silo], sites: Sequence[Site], inboxes: Sequence[list[Message]]
) -> list[Upload]:
    """What clients make of one round, trained together."""
    config = bench.config
    sgd = LocalSGD(settled(config.lr), config.momentum, config.batch_size, config.local_epochs, config.grad_clip)

    def train(start: Stack, objective: Objective) -> Stack:
        indices = [silo.index for silo in silos]
        return bench.trainer.train(start, [site.data for site in sites], indices, round_, sgd, objective)

    key = _open(bench, silos[0], sites[0], round_)
    participants = [
        _participant(bench, silo, site, inbox, round_) for silo, site, inbox in zip(silos, sites, inboxes, strict=True)
    ]
    calls = wire.messages_of(inboxes[0], Kind.ROUND)
    count = calls[-1].weight if calls else len(silos)
    return bench.algorithm.client_round(Local(config, key, count, bench.project, train), participants)


def _round_of(bench: Workbench, silo: Silo, inbox: list[Message]) -> int | None:
    """The round that a packet asks for, if any."""
    if not bench.algorithm.exchanges:
        return silo.round + 1
    calls = wire.messages_of(inbox, Kind.ROUND)
    if not calls:
        return None
    round_ = calls[-1].round
    if round_ < silo.round or (round_ == silo.round and not silo.reply):
        raise ProtocolError(f"client {silo.index} is past round {round_}: replayed message refused")
    return round_


def _participant(bench: Workbench, silo: Silo, site: Site, inbox: list[Message], round_: int) -> Participant:
    state = silo.state or bench.algorithm.client_init(bench.config, _initial_model(bench, silo, site))
    aggregates = {message.round: message for message in wire.messages_of(inbox, Kind.AGGREGATE)}
    size = bench.algorithm.upload_size(bench.config, bench.trainer.layout.size)
    first = silo.round if bench.algorithm.catch_up == "all" else round_ - 1
    history = []
    for past in range(first, round_):
        if past not in aggregates and past > 0 and bench.algorithm.exchanges:
            raise ProtocolError(f"the aggregate of round {past} is missing")
        aggregate = wire.vector(aggregates[past], size) if past in aggregates else None
        history.append(Step(_open(bench, silo, site, past), aggregate))
    return Participant(state, history, site.entropy.secret("noise", round_))


def _initial_model(bench: Workbench, silo: Silo, site: Site) -> Vector:
    return bench.initial(_open(bench, silo, site, 0))


def _open(bench: Workbench, silo: Silo, site: Site, round_: int) -> SecretKey | None:
    """The key of a round, opened from its envelope; None where the algorithm has no secrets."""
    if not bench.algorithm.secret:
        return None
    if round_ not in silo.envelopes:
        raise ProtocolError(f"client {silo.index} has no sealed key for round {round_}")
    dealer, sealed = silo.envelopes[round_]
    return site.identity.open(sealed, binding(bench.run, round_, dealer, silo.index, bench.tag))


def _reply(bench: Workbench, silo: Silo, site: Site, inbox: list[Message], upload: Upload | None) -> tuple[Silo, bytes]:
    replies = [_deal(bench, silo, site, request.round) for request in wire.messages_of(inbox, Kind.DEAL_REQUEST)]
    if wire.messages_of(inbox, Kind.FINISH):
        silo = dataclasses.replace(silo, state=_finished(bench, silo, site, inbox))
    if upload is None:
        return silo, wire.encode(replies)
    round_ = _round_of(bench, silo, inbox) or 0
    if bench.algorithm.exchanges:
        weight = len(site.data.y) if bench.config.weighting == "samples" else 1
        fields = (bench.run, round_, silo.index, upload.vector, weight, bench.tag, upload.fingerprint)
        replies.insert(0, Message(Kind.UPLOAD, *fields))
    reply = wire.encode(replies)
    kept = {r: envelope for r, envelope in silo.envelopes.items() if r >= round_}
    return dataclasses.replace(silo, round=round_, state=upload.state, envelopes=kept, reply=reply), reply


def finished(bench: Workbench, silo: Silo, site: Site, packet: bytes) -> ClientState:
    """The state that a client ends with, if `packet` is the server's last; the silo itself stays as it is."""
    inbox = _accepted(bench, wire.decode(packet))
    return _finished(bench, _noted(silo, inbox), site, inbox)


def _finished(bench: Workbench, silo: Silo, site: Site, inbox: list[Message]) -> ClientState:
    end = wire.messages_of(inbox, Kind.FINISH)
    participant = _participant(bench, silo, site, inbox, end[-1].round + 1 if end else silo.round + 1)
    return bench.algorithm.client_finish(Local(bench.config, None, 0, bench.project, _no_training), participant)


def _no_training(_start: Stack, _objective: Objective) -> Stack:
    raise ProtocolError("there is nothing to train after the last round")


def _deal(bench: Workbench, silo: Silo, site: Site, round_: int) -> Message:
    """Draw the key of a round and seal it to everyone."""
    if not silo.roster:
        raise ProtocolError(f"client {silo.index} was asked to deal a key before it had the roster")
    key = site.entropy.secret("round-key", round_)
    envelopes = seal_to_all(key, silo.roster, bench.run, round_, silo.index, bench.tag)
    return Message(Kind.DEAL, bench.run, round_, silo.index, wire.raw(envelopes), 0, bench.tag)
