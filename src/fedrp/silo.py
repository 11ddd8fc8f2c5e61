"""The client's side of the protocol: bytes in, bytes out, and a state that can be saved between any two messages.

`respond` serves any number of clients that live in one process (a deployment has one), so that they can be trained
together. It opens sealed round keys only while it works; what it keeps are the envelopes.
"""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fedrp import secure_sum, wire
from fedrp.algorithms import ALGORITHMS, wire_tag
from fedrp.algorithms.base import Algorithm, ClientState, Local, Participant, Precise, Step, Upload
from fedrp.config import RunConfig, settled
from fedrp.errors import ConfigError, ProtocolError
from fedrp.masks import Masker
from fedrp.models import ModelFactory, Vector, public_initial, secret_initial
from fedrp.projection import Projection, make_projection
from fedrp.rng import RunSeed
from fedrp.roster import Roster
from fedrp.sealing import Entropy, Identity, Place, seal_to_all, verify
from fedrp.secret import SecretKey
from fedrp.secure_sum import Call, Words
from fedrp.training import Examples, LocalSGD, Loss, Objective, Stack, Trainer, make_trainer
from fedrp.wire import Kind, Message

_log = logging.getLogger(__name__)


class Envelope(NamedTuple):
    """A sealed round key as it came, and who dealt it."""

    dealer: int
    sealed: bytes


@dataclass(frozen=True)
class Silo:
    """All that a client keeps between two messages. Holds no opened key.

    Must be stored before a reply leaves: a client that forgets what it has sent can be made to send more.
    """

    index: int
    round: int = 0  # the last round that it took part in; 0 is the set-up. Never falls
    since: int = 0  # the round that `state` is of; falls to 0 when the client is told to rebuild its state
    state: ClientState | None = None
    envelopes: Mapping[int, Envelope] = field(default_factory=dict)
    call: Call | None = None  # of the last round, where uploads are masked
    heard: bytes = b""  # digest of all aggregates before its last masked upload
    left_out: tuple[int, ...] = ()  # in the recovery of the last round that it helped in; empty for none
    reply: bytes = b""  # to the last round, to be sent again if that is asked for again

    def record(self) -> dict[str, Any]:
        """All but `state` and `reply`, for JSON."""
        envelopes = {str(r): [e.dealer, e.sealed.hex()] for r, e in self.envelopes.items()}
        return {
            "client": self.index,
            "round": self.round,
            "since": self.since,
            "envelopes": envelopes,
            "call": self.call and [list(self.call.clients), list(self.call.weights)],
            "heard": self.heard.hex(),
            "left_out": list(self.left_out),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any], state: ClientState | None, reply: bytes = b"") -> "Silo":
        """The inverse of `record`."""
        envelopes = {int(r): Envelope(d, bytes.fromhex(s)) for r, (d, s) in record["envelopes"].items()}
        call = Call(*map(tuple, record["call"])) if record["call"] else None
        return cls(
            index=record["client"],
            round=record["round"],
            since=record["since"],
            state=state,
            envelopes=envelopes,
            call=call,
            heard=bytes.fromhex(record["heard"]),
            left_out=tuple(record["left_out"]),
            reply=reply,
        )


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
        raise ConfigError(f"clients={config.clients}, but the roster has {len(roster.members)} silos")
    seed = RunSeed(config.seed)
    trainer = make_trainer(factory, loss, device, seed)

    @functools.lru_cache(maxsize=2)
    def project(key: SecretKey) -> Projection:
        return make_projection(settled(config.projection), key, trainer.layout.size, config.dim, projection_memory)

    @functools.lru_cache(maxsize=1)
    def initial(key: SecretKey | None) -> Vector:
        return public_initial(factory, seed) if key is None else secret_initial(factory, key)

    return Workbench(config, run, roster, trainer, project, initial)


def hello(bench: Workbench, index: int, site: Site) -> bytes:
    """A client's first packet: which roster it has, and its weight."""
    digest = wire.raw(bench.roster.digest)
    return wire.encode([Message(Kind.HELLO, bench.run, 0, index, digest, _weight(bench, site), bench.tag)])


