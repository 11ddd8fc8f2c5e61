"""The client's side of the protocol: bytes in, bytes out, and a state that can be saved between any two messages.

`respond` serves any number of clients that live in one process (a deployment has one), so that they can be trained
together. It opens sealed secrets only while it works; what it keeps are the envelopes.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

from fedrp.algorithms.client_side import ClientState, Local, Participant, Step, Upload, own_normals, own_words
from fedrp.compression import coding as codes
from fedrp.crypto import secure_aggregation
from fedrp.crypto.epochs import covering
from fedrp.crypto.masks import Masker, extended
from fedrp.crypto.sealing import MaskKey, seal_to_all, signed_mask_key
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.engines.descent import local_sgd
from fedrp.errors import ProtocolError
from fedrp.learning.objective import Objective, Stack
from fedrp.mechanisms import quorum
from fedrp.mechanisms.base import AtClient
from fedrp.mechanisms.cohort import most_rounds
from fedrp.mechanisms.delivery import masked_at_all
from fedrp.protocol import wire
from fedrp.protocol.client_state import (
    Client,
    Inbox,
    Site,
    Workbench,
    noted,
    opened_keys,
    place_of,
    read_packet,
    weight_of,
)
from fedrp.protocol.history import Past, past_rounds
from fedrp.protocol.wire import Kind, Message
from fedrp.records.promise import protection
from fedrp.records.training import RecordNoise, RecordTrainer
from fedrp.types import FINGERPRINT_BYTES, Precise, Vector

_log = logging.getLogger(__name__)


def hello(bench: Workbench, index: int, site: Site) -> bytes:
    """A client's first packet: which roster it has, its weight and, where uploads are masked, its mask key."""
    digest = bench.roster.digest
    signed = b""
    if masked_at_all(bench.config):
        signed = signed_mask_key(_mask_key(site, index), site.identity, bench.run, digest, index)
    payload = wire.raw(digest + signed)
    return wire.encode([Message(Kind.HELLO, bench.context, 0, index, payload, weight_of(bench, site))])


def _mask_key(site: Site, index: int) -> MaskKey:
    if site.mask_key is None:
        raise ProtocolError(f"client {index} has no mask key any more: this run is over here")
    return site.mask_key


class _Work(NamedTuple):
    """One client at work on one packet."""

    client: Client
    site: Site
    inbox: Inbox
    round: int | None  # that it is asked for, if any
    answered: bool = False  # before, with the bytes that it kept
    complaint: Message | None = None  # about a key that it was sent: then it does nothing else


def respond(
    bench: Workbench, clients: Sequence[Client], sites: Sequence[Site], packets: Sequence[bytes]
) -> list[tuple[Client, bytes]]:
    """Each client's new state and reply to its packet.

    Guarantees: pure but for the clients' own entropy; inputs are not changed; a packet that is refused (`WireError`,
    `ProtocolError`) changes nothing; one that holds a key which is not usable changes nothing and gets a complaint.
    """
    works = [_work(bench, *client) for client in zip(clients, sites, packets, strict=True)]
    training = [p for p, work in enumerate(works) if work.round is not None and not (work.answered or work.complaint)]
    uploads: dict[int, tuple[_Plan, Upload]] = {}
    for round_ in {works[p].round for p in training}:  # one, if the server is honest
        together = [p for p in training if works[p].round == round_]
        uploads |= dict(zip(together, _train(bench, round_ or 0, [works[p] for p in together]), strict=True))
    replies = []
    for position, work in enumerate(works):
        if work.complaint:
            replies.append((clients[position], wire.encode([work.complaint])))
        elif work.answered:
            replies.append((work.client, work.client.reply))
        else:
            replies.append(_reply(bench, work, *uploads.get(position, (None, None))))
    return replies


def _work(bench: Workbench, client: Client, site: Site, packet: bytes) -> _Work:
    inbox = read_packet(bench, packet)
    client, complaint = noted(bench, client, site, inbox)
    if complaint:
        return _Work(client, site, inbox, None, complaint=complaint)
    round_ = _round_of(bench, client, site, inbox)
    answered = round_ == client.round and client.reply != b""
    return _Work(client if answered else _counted(client, round_, inbox), site, inbox, round_, answered)


