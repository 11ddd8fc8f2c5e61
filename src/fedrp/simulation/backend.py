"""Where simulated clients live: in this process, or spread over worker processes.

A `Host` keeps the states of its clients. A `Backend` is all hosts of a run, one here or several in processes of their
own. What clients do is for those who derive from the two: `hosts` for the protocol, `alone` for every client by itself.
"""

import functools
import hashlib
import itertools
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load as unpacked
from safetensors.torch import save as packed

from fedrp.config.run import Resolved
from fedrp.config.speed import Speed
from fedrp.files import SHARED, write_content, writing
from fedrp.learning.evaluate import Correct, Score, score
from fedrp.learning.layout import ModelFactory, State
from fedrp.learning.objective import Examples, Loss
from fedrp.learning.trainer import LocalModel
from fedrp.means import weighted_sum
from fedrp.projection import kernels
from fedrp.simulation.processes import Worker
from fedrp.types import Vector

_WAVE_CLIENTS = 64  # per worker, whose packets and replies are in memory at a time, see `Backend.waves`
_GROUP_CLIENTS = 25  # enough that applying a matrix to them is limited by arithmetic, not by memory
_GROUP_FLOATS = 2**24  # and their weights take at most 64 MB

End = TypeVar("End")  # what a client must be told to end with its final model: a packet, or None where nobody is told


class HostSetup(NamedTuple):
    """All that a host is built from; sent once to a worker."""

    config: Resolved
    speed: Speed
    run: bytes
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


# --- in one process --------------------------------------------------------------------------------------------------


class Host(ABC, Generic[End]):
    """The clients of one process: their final models, and files of their states."""

    def __init__(self, setup: HostSetup, model: LocalModel) -> None:
        self._setup, self._model = setup, model

    @abstractmethod
    def final_model(self, client: int, end: End) -> Vector:
        """The model that a client would end with if the run finished now."""

    @abstractmethod
    def packed(self, clients: Sequence[int]) -> bytes:
        """The states of clients as a file."""

    @abstractmethod
    def take_up(self, path: Path) -> None:
        """Go on with the states in a file that `packed` made."""

    def score(self, ends: Mapping[int, End]) -> dict[int, Score]:
        """Score the clients' final models."""
        return {client: self.score_model(self.final_model(client, end)) for client, end in ends.items()}

    def score_model(self, model: Vector) -> Score:
        """Score a given model."""
        return score(self._model, model, self._setup.test, self._setup.correct)

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
        """Write the states of all clients, a file per group; the caller syncs the folder.

        Returns:
            The SHA-256 sums of the files, by name.
        """
        sums = {}
        for group, members in self._setup.groups.items():
            path = _group_file(folder, group)
            data = self.packed(members)
            with writing(path):  # here and not at the caller, who may be in another process
                write_content(path, data, SHARED)
            sums[path.name] = hashlib.sha256(data).hexdigest()
        return sums

    def load(self, folder: Path) -> None:
        """Take up states written by `save`."""
        for group in self._setup.groups:
            self.take_up(_group_file(folder, group))

    def peak_memory(self) -> float:
        """Largest resident size of this process so far, in MB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _group_file(folder: Path, group: int) -> Path:
    return folder / f"clients-{group:04d}.safetensors"


def set_threads(speed: Speed) -> None:
    """Let this process compute with as many threads as configured."""
    torch.set_num_threads(speed.threads)
    kernels.set_threads(speed.threads)


# --- in all processes ------------------------------------------------------------------------------------------------


MakeHost = Callable[[HostSetup], Host[End]]


def hosted(make: MakeHost[End], setup: HostSetup) -> Host[End]:
    """A host that has its process for itself."""
    set_threads(setup.speed)
    return make(setup)


class Backend(Generic[End]):
    """All clients of a simulation, wherever they live. Calls go to all workers at once."""

    def __init__(self, setup: HostSetup, make: MakeHost[End]) -> None:
        self._groups = [members for _, members in sorted(setup.groups.items())]
        count = min(setup.speed.workers, len(setup.groups))
        self._owner: dict[int, int] = {}
        shares = []
        for worker in range(count):
            groups = {g: members for g, members in setup.groups.items() if g % count == worker}
            clients = [client for members in groups.values() for client in members]
            self._owner.update(dict.fromkeys(clients, worker))
            shares.append(setup._replace(groups=groups, data={c: setup.data[c] for c in clients}))
        self._local = make(setup) if count == 1 else None
        self._workers: list[Worker] = []
        try:
            for share in shares if count > 1 else ():
                self._workers.append(Worker(functools.partial(hosted, make, share)))
        except BaseException:  # also Ctrl-C: those that have started must not stay
            self.stop()
            raise

    def waves(self, clients: Iterable[int]) -> Iterator[list[int]]:
        """Clients in parts that are asked together: whole groups, in order, and enough to keep all workers busy."""
        chosen, wave = set(clients), list[int]()
        for members in self._groups:
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

    def _each(self, method: str, told: Mapping[int, object]) -> list[Any]:
        """Ask every host, telling it what is for its own clients."""
        if self._local:
            return [getattr(self._local, method)(told)]
        for number, worker in enumerate(self._workers):
            worker.send(method, {c: item for c, item in told.items() if self._owner[c] == number})
        return [worker.receive() for worker in self._workers]
