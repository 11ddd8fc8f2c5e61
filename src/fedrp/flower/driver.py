"""The server's loop over a Flower grid: who is there, who is asked, how long to wait, what is kept.

All that it decides is in `fedrp.protocol.server`; this file carries packets and is patient. One exchange per round in
the normal case. Nothing depends on clocks being right: waiting is measured with the monotonic clock of this machine.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from flwr.serverapp import Grid

from fedrp.algorithms.cohort import needed as quorum_of
from fedrp.crypto.sizes import DIGEST_BYTES, MASK_KEY_BYTES
from fedrp.errors import ProtocolError, QuorumError, WireError
from fedrp.flower.messages import FINISH, HELLO, ROUND, LostError, RefusedError, packet_of, question
from fedrp.flower.settings import Pacing
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.server import Coordinator, Reply
from fedrp.protocol.wire import Kind, Limit
from fedrp.storage.server import ServerFolder
from fedrp.types import Packets

Say = Callable[[str], None]

_HELLO_LIMIT = Limit(1, DIGEST_BYTES + MASK_KEY_BYTES)
_LOOK = 2.0  # seconds between two looks at who is online, at most
_LONGEST_PAUSE = 60.0  # seconds between two attempts at a round
_TRIES = 3  # at one client in one exchange, if the way to it fails


class Answers(NamedTuple):
    """What came back of an exchange."""

    replies: Packets
    refused: dict[int, str]  # client -> code
    absent: frozenset[int]  # clients that were not reached in time


@dataclass
class Carrier:
    """Finds the clients behind Flower's nodes and carries packets to them and back."""

    grid: Grid
    run: bytes
    projection: int  # its code on the wire
    clients: int
    pacing: Pacing
    say: Say
    homes: dict[int, int] = field(default_factory=dict)  # client -> node
    newcomers: Packets = field(default_factory=dict)  # client -> its HELLO, until it is welcomed
    bytes_up: int = 0
    bytes_down: int = 0
    _online: frozenset[int] = frozenset()
    _looked: float = -math.inf
    _greeted: dict[int, float] = field(default_factory=dict)  # node -> when
    _greetings: dict[str, int] = field(default_factory=dict)  # message -> node

    @property
    def _pause(self) -> float:
        return min(_LOOK, 8 * self.pacing.poll)

    @property
    def _introducing(self) -> bool:
        """Whether someone who is online was asked who it is and has not answered."""
        return bool(self._online & (set(self._greetings.values()) - set(self.homes.values())))

    def present(self) -> frozenset[int]:
        """Clients that are online now."""
        self._look()
        return frozenset(client for client, node in self.homes.items() if node in self._online)

    def look_again(self) -> None:
        """Do not rely on an earlier look at who is online."""
        self._looked = -math.inf

    def gather(self, needed: int, patience: float) -> None:
        """Wait until `needed` clients are online.

        Raises:
            QuorumError: they did not come in time.
        """
        end = time.monotonic() + patience
        told = -1
        while len(present := self.present()) < needed:
            if len(present) != told:
                told = len(present)
                self.say(f"waiting for sites: {told} of {needed} online {sorted(present)}")
            if time.monotonic() > end:
                raise QuorumError(f"{len(present)} sites online after {patience:g} s, {needed} needed: start more")
            self._pull([])
            time.sleep(self.pacing.poll)

    def exchange(self, kind: str, round_: int, packets: Packets, needed: int) -> Answers:
        """Carry packets to clients and wait for their replies, up to the round's deadline.

        Clients that are offline are waited for only while fewer than `needed` have replied; who comes back before the
        end is asked then. At the end of the run, those who are online but have yet to say who they are are waited for.
        """
        end = time.monotonic() + self.pacing.round_timeout
        replies: Packets = {}
        refused: dict[int, str] = {}
        waiting: dict[str, int] = {}
        tries = dict.fromkeys(packets, 0)
        again = dict.fromkeys(packets, -math.inf)  # not before
        unsent = set(packets)
        while True:
            reachable = {client for client in unsent & self.present() if tries[client] < _TRIES}
            for client in sorted(c for c in reachable if again[c] <= time.monotonic()):
                tries[client] += 1
                message_id = self._push(packets[client], self.homes[client], kind, round_)
                if message_id is None:
                    again[client] = time.monotonic() + self._pause
                    continue
                waiting[message_id] = client
                unsent.discard(client)
            for message_id, reply in self._pull(waiting):
                if message_id not in waiting:  # a reply to nothing that was asked
                    continue
                client = waiting.pop(message_id)
                if isinstance(reply, bytes):
                    replies[client] = reply
                elif isinstance(reply, LostError):
                    again[client] = time.monotonic() + self._pause
                    unsent.add(client)
                else:
                    refused[client] = str(reply)
            reachable = {client for client in unsent & self.present() if tries[client] < _TRIES}
            enough = len(replies) >= needed and not (kind == FINISH and self._introducing)
            done = not waiting and not reachable and (enough or not unsent)
            if done or time.monotonic() > end:
                return Answers(replies, refused, frozenset(packets) - set(replies) - set(refused))
            time.sleep(self.pacing.poll)

    def dismiss(self, client: int, why: object) -> None:
        """Forget a client that cannot take part as it is; it is asked who it is again a little later."""
        self._turn_away(self.homes.pop(client), f"cannot take part: {why}")

    def _look(self) -> None:
        """Notice who has come and gone, now and then; greet newcomers."""
        now = time.monotonic()
        if now - self._looked < self._pause:
            return
        self._looked = now
        self._online = frozenset(self.grid.get_node_ids())
        for node in self._online - set(self.homes.values()):
            if now - self._greeted.get(node, -math.inf) > self.pacing.round_timeout:
                self._greeted[node] = now
                message_id = self._push(b"", node, HELLO, 0)
                if message_id is not None:
                    self._greetings[message_id] = node

    def _push(self, packet: bytes, node: int, kind: str, round_: int) -> str | None:
        """Send a packet to a node; the message's id, or None if Flower did not take it."""
        pushed = list(self.grid.push_messages([question(packet, node, kind, self.run, round_)]))
        self.bytes_down += len(packet)
        return pushed[0] if pushed else None

    def _pull(self, waiting: Iterable[str]) -> list[tuple[str, bytes | RefusedError]]:
        """Replies to the given messages; newcomers' hellos are dealt with on the way."""
        asked = [*waiting, *self._greetings]
        found = []
        for message in self.grid.pull_messages(asked) if asked else []:
            message_id = message.metadata.reply_to_message_id
            try:
                reply: bytes | RefusedError = packet_of(message)
            except RefusedError as error:
                reply = error
            if isinstance(reply, bytes):
                self.bytes_up += len(reply)
            node = self._greetings.pop(message_id, None)
            if node is None:
                found.append((message_id, reply))
            elif isinstance(reply, bytes):
                self._meet(node, reply)
            else:
                self._turn_away(node, f"is not a site of this run: {reply}")
        return found

    def _meet(self, node: int, hello: bytes) -> None:
        """A node has said who it is."""
        try:
            client = self._introduced(hello)
        except (WireError, ProtocolError) as error:
            self._turn_away(node, f"is not a site of this run: {error}")
            return
        home = self.homes.get(client)
        if home is not None and home in self._online and home != node:
            # The other may be dead, which Flower notices after a while.
            self._turn_away(node, f"says that it is client {client}, who is online as node {home}: ignored for now")
            return
        self.homes[client], self.newcomers[client] = node, hello

    def _turn_away(self, node: int, why: str) -> None:
        """Leave a node out, and ask it again a little later."""
        self.say(f"node {node} {why}")
        self._greeted[node] = time.monotonic() - self.pacing.round_timeout + 5 * self._pause

    def _introduced(self, hello: bytes) -> int:
        """The client that a HELLO is from."""
        for message in wire.messages_of(wire.decode(hello, {Kind.HELLO: _HELLO_LIMIT}), Kind.HELLO):
            if (message.run, message.projection) == (self.run, self.projection) and message.sender < self.clients:
                return message.sender
        raise ProtocolError("its HELLO is of another run or projection, or names no client of this run")


