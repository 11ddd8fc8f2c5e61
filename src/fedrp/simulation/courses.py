"""How the rounds of a simulation are done: by the protocol, server and clients being saved together, or each alone."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrp.backends.workers import Backend
from fedrp.mechanisms import cohort
from fedrp.mechanisms.cohort import Coins
from fedrp.mechanisms.delivery import averages
from fedrp.protocol import server as server_side
from fedrp.protocol.rounds import begin, rounds
from fedrp.protocol.server_state import Server, new_server
from fedrp.reporting.records import Delivery, RoundRecord, Traffic, Trained
from fedrp.rng import RunSeed
from fedrp.simulation.alone import LoneClients
from fedrp.simulation.carrier import NoStore, SimulatedCarrier
from fedrp.simulation.clients import Clients, Tap
from fedrp.simulation.identities import simulated_coins, simulated_roster
from fedrp.simulation.population import Population, ShardSetup
from fedrp.simulation.runfolder import Files, Progress, RunFolder
from fedrp.types import Packets

_log = logging.getLogger(__name__)

_PORTION = 250  # clients


@dataclass
class Federated:
    """A run of the protocol. Server and clients are saved together, after each round."""

    clients: Clients
    server: Server

    @classmethod
    def begun(cls, setup: ShardSetup, parameters: int, backend: Backend, tap: Tap | None) -> "Federated":
        """Clients and a server that have not met yet."""
        config = setup.config
        roster = simulated_roster(RunSeed(config.seed), config.clients)
        return cls(Clients(setup, roster, backend, tap), new_server(config, setup.run, parameters))

    @property
    def secret(self) -> bool:
        """Whether clients share secret matrices."""
        return self.server.algorithm.round_keys

    def rounds(self) -> Iterator[Trained]:
        """The rounds that are left."""
        if self.server.round < self.server.settings.rounds:
            yield from self._closed(self.server.settings.rounds)

    def deliver(self) -> Delivery | None:
        """Have all models averaged, if they are to be: one more round, which no checkpoint keeps.

        So a run can still be given more rounds, and one that was killed meanwhile does the same again.
        """
        settings = self.server.settings
        if not averages(settings):
            return None
        if self.server.round < settings.rounds:  # it was stopped: what is left of it counts as given up
            self.server = dataclasses.replace(self.server, round=settings.rounds)
        (last,) = self._closed(settings.rounds + 1)
        return Delivery(last.participants, last.traffic.plus(self.last_traffic()), last.seconds)

    def _closed(self, last: int) -> Iterator[Trained]:
        """The rounds that are left up to one."""
        carrier, store = SimulatedCarrier.of(self.server, self.clients), NoStore()
        self.server = begin(self.server, carrier, store, self.server.config.clients)
        for closed in rounds(self.server, carrier, store, seeded_coins):
            self.server, report = closed.server, closed.report
            self.clients.close_round()
            if report.void:
                _log.warning("round %d was given up: %s", self.server.round, report.void)
            count = len(report.participants)
            yield Trained(
                *(self.server.round, count, closed.cohort - count),
                *(carrier.take_traffic(), closed.seconds, report.consensus_bound),
            )
            if self.server.round == last:
                return

    def ends(self, clients: Sequence[int]) -> Packets:
        """What clients would be told if the run ended now."""
        return dict(server_side.finish(self.server, tuple(clients)))  # for workers, who get their parts of it

    def last_traffic(self) -> Traffic:
        """Of what all clients are told at the end."""
        total, clients = Traffic(), range(self.server.config.clients)
        for first in range(0, len(clients), _PORTION):  # all packets at once may be large
            total = total.plus(Traffic.of(self.ends(clients[first : first + _PORTION]), {}))
        return total

    def take_up(self, folder: RunFolder) -> Progress:
        """Go on after the last round that is in a folder."""
        progress = folder.load(self.clients)
        self.server = folder.load_server(self.server, progress.checkpoint)
        return progress

    def keep(self, folder: RunFolder, record: RoundRecord, seconds: float, files: Files) -> None:
        """Write a round into a folder, with files of the caller's."""
        folder.save(self.clients, record, seconds, files, self.server)


def seeded_coins(server: Server) -> Coins:
    """What chooses participants; here it must be the same in every run with this seed."""
    return simulated_coins(server.config, server.round + 1)


@dataclass
class Alone:
    """A run without a server; but for one exchange after its rounds, if models are averaged."""

    setup: ShardSetup
    lone: LoneClients
    backend: Backend
    tap: Tap | None = None  # on that exchange
    round: int = 0  # the last one that is done
    after: Federated | None = None  # who the clients are once they have begun to talk
    secret = False

    @property
    def clients(self) -> Population[Any]:
        """All of them."""
        return self.after.clients if self.after else self.lone

    def rounds(self) -> Iterator[Trained]:
        """The rounds that are left. Who takes part is drawn as it is with a server."""
        config = self.setup.config
        while self.round < config.rounds:
            began = time.monotonic()
            coins = simulated_coins(config, self.round + 1)
            chosen = np.argsort(coins)[: cohort.due(config, coins)].tolist()
            self.lone.train(chosen, self.round + 1)
            self.lone.close_round()
            self.round += 1
            yield Trained(self.round, len(chosen), 0, Traffic(), time.monotonic() - began)

    def deliver(self) -> Delivery | None:
        """Have all models averaged, if they are to be, by a server that has seen nothing of the rounds."""
        if not averages(self.setup.config):
            return None
        models = self.lone.final_models(self.ends(range(self.setup.config.clients)))
        self.after = Federated.begun(self.setup, models[0].size, self.backend, self.tap)
        self.after.clients.adopt(models)
        return self.after.deliver()

    def ends(self, clients: Sequence[int]) -> Mapping[int, Any]:
        """Nobody is told anything, unless models were averaged."""
        return self.after.ends(clients) if self.after else dict.fromkeys(clients)

    def last_traffic(self) -> Traffic:
        """None."""
        return Traffic()

    def take_up(self, folder: RunFolder) -> Progress:
        """Go on after the last round that is in a folder."""
        progress = folder.load(self.lone)
        self.round = len(progress.records)
        return progress

    def keep(self, folder: RunFolder, record: RoundRecord, seconds: float, files: Files) -> None:
        """Write a round into a folder, with files of the caller's."""
        folder.save(self.clients, record, seconds, files)
