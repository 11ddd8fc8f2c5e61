"""Where simulated clients live: in this process, or spread over worker processes.

A `ClientHost` keeps the state of its clients and answers packets with packets. `Hosts` are all of them, one here or
several in processes of their own, to whom pass packets, scores and file names, never a client's state.
"""

import dataclasses
import functools
import hashlib
import itertools
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as unpacked
from safetensors.torch import save as packed

from fedrp.algorithms.client_side import ClientState
from fedrp.config.run import Resolved
from fedrp.config.speed import Speed
from fedrp.crypto.roster import Roster
from fedrp.files import SHARED, write_content, writing
from fedrp.learning.evaluate import Correct, Score, score
from fedrp.learning.layout import ModelFactory, State
from fedrp.learning.objective import Examples, Loss
from fedrp.projection import kernels
from fedrp.protocol.aggregate import weighted_sum
from fedrp.protocol.client import finished, hello, respond
from fedrp.protocol.client_state import Client, make_workbench
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_site
from fedrp.simulation.processes import Worker
from fedrp.storage.client_state import packed_clients, read_clients
from fedrp.types import Packets, Vector

_WAVE_CLIENTS = 64  # per worker, whose packets and replies are in memory at a time; see `Hosts.waves`
_GROUP_CLIENTS = 25  # enough that applying a matrix to them is limited by arithmetic, not by memory
_GROUP_FLOATS = 2**24  # and their weights take at most 64 MB


class HostSetup(NamedTuple):
    """All that a host is built from; sent once to a worker."""

    config: Resolved
    speed: Speed
    run: bytes
    roster: Roster
    factory: ModelFactory
    loss: Loss
    correct: Correct
    groups: dict[int, list[int]]  # group number -> its clients
    data: dict[int, Examples]
    test: Examples


class GroupSum(NamedTuple):
    """The sum of the models of a group's clients, for the average of all models."""

    group: int
    total: Vector