def begun(bench: Workbench, client: Client, site: Site, packet: bytes) -> Client:
    """The client with the round counted that a packet asks for, to be stored before it trains.

    So whatever a record does to training, the round counts; and is done again only for the same bytes, with the same
    coins and noise. A packet whose round is refused does not count; one that is refused for what else it asks may.
    """
    work = _work(bench, client, site, packet)
    if work.round is None or work.answered or work.complaint:
        return client
    _plan(bench.at(work.round), work.client, site, work.inbox, work.round)
    opened_keys(bench, work.client, site)(work.round)
    return _counted(client, work.round, work.inbox)


def _counted(client: Client, round_: int | None, inbox: Inbox) -> Client:
    if round_ is None or round_ == client.begun:
        return client
    return dataclasses.replace(client, begun=round_, asked=inbox.digest, taken=client.taken + 1)


class _Plan(NamedTuple):
    """What a client goes into a round with."""

    participant: Participant
    past: list[Past]  # what it applies first
    previous: Vector | None  # the last aggregate, also if it was applied before; None before there is one
    transcript: bytes


def _train(bench: Workbench, round_: int, works: Sequence[_Work]) -> list[tuple[_Plan, Upload]]:
    """What clients make of one round, trained together."""
    bench = bench.at(round_)
    config = bench.config
    # What diverged becomes a zero update, or the start of a ball. To stop would tell more than the result may.
    sgd = local_sgd(config, config.lr, round_, config.tolerant)
    data, indices = [work.site.data for work in works], [work.client.index for work in works]

    def train(start: Stack, objective: Objective) -> Stack:
        trainer = _record_trainer(bench, works) if config.record_private else bench.trainer
        return trainer.train(start, data, indices, round_, sgd, objective)

    def sums(start: Stack, objective: Objective) -> Precise:
        return _record_trainer(bench, works).sums(start, data, sgd, objective)

    key = opened_keys(bench, works[0].client, works[0].site)(round_)
    plans = [_plan(bench, work.client, work.site, work.inbox, round_) for work in works]
    local = Local(config, key, bench.project, bench.rotate, train, bench.trainer.model.device, sums)
    uploads = bench.algorithm.client.round(local, [plan.participant for plan in plans])
    return list(zip(plans, uploads, strict=True))


def _record_trainer(bench: Workbench, works: Sequence[_Work]) -> RecordTrainer:
    secrets = [work.site.entropy.noise(bench.run, _call_of(work).round, work.inbox.digest) for work in works]
    found = [protection(bench.config, len(work.site.data.y)) for work in works]
    noise = [RecordNoise(*own, secret.derive("records")) for own, secret in zip(found, secrets, strict=True)]
    return RecordTrainer(bench.trainer.model, noise, bench.microbatch)


def _round_of(bench: Workbench, client: Client, site: Site, inbox: Inbox) -> int | None:
    """The round that a packet asks for, if any."""
    if inbox.call is None:
        return None
    round_, count = inbox.call.round, inbox.call.weight
    bench = bench.at(round_)
    config = bench.config
    if round_ < client.round or (round_ == client.round and not client.reply) or client.round < round_ < client.begun:
        raise ProtocolError(f"client {client.index} is past round {round_}: replayed message refused")
    if round_ > config.rounds:  # privacy is accounted for these
        raise ProtocolError(f"round {round_} was asked for, but the run has {config.rounds}: refused")
    if client.round < round_ == client.begun and inbox.digest != client.asked:
        raise ProtocolError(f"client {client.index} began round {round_} for another packet: its noise is for that one")
    new = round_ > max(client.round, client.begun)
    if (config.private or config.record_private) and new and client.taken >= most_rounds(config):
        raise ProtocolError(
            f"client {client.index} has taken part in {client.taken} of {config.rounds} rounds, more than honest coins "
            "would choose it for: refused"
        )
    if config.secure_aggregation:
        call = Cohort.of(inbox.call.payload)
        quorum.require_cohort(config, call, client.index, weight_of(bench, site))
        if len(call.clients) != count:  # shares of noise depend on it
            raise ProtocolError(f"{count} participants announced, {len(call.clients)} listed")
        if round_ == client.round and call != client.call:
            raise ProtocolError(
                f"client {client.index} was sent another list of participants for round {round_}: refused"
            )
        for other in call.clients:
            if not client.mask_keys.size or not client.mask_keys[other].any():
                raise ProtocolError(f"client {client.index} was not sent the mask key of client {other}")
    return round_


