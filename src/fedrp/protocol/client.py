"""The client's side of the protocol: bytes in, bytes out, and a state that can be saved between any two messages.

`respond` serves any number of clients that live in one process (a deployment has one), so that they can be trained
together. It opens sealed round keys only while it works; what it keeps are the envelopes.
"""

import dataclasses
import functools
import hashlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.client_dp import most_rounds
from fedrp.algorithms.client_side import ClientState, Local, Participant, Step, Upload
from fedrp.algorithms.servers import wire_tag
from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression import grid
from fedrp.config import RunConfig, settings_digest, settled
from fedrp.crypto import secure_aggregation
from fedrp.crypto.masks import NO_PEERS, Masker, PeerKeys, extended
from fedrp.crypto.roster import Roster
from fedrp.crypto.sealing import Entropy, Identity, MaskKey, Place, mask_key_of, seal_to_all, signed_mask_key, verify
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Call
from fedrp.errors import ConfigError, ProtocolError
from fedrp.learning.initial import public_initial, secret_initial
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, LocalSGD, Loss, Objective, Stack
from fedrp.learning.sequential import make_trainer
from fedrp.learning.trainer import Trainer
from fedrp.projection.families import Projection, make_projection
from fedrp.protocol import quorum, wire
from fedrp.protocol.history import Past, past_rounds
from fedrp.protocol.limits import MASK_ENTRY_BYTES, from_server
from fedrp.protocol.wire import Kind, Limits, Message
from fedrp.rng import RunSeed
from fedrp.types import FINGERPRINT_BYTES, Precise, Vector, Words

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
        raise ConfigError(f"clients={config.clients}, but the roster has {len(roster.members)} silos")
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


def hello(bench: Workbench, index: int, site: Site) -> bytes:
    """A client's first packet: which roster it has, its weight and, where uploads are masked, its mask key."""
    digest = bench.roster.digest
    signed = b""
    if bench.config.secure_aggregation:
        signed = signed_mask_key(_mask_key(site, index), site.identity, bench.run, digest, index)
    payload = wire.raw(digest + signed)
    return wire.encode([Message(Kind.HELLO, bench.run, 0, index, payload, weight_of(bench, site), bench.tag)])


def _mask_key(site: Site, index: int) -> MaskKey:
    if site.mask_key is None:
        raise ProtocolError(f"client {index} has no mask key any more: this run is over here")
    return site.mask_key


def weight_of(bench: Workbench, site: Site) -> int:
    """A client's weight in averages."""
    return len(site.data.y) if bench.config.weighting == "samples" else 1


class _Inbox(NamedTuple):
    """A packet, read once."""

    messages: list[Message]
    digest: bytes  # of its bytes

    def of(self, kind: Kind) -> list[Message]:
        return wire.messages_of(self.messages, kind)

    @property
    def call(self) -> Message | None:
        """What asks for a round."""
        found = self.of(Kind.ROUND)
        return found[-1] if found else None


class _Work(NamedTuple):
    """One client at work on one packet."""

    silo: Silo
    site: Site
    inbox: _Inbox
    round: int | None  # that it is asked for, if any
    answered: bool = False  # before, with the bytes that it kept
    complaint: Message | None = None  # about a key that it was sent: then it does nothing else


def respond(
    bench: Workbench, silos: Sequence[Silo], sites: Sequence[Site], packets: Sequence[bytes]
) -> list[tuple[Silo, bytes]]:
    """Each client's new state and reply to its packet.

    Guarantees: pure but for the clients' own entropy; inputs are not changed; a packet that is refused (`WireError`,
    `ProtocolError`) changes nothing; one that holds a key which is not usable changes nothing and gets a complaint.
    """
    works = [_work(bench, *client) for client in zip(silos, sites, packets, strict=True)]
    training = [p for p, work in enumerate(works) if work.round is not None and not (work.answered or work.complaint)]
    uploads: dict[int, tuple[_Plan, Upload]] = {}
    for round_ in {works[p].round for p in training}:  # one, but where clients never talk and so count for themselves
        together = [p for p in training if works[p].round == round_]
        uploads |= dict(zip(together, _train(bench, round_ or 0, [works[p] for p in together]), strict=True))
    replies = []
    for position, work in enumerate(works):
        if work.complaint:
            replies.append((silos[position], wire.encode([work.complaint])))
        elif work.answered:
            replies.append((work.silo, work.silo.reply))
        else:
            replies.append(_reply(bench, work, *uploads.get(position, (None, None))))
    return replies


