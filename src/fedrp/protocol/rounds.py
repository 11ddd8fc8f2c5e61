"""The round loop: open, exchange, recover, close, deal the next key. The only place that knows this order.

A `Carrier` brings packets to clients and a `Store` keeps the server's state before anything leaves that depends on it.
Whoever runs a federation gives the loop its own of both: the simulator, Flower's driver, the audit.
"""

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from fedrp.crypto.sizes import DIGEST_BYTES
from fedrp.errors import FedRPError, ProtocolError, QuorumError, WireError
from fedrp.mechanisms import cohort
from fedrp.mechanisms.cohort import Coins
from fedrp.mechanisms.exchanges import Answers, Exchange, Missed, Step, Take
from fedrp.protocol import server as server_side
from fedrp.protocol.server import RoundReport
from fedrp.protocol.server_state import Server, read
from fedrp.protocol.tally import Tally, outstanding, take_correction, take_upload
from fedrp.types import Packets, only

_log = logging.getLogger(__name__)

Toss = Callable[[Server], Coins]  # the coins that choose the cohort of the next round


class Carrier(Protocol):
    """Knows which clients are there, and brings packets to them and their replies back."""

    @property
    def attempts(self) -> int:
        """How often a round is tried, and how often each client is asked for a key."""

    def gather(self, needed: int) -> None:
        """Wait until `needed` clients are there.

        Raises:
            QuorumError: they did not come in time.
        """

    def present(self) -> frozenset[int]:
        """Clients that are there now."""

    def hellos(self) -> Packets:
        """The hellos that have come since the last call."""

    def dismiss(self, client: int, why: FedRPError) -> None:
        """A client said hello, and cannot take part as it is."""

    def exchange(self, packets: Mapping[int, bytes], exchange: Exchange, take: Take) -> Answers:
        """Bring packets to clients, and hand over their replies, as far as they come in time, one by one.

        A packet is made when it is looked up, so look it up when it leaves. A client's reply is handed over once.
        """

    def missed(self, missed: Missed) -> None:
        """An attempt at a round had too few uploads: tell, and wait before the next one if there is one.

        Raises:
            QuorumError: it was the last.
        """

    def say(self, text: str) -> None:
        """Tell whoever watches the run."""


class Store(Protocol):
    """Keeps the server's state. What must not be forgotten is saved before anything leaves that depends on it."""

    def save(self, server: Server) -> None:
        """Keep this state in place of the one before."""

    def log(self, event: str, details: Mapping[str, object]) -> None:
        """Note what happened."""


class ClosedRound(NamedTuple):
    """A round that is over, and what it took."""

    server: Server
    report: RoundReport
    cohort: int  # number of clients that were asked
    answers: Answers  # of the last attempt
    seconds: float

    @property
    def is_delivery(self) -> bool:
        """Whether it is the exchange of models after the last round."""
        return self.server.round > self.server.settings.rounds


def begin(server: Server, carrier: Carrier, store: Store, needed: int) -> Server:
    """The server once `needed` clients have said hello and the keys of the next round are there."""
    if server.round == server.config.rounds:
        return server
    return _with_keys(_assembled(server, carrier, needed), carrier, store)


def rounds(server: Server, carrier: Carrier, store: Store, toss: Toss) -> Iterator[ClosedRound]:
    """The rounds that are left, one after the other, for a server that `begin` returned.

    Where models are averaged at the end, that is one more round; `is_delivery` tells it from the others.

    Raises:
        QuorumError: too few clients for too long. What was saved can be gone on with.
    """
    while server.round < server.config.rounds:
        closed = _round(server, carrier, store, toss)
        server = closed.server
        yield closed


def _round(server: Server, carrier: Carrier, store: Store, toss: Toss) -> ClosedRound:
    began, round_ = time.monotonic(), server.round + 1
    tally: Tally | None = None
    for attempt in itertools.count(1):
        server = _welcomed(server, carrier)
        opened, packets = server_side.open_round(server, toss(server))
        sampled = server.config.participation < 1 or server.config.secure_aggregation  # by coins, or by who is there
        if opened.participants != server.participants and sampled:
            store.save(opened)  # who was chosen stays chosen, also after a crash
        server = opened
        tally = tally or Tally.of(server)  # what came at an earlier attempt stays
        asked = only(packets, outstanding(server, tally))
        needed = _needed(server)
        lacking = needed - len(packets) + len(asked)
        take = functools.partial(take_upload, server, tally)
        answers = carrier.exchange(asked, Exchange(Step.TRAIN, round_, attempt, lacking), take)
        try:
            server, requests = server_side.recover(server, tally)
            if requests:  # clients help to leave out one set of the others only: it must not be forgotten
                store.save(server)
                take = functools.partial(take_correction, server, tally)
                carrier.exchange(requests, Exchange(Step.RECOVER, round_, attempt, len(requests)), take)
            server, report = server_side.close_round(server, tally)
            break
        except QuorumError as error:
            store.log("round failed", {"round": round_, "attempt": attempt, "why": str(error)})
            carrier.missed(Missed(round_, attempt, frozenset(asked), answers, error))
            server = _assembled(server, carrier, needed)
    store.save(server)
    server = _with_keys(server, carrier, store)
    return ClosedRound(server, report, len(packets), answers, time.monotonic() - began)


def _needed(server: Server) -> int:
    """Uploads without which the open round is none; once a recovery has begun, all but those left out."""
    participants = len(server.participants)
    return participants - len(server.left_out) if server.left_out else cohort.needed(server.config, participants)


def _assembled(server: Server, carrier: Carrier, needed: int) -> Server:
    """The server once enough clients are there who agree on who takes part."""
    while True:
        carrier.gather(needed)
        server = _welcomed(server, carrier)
        if len(carrier.present()) >= needed:
            return server


def _welcomed(server: Server, carrier: Carrier) -> Server:
    """The server with the clients that have said hello since. The most frequent roster is the run's."""
    hellos = read(server, carrier.hellos())
    rosters = {c: [m.payload.tobytes()[:DIGEST_BYTES] for m in reply.messages] for c, reply in hellos.items()}
    counts = Counter(digest for digests in rosters.values() for digest in digests)
    for client in sorted(hellos, key=lambda c: -sum(counts[digest] for digest in rosters[c])):
        try:
            server = server_side.welcome(server, {client: hellos[client]})
        except (WireError, ProtocolError) as error:
            carrier.dismiss(client, error)
    return server


def _with_keys(server: Server, carrier: Carrier, store: Store) -> Server:
    """Have clients deal the secrets that are not there: the first one, and those whose dealer dropped out.

    They are kept before anyone is sent one: a client takes only one for a round.
    """
    for attempt in range(carrier.attempts * server.config.clients):
        packets = server_side.request_key(server, attempt)
        if not packets:
            return server
        carrier.gather(1)
        if not set(packets) <= carrier.present():
            continue
        try:
            replies: Packets = {}
            carrier.exchange(packets, Exchange(Step.DEAL, server.round, attempt + 1, 1), replies.__setitem__)
            server = server_side.take_keys(server, read(server, replies))
        except (WireError, ProtocolError) as error:
            carrier.say(f"the key of round {server.round + 1} was refused: {error}")
            continue
        store.save(server)
    if server_side.request_key(server, 0):
        raise QuorumError(f"nobody dealt the key of round {server.round + 1}: run again with the same store")
    return server