def _plan(bench: Workbench, client: Client, site: Site, inbox: Inbox, round_: int) -> _Plan:
    key_of = opened_keys(bench, client, site)
    state = client.state or bench.algorithm.client.init(bench.config, bench.initial(key_of(0)))
    memory = bench.algorithm.server.memory
    past = past_rounds(bench.written, bench.run, inbox.messages, client.since, round_)
    keys = [key_of(step.round) for step in past]
    # Of one aggregate nothing before it is left; where clients replay, it makes no difference when they do.
    transcript = bench.settings if memory == "aggregate" else client.transcript or bench.settings
    for key, step in zip(keys, past, strict=True) if bench.config.secure_aggregation else ():
        transcript = extended(transcript, round_ if memory == "own" else 0, step.round, step.aggregate, key)
    history = [Step(key, _update_of(bench, step), step.round) for key, step in zip(keys, past, strict=True)]
    previous = past[-1].aggregate if past else client.last  # nothing to apply: all rounds since were given up
    return _Plan(Participant(state, history), past, previous, transcript)


def _update_of(bench: Workbench, past: Past) -> Vector | None:
    """What the algorithm made of a past round."""
    return None if past.aggregate is None else bench.at(past.round).pipeline.update_of(past.aggregate)


def _call_of(work: _Work) -> Message:
    """What asks a client for the round that it works on."""
    if work.inbox.call is None:
        raise ProtocolError(f"client {work.client.index} was asked for no round")
    return work.inbox.call


def _reply(bench: Workbench, work: _Work, plan: _Plan | None, upload: Upload | None) -> tuple[Client, bytes]:
    client, site, inbox, round_ = work[:4]
    replies = []
    for request in inbox.of(Kind.DEAL_REQUEST):
        client, deal = _dealt(bench.at(request.round), client, site, request.round)
        replies.append(deal)
    for request in inbox.of(Kind.RECOVER):
        client, correction = _recovered(bench.at(request.round), client, site, request)
        replies.append(correction)
    if round_ is None or upload is None or plan is None:
        return client, wire.encode(replies)
    bench = bench.at(round_)
    context = _at_client(bench, work, plan)
    sent, mark = bench.pipeline.sent(upload.vector, context), upload.fingerprint
    if context.cohort is not None:
        client = dataclasses.replace(client, call=context.cohort, transcript=plan.transcript)
        sent = _masker(bench, client, site, round_, context.cohort).masked(sent)
        if bench.algorithm.server.memory == "own":  # so that an honest server sums only those whose masks cancel
            mark = plan.transcript[:FINGERPRINT_BYTES]
    coding = bench.pipeline.upload_coding(bench.upload_size)
    payload = coding.encode(sent, codes.place_of(bench.run, round_, client.index))
    fields = (bench.context, round_, client.index, payload, weight_of(bench, site), mark, coding.width)
    reply = wire.encode([Message(Kind.UPLOAD, *fields), *replies])
    # Its own key is needed again in the next round; if this one is given up, that of the last one that was not.
    replays = bench.algorithm.server.memory == "history"
    oldest = covering(client.envelopes, round_ if replays else plan.past[-1].round) or 0
    moved = dataclasses.replace(
        client,
        round=round_,
        since=round_,
        state=upload.state,
        envelopes={r: e for r, e in client.envelopes.items() if r == 0 or r >= oldest},  # keys mix in the set-up's
        last=plan.previous if replays else None,
        left_out=(),
        reply=reply,
    )
    return moved, reply


