"""Plain loop: FedAvg without a framework, the reference that the simulator's speed is measured against.

It is what a good engineer writes in PyTorch for one machine: the data in memory as tensors, one module, torch's own SGD
with momentum, gradients set to None, no loader, one thread a process. Each process takes the clients in turn.
"""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedrp.algorithms.resolve import resolved
from fedrp.backends.processes import ProcessWorker
from fedrp.config import Resolved, RunConfig
from fedrp.learning.initial import public_initial
from fedrp.learning.layout import ModelFactory, built, layout_of
from fedrp.learning.objective import Loss
from fedrp.learning.pixels import floats
from fedrp.learning.task import Task, split_among_clients
from fedrp.means import weighted_sum
from fedrp.rng import RunSeed
from fedrp.types import Vector


class PlainWork(NamedTuple):
    """What one process of the reference is built from."""

    factory: ModelFactory
    loss: Loss
    data: dict[int, tuple[torch.Tensor, torch.Tensor]]  # inputs and targets of the clients that it trains
    config: Resolved


class PlainLoop:
    """One process of the reference, which trains its clients one after the other."""

    def __init__(self, work: PlainWork) -> None:
        torch.set_num_threads(1)
        self._work = work
        self._module = work.factory().train()

    def round(self, start: Vector, round_: int) -> Vector:
        """The sum of the models that the clients of this process reach from `start`."""
        parameters = list(self._module.parameters())
        pieces = torch.split(torch.from_numpy(start), [parameter.numel() for parameter in parameters])
        common = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
        total = torch.zeros(len(start))
        for client, data in self._work.data.items():
            with torch.no_grad():
                for parameter, value in zip(parameters, common, strict=True):
                    parameter.copy_(value)
            self._train(parameters, data, client, round_)
            total += torch.nn.utils.parameters_to_vector(parameters).detach()
        reached: Vector = total.numpy()
        return reached

    def close(self) -> None:
        """Nothing of it is on disk."""

    def _train(
        self,
        parameters: Sequence[torch.nn.Parameter],
        data: tuple[torch.Tensor, torch.Tensor],
        client: int,
        round_: int,
    ) -> None:
        x, y = data
        module, loss, config = self._module, self._work.loss, self._work.config
        optimiser = torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
        shuffle = RunSeed(config.seed).generator("batches", round_, client)  # the simulator's batches: same arithmetic
        for _ in range(config.local_epochs):
            order = torch.from_numpy(shuffle.permutation(len(y)))
            for batch in torch.split(order, config.batch_size):
                optimiser.zero_grad(set_to_none=True)
                loss(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                if config.grad_clip:
                    torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
                optimiser.step()


class Reference:
    """FedAvg in plain loops, in one process or several."""

    def __init__(self, config: RunConfig, task: Task, processes: int = 1) -> None:
        settings = resolved(config, layout_of(built(task.model)).size)
        self.model = public_initial(task.model, RunSeed(config.seed))
        self._clients, self._round = config.clients, 0
        parts = split_among_clients(task, config)
        data = {client: (floats(part.x), part.y) for client, part in enumerate(parts)}
        shares = [{c: d for c, d in data.items() if c % processes == number} for number in range(processes)]
        self._workers: list[ProcessWorker] = []
        try:
            for share in shares:
                work = PlainWork(task.model, task.loss, share, settings)
                self._workers.append(ProcessWorker())
                self._workers[-1].begin(functools.partial(PlainLoop, work))
        except BaseException:  # also Ctrl-C: those that have started must not stay
            self.stop()
            raise

    def round(self) -> float:
        """Train a round from where the last one ended; returns the seconds from start to mean."""
        began, self._round = time.monotonic(), self._round + 1
        for worker in self._workers:
            worker.send("round", self.model, self._round)
        sums = [worker.receive() for worker in self._workers]
        self.model = weighted_sum(sums, [1 / self._clients] * len(sums))
        return time.monotonic() - began

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