def drive(grid: Grid, server: Coordinator, folder: ServerFolder, pacing: Pacing, say: Say) -> Coordinator:
    """Run what is left of a run, and return the server at its end. Everything that was completed is in the folder.

    Raises:
        QuorumError: too few sites for too long. Nothing is lost: drive again with the same folder.
    """
    carrier = Carrier(grid, server.run, server.tag, server.config.clients, pacing, say)
    folder.report({**_about(server), "finished": False})
    if server.round:
        say(f"going on after round {server.round}")
    if server.round < server.config.rounds:
        server = _assembled(server, carrier, pacing.min_clients or server.config.clients)
        server = _keys(server, carrier, folder)
    while server.round < server.config.rounds:
        server = _round(server, carrier, folder)
    _finish(server, carrier, folder)
    return server


def _assembled(server: Coordinator, carrier: Carrier, needed: int) -> Coordinator:
    """The server once enough clients are there who agree on who takes part."""
    while True:
        carrier.gather(needed, carrier.pacing.start_timeout)
        server = _welcomed(server, carrier)
        if len(carrier.present()) >= needed:
            return server


def _welcomed(server: Coordinator, carrier: Carrier) -> Coordinator:
    """The server with the clients that have said hello since. The most frequent roster is the run's."""
    hellos, carrier.newcomers = carrier.newcomers, {}
    read = server_side.read(server, hellos)
    rosters = {c: [m.payload.tobytes()[:DIGEST_BYTES] for m in reply.messages] for c, reply in read.items()}
    counts = Counter(digest for digests in rosters.values() for digest in digests)
    for client in sorted(hellos, key=lambda c: -sum(counts[digest] for digest in rosters[c])):
        try:
            server = server_side.welcome(server, {client: read[client]})
        except (WireError, ProtocolError) as error:
            carrier.dismiss(client, error)
    return server