def _work(bench: Workbench, silo: Silo, site: Site, packet: bytes) -> _Work:
    inbox = _read(bench, packet)
    silo, complaint = _noted(bench, silo, site, inbox)
    if complaint:
        return _Work(silo, site, inbox, None, complaint=complaint)
    round_ = _round_of(bench, silo, site, inbox)
    return _Work(silo, site, inbox, round_, answered=round_ == silo.round and silo.reply != b"")


def _read(bench: Workbench, packet: bytes) -> _Inbox:
    messages = _accepted(bench, wire.decode(packet, bench.limits))
    return _Inbox(messages, hashlib.sha256(packet).digest())


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


def _noted(bench: Workbench, silo: Silo, site: Site, inbox: _Inbox) -> tuple[Silo, Message | None]:
    """The silo with the keys that it was given, each once it is checked; or what it complains about."""
    silo = _with_mask_keys(bench, _restarted(bench, silo, inbox), inbox)
    envelopes = dict(silo.envelopes)
    for message in inbox.of(Kind.SEALED):
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
        try:
            verify(envelope.sealed, bench.roster.members[envelope.dealer].keys, place)
            site.identity.open(envelope.sealed, place)
        except ProtocolError as error:  # the dealer's fault or the server's: either way another key is needed
            _log.warning("client %d complains about the key of round %d: %s", silo.index, message.round, error)
            fields = (bench.run, message.round, silo.index, wire.EMPTY, envelope.dealer, bench.tag)
            return silo, Message(Kind.COMPLAINT, *fields)
        envelopes[message.round] = envelope
    return dataclasses.replace(silo, envelopes=envelopes), None


def _restarted(bench: Workbench, silo: Silo, inbox: _Inbox) -> Silo:
    """The silo, set back to the start if it is told to rebuild its state, or if no round has had an outcome yet."""
    call = inbox.call
    if call is not None and call.round <= silo.round:  # it has done that for this round before
        return silo
    if bench.algorithm.server.memory == "history":
        anew = bool(inbox.of(Kind.REBUILD))
    else:  # elsewhere a client's own past would be lost, and a server could choose whose
        void = {message.round for message in inbox.of(Kind.VOID)}
        anew = call is not None and silo.since > 0 and void.issuperset(range(1, call.round))
    if anew:
        return dataclasses.replace(silo, since=0, state=None, envelopes={}, transcript=b"", last=None)
    return silo


def _with_mask_keys(bench: Workbench, silo: Silo, inbox: _Inbox) -> Silo:
    """The silo with the mask keys that it was given; each is checked once and never replaced."""
    for message in inbox.of(Kind.MASK_KEYS):
        told = _peer_keys(message.payload.tobytes(), bench.roster, bench.run)
        if not silo.mask_keys.size:
            silo = dataclasses.replace(silo, mask_keys=told)  # simulated clients share one array
            continue
        known, new = _given(silo.mask_keys), _given(told)
        if (silo.mask_keys[known & new] != told[known & new]).any():
            raise ProtocolError(f"client {silo.index} was sent another mask key of a client than it has: refused")
        silo = dataclasses.replace(silo, mask_keys=np.where(known[:, None], silo.mask_keys, told))
    return silo


def _given(keys: PeerKeys) -> npt.NDArray[np.bool_]:
    return np.asarray(keys.any(axis=1))


