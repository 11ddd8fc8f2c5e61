"""The simulator's carrier: hands packets to the clients, loses some where the config says so, and counts bytes."""

from dataclasses import dataclass, field

from fedrp.config.run import Resolved
from fedrp.errors import QuorumError
from fedrp.protocol.rounds import Answers, Exchange, Missed, NearCarrier, Step, hellos_matter
from fedrp.protocol.server_state import Server
from fedrp.rng import RunSeed
from fedrp.simulation.clients import Clients
from fedrp.simulation.result import Traffic
from fedrp.types import Packets

_ATTEMPTS = 5  # at a round that misses its quorum


@dataclass
class SimulatedCarrier(NearCarrier):
    """Carries packets to simulated clients."""

    population: Clients
    config: Resolved
    greeting: bool  # whether clients have yet to be asked for their hellos
    traffic: Traffic = field(default_factory=Traffic)  # since it was last taken

    @classmethod
    def of(cls, server: Server, population: Clients) -> "SimulatedCarrier":
        """The carrier of a run that begins or goes on with this server."""
        greeting = server.round == 0 and hellos_matter(server)
        return cls(server.config.clients, _ATTEMPTS, population, server.config, greeting)

    def hellos(self) -> Packets:
        """Every client's, once; nobody's where nothing depends on them, or an earlier sitting had them."""
        if not self.greeting:
            return {}
        self.greeting = False
        hellos = self.population.hello()
        self.traffic = self.traffic.plus(Traffic.of({}, hellos))
        return hellos

    def exchange(self, packets: Packets, exchange: Exchange) -> Answers:
        """The replies of all but those who drop out: half of them before they train, half after."""
        never, late = self._dropouts(packets, exchange) if exchange.step is Step.TRAIN else (set(), set())
        sent = {client: packet for client, packet in packets.items() if client not in never}
        replies = {client: reply for client, reply in self.population.exchange(sent).items() if client not in late}
        self.traffic = self.traffic.plus(Traffic.of(sent, replies))
        return Answers(replies, absent=frozenset(never | late))

    def missed(self, missed: Missed) -> None:
        """Try again at once, a few times."""
        if missed.attempt == _ATTEMPTS:
            raise QuorumError(f"{missed.error}; asked {_ATTEMPTS} times: lower --dropout or --quorum") from None

    def take_traffic(self) -> Traffic:
        """What was carried since the last call; the set-up's is counted with the first round."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def _dropouts(self, packets: Packets, exchange: Exchange) -> tuple[set[int], set[int]]:
        """Clients that are never reached, and clients whose reply is lost."""
        rng = RunSeed(self.config.seed).generator("dropout", exchange.round, exchange.attempt - 1)
        draws = dict(zip(packets, rng.random(len(packets)), strict=True))
        never = {client for client in packets if draws[client] < self.config.dropout / 2}
        return never, {client for client in packets if draws[client] < self.config.dropout} - never