def _round(server: Coordinator, carrier: Carrier, folder: ServerFolder) -> Coordinator:
    began, up, down = time.monotonic(), carrier.bytes_up, carrier.bytes_down
    replies: dict[int, Reply] = {}
    for attempt in range(1, carrier.pacing.attempts + 1):
        server = _welcomed(server, carrier)
        opened, packets = server_side.open_round(server, _coins(server))
        sampled = server.config.participation < 1 or server.config.secure_aggregation  # by coins, or by who is there
        if opened.participants != server.participants and sampled:
            folder.save(opened)  # who was chosen stays chosen, also after a crash
        server = opened
        waiting = server_side.outstanding(server, replies)
        asked = {client: packet for client, packet in packets.items() if client in waiting}
        needed = len(packets) - len(server.left_out) if server.left_out else quorum_of(server.config, len(packets))
        answers = carrier.exchange(ROUND, server.round + 1, asked, needed - len(packets) + len(asked))
        replies |= server_side.read(server, answers.replies)
        try:
            server, requests = server_side.recover(server, replies)
            if requests:  # clients help to leave out one set of the others only: it must not be forgotten
                folder.save(server)
            corrections = carrier.exchange(ROUND, server.round + 1, requests, len(requests)).replies
            server, report = server_side.close_round(server, replies, server_side.read(server, corrections))
            break
        except QuorumError as error:
            folder.log("round failed", {"round": server.round + 1, "attempt": attempt, "why": str(error)})
            carrier.say(f"{error} {_troubles(answers)}; attempt {attempt} of {carrier.pacing.attempts}")
            if asked and all(answers.refused.get(client) == ProtocolError.__name__ for client in asked):
                carrier.say(
                    f"all refuse round {server.round + 1} (ProtocolError): if this store was put back from a copy, "
                    "the sites are past it; put the latest back, or begin a new run with another store"
                )
            if attempt == carrier.pacing.attempts:
                raise
            time.sleep(min(_LONGEST_PAUSE, carrier.pacing.poll * 2**attempt))  # a full disk is not emptied at once
            server = _assembled(server, carrier, needed)
    folder.save(server)
    server = _keys(server, carrier, folder)
    if report.void:
        carrier.say(f"round {server.round} was given up: {report.void}")
    line = {
        "round": server.round,
        "void": report.void,
        "participants": list(report.participants),
        "refused": {**answers.refused, **report.refused},
        "absent": sorted(answers.absent),
        "bytes_up": carrier.bytes_up - up,
        "bytes_down": carrier.bytes_down - down,
        "seconds": round(time.monotonic() - began, 3),
    }
    folder.log("round", line)
    folder.report({**line, **_about(server), "finished": False})
    troubles = _troubles(answers._replace(refused={**answers.refused, **report.refused}))
    carrier.say(f"round {server.round}/{server.config.rounds}: {len(report.participants)} clients {troubles}")
    return server


