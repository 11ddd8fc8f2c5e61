"""The clients of the protocol in a simulation: packets in, packets out. Their states never leave their worker."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fedrp.algorithms.client_side import ClientState
from fedrp.backends.states import StateStore, budget_of
from fedrp.backends.workers import Backend
from fedrp.crypto.roster import Roster
from fedrp.protocol.client import finished, hello, respond
from fedrp.protocol.client_state import Client, Site, make_workbench
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_site
from fedrp.simulation.population import Population, Shard, ShardSetup
from fedrp.storage.client_state import packed_clients, read_clients
from fedrp.types import Packets, Vector


class ClientShard(Shard[bytes]):
    """Clients of the protocol, each with its state and its premises."""

    def __init__(self, roster: Roster, setup: ShardSetup) -> None:
        config = setup.config
        model = (setup.factory, setup.loss, torch.device(setup.speed.device))
        memory, engine = setup.speed.projection_memory * 2**20, setup.speed.engine
        small = setup.speed.microbatch
        self._bench = make_workbench(config, setup.run, roster, *model, memory, engine, small)
        super().__init__(setup, self._bench.trainer.model)
        self._site = functools.cache(self._made_site)  # those who are never asked need none
        self._states = StateStore(
            make=Client,
            arrays=lambda client: [*(client.state or ()), client.last, client.mask_keys],
            pack=lambda client: packed_clients(setup.run, [client]),
            read=lambda path: read_clients(path, setup.run)[0],
            budget=budget_of(setup.speed),
        )
        self._replied: set[int] = set()  # whose states hold their reply

    def _made_site(self, client: int) -> Site:
        data = self._setup.data[client].on(self._model.device)  # there for the whole run
        return simulated_site(RunSeed(self._setup.config.seed), client, data)

    def hello(self) -> Packets:
        """Every client's first packet."""
        return {client: hello(self._bench, client, self._site(client)) for client in self._setup.data}

    def respond(self, packets: Packets) -> Packets:
        """The clients' replies; their states move on."""
        replies: Packets = {}
        for group, members in self._setup.groups.items():
            chosen = [client for client in members if client in packets]
            if not chosen:
                continue
            states, sites = [self._states[c] for c in chosen], [self._site(c) for c in chosen]
            answers = respond(self._bench, states, sites, [packets[c] for c in chosen])
            for client, (state, reply) in zip(chosen, answers, strict=True):
                self._states[client] = state
                replies[client] = reply
            self._changed.add(group)
            self._replied.update(chosen)
        return replies

    def adopt(self, models: Mapping[int, Vector]) -> None:
        """Take up models that clients have trained by themselves."""
        for client, model in models.items():
            self._states[client] = Client(client, state=ClientState(model))
        self._states.settle()

    def close_round(self) -> None:
        """Forget replies: nobody asks for them again. States that have not been needed for long go to disk."""
        for client in self._replied:
            self._states[client] = dataclasses.replace(self._states[client], reply=b"")
        self._replied.clear()
        self._states.settle()

    def close(self) -> None:
        """Remove what is on disk."""
        self._states.close()

    def final_model(self, client: int, end: bytes) -> Vector:
        """The model that a client would end with if this packet were its last."""
        return finished(self._bench, self._states[client], self._site(client), end).model

    def packed(self, clients: Sequence[int]) -> bytes:
        """See `fedrp.storage.client_state`."""
        return packed_clients(self._setup.run, [self._states[client] for client in clients])

    def take_up(self, path: Path) -> None:
        """Go on with the states in a file that `packed` made."""
        for client in read_clients(path, self._setup.run):
            self._states[client.index] = client
        self._states.settle()


# (sent to clients, their replies) of one exchange, as it happens. What it changes in the replies, the server gets.
Tap = Callable[[Packets, Packets], None]


class Clients(Population[bytes]):
    """All clients of the protocol. A tap sees what is carried."""

    def __init__(self, setup: ShardSetup, roster: Roster, backend: Backend, tap: Tap | None = None) -> None:
        self._tap = tap or (lambda _sent, _replies: None)
        super().__init__(setup, functools.partial(ClientShard, roster), backend)

    def exchange(self, packets: Packets) -> Packets:
        """Deliver packets to clients and return their replies. Only bytes pass, in both directions."""
        require_bytes(packets)
        replies = {c: r for part in self._each("respond", packets) for c, r in part.items()}
        require_bytes(replies)
        self._tap(packets, replies)
        return dict(sorted(replies.items()))

    def adopt(self, models: Mapping[int, Vector]) -> None:
        """Let clients go on with models that they have trained by themselves."""
        self._each("adopt", models)

    def hello(self) -> Packets:
        """Every client's first packet."""
        packets = {c: p for part in self._all("hello") for c, p in part.items()}
        require_bytes(packets)
        self._tap({}, packets)
        return packets


def require_bytes(packets: Packets) -> None:
    """The rule of the house: nothing but encoded bytes passes between the two sides."""
    for client, packet in packets.items():
        if type(packet) is not bytes:
            raise TypeError(f"client {client}: a {type(packet).__name__} tried to cross the wire, only bytes may")