@functools.lru_cache(maxsize=2)
def _peer_keys(payload: bytes, roster: Roster, run: bytes) -> PeerKeys:
    """The mask keys of a MASK_KEYS message, all of them signed by their owners for this run."""
    keys = np.zeros((len(roster.members), 32), np.uint8)
    if len(payload) % MASK_ENTRY_BYTES:
        raise ProtocolError(f"mask keys come in {MASK_ENTRY_BYTES} bytes each, got {len(payload)}")
    for start in range(0, len(payload), MASK_ENTRY_BYTES):
        (client,) = struct.unpack_from("<I", payload, start)
        if client >= len(roster.members):
            raise ProtocolError(f"a mask key of client {client}, who is not in the roster")
        if keys[client].any():
            raise ProtocolError(f"two mask keys of client {client} in one packet: refused")
        signed = payload[start + 4 : start + MASK_ENTRY_BYTES]
        public = mask_key_of(signed, roster.members[client].keys.ed25519, run, roster.digest, client)
        keys[client] = np.frombuffer(public, np.uint8)
    keys.flags.writeable = False
    return keys


def _place(bench: Workbench, round_: int, dealer: int, recipient: int) -> Place:
    return Place(bench.run, round_, dealer, recipient, bench.tag, bench.roster.digest, bench.config.sealing)


class _Plan(NamedTuple):
    """What a client goes into a round with."""

    participant: Participant
    past: list[Past]  # what it applies first
    transcript: bytes


def _train(bench: Workbench, round_: int, works: Sequence[_Work]) -> list[tuple[_Plan, Upload]]:
    """What clients make of one round, trained together."""
    config = bench.config
    # What diverged becomes a zero update, or the start of a ball. To stop would tell more than the result may.
    log_divergence = config.private or config.ball is not None
    sgd = LocalSGD(
        settled(config.lr), config.momentum, config.batch_size, config.local_epochs, config.grad_clip, log_divergence
    )

    def train(start: Stack, objective: Objective) -> Stack:
        indices = [work.silo.index for work in works]
        return bench.trainer.train(start, [work.site.data for work in works], indices, round_, sgd, objective)

    key = _open(bench, works[0].silo, works[0].site, round_)
    plans = [_plan(bench, work.silo, work.site, work.inbox, round_) for work in works]
    call = works[0].inbox.call
    count = call.weight if call else len(works)
    local = Local(config, key, count, bench.project, train, bench.trainer.model.device)
    uploads = bench.algorithm.client.round(local, [plan.participant for plan in plans])
    return list(zip(plans, uploads, strict=True))


def _round_of(bench: Workbench, silo: Silo, site: Site, inbox: _Inbox) -> int | None:
    """The round that a packet asks for, if any."""
    config = bench.config
    if not bench.algorithm.server.exchanges:
        return silo.round + 1
    if inbox.call is None:
        return None
    round_, count = inbox.call.round, inbox.call.weight
    if round_ < silo.round or (round_ == silo.round and not silo.reply):
        raise ProtocolError(f"client {silo.index} is past round {round_}: replayed message refused")
    if round_ > config.rounds:  # privacy is accounted for these
        raise ProtocolError(f"round {round_} was asked for, but the run has {config.rounds}: refused")
    if config.private and round_ > silo.round and silo.taken >= most_rounds(config):
        raise ProtocolError(
            f"client {silo.index} has taken part in {silo.taken} of {config.rounds} rounds, more than honest coins "
            "would choose it for: refused"
        )
    if config.secure_aggregation:
        call = Call.of(inbox.call.payload)
        quorum.require_call(config, call, silo.index, weight_of(bench, site))
        if len(call.clients) != count:  # shares of noise depend on it
            raise ProtocolError(f"{count} participants announced, {len(call.clients)} listed")
        if round_ == silo.round and call != silo.call:
            raise ProtocolError(
                f"client {silo.index} was sent another list of participants for round {round_}: refused"
            )
        for other in call.clients:
            if not silo.mask_keys.size or not silo.mask_keys[other].any():
                raise ProtocolError(f"client {silo.index} was not sent the mask key of client {other}")
    return round_