def _coins(server: Coordinator) -> server_side.Coins:
    """What chooses participants, from the system's entropy: sampling protects nobody if its coins can be foreseen."""
    words = np.frombuffer(os.urandom(8 * server.config.clients), "<u8")
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, np.float64)


def _keys(server: Coordinator, carrier: Carrier, folder: ServerFolder) -> Coordinator:
    """Have clients deal the keys that are not there: the first ones, and those whose dealer dropped out.

    They are kept before anyone is sent one: a client takes only one key for a round.
    """
    for attempt in range(carrier.pacing.attempts * server.config.clients):
        packets = server_side.request_key(server, attempt)
        if not packets:
            return server
        carrier.gather(1, carrier.pacing.start_timeout)
        if set(packets) <= carrier.present():
            answers = carrier.exchange(ROUND, server.round, packets, 1)
            try:
                server = server_side.take_keys(server, server_side.read(server, answers.replies))
            except (WireError, ProtocolError) as error:
                carrier.say(f"the key of round {server.round + 1} was refused: {error}")
                continue
            folder.save(server)
    raise QuorumError(f"nobody dealt the key of round {server.round + 1}: run again with the same store")


def _finish(server: Coordinator, carrier: Carrier, folder: ServerFolder) -> None:
    """Give everyone what the last model needs. Who is away gets it when the app is run again with the same store."""
    everyone, served = tuple(range(server.config.clients)), folder.served()
    if lacking := tuple(client for client in everyone if client not in served):
        carrier.look_again()  # a round that was just closed may have lost someone, who would be waited for in vain
        carrier.gather(1, carrier.pacing.start_timeout)
        answers = carrier.exchange(FINISH, server.round, server_side.finish(server, lacking), 0 if served else 1)
        served |= answers.replies.keys()
        folder.keep_served(served)
    missing = sorted(set(everyone) - served)
    folder.log("finish", {"delivered": sorted(served), "missing": missing})
    folder.report({**_about(server), "finished": True, "missing": missing})
    if missing:
        carrier.say(f"without the last model: clients {missing}; run again with the same store to deliver it")
    carrier.say(f"finished after {server.round} rounds; {len(served)} sites have the model")


def _about(server: Coordinator) -> dict[str, object]:
    config = server.config
    return {
        "role": "server",
        "run": server.run.hex(),
        "algorithm": config.algorithm,
        "round": server.round,
        "rounds": config.rounds,
        "clients": config.clients,
    }


def _troubles(answers: Answers) -> str:
    parts = [f"client {client} refused ({code})" for client, code in sorted(answers.refused.items())]
    parts += [f"client {client} absent" for client in sorted(answers.absent)]
    return f"({'; '.join(parts)})" if parts else ""
