"""Flower's carrier: which clients are there, how packets reach them, how long to wait.

Nothing depends on clocks being right: waiting is measured with the monotonic clock of this machine.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from fedrp.crypto.sizes import DIGEST_BYTES, MASK_KEY_BYTES
from fedrp.errors import FedRPError, ProtocolError, QuorumError, WireError
from fedrp.flower.messages import FINISH, HELLO, ROUND, LostError, RefusedError, packet_of, question, site_of
from fedrp.flower.settings import Pacing
from fedrp.mechanisms.exchanges import Answers, Exchange, Missed, Take
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind, Limit
from fedrp.types import Packets

Say = Callable[[str], None]

_HELLO_LIMITS = {Kind.HELLO: Limit(1, DIGEST_BYTES + MASK_KEY_BYTES)}
_LOOK = 2.0  # seconds between two looks at who is online, at most
_LONGEST_PAUSE = 60.0  # seconds between two attempts at a round
_TRIES = 3  # at one client in one exchange, if the way to it fails


@dataclass
class GridCarrier:
    """Finds the clients behind Flower's nodes and carries packets to them and back."""

    grid: Grid
    run: bytes
    context: bytes  # of its messages
    clients: int
    pacing: Pacing
    say: Say
    homes: dict[int, int] = field(default_factory=dict)  # client -> node
    note: Callable[[Mapping[str, object]], None] = lambda _changes: None  # for the status file
    _names: dict[int, str] = field(default_factory=dict)  # node -> what its site calls itself
    _turned_away: dict[str, str] = field(default_factory=dict)  # who -> why, until it takes part
    _newcomers: Packets = field(default_factory=dict)  # client -> its HELLO, until it is welcomed
    _bytes_up: int = 0
    _bytes_down: int = 0
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

    @property
    def attempts(self) -> int:
        """How often a round is tried, and how often each client is asked for a key."""
        return self.pacing.attempts

    def present(self) -> frozenset[int]:
        """Clients that are online now."""
        self._look()
        return frozenset(client for client, node in self.homes.items() if node in self._online)

    def look_again(self) -> None:
        """Do not rely on an earlier look at who is online."""
        self._looked = -math.inf

    def gather(self, needed: int) -> None:
        """Wait until `needed` clients are online.

        Raises:
            QuorumError: they did not come in time.
        """
        patience = self.pacing.start_timeout
        end = time.monotonic() + patience
        told = -1
        while len(present := self.present()) < needed:
            if len(present) != told:
                told = len(present)
                names = ", ".join(self.called(client) for client in sorted(present))
                self.say(f"waiting for sites: {told} of {needed} online{f' ({names})' if names else ''}")
            if time.monotonic() > end:
                why = "".join(f"; {who} {why}" for who, why in self._turned_away.items())
                raise QuorumError(f"{len(present)} sites online after {patience:g} s, {needed} needed: start more{why}")
            self._pull([])
            time.sleep(self.pacing.poll)

    def hellos(self) -> Packets:
        """The hellos that have come since the last call."""
        hellos, self._newcomers = self._newcomers, {}
        return hellos

    def exchange(self, packets: Mapping[int, bytes], exchange: Exchange, take: Take) -> Answers:
        """Carry packets of a round."""
        return self.carry(ROUND, exchange.round, packets, exchange.needed, take)

    def carry(self, kind: str, round_: int, packets: Mapping[int, bytes], needed: int, take: Take) -> Answers:
        """Carry packets to clients and hand over their replies as they come, up to the round's deadline.

        Clients that are offline are waited for only while fewer than `needed` have replied; who comes back before the
        end is asked then. At the end of the run, those who are online but have yet to say who they are are waited for.
        """
        end = time.monotonic() + self.pacing.round_timeout
        replied: set[int] = set()
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
            # Nothing that was not asked for. What comes together is taken in the order of clients.
            came = {waiting.pop(asked): reply for asked, reply in self._pull(waiting) if asked in waiting}
            for client, reply in sorted(came.items()):
                if isinstance(reply, bytes):
                    replied.add(client)
                    take(client, reply)
                elif isinstance(reply, LostError):
                    again[client] = time.monotonic() + self._pause
                    unsent.add(client)
                else:
                    refused[client] = str(reply)
            reachable = {client for client in unsent & self.present() if tries[client] < _TRIES}
            enough = len(replied) >= needed and not (kind == FINISH and self._introducing)
            done = not waiting and not reachable and (enough or not unsent)
            if done or time.monotonic() > end:
                return Answers(refused, frozenset(packets) - replied - set(refused))
            time.sleep(self.pacing.poll)

    def dismiss(self, client: int, why: FedRPError) -> None:
        """Forget a client that cannot take part as it is; it is asked who it is again a little later."""
        self._turn_away(self.homes.pop(client), f"cannot take part: {why}")

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that were carried since the last call, up and down."""
        taken = self._bytes_up, self._bytes_down
        self._bytes_up = self._bytes_down = 0
        return taken

    def missed(self, missed: Missed) -> None:
        """Tell what was wrong with an attempt at a round, and wait before the next one.

        Raises:
            QuorumError: it was the last.
        """
        refused, asked = missed.answers.refused, missed.asked
        self.say(f"{missed.error} {troubles(missed.answers, self.called)}; attempt {missed.attempt} of {self.attempts}")
        if asked and all(refused.get(client) == ProtocolError.__name__ for client in asked):
            self.say(
                f"all refuse round {missed.round} (ProtocolError): if this store was put back from a copy, "
                "the sites are past it; put the latest back, or begin a new run with another store"
            )
        if missed.attempt == self.attempts:
            raise missed.error
        time.sleep(min(_LONGEST_PAUSE, self.pacing.poll * 2**missed.attempt))  # a full disk is not emptied at once

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
        self._bytes_down += len(packet)
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
                self._bytes_up += len(reply)
            node = self._greetings.pop(message_id, None)
            if node is not None and (name := site_of(message)):
                self._names[node] = name
            if node is None:
                found.append((message_id, reply))
            elif isinstance(reply, bytes):
                self._meet(node, reply)
            else:
                self._turn_away(node, f"cannot take part: {reason(str(reply))}")
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
            other = self._node_called(home)
            self._turn_away(node, f"says that it is client {client}, who is online as {other}: ignored for now")
            return
        self.homes[client], self._newcomers[client] = node, hello
        if self._turned_away.pop(self._node_called(node), None):
            self.note({"turned_away": dict(self._turned_away)})

    def _turn_away(self, node: int, why: str) -> None:
        """Leave a node out, and ask it again a little later."""
        who = self._node_called(node)
        self.say(f"{who} {why}")
        self._turned_away[who] = why
        self.note({"turned_away": dict(self._turned_away)})
        self._greeted[node] = time.monotonic() - self.pacing.round_timeout + 5 * self._pause

    def _node_called(self, node: int) -> str:
        name = self._names.get(node)
        return f"site '{name}' (node {node})" if name else f"node {node}"

    def called(self, client: int) -> str:
        """A client, with the name that its site gave."""
        name = self._names.get(self.homes.get(client, -1))
        return f"client {client} ('{name}')" if name else f"client {client}"

    def names(self) -> dict[int, str]:
        """What the sites of clients call themselves."""
        return {client: self._names[node] for client, node in sorted(self.homes.items()) if node in self._names}

    def _introduced(self, hello: bytes) -> int:
        """The client that a HELLO is from."""
        for message in wire.messages_of(wire.decode(hello, _HELLO_LIMITS), Kind.HELLO):
            if message.context == self.context and message.sender < self.clients:
                return message.sender
        raise ProtocolError("its HELLO is of another run or projection, or names no client of this run")


def troubles(answers: Answers, called: Callable[[int], str]) -> str:
    """Who refused and who was absent, in brackets; nothing if nobody."""
    parts = [f"{called(client)} refused: {reason(code)}" for client, code in sorted(answers.refused.items())]
    parts += [f"{called(client)} absent" for client in sorted(answers.absent)]
    return f"({'; '.join(parts)})" if parts else ""


_REASONS = {
    "LoadError": "its `load` failed",
    "DataError": "its data cannot be used",
    "ConfigError": "its settings, or what it agreed to, are not those of this run",
    "SiteError": "its state folder cannot be used",
    "PrivacyError": "the run is beyond its budget",
    "Failure": "it failed",
}


def reason(code: str) -> str:
    """What a code of a site means; why it is so, only the site knows."""
    known = _REASONS.get(code)
    return f"{known} ({code}; there 'fedrp status' says why)" if known else code