def _weight(bench: Workbench, site: Site) -> int:
    return len(site.data.y) if bench.config.weighting == "samples" else 1


def respond(
    bench: Workbench, silos: Sequence[Silo], sites: Sequence[Site], packets: Sequence[bytes]
) -> list[tuple[Silo, bytes]]:
    """Each client's new state and reply to its packet.

    Guarantees: pure but for the clients' own entropy; inputs are not changed; a packet that is refused (`WireError`,
    `ProtocolError`) changes nothing.
    """
    inboxes = [_accepted(bench, wire.decode(packet)) for packet in packets]
    silos = [_noted(bench, silo, inbox) for silo, inbox in zip(silos, inboxes, strict=True)]
    rounds = [_round_of(bench, *client) for client in zip(silos, sites, inboxes, strict=True)]
    answered = [round_ == silo.round and silo.reply != b"" for silo, round_ in zip(silos, rounds, strict=True)]
    training = [position for position, round_ in enumerate(rounds) if round_ is not None and not answered[position]]
    uploads: dict[int, Upload] = {}
    for round_ in {rounds[p] for p in training}:  # one, but where clients never talk and so count for themselves
        together = [p for p in training if rounds[p] == round_]
        chosen = [silos[p] for p in together], [sites[p] for p in together], [inboxes[p] for p in together]
        uploads |= dict(zip(together, _train(bench, round_ or 0, *chosen), strict=True))
    return [
        (silo, silo.reply) if answered[p] else _reply(bench, silo, sites[p], inboxes[p], rounds[p], uploads.get(p))
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


def _noted(bench: Workbench, silo: Silo, inbox: list[Message]) -> Silo:
    """The silo after it has put away the sealed keys that it was given, each once its signature is checked."""
    calls = wire.messages_of(inbox, Kind.ROUND)
    repeated = bool(calls) and calls[-1].round <= silo.round  # it has rebuilt its state for this round before
    if wire.messages_of(inbox, Kind.REBUILD) and bench.algorithm.catch_up == "all" and not repeated:
        silo = dataclasses.replace(silo, since=0, state=None)
    envelopes = dict(silo.envelopes)
    for message in wire.messages_of(inbox, Kind.SEALED):
        envelope = Envelope(message.sender, message.payload.tobytes())
        known = envelopes.get(message.round)
        if message.round < silo.since or envelope == known:
            continue
        if known is not None:
            raise ProtocolError(
                f"client {silo.index} was sent another key for round {message.round} than it has: refused"
            )
        if envelope.dealer >= len(bench.roster.members):
            raise ProtocolError(
                f"the key of round {message.round} was dealt by client {envelope.dealer}, who is not in the roster"
            )
        place = _place(bench, message.round, envelope.dealer, silo.index)
        verify(envelope.sealed, bench.roster.members[envelope.dealer].keys, place)
        envelopes[message.round] = envelope
    return dataclasses.replace(silo, envelopes=envelopes)


def _place(bench: Workbench, round_: int, dealer: int, recipient: int) -> Place:
    return Place(bench.run, round_, dealer, recipient, bench.tag, bench.roster.digest, bench.config.sealing)


def _train(
    bench: Workbench, round_: int, silos: Sequence[Silo], sites: Sequence[Site], inboxes: Sequence[list[Message]]
) -> list[Upload]:
    """What clients make of one round, trained together."""
    config = bench.config
    # What diverged becomes a zero update, or the start of a ball. To stop would tell more than the result may.
    discreet = config.private or config.ball is not None
    sgd = LocalSGD(
        settled(config.lr), config.momentum, config.batch_size, config.local_epochs, config.grad_clip, discreet
    )

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


def _round_of(bench: Workbench, silo: Silo, site: Site, inbox: list[Message]) -> int | None:
    """The round that a packet asks for, if any."""
    if not bench.algorithm.exchanges:
        return silo.round + 1
    calls = wire.messages_of(inbox, Kind.ROUND)
    if not calls:
        return None
    round_ = calls[-1].round
    if round_ < silo.round or (round_ == silo.round and not silo.reply):
        raise ProtocolError(f"client {silo.index} is past round {round_}: replayed message refused")
    if round_ > bench.config.rounds:  # privacy is accounted for these
        raise ProtocolError(f"round {round_} was asked for, but the run has {bench.config.rounds}: refused")
    if bench.config.secure_aggregation:
        call = Call.of(calls[-1].payload)
        secure_sum.require_call(bench.config, call, silo.index, _weight(bench, site))
        if len(call.clients) != calls[-1].weight:  # shares of noise depend on it
            raise ProtocolError(f"{calls[-1].weight} participants announced, {len(call.clients)} listed")
        if round_ == silo.round and call != silo.call:
            raise ProtocolError(
                f"client {silo.index} was sent another list of participants for round {round_}: refused"
            )
    return round_


def _participant(bench: Workbench, silo: Silo, site: Site, inbox: list[Message], round_: int) -> Participant:
    state = silo.state or bench.algorithm.client_init(bench.config, _initial_model(bench, silo, site))
    first = silo.since if bench.algorithm.catch_up == "all" else round_ - 1
    history = []
    for past in range(first, round_):
        aggregate = _aggregate(bench, inbox, past)
        if aggregate is None and past > 0 and bench.algorithm.exchanges:
            raise ProtocolError(f"the aggregate of round {past} is missing")
        history.append(Step(_open(bench, silo, site, past), aggregate))
    return Participant(state, history, site.entropy.secret("noise", round_))


def _aggregate(bench: Workbench, inbox: list[Message], round_: int) -> Vector | None:
    """The aggregate of a round, if the packet holds it."""
    found = [message for message in wire.messages_of(inbox, Kind.AGGREGATE) if message.round == round_]
    return wire.vector(found[-1], _upload_size(bench)) if found else None


def _upload_size(bench: Workbench) -> int:
    return bench.algorithm.upload_size(bench.config, bench.trainer.layout.size)


def _initial_model(bench: Workbench, silo: Silo, site: Site) -> Vector:
    return bench.initial(_open(bench, silo, site, 0))


def _open(bench: Workbench, silo: Silo, site: Site, round_: int) -> SecretKey | None:
    """The key of a round, opened from its envelope; None where the algorithm has no secrets."""
    if not bench.algorithm.secret:
        return None
    if round_ not in silo.envelopes:
        raise ProtocolError(f"client {silo.index} has no sealed key for round {round_}")
    dealer, sealed = silo.envelopes[round_]
    return site.identity.open(sealed, _place(bench, round_, dealer, silo.index))


def _reply(
    bench: Workbench, silo: Silo, site: Site, inbox: list[Message], round_: int | None, upload: Upload | None
) -> tuple[Silo, bytes]:
    replies = [_deal(bench, silo, site, request.round) for request in wire.messages_of(inbox, Kind.DEAL_REQUEST)]
    for request in wire.messages_of(inbox, Kind.RECOVER):
        silo, correction = _recovered(bench, silo, site, request)
        replies.append(correction)
    if round_ is None or upload is None:
        return silo, wire.encode(replies)
    envelopes = {r: envelope for r, envelope in silo.envelopes.items() if r >= round_}
    if bench.algorithm.exchanges:
        payload: wire.Payload = upload.vector
        if bench.config.secure_aggregation:
            silo, payload = _masked(bench, silo, site, inbox, round_, upload.vector)
        fields = (bench.run, round_, silo.index, payload, _weight(bench, site), bench.tag, upload.fingerprint)
        replies.insert(0, Message(Kind.UPLOAD, *fields))
    reply = wire.encode(replies)
    moved = dataclasses.replace(
        silo, round=round_, since=round_, state=upload.state, envelopes=envelopes, left_out=(), reply=reply
    )
    return moved, reply


def _masked(
    bench: Workbench, silo: Silo, site: Site, inbox: list[Message], round_: int, vector: Vector | Precise
) -> tuple[Silo, Words]:
    """A client's vector as whole numbers under its masks; the silo remembers towards whom."""
    call = Call.of(wire.messages_of(inbox, Kind.ROUND)[-1].payload)
    scale = bench.algorithm.scale(bench.config, _aggregate(bench, inbox, round_ - 1), call)
    words, cut = secure_sum.encode(vector, scale, _weight(bench, site))
    if cut:
        _log.warning(
            "client %d, round %d: %d of %d numbers beyond +-%g were cut off before masking: raise secure_range",
            *(silo.index, round_, cut, vector.size, scale.bound),
        )
    silo = dataclasses.replace(silo, call=call, heard=_heard(bench, silo, site, inbox, round_))
    return silo, _masker(bench, silo, site, round_, call).masked(words)


def _heard(bench: Workbench, silo: Silo, site: Site, inbox: list[Message], round_: int) -> bytes:
    """A digest of the aggregates of all rounds so far; of those that a client missed, the server states the digests.

    Where clients replay missed rounds, and so have every round's key, it covers the keys too.
    Were clients summed that had ever been told different things, a lying server could bring all but one of them to an
    upload that it knows, and would find the upload of the one in the sum.
    """
    stated: dict[int, bytes] = {}
    for message in wire.messages_of(inbox, Kind.DIGESTS):
        data, size = message.payload.tobytes(), secure_sum.DIGEST_BYTES
        stated |= {message.round + i: data[i * size : (i + 1) * size] for i in range(len(data) // size)}
    heard = silo.heard if silo.since else b""
    for past in range(silo.since, round_):
        aggregate = _aggregate(bench, inbox, past)
        digest = stated.get(past, b"") if aggregate is None else secure_sum.digest(aggregate)
        if past > 0 and not digest:
            raise ProtocolError(f"client {silo.index} was not told the aggregate of round {past}, nor its digest")
        key = _open(bench, silo, site, past) if bench.algorithm.catch_up == "all" else None
        heard = hashlib.sha256(heard + digest + (key.derive("heard").reveal() if key else b"")).digest()
    return heard


def _recovered(bench: Workbench, silo: Silo, site: Site, request: Message) -> tuple[Silo, Message]:
    """A client's help in taking off the masks of clients left out of its last round; for one set of them only."""
    if silo.call is None or request.round != silo.round or request.round == 0:
        raise ProtocolError(f"client {silo.index} has no masked upload in round {request.round} to be recovered")
    left_out = secure_sum.clients_of(request.payload)
    secure_sum.require_left_out(bench.config, silo.call, left_out, silo.index)
    if silo.left_out not in ((), left_out):
        raise ProtocolError(f"client {silo.index} helped in another recovery of round {request.round}: refused")
    masker = _masker(bench, silo, site, request.round, silo.call)
    words = masker.correction(left_out, _upload_size(bench))
    correction = Message(Kind.CORRECTION, bench.run, request.round, silo.index, words, 0, bench.tag)
    return dataclasses.replace(silo, left_out=left_out), correction


def _masker(bench: Workbench, silo: Silo, site: Site, round_: int, call: Call) -> Masker:
    key = _open(bench, silo, site, round_)
    return Masker(site.identity, bench.roster, silo.index, bench.run, round_, call, silo.heard, key)


def finished(bench: Workbench, silo: Silo, site: Site, packet: bytes) -> ClientState:
    """The state that a client ends with, if `packet` is the server's last; the silo itself stays as it is."""
    inbox = _accepted(bench, wire.decode(packet))
    return _finished(bench, _noted(bench, silo, inbox), site, inbox)


def _finished(bench: Workbench, silo: Silo, site: Site, inbox: list[Message]) -> ClientState:
    end = wire.messages_of(inbox, Kind.FINISH)
    participant = _participant(bench, silo, site, inbox, end[-1].round + 1 if end else silo.since + 1)
    return bench.algorithm.client_finish(Local(bench.config, None, 0, bench.project, _no_training), participant)


def _no_training(_start: Stack, _objective: Objective) -> Stack:
    raise ProtocolError("there is nothing to train after the last round")


def _deal(bench: Workbench, silo: Silo, site: Site, round_: int) -> Message:
    """Draw the key of a round, seal it to everyone in the roster, and sign."""
    key = site.entropy.secret("round-key", round_)
    place = _place(bench, round_, silo.index, silo.index)
    envelopes = seal_to_all(key, site.identity, bench.roster.keys, place)
    return Message(Kind.DEAL, bench.run, round_, silo.index, wire.raw(envelopes), 0, bench.tag)
