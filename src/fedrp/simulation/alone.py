"""Clients that train by themselves: rounds of local training from the common start, and no messages (FWC)."""

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fedrp.algorithms.client_side import stacked
from fedrp.backends.states import StateStore, budget_of
from fedrp.backends.workers import Backend
from fedrp.engines.choice import make_trainer
from fedrp.engines.descent import local_sgd
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import LocalSGD
from fedrp.rng import RunSeed
from fedrp.simulation.population import Population, Shard, ShardSetup
from fedrp.storage.codec import OtherVersionError, Stored, packed, read
from fedrp.types import Vector


class Lone(NamedTuple):
    """A client that talks to nobody."""

    model: Vector
    rounds: int = 0  # that it took part in: its batches are drawn by its own count


class LoneShard(Shard[None]):
    """Lone clients of one worker."""

    def __init__(self, setup: ShardSetup) -> None:
        seed = RunSeed(setup.config.seed)
        self._trainer = make_trainer(
            setup.factory, setup.loss, torch.device(setup.speed.device), seed, setup.speed.engine
        )
        super().__init__(setup, self._trainer.model)
        self._data = functools.cache(lambda client: setup.data[client].on(self._model.device))  # for the whole run
        initial = public_initial(setup.factory, seed)
        self._states = StateStore(
            make=lambda _client: Lone(initial),
            arrays=lambda lone: [lone.model],
            pack=lambda lone: packed(setup.run, Stored({"rounds": lone.rounds}, {"model": lone.model})),
            read=lambda path: self._read_one(path),
            budget=budget_of(setup.speed),
        )

    def _read_one(self, path: Path) -> Lone:
        about, arrays = read(path, self._setup.run)
        return Lone(arrays["model"], about["rounds"])

    def train(self, chosen: Collection[int], round_: int) -> None:
        """A round of local training for those of the clients that take part."""
        config = self._setup.config
        sgd = local_sgd(config, config.lr, round_)  # the learning rate follows the run's rounds, as with a server
        for group, members in self._setup.groups.items():
            alike: dict[int, list[int]] = {}  # rounds done -> those who are trained together
            for client in members:
                if client in chosen:
                    alike.setdefault(self._states[client].rounds, []).append(client)
            for done, clients in alike.items():
                self._train(clients, done + 1, sgd)
            if alike:
                self._changed.add(group)

    def _train(self, clients: Sequence[int], round_: int, sgd: LocalSGD) -> None:
        start = stacked([self._states[client].model for client in clients])
        data = [self._data(client) for client in clients]
        models = self._trainer.train(start, data, clients, round_, sgd)
        for client, model in zip(clients, models, strict=True):
            self._states[client] = Lone(model, round_)

    def final_model(self, client: int, end: None) -> Vector:  # noqa: ARG002 - it is told nothing
        """The model as it is."""
        return self._states[client].model

    def packed(self, clients: Sequence[int]) -> bytes:
        """Models and numbers of rounds as a safetensors file."""
        states = {str(client): self._states[client] for client in clients}
        about = {"rounds": {client: state.rounds for client, state in states.items()}}
        return packed(self._setup.run, Stored(about, {client: state.model for client, state in states.items()}))

    def take_up(self, path: Path) -> None:
        """Go on with the states in a file that `packed` made."""
        about, models = read(path, self._setup.run)
        if "rounds" not in about:  # when lone clients were clients of the protocol
            raise OtherVersionError.of(path)
        for client, rounds in about["rounds"].items():
            self._states[int(client)] = Lone(models[client], rounds)
        self._states.settle()

    def close_round(self) -> None:
        """States that have not been needed for long go to disk."""
        self._states.settle()

    def close(self) -> None:
        """Remove what is on disk."""
        self._states.close()


class LoneClients(Population[None]):
    """All lone clients of a simulation."""

    def __init__(self, setup: ShardSetup, backend: Backend) -> None:
        super().__init__(setup, LoneShard, backend)

    def train(self, chosen: Collection[int], round_: int) -> None:
        """A round of local training for those who take part."""
        self._all("train", frozenset(chosen), round_)
