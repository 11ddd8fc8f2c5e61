"""The simulator's carrier: hands packets to the clients, loses some where the config says so, and counts bytes.

And what every run has whose parties are all on this machine and end together: `NearCarrier`, `NoStore`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedrp.config.run import Resolved
from fedrp.errors import FedRPError, QuorumError
from fedrp.mechanisms.exchanges import Answers, Exchange, Missed, Step, Take
from fedrp.protocol.server_state import Server, hellos_matter
from fedrp.reporting.records import Traffic
from fedrp.rng import RunSeed
from fedrp.types import Packets

_log = logging.getLogger(__name__)

_ATTEMPTS = 5  # at a round that misses its quorum


class NoStore:
    """A store that keeps nothing: for runs whose parties end together, or are saved together after each round."""

    def save(self, server: Server) -> None:
        """Keep nothing."""

    def log(self, event: str, details: Mapping[str, object]) -> None:
        """Note nothing."""


@dataclass
class NearCarrier:
    """What is common to carriers whose clients are all on this machine, and always there."""

    clients: int
    attempts: int

    def gather(self, needed: int) -> None:
        """Nobody has to be waited for."""

    def present(self) -> frozenset[int]:
        """Everyone."""
        return frozenset(range(self.clients))

    def dismiss(self, client: int, why: FedRPError) -> None:  # noqa: ARG002 - the error names the client
        """Stop: nobody else will come in its place."""
        raise why

    def missed(self, missed: Missed) -> None:
        """Try again at once."""
        if missed.attempt == self.attempts:
            raise missed.error

    def say(self, text: str) -> None:
        """Log it."""
        _log.info("%s", text)


class Reached(Protocol):
    """Simulated clients, as far as packets reach them."""

    def waves(self, clients: Iterable[int]) -> Iterator[list[int]]:
        """Clients in parts that are asked together."""

    def exchange(self, packets: Packets) -> Packets:
        """Deliver packets and return the replies."""

    def hello(self) -> Packets:
        """Every client's first packet."""


@dataclass
class SimulatedCarrier(NearCarrier):
    """Carries packets to simulated clients."""

    population: Reached
    config: Resolved
    greeting: bool  # whether clients have yet to be asked for their hellos
    traffic: Traffic = field(default_factory=Traffic)  # since it was last taken

    @classmethod
    def of(cls, server: Server, population: Reached) -> "SimulatedCarrier":
        """The carrier of a run that begins or goes on with this server."""
        greeting = not server.roster and hellos_matter(server)
        return cls(server.config.clients, _ATTEMPTS, population, server.config, greeting)

    def hellos(self) -> Packets:
        """Every client's, once; nobody's where nothing depends on them, or an earlier sitting had them."""
        if not self.greeting:
            return {}
        self.greeting = False
        hellos = self.population.hello()
        self.traffic = self.traffic.plus(Traffic.of({}, hellos))
        return hellos

    def exchange(self, packets: Mapping[int, bytes], exchange: Exchange, take: Take) -> Answers:
        """The replies of all but those who drop out: half of them before they train, half after.

        They are handed over in the order of client numbers, so that results do not depend on who was faster. Packets
        and replies of a wave of clients are here at a time.
        """
        never, late = self._dropouts(packets, exchange) if exchange.step is Step.TRAIN else (set(), set())
        for wave in self.population.waves([client for client in packets if client not in never]):
            sent = {client: packets[client] for client in wave}
            replies = {client: reply for client, reply in self.population.exchange(sent).items() if client not in late}
            self.traffic = self.traffic.plus(Traffic.of(sent, replies))
            for client, reply in replies.items():
                take(client, reply)
        return Answers(absent=frozenset(never | late))

    def missed(self, missed: Missed) -> None:
        """Try again at once, a few times."""
        if missed.attempt == _ATTEMPTS:
            raise QuorumError(f"{missed.error}; asked {_ATTEMPTS} times: lower dropout or quorum") from None

    def take_traffic(self) -> Traffic:
        """What was carried since the last call; the set-up's is counted with the first round."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def _dropouts(self, packets: Mapping[int, bytes], exchange: Exchange) -> tuple[set[int], set[int]]:
        """Clients that are never reached, and clients whose reply is lost."""
        rng = RunSeed(self.config.seed).generator("dropout", exchange.round, exchange.attempt - 1)
        draws = dict(zip(packets, rng.random(len(packets)), strict=True))
        never = {client for client in packets if draws[client] < self.config.dropout / 2}
        return never, {client for client in packets if draws[client] < self.config.dropout} - never
