"""All clients of a simulation, in shards: what one worker holds is a `Shard`, all of them are a `Population`.

What clients do is for those who derive from the two: `clients` for the protocol, `alone` for every client by itself.
"""

import functools
import hashlib
import itertools
import logging
import os
import platform
import resource
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load as unpacked
from safetensors.torch import save as packed

from fedrp.algorithms.registration import Registered, registered, take_over
from fedrp.backends.workers import Backend, UnsentError
from fedrp.config.run import Resolved
from fedrp.config.speed import Speed
from fedrp.files import SHARED, write_content, writing
from fedrp.learning.evaluate import Metrics, Score, score
from fedrp.learning.holdings import Holdings
from fedrp.learning.layout import ModelFactory, State
from fedrp.learning.objective import Examples, Loss
from fedrp.learning.trainer import LocalModel
from fedrp.means import weighted_sum
from fedrp.projection import kernels
from fedrp.types import Vector

_log = logging.getLogger(__name__)

_WAVE_CLIENTS = 64  # per worker, whose packets and replies are in memory at a time, see `Population.waves`
_GROUP_CLIENTS = 25  # enough that applying a matrix to them is limited by arithmetic, not by memory
_GROUP_FLOATS = 2**24  # and their weights take at most 64 MB

End = TypeVar("End")  # what a client must be told to end with its final model: a packet, or None where nobody is told


class ShardSetup(NamedTuple):
    """All that a shard is built from; sent once to its worker. Before it is divided, it is of all clients."""

    config: Resolved
    speed: Speed  # with the engine that was chosen: the same for all workers
    run: bytes
    factory: ModelFactory
    loss: Loss
    metrics: Metrics
    groups: dict[int, list[int]]  # group number -> its clients
    data: Mapping[int, Examples]
    test: Examples


class GroupSum(NamedTuple):
    """The sum of the models of a group's clients, for the average of all models."""

    group: int
    total: Vector


class Peak(NamedTuple):
    """Largest resident size of a process so far."""

    process: tuple[str, int]  # machine and process id
    megabytes: float


