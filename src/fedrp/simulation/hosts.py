"""The clients of the protocol in a simulation: packets in, packets out. Their states never leave their process."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedrp.crypto.roster import Roster
from fedrp.protocol.client import finished, hello, respond
from fedrp.protocol.client_state import Client, make_workbench
from fedrp.rng import RunSeed
from fedrp.simulation.backend import Backend, Host, HostSetup
from fedrp.simulation.identities import simulated_site
from fedrp.storage.client_state import packed_clients, read_clients
from fedrp.types import Packets, Vector


class ClientHost(Host[bytes]):
    """Clients of the protocol, each with its state and its premises."""

    def __init__(self, roster: Roster, setup: HostSetup) -> None:
        config, seed = setup.config, RunSeed(setup.config.seed)
        memory = setup.speed.projection_memory * 2**20
        device = torch.device(setup.speed.device)
        self._bench = make_workbench(config, setup.run, roster, setup.factory, setup.loss, device, memory)
        super().__init__(setup, self._bench.trainer.model)
        self._states = {client: Client(client) for client in setup.data}
        self._sites = {client: simulated_site(seed, client, data) for client, data in setup.data.items()}

    def hello(self) -> Packets:
        """Every client's first packet."""
        return {client: hello(self._bench, client, site) for client, site in self._sites.items()}

    def respond(self, packets: Packets) -> Packets:
        """The clients' replies; their states move on."""
        replies: Packets = {}
        for members in self._setup.groups.values():
            chosen = [client for client in members if client in packets]
            if not chosen:
                continue
            states, sites = [self._states[c] for c in chosen], [self._sites[c] for c in chosen]
            answers = respond(self._bench, states, sites, [packets[c] for c in chosen])
            for client, (state, reply) in zip(chosen, answers, strict=True):
                self._states[client] = state
                replies[client] = reply
        return replies

    def final_model(self, client: int, end: bytes) -> Vector:
        """The model that a client would end with if this packet were its last."""
        return finished(self._bench, self._states[client], self._sites[client], end).model

    def packed(self, clients: Sequence[int]) -> bytes:
        """See `fedrp.storage.client_state`. Without replies: a simulation never asks for a round again."""
        return packed_clients(self._setup.run, [dataclasses.replace(self._states[c], reply=b"") for c in clients])

    def take_up(self, path: Path) -> None:
        """Go on with the states in a file that `packed` made."""
        self._states.update((client.index, client) for client in read_clients(path, self._setup.run))


# (sent to clients, their replies) of one exchange, as it happens. What it changes in the replies, the server gets.
Tap = Callable[[Packets, Packets], None]


class Hosts(Backend[bytes]):
    """All clients of the protocol. A tap sees what is carried."""

    def __init__(self, setup: HostSetup, roster: Roster, tap: Tap | None = None) -> None:
        self._tap = tap or (lambda _sent, _replies: None)
        super().__init__(setup, functools.partial(ClientHost, roster))

    def exchange(self, packets: Packets) -> Packets:
        """Deliver packets to clients and return their replies. Only bytes pass, in both directions."""
        require_bytes(packets)
        replies = {c: r for part in self._each("respond", packets) for c, r in part.items()}
        require_bytes(replies)
        self._tap(packets, replies)
        return dict(sorted(replies.items()))

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
