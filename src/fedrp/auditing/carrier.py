"""The audit's carrier: all clients in this process, none ever away."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedrp.mechanisms.exchanges import Answers, Exchange, Step, Take
from fedrp.protocol.client import hello, respond
from fedrp.protocol.client_state import Client, Site, Workbench
from fedrp.simulation.carrier import NearCarrier
from fedrp.types import Packets


@dataclass
class BenchCarrier(NearCarrier):
    """Carries packets to clients that stand side by side."""

    bench: Workbench
    sites: list[Site]
    states: list[Client]
    greeting: bool  # whether clients have yet to be asked for their hellos
    heard: Packets = field(default_factory=dict, init=False)  # the replies to the last round

    def hellos(self) -> Packets:
        """Every client's, once, where something depends on them."""
        greeted, self.greeting = self.greeting, False
        return {client: hello(self.bench, client, site) for client, site in enumerate(self.sites) if greeted}

    def exchange(self, packets: Mapping[int, bytes], exchange: Exchange, take: Take) -> Answers:
        """All replies; the clients' states move on."""
        asked = sorted(packets)
        states, sites = [self.states[c] for c in asked], [self.sites[c] for c in asked]
        answers = respond(self.bench, states, sites, [packets[c] for c in asked])
        replies = {}
        for client, (state, reply) in zip(asked, answers, strict=True):
            self.states[client], replies[client] = state, reply
            take(client, reply)
        if exchange.step is Step.TRAIN:
            self.heard = replies
        return Answers()