def grouped(clients: int, parameters: int) -> dict[int, list[int]]:
    """Clients that are trained together. Never depends on the number of workers: results must not, either."""
    count = 2
    while count < clients and (clients > count * _GROUP_CLIENTS or clients * parameters > count * _GROUP_FLOATS):
        count *= 2
    bounds = [clients * group // count for group in range(count + 1)]
    pairs = [(first, last) for first, last in itertools.pairwise(bounds) if last > first]
    return {group: list(range(first, last)) for group, (first, last) in enumerate(pairs)}


# --- of one worker ---------------------------------------------------------------------------------------------------


class Shard(ABC, Generic[End]):
    """The clients of one worker: their final models, and files of their states."""

    def __init__(self, setup: ShardSetup, model: LocalModel) -> None:
        self._setup, self._model = setup, model
        self._test = setup.test.on(model.device)
        self._changed = set(setup.groups)  # whose states `changed` has not told of

    @abstractmethod
    def final_model(self, client: int, end: End) -> Vector:
        """The model that a client would end with if the run finished now."""

    @abstractmethod
    def packed(self, clients: Sequence[int]) -> bytes:
        """The states of clients as a file."""

    @abstractmethod
    def take_up(self, path: Path) -> None:
        """Go on with the states in a file that `packed` made."""

    @abstractmethod
    def close_round(self) -> None:
        """Let go of what only the round that is over needed."""

    @abstractmethod
    def close(self) -> None:
        """Remove what is on disk."""

    def score(self, ends: Mapping[int, End]) -> dict[int, Score]:
        """Score the clients' final models."""
        return {client: self.score_model(self.final_model(client, end)) for client, end in ends.items()}

    def score_model(self, model: Vector) -> Score:
        """Score a given model."""
        return score(self._model, model, self._test, self._setup.metrics)

    def state(self, model: Vector) -> bytes:
        """All of a given model, see `LocalModel.state`; packed, as a tensor in a pipe would take a file descriptor."""
        return packed(self._model.state(model))

    def sums(self, ends: Mapping[int, End]) -> list[GroupSum]:
        """Sums of final models, per group."""
        result = []
        for group, members in self._setup.groups.items():
            models = (self.final_model(client, ends[client]) for client in members)
            result.append(GroupSum(group, functools.reduce(np.add, models)))
        return result

    def final_models(self, ends: Mapping[int, End]) -> dict[int, Vector]:
        """The clients' final models. For the simulation's result; a deployment has no such call."""
        return {client: self.final_model(client, end) for client, end in ends.items()}

    def save(self, folder: Path) -> dict[str, str]:
        """Write the states of all clients, a file per group, see `write_group`."""
        return dict(write_group(folder, group, self.packed(members)) for group, members in self._setup.groups.items())

    def load(self, folder: Path) -> None:
        """Take up states written by `save`."""
        for group in self._setup.groups:
            self.take_up(group_file(folder, group))

    def changed(self) -> dict[int, bytes]:
        """The states of all clients in groups where a state changed since the last call, packed, by group."""
        found = {group: self.packed(self._setup.groups[group]) for group in sorted(self._changed)}
        self._changed.clear()
        return found

    def restore(self, groups: Mapping[int, bytes]) -> None:
        """Take up states that `changed` packed."""
        with tempfile.TemporaryDirectory(prefix="fedrp-") as folder:
            for group, data in groups.items():
                path = group_file(Path(folder), group)
                path.write_bytes(data)
                self.take_up(path)

    def peak_memory(self) -> Peak:
        """Of this process."""
        return peak_memory()


def group_file(folder: Path, group: int) -> Path:
    """Where the states of a group are."""
    return folder / f"clients-{group:04d}.safetensors"


def write_group(folder: Path, group: int, data: bytes) -> tuple[str, str]:
    """Write the states of a group; the caller syncs the folder. Returns the file's name and SHA-256 sum."""
    path = group_file(folder, group)
    with writing(path):  # here and not at the caller, who may be in another process
        write_content(path, data, SHARED)
    return path.name, hashlib.sha256(data).hexdigest()


def peak_memory() -> Peak:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Peak((platform.node(), os.getpid()), used)


def set_threads(speed: Speed) -> None:
    """Let this process compute with as many threads as configured."""
    torch.set_num_threads(speed.threads)
    kernels.set_threads(speed.threads)


MakeShard = Callable[[ShardSetup], Shard[End]]


def made(make: MakeShard[End], added: Sequence[Registered], setup: ShardSetup) -> Shard[End]:
    """A shard in a process that computes with the configured number of threads, and knows what was registered."""
    set_threads(setup.speed)
    take_over(added)
    return make(setup)


# --- of all workers --------------------------------------------------------------------------------------------------


class Population(Generic[End]):
    """All clients of a simulation, wherever they are. Calls go to all workers at once."""

    def __init__(self, setup: ShardSetup, make: MakeShard[End], backend: Backend) -> None:
        self._in_order = [members for _, members in sorted(setup.groups.items())]
        try:
            self._begin(setup, make, backend, min(setup.speed.workers or 1, len(setup.groups)))
        except UnsentError as error:
            _log.warning("%s: all clients are computed in this one", error)
            backend.stop()
            self._begin(setup, make, backend, 1)

    def _begin(self, setup: ShardSetup, make: MakeShard[End], backend: Backend, count: int) -> None:
        """Divide the clients among so many workers."""
        self._workers = backend.workers(count)
        self._groups = [{g: members for g, members in setup.groups.items() if g % count == w} for w in range(count)]
        self._owner = {c: w for w, groups in enumerate(self._groups) for members in groups.values() for c in members}
        holdings, added = Holdings(setup.data), registered()
        for number, (worker, groups) in enumerate(zip(self._workers, self._groups, strict=True)):
            clients = [client for client, owner in self._owner.items() if owner == number]
            own = holdings.near(clients) if worker.kept is None else holdings.far(clients)
            worker.begin(functools.partial(made, make, added, setup._replace(groups=groups, data=own)))
        self._all("peak_memory")  # one that cannot read what it was sent says so now

    def waves(self, clients: Iterable[int]) -> Iterator[list[int]]:
        """Clients in parts that are asked together: whole groups, in order, and enough to keep all workers busy."""
        chosen, wave = set(clients), list[int]()
        for members in self._in_order:
            wave += [client for client in members if client in chosen]
            if len(wave) >= _WAVE_CLIENTS * max(1, len(self._workers)):
                yield wave
                wave = []
        if wave:
            yield wave

    def score(self, ends: Mapping[int, End]) -> dict[int, Score]:
        """Scores of clients' final models."""
        scores = {c: s for part in self._each("score", ends) for c, s in part.items()}
        return dict(sorted(scores.items()))  # a mean over them must not depend on who answered first

    def average(self, ends: Mapping[int, End]) -> Vector:
        """The average of all clients' final models; the same whatever the number of workers."""
        parts = [part for parts in self._each("sums", ends) for part in parts]
        sums = sorted(parts, key=lambda part: part.group)
        return weighted_sum([part.total for part in sums], [1 / len(ends)] * len(sums))

    def score_model(self, model: Vector) -> Score:
        """Score a given model."""
        return self._any("score_model", model)  # type: ignore[no-any-return]

    def state(self, model: Vector) -> State:
        """All of a given model, also what is not trained: the same in every process, as the run seed gives it."""
        return unpacked(self._any("state", model))

    def final_models(self, ends: Mapping[int, End]) -> dict[int, Vector]:
        """Clients' final models."""
        return {c: m for part in self._each("final_models", ends) for c, m in part.items()}

    def close_round(self) -> None:
        """A round is over: workers let go of what it needed, and one that is lost is replaced as of now."""
        self._all("close_round")
        for worker in self._workers:
            worker.keep()

    def save(self, folder: Path) -> dict[str, str]:
        """Write all clients' states into a folder; returns the SHA-256 sums of the files, by name."""
        near = [worker for worker in self._workers if worker.kept is None]
        for worker in near:
            worker.send("save", folder)
        sums: dict[str, str] = {}
        for worker in self._workers:  # those far away have no disk in common with us
            sums.update(write_group(folder, group, data) for group, data in (worker.kept or {}).items())
        for worker in near:
            sums |= worker.receive()
        return sums

    def load(self, folder: Path) -> None:
        """Read all clients' states from a folder."""
        for worker, groups in zip(self._workers, self._groups, strict=True):
            if worker.kept is None:
                worker.send("load", folder)
            else:
                worker.send("restore", {group: group_file(folder, group).read_bytes() for group in groups})
        for worker in self._workers:
            worker.receive()

    def peak_memory(self) -> float:
        """Sum of the largest resident sizes so far of all processes of this run, in MB."""
        peaks: dict[tuple[str, int], float] = dict([peak_memory(), *self._all("peak_memory")])  # each process once
        return sum(peaks.values())

    def _any(self, method: str, *arguments: object) -> Any:
        self._workers[0].send(method, *arguments)
        return self._workers[0].receive()

    def _all(self, method: str, *arguments: object) -> list[Any]:
        for worker in self._workers:
            worker.send(method, *arguments)
        return [worker.receive() for worker in self._workers]

    def _each(self, method: str, told: Mapping[int, object]) -> list[Any]:
        """Ask every shard, telling it what is for its own clients."""
        for number, worker in enumerate(self._workers):
            worker.send(method, {c: item for c, item in told.items() if self._owner[c] == number})
        return [worker.receive() for worker in self._workers]