def _plan(bench: Workbench, silo: Silo, site: Site, inbox: _Inbox, round_: int) -> _Plan:
    state = silo.state or bench.algorithm.client.init(bench.config, _initial_model(bench, silo, site))
    if bench.algorithm.server.exchanges:
        size, memory = bench.upload_size, bench.algorithm.server.memory
        past = past_rounds(bench.config, bench.algorithm.server, size, inbox.messages, silo.since, round_)
    else:
        memory, past = "own", [Past(0, None)]
    history = [Step(_open(bench, silo, site, step.round), step.aggregate) for step in past]
    # Of one aggregate nothing before it is left; where clients replay, it makes no difference when they do.
    transcript = bench.settings if memory == "aggregate" else silo.transcript or bench.settings
    for (key, aggregate), step in zip(history, past, strict=True):
        transcript = extended(transcript, round_ if memory == "own" else 0, step.round, aggregate, key)
    noise = site.entropy.noise(bench.run, round_, inbox.digest)
    previous = past[-1].aggregate if past else silo.last  # nothing to apply: all rounds since were given up
    return _Plan(Participant(state, history, noise, previous), past, transcript)


def _initial_model(bench: Workbench, silo: Silo, site: Site) -> Vector:
    return bench.initial(_open(bench, silo, site, 0))


def _open(bench: Workbench, silo: Silo, site: Site, round_: int) -> SecretKey | None:
    """The key of a round, opened from its envelope; None where the algorithm has no secrets."""
    if not bench.algorithm.server.round_keys:
        return None
    if round_ not in silo.envelopes:
        raise ProtocolError(f"client {silo.index} has no sealed key for round {round_}")
    dealer, sealed = silo.envelopes[round_]
    return site.identity.open(sealed, _place(bench, round_, dealer, silo.index))


def _reply(bench: Workbench, work: _Work, plan: _Plan | None, upload: Upload | None) -> tuple[Silo, bytes]:
    silo, site, inbox, round_ = work[:4]
    replies = []
    for request in inbox.of(Kind.DEAL_REQUEST):
        silo, deal = _dealt(bench, silo, site, request.round)
        replies.append(deal)
    for request in inbox.of(Kind.RECOVER):
        silo, correction = _recovered(bench, silo, site, request)
        replies.append(correction)
    if round_ is None or upload is None or plan is None:
        return silo, wire.encode(replies)
    if bench.algorithm.server.exchanges:
        payload: wire.Payload = upload.vector
        mark = upload.fingerprint
        if bench.config.secure_aggregation:
            silo, payload = _masked(bench, work._replace(silo=silo), plan, upload.vector)
            if bench.algorithm.server.memory == "own":  # so that an honest server sums only those whose masks cancel
                mark = plan.transcript[:FINGERPRINT_BYTES]
        fields = (bench.run, round_, silo.index, payload, weight_of(bench, site), bench.tag, mark)
        replies.insert(0, Message(Kind.UPLOAD, *fields))
    reply = wire.encode(replies)
    # Its own key is needed again in the next round; if this one is given up, that of the last one that was not.
    replays = bench.algorithm.server.memory == "history"
    oldest = round_ if replays else plan.past[-1].round
    moved = dataclasses.replace(
        silo,
        round=round_,
        since=round_,
        state=upload.state,
        envelopes={r: envelope for r, envelope in silo.envelopes.items() if r >= oldest},
        last=plan.participant.previous if replays else None,
        left_out=(),
        reply=reply,
        taken=silo.taken + 1,
    )
    return moved, reply


