"""The audit's carrier: all clients in this process, none ever away."""

from dataclasses import dataclass

from fedrp.protocol.client import hello, respond
from fedrp.protocol.client_state import Client, Site, Workbench
from fedrp.protocol.rounds import Answers, Exchange, NearCarrier
from fedrp.types import Packets


@dataclass
class BenchCarrier(NearCarrier):
    """Carries packets to clients that stand side by side."""

    bench: Workbench
    sites: list[Site]
    states: list[Client]
    greeting: bool  # whether clients have yet to be asked for their hellos

    def hellos(self) -> Packets:
        """Every client's, once, where something depends on them."""
        greeted, self.greeting = self.greeting, False
        return {client: hello(self.bench, client, site) for client, site in enumerate(self.sites) if greeted}

    def exchange(self, packets: Packets, exchange: Exchange) -> Answers:  # noqa: ARG002 - nobody is ever away
        """All replies; the clients' states move on."""
        asked = sorted(packets)
        states, sites = [self.states[c] for c in asked], [self.sites[c] for c in asked]
        answers = respond(self.bench, states, sites, [packets[c] for c in asked])
        for client, (state, _) in zip(asked, answers, strict=True):
            self.states[client] = state
        return Answers({client: reply for client, (_, reply) in zip(asked, answers, strict=True)})