def grouped(clients: int, parameters: int) -> dict[int, list[int]]:
    """Clients that are trained together. Never depends on the number of workers: results must not, either."""
    count = 2
    while count < clients and (clients > count * _GROUP_CLIENTS or clients * parameters > count * _GROUP_FLOATS):
        count *= 2
    bounds = [clients * group // count for group in range(count + 1)]
    pairs = [(first, last) for first, last in itertools.pairwise(bounds) if last > first]
    return {group: list(range(first, last)) for group, (first, last) in enumerate(pairs)}


class ClientHost:
    """The clients of one process and their states."""

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        config, seed = setup.config, RunSeed(setup.config.seed)
        memory = setup.speed.projection_memory * 2**20
        device = torch.device(setup.speed.device)
        self._bench = make_workbench(config, setup.run, setup.roster, setup.factory, setup.loss, device, memory)
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

    def score(self, packets: Packets) -> dict[int, Score]:
        """Score the models that clients would end with if the run finished now, by these packets."""
        local, setup = self._bench.trainer.model, self._setup
        return {c: score(local, self._final(c, p).model, setup.test, setup.correct) for c, p in packets.items()}

    def score_model(self, model: Vector) -> Score:
        """Score a given model."""
        return score(self._bench.trainer.model, model, self._setup.test, self._setup.correct)

    def state(self, model: Vector) -> bytes:
        """All of a given model, see `LocalModel.state`; packed, as a tensor in a pipe would take a file descriptor."""
        return packed(self._bench.trainer.model.state(model))

    def sums(self, packets: Packets) -> list[GroupSum]:
        """Sums of final models, per group."""
        result = []
        for group, members in self._setup.groups.items():
            models = (self._final(client, packets[client]).model for client in members)
            result.append(GroupSum(group, functools.reduce(np.add, models)))
        return result

    def final_models(self, packets: Packets) -> dict[int, Vector]:
        """The clients' final models. For the simulation's result; a deployment has no such call."""
        return {client: self._final(client, packet).model for client, packet in packets.items()}

    def _final(self, client: int, packet: bytes) -> ClientState:
        return finished(self._bench, self._states[client], self._sites[client], packet)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the states of all clients, see `fedrp.storage.client_state`; the caller syncs the folder.

        Returns:
            The SHA-256 sums of the files, by name.
        """
        sums = {}
        for group, members in self._setup.groups.items():
            path = _group_file(folder, group)
            # Without replies: a simulation goes on after a round, and never asks for one again.
            data = packed_clients(self._setup.run, [dataclasses.replace(self._states[c], reply=b"") for c in members])
            with writing(path):  # here and not at the caller, who may be in another process
                write_content(path, data, SHARED)
            sums[path.name] = hashlib.sha256(data).hexdigest()
        return sums

    def load(self, folder: Path) -> None:
        """Take up states written by `save`."""
        for group in self._setup.groups:
            self._states.update((c.index, c) for c in read_clients(_group_file(folder, group), self._setup.run))

    def peak_memory(self) -> float:
        """Largest resident size of this process so far, in MB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _group_file(folder: Path, group: int) -> Path:
    return folder / f"clients-{group:04d}.safetensors"


def set_threads(speed: Speed) -> None:
    """Let this process compute with as many threads as configured."""
    torch.set_num_threads(speed.threads)
    kernels.set_threads(speed.threads)


def hosted(setup: HostSetup) -> ClientHost:
    """A host that has its process for itself."""
    set_threads(setup.speed)
    return ClientHost(setup)


# (sent to clients, their replies) of one exchange, as it happens. What it changes in the replies, the server gets.
Tap = Callable[[Packets, Packets], None]


class Hosts:
    """All clients of a simulation, wherever they live. Calls go to all workers at once; a tap sees what is carried."""

    def __init__(self, setup: HostSetup, tap: Tap | None = None) -> None:
        self._tap = tap or (lambda _sent, _replies: None)
        self._groups = [members for _, members in sorted(setup.groups.items())]
        count = min(setup.speed.workers, len(setup.groups))
        self._owner: dict[int, int] = {}
        shares = []
        for worker in range(count):
            groups = {g: members for g, members in setup.groups.items() if g % count == worker}
            clients = [client for members in groups.values() for client in members]
            self._owner.update(dict.fromkeys(clients, worker))
            shares.append(setup._replace(groups=groups, data={c: setup.data[c] for c in clients}))
        self._local = ClientHost(setup) if count == 1 else None
        self._workers: list[Worker] = []
        try:
            for share in shares if count > 1 else ():
                self._workers.append(Worker(functools.partial(hosted, share)))
        except BaseException:  # also Ctrl-C: those that have started must not stay
            self.stop()
            raise

    def waves(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients in parts that are asked together: whole groups, in order, and enough to keep all workers busy."""
        wave: list[int] = []
        chosen = set(clients)
        for members in self._groups:
            wave += [client for client in members if client in chosen]
            if len(wave) >= _WAVE_CLIENTS * max(1, len(self._workers)):
                yield wave
                wave = []
        if wave:
            yield wave

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

    def score(self, packets: Packets) -> dict[int, Score]:
        """Scores of clients' models, see `ClientHost.score`."""
        scores = {c: s for part in self._each("score", packets) for c, s in part.items()}
        return dict(sorted(scores.items()))  # a mean over them must not depend on who answered first

    def average(self, packets: Packets) -> Vector:
        """The average of all clients' final models; the same whatever the number of workers."""
        parts = [part for parts in self._each("sums", packets) for part in parts]
        sums = sorted(parts, key=lambda part: part.group)
        return weighted_sum([part.total for part in sums], [1 / len(packets)] * len(sums))

    def score_model(self, model: Vector) -> Score:
        """Score a given model."""
        return self._any("score_model", model)  # type: ignore[no-any-return]

    def state(self, model: Vector) -> State:
        """All of a given model, also what is not trained: the same in every process, as the run seed gives it."""
        return unpacked(self._any("state", model))

    def final_models(self, packets: Packets) -> dict[int, Vector]:
        """Clients' final models."""
        return {c: m for part in self._each("final_models", packets) for c, m in part.items()}

    def save(self, folder: Path) -> dict[str, str]:
        """Write all clients' states into a folder; returns the SHA-256 sums of the files, by name."""
        return {name: digest for part in self._all("save", folder) for name, digest in part.items()}

    def load(self, folder: Path) -> None:
        """Read all clients' states from a folder."""
        self._all("load", folder)

    def peak_memory(self) -> float:
        """Sum of the largest resident sizes of all processes of this run, in MB."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return own + sum(self._all("peak_memory")) if self._workers else own

    def stop(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.stop()

    def _any(self, method: str, *arguments: object) -> Any:
        if self._local:
            return getattr(self._local, method)(*arguments)
        self._workers[0].send(method, *arguments)
        return self._workers[0].receive()

    def _all(self, method: str, *arguments: object) -> list[Any]:
        if self._local:
            return [getattr(self._local, method)(*arguments)]
        for worker in self._workers:
            worker.send(method, *arguments)
        return [worker.receive() for worker in self._workers]

    def _each(self, method: str, packets: Packets) -> list[Any]:
        if self._local:
            return [getattr(self._local, method)(packets)]
        for number, worker in enumerate(self._workers):
            worker.send(method, {c: p for c, p in packets.items() if self._owner[c] == number})
        return [worker.receive() for worker in self._workers]


def require_bytes(packets: Packets) -> None:
    """The rule of the house: nothing but encoded bytes passes between the two sides."""
    for client, packet in packets.items():
        if type(packet) is not bytes:
            raise TypeError(f"client {client}: a {type(packet).__name__} tried to cross the wire, only bytes may")