def _masked(bench: Workbench, work: _Work, plan: _Plan, vector: Vector | Precise) -> tuple[Silo, Words]:
    """A client's vector as whole numbers under its masks; the silo remembers towards whom."""
    silo, site, inbox, round_ = work[:4]
    if inbox.call is None or round_ is None:
        raise ProtocolError("a masked upload needs a list of participants")
    call = Call.of(inbox.call.payload)
    scale = bench.algorithm.server.scale(bench.config, plan.participant.previous, call)
    words, cut = grid.encode(vector, scale, weight_of(bench, site))
    if cut:
        _log.warning(
            "client %d, round %d: %d of %d numbers beyond +-%g were cut off before masking: raise secure_range",
            *(silo.index, round_, cut, vector.size, scale.bound),
        )
    silo = dataclasses.replace(silo, call=call, transcript=plan.transcript)
    return silo, _masker(bench, silo, site, round_, call).masked(words)


def _recovered(bench: Workbench, silo: Silo, site: Site, request: Message) -> tuple[Silo, Message]:
    """A client's help in taking off the masks of clients left out of its last round; for one set of them only."""
    # After it was told to rebuild its state it has not the transcript any more that its masks came from.
    if silo.call is None or request.round == 0 or not request.round == silo.round == silo.since:
        raise ProtocolError(f"client {silo.index} has no masked upload in round {request.round} to be recovered")
    left_out = secure_aggregation.clients_of(request.payload)
    quorum.require_left_out(bench.config, silo.call, left_out, silo.index)
    if silo.left_out not in ((), left_out):
        raise ProtocolError(f"client {silo.index} helped in another recovery of round {request.round}: refused")
    masker = _masker(bench, silo, site, request.round, silo.call)
    words = masker.correction(left_out, bench.upload_size)
    correction = Message(Kind.CORRECTION, bench.run, request.round, silo.index, words, 0, bench.tag)
    return dataclasses.replace(silo, left_out=left_out), correction


def _masker(bench: Workbench, silo: Silo, site: Site, round_: int, call: Call) -> Masker:
    key, own = _open(bench, silo, site, round_), _mask_key(site, silo.index)
    if silo.mask_keys[silo.index].tobytes() != own.public:
        raise ProtocolError(f"the others have another mask key of client {silo.index} than it has: sit this run out")
    place = (bench.roster.digest, silo.index, bench.run, round_)
    return Masker(own, silo.mask_keys, *place, call, silo.transcript, key)


def finished(bench: Workbench, silo: Silo, site: Site, packet: bytes) -> ClientState:
    """The state that a client ends with, if `packet` is the server's last; the silo itself stays as it is.

    Raises:
        ProtocolError: the packet is not usable; also if a key in it does not open.
    """
    inbox = _read(bench, packet)
    silo, complaint = _noted(bench, silo, site, inbox)
    if complaint:
        raise ProtocolError(f"client {silo.index} cannot open the key of round {complaint.round}: it has no model")
    end = inbox.of(Kind.FINISH)
    last = end[-1].round if end else silo.since
    if last > bench.config.rounds:  # before a history of so many rounds is looked for
        raise ProtocolError(f"the end of round {last} was announced, but the run has {bench.config.rounds}: refused")
    plan = _plan(bench, silo, site, inbox, last + 1)
    return bench.algorithm.client.finish(Local(bench.config, None, 0, bench.project, _no_training), plan.participant)


def _no_training(_start: Stack, _objective: Objective) -> Stack:
    raise ProtocolError("there is nothing to train after the last round")


def _dealt(bench: Workbench, silo: Silo, site: Site, round_: int) -> tuple[Silo, Message]:
    """Draw the key of a round, seal it to everyone in the roster, and sign; once per round."""
    if not bench.algorithm.server.round_keys or round_ > bench.config.rounds or round_ <= silo.dealt:
        raise ProtocolError(f"client {silo.index} deals no key for round {round_}: it has dealt up to {silo.dealt}")
    key = site.entropy.secret("round-key", round_)
    place = _place(bench, round_, silo.index, silo.index)
    envelopes = seal_to_all(key, site.identity, bench.roster.keys, place)
    deal = Message(Kind.DEAL, bench.run, round_, silo.index, wire.raw(envelopes), 0, bench.tag)
    return dataclasses.replace(silo, dealt=round_), deal
