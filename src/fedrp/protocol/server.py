"""The server's side of the protocol: it relays envelopes that it cannot open and averages numbers it cannot read.

Explicit state (`Server`) and pure functions from packets to packets. It never holds a key, a model or a matrix:
nothing in this file imports what could make one.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedrp.compression.coding import place_of
from fedrp.crypto.epochs import Dealt, covering
from fedrp.crypto.sizes import DIGEST_BYTES, ENVELOPE_BYTES, MASK_KEY_BYTES, split
from fedrp.errors import DivergenceError, ProtocolError, QuorumError, WireError
from fedrp.means import divided, trimmed_mean
from fedrp.mechanisms import cohort, quorum
from fedrp.mechanisms.base import Numbers
from fedrp.mechanisms.cohort import Coins
from fedrp.mechanisms.delivery import masked_at_all
from fedrp.mechanisms.reachable import require_reachable
from fedrp.protocol import wire
from fedrp.protocol.news import packets_with_news
from fedrp.protocol.server_state import (
    MaskEntry,
    Replies,
    Reply,
    Server,
    cohort_of,
    deals_due,
    distrusted,
    message_of,
    next_dealer,
    only_message,
)
from fedrp.protocol.tally import Tally, complaints_of, is_lost, is_spoilt, received_of, rests_on, total_of
from fedrp.protocol.wire import EMPTY, SERVER, Kind, Payload
from fedrp.types import Packets, Words

_MOST_VOID = 3  # rounds in a row that have no outcome before the run is given up, complaints apart


class RoundReport(NamedTuple):
    """What the server can say of a round."""

    participants: tuple[int, ...]
    refused: Mapping[int, str]  # client -> why its reply was not used
    consensus_bound: float | None = None  # no two participants' models are further apart, see `ServerSide.certificate`
    void: str = ""  # why the round was given up, if it was


def welcome(server: Server, hellos: Replies) -> Server:
    """The server once clients have said hello, at any time and in any number: weights, mask keys, one roster for all.

    Raises:
        ProtocolError: a client has another roster than those before it, or another weight or mask key than it had.
    """
    roster, weights, mask_keys = server.roster, list(server.weights), dict(server.mask_keys)
    for client, reply in sorted(hellos.items()):
        message = only_message(reply, Kind.HELLO, client)
        payload = message.payload.tobytes()
        digest, signed = payload[:DIGEST_BYTES], payload[DIGEST_BYTES:]
        if roster and digest != roster:
            raise ProtocolError(f"client {client} has another roster than the others: compare 'fedrp roster show'")
        if client >= len(weights) or message.weight < 1:
            raise ProtocolError(f"client {client} is not one of {len(weights)}, or has no weight")
        if weights[client] not in (0, message.weight):  # uploads and masks of the open round were made with it
            raise ProtocolError(
                f"client {client} came back with weight {message.weight}, it had {weights[client]}: "
                "a run goes on with the data that it began with"
            )
        if masked_at_all(server.settings):
            if len(signed) != MASK_KEY_BYTES or mask_keys.get(client, MaskEntry(0, signed)).signed != signed:
                raise ProtocolError(f"client {client} came with no mask key or another one: it must sit this run out")
            # The cohort of a round that is open was chosen without it.
            first = server.round + (2 if server.participants else 1)
            if not server.settings.secure_aggregation:  # nobody needs it before the models are sent
                first = max(first, server.settings.rounds + 1)
            mask_keys.setdefault(client, MaskEntry(first, signed))
        roster, weights[client] = digest, message.weight
    return dataclasses.replace(server, roster=roster, weights=tuple(weights), mask_keys=mask_keys)


def take_keys(server: Server, replies: Replies) -> Server:
    """The server with the envelopes that dealers sent for rounds to come. A secret that was dealt is not replaced."""
    dealt = dict(server.dealt)
    for client, reply in replies.items():
        for message in wire.messages_of(reply.messages, Kind.DEAL):
            size = ENVELOPE_BYTES[server.config.sealing]
            envelopes = split(message.payload.tobytes(), size, server.config.clients, "envelopes")
            if message.round in deals_due(server, server.round + 1) and client not in distrusted(server):
                dealt.setdefault(message.round, Dealt(client, tuple(envelopes)))
    return dataclasses.replace(server, dealt=dealt)


def open_round(server: Server, coins: Coins) -> tuple[Server, Mapping[int, bytes]]:
    """Who takes part in the next round, and what each of them is sent; packets are made when they are asked for.

    `coins` are one number in [0, 1) per client, which must not depend on anything that was sent. They are not looked at
    for a round that was opened before: whoever was chosen stays chosen. So keep the returned server.

    Raises:
        QuorumError: too few clients can take part.
    """
    round_ = server.round + 1
    participants = server.participants or _chosen(server, coins)
    listed = cohort_of(server, participants).payload() if server.config.secure_aggregation else EMPTY
    call = dataclasses.replace(message_of(server, Kind.ROUND, round_, listed), weight=len(participants))
    dealer = next_dealer(server, participants, round_)
    also = {} if dealer is None else {dealer: message_of(server, Kind.DEAL_REQUEST, round_ + 1)}
    packets = packets_with_news(server, participants, round_, call, also)
    return dataclasses.replace(server, participants=participants), packets


def recover(server: Server, tally: Tally) -> tuple[Server, Packets]:
    """What must still be asked before a round with this tally can be closed: mostly nothing.

    Only where uploads are masked and some are missing, those whose uploads are summed must help; the tally takes their
    answers (`take_correction`). Keep the returned server: asked for once, the set of those left out stays.

    Raises:
        QuorumError: too few uploads. The round can be opened again, unless a recovery was begun.
    """
    if not server.config.secure_aggregation:
        return server, {}
    call = cohort_of(server, server.participants)
    received = received_of(server, tally)
    missing = [client for client in call.clients if client not in received.uploads]
    if not server.left_out and (not missing or is_lost(server, received) or is_spoilt(server, received)):
        return server, {}
    try:
        left_out = server.left_out or quorum.choose_left_out(server.config, call, missing, server.round + 1)
    except QuorumError as error:
        raise QuorumError(f"round {server.round + 1}: {error}{_reasons(received.refused)}") from None
    request = message_of(server, Kind.RECOVER, server.round + 1, np.array(left_out, np.uint32))
    helpers = [client for client in call.clients if client not in left_out and client not in tally.corrected]
    return dataclasses.replace(server, left_out=left_out), dict.fromkeys(helpers, wire.encode([request]))


def close_round(server: Server, tally: Tally) -> tuple[Server, RoundReport]:
    """Aggregate the uploads of the open round, from its tally, which stays as it is.

    A round can be given up (`RoundReport.void`): it counts, has no aggregate, and whatever it has cost in privacy is
    spent. That happens where uploads are too few only because clients' copies of the common model differ (they are told
    to rebuild them), where a client cannot use the round's key (another client deals anew), and where the sum
    of masked uploads is none of honest clients. (No client may send a second upload in one round: with the first one
    it would tell more than either.)

    Raises:
        QuorumError: too few of the participants sent a valid upload. The round can be opened again, for those who are
            `outstanding`.
        DivergenceError: the aggregate is not finite.
        ProtocolError: a copy differs although it was rebuilt, and without it the round is none; or too many rounds in
            a row were given up.
    """
    round_ = server.round + 1
    received = received_of(server, tally)
    uploads, refused, differing = received.uploads, received.refused, received.differing
    if came := [client for client in server.left_out if client in uploads]:
        why = "left out, because a sum with it would tell the upload of the one who is missing"
        uploads, refused = uploads - set(came), refused | dict.fromkeys(came, why)
    lost = not server.left_out and is_lost(server, received)
    complained = () if server.left_out else complaints_of(server, received)
    spoilt = not server.left_out and is_spoilt(server, received)
    needed = cohort.needed(server.config, len(server.participants))
    if len(uploads) < needed and not lost and not spoilt:
        raise QuorumError(f"round {round_}: {len(uploads)} valid uploads, {needed} needed{_reasons(refused)}")
    if lost and differing & server.differing:
        raise ProtocolError(
            f"round {round_}: the copy of client {min(differing & server.differing)} differs although it was rebuilt: "
            "begin again with projection='sign' if machines are unlike, or with a quorum that can do without it "
            "(what these rounds have cost in privacy is spent)"
        )
    outcome = _Outcome()
    if spoilt:
        reasons = (f"client {c.client} cannot use the key that client {c.dealer} dealt" for c in complained)
        outcome = _Outcome(void="; ".join(reasons))
    elif lost:
        outcome = _Outcome(void="too few copies of the common model agree")
    else:
        outcome = _aggregated(server, tally, uploads)
    if outcome.void and not spoilt and round_ - server.latest >= _MOST_VOID:
        raise ProtocolError(f"{_MOST_VOID} rounds in a row were given up, the last because {outcome.void}")
    useless = {c.round for c in complained if not rests_on(server, c.round)}
    aggregates = dict(server.aggregates)
    if outcome.aggregate is not None:
        aggregates[round_] = outcome.aggregate
    closed = dataclasses.replace(
        server,
        round=round_,
        participants=(),
        left_out=(),
        # Also who was left out of the sum has moved on.
        last_seen=tuple(round_ if client in received.uploads else last for client, last in enumerate(server.last_seen)),
        differing=server.differing - received.uploads | differing,
        aggregates=aggregates,
        complaints=(*server.complaints, *complained),
        dealt={r: d for r, d in server.dealt.items() if not spoilt or r not in useless},
    )
    if tally.dealer in received.uploads or tally.dealer in differing:  # also if it is not summed, it deals
        with contextlib.suppress(ProtocolError, WireError):  # no envelopes: `request_key` asks another client
            closed = take_keys(closed, {tally.dealer: Reply(tally.dealt)})
    counted = () if outcome.void else tuple(sorted(uploads))
    return _pruned(closed), RoundReport(counted, refused, outcome.consensus_bound, outcome.void)


class _Outcome(NamedTuple):
    aggregate: Payload | None = None  # as it is sent
    consensus_bound: float | None = None
    void: str = ""  # why there is no aggregate


def _aggregated(server: Server, tally: Tally, uploads: frozenset[int]) -> _Outcome:
    config, round_, pipeline, call, certified = server.config, server.round + 1, server.pipeline, None, None
    weight = float(sum(cohort_of(server, tuple(uploads)).weights))
    numbers: Numbers
    if config.secure_aggregation:
        call = cohort_of(server, server.participants)
        numbers = _unmasked(server, tally, uploads)
    else:
        each = [tally.whole[client] for client in sorted(tally.whole) if client in uploads]
        share, certificate = config.trimmed_share, server.algorithm.certificate(config)
        divisor = pipeline.divisor or weight
        numbers = trimmed_mean(each, share) if share else divided(total_of(server, tally, uploads), divisor)
        certified = certificate(each) if certificate else None
    past = [server.decoded(r, server.aggregates[r]) for r in sorted(server.aggregates, reverse=True)[:2]]
    try:
        aggregate = pipeline.aggregate(past, numbers, weight, call)
        if not np.isfinite(aggregate).all():  # stored, it would stop every later sitting too
            raise DivergenceError(f"round {round_}: the clients' numbers are too large to be averaged: lower lr")
        payload = server.aggregate_coding(round_).encode(aggregate, place_of(server.run, round_, SERVER))
        # Clients would refuse what is beyond.
        require_reachable(server.decoded(round_, payload), pipeline.reach(round_, aggregate.size), round_)
    except ProtocolError as error:
        return _Outcome(void=str(error))
    return _Outcome(payload, certified)


def _unmasked(server: Server, tally: Tally, uploads: frozenset[int]) -> Words:
    """The sum of masked uploads, of which no mask is left."""
    if len(uploads) + len(server.left_out) < len(server.participants):
        raise QuorumError(f"round {server.round + 1}: masked uploads are incomplete, ask `recover` how to go on")
    total = total_of(server, tally, uploads)
    if not server.left_out:
        return total
    if lacking := sorted(uploads - tally.corrected):
        why = tally.uncorrected.get(lacking[0], "no answer")
        raise QuorumError(
            f"round {server.round + 1}: client {lacking[0]} did not help to recover it ({why}): ask it again"
        )
    corrected: Words = total - tally.corrections
    return corrected


def _reasons(refused: Mapping[int, str]) -> str:
    return "".join(f"; client {client}: {why}" for client, why in refused.items())


def request_key(server: Server, attempt: int) -> Packets:
    """Ask a client for the secrets that the next round's key needs and that are not there; nothing if they are.

    At first that is the one of the set-up, later those whose dealer dropped out. Count `attempt` up from 0 until
    nothing is asked: each time it is the turn of the next client in the roster.
    """
    lacking = deals_due(server, server.round + 1)
    if not lacking:
        return {}
    first = 0 if server.round == 0 else server.round + 1
    requests = [message_of(server, Kind.DEAL_REQUEST, round_) for round_ in lacking]
    turns = [(first + turn) % server.config.clients for turn in range(server.config.clients)]
    dealers = [client for client in turns if client not in distrusted(server)]
    return {dealers[attempt % len(dealers)]: wire.encode(requests)}


def finish(server: Server, clients: tuple[int, ...]) -> Mapping[int, bytes]:
    """The last packets: what a client needs to end up with the consensus of all rounds so far."""
    done = message_of(server, Kind.FINISH, server.round)
    return packets_with_news(server, clients, server.round + 1, done, {})


def _chosen(server: Server, coins: Coins) -> tuple[int, ...]:
    """Who takes part: of those who can, the ones with the smallest coins, as many as are due."""
    config = server.config
    able = [client for client in np.argsort(coins).tolist() if _able(server, client)]
    count = cohort.due(config, coins[able])
    needed = cohort.needed(config, min(count, len(able)))
    if len(able) < needed:
        raise QuorumError(f"round {server.round + 1}: {len(able)} clients can take part, {needed} needed")
    return tuple(sorted(able[:count]))


def _able(server: Server, client: int) -> bool:
    """Whether a client can be summed with the others.

    Under masks its mask key must be known and, where clients keep state of their own, it must have taken part in every
    round.
    """
    if not server.config.secure_aggregation:
        return True
    if client not in server.mask_keys or server.mask_keys[client].known > server.round + 1:
        return False
    in_step = not server.aggregates or server.last_seen[client] == max(server.last_seen)
    return in_step or server.algorithm.memory != "own"


def _pruned(server: Server) -> Server:
    """Forget what no client can still need. Where missed rounds are replayed, all of them are kept."""
    if server.algorithm.memory == "history":
        return server
    oldest = covering(server.dealt, server.latest) or 0
    keys = {r: d for r, d in server.dealt.items() if r >= oldest or (r == 0 and min(server.last_seen) == 0)}
    needed = sorted(server.aggregates)[-2 if server.config.server_momentum else -1 :]
    return dataclasses.replace(server, aggregates={r: server.aggregates[r] for r in needed}, dealt=keys)