def _at_client(bench: Workbench, work: _Work, plan: _Plan) -> AtClient:
    """What the mechanisms of a round need of a client."""
    client, site, inbox = work[:3]
    asked = _call_of(work)
    # Made where a mechanism draws: a packet may be a model of 45 MB, and its hash takes time.
    noise = functools.cache(lambda: site.entropy.noise(bench.run, asked.round, inbox.digest))
    warn = functools.partial(_log.warning, "client %d, round %d: %s", client.index, asked.round)
    cohort = Cohort.of(asked.payload) if bench.config.secure_aggregation else None
    own = (own_normals(noise), own_words(noise))
    return AtClient(plan.previous, asked.weight, *own, warn, cohort, weight_of(bench, site))


def _recovered(bench: Workbench, client: Client, site: Site, request: Message) -> tuple[Client, Message]:
    """A client's help in taking off the masks of clients left out of its last round; for one set of them only."""
    # After it was told to rebuild its state it has not the transcript any more that its masks came from.
    if client.call is None or request.round == 0 or not request.round == client.round == client.since:
        raise ProtocolError(f"client {client.index} has no masked upload in round {request.round} to be recovered")
    left_out = secure_aggregation.clients_of(request.payload)
    quorum.require_left_out(bench.config, client.call, left_out, client.index)
    if client.left_out not in ((), left_out):
        raise ProtocolError(f"client {client.index} helped in another recovery of round {request.round}: refused")
    masker = _masker(bench, client, site, request.round, client.call)
    coding = bench.pipeline.upload_coding(bench.upload_size)
    words = coding.encode(masker.correction(left_out, bench.upload_size), b"")
    correction = Message(Kind.CORRECTION, bench.context, request.round, client.index, words, width=coding.width)
    return dataclasses.replace(client, left_out=left_out), correction


def _masker(bench: Workbench, client: Client, site: Site, round_: int, call: Cohort) -> Masker:
    key, own = opened_keys(bench, client, site)(round_), _mask_key(site, client.index)
    if client.mask_keys[client.index].tobytes() != own.public:
        raise ProtocolError(f"the others have another mask key of client {client.index} than it has: sit this run out")
    place = (bench.roster.digest, client.index, bench.run, round_)
    return Masker(own, client.mask_keys, *place, call, client.transcript, key)


def finished(bench: Workbench, client: Client, site: Site, packet: bytes) -> ClientState:
    """The state that a client ends with, if `packet` is the server's last; the client itself stays as it is.

    Raises:
        ProtocolError: the packet is not usable; also if a key in it does not open.
    """
    inbox = read_packet(bench, packet)
    client, complaint = noted(bench, client, site, inbox)
    if complaint:
        raise ProtocolError(f"client {client.index} cannot open the key of round {complaint.round}: it has no model")
    end = inbox.of(Kind.FINISH)
    if not end:
        raise ProtocolError(f"client {client.index} was sent a last packet that announces no end: refused")
    last = end[-1].round
    bench = bench.at(last)
    if last > bench.config.rounds:  # before a history of so many rounds is looked for
        raise ProtocolError(f"the end of round {last} was announced, but the run has {bench.config.rounds}: refused")
    plan = _plan(bench, client, site, inbox, last + 1)
    local = Local(bench.config, None, bench.project, bench.rotate, _no_training)
    told = plan.past[-1].round if plan.past else last  # the round of the aggregate, which may be an earlier one
    return bench.at(told).algorithm.client.finish(local, plan.participant)


def _no_training(_start: Stack, _objective: Objective) -> Stack:
    raise ProtocolError("there is nothing to train after the last round")


def _dealt(bench: Workbench, client: Client, site: Site, round_: int) -> tuple[Client, Message]:
    """Draw the secret of an epoch that begins with a round, seal it to everyone in the roster, and sign; once."""
    if not bench.algorithm.server.round_keys or round_ > bench.config.rounds or round_ <= client.dealt:
        raise ProtocolError(f"client {client.index} deals no key for round {round_}: it has dealt up to {client.dealt}")
    secret = site.entropy.secret("epoch", round_)
    place = place_of(bench, round_, client.index, client.index)
    envelopes = seal_to_all(secret, site.identity, bench.roster.keys, place)
    deal = Message(Kind.DEAL, bench.context, round_, client.index, wire.raw(envelopes))
    return dataclasses.replace(client, dealt=round_), deal
