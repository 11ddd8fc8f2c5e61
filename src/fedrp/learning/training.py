"""Local training: SGD with momentum for a group of clients at once. Knows no algorithm.

The one seam is `train(start, objective)`: rows are clients. An `Objective` says how variables become weights and what
is added to the loss gradient, so that plain SGD, ADMM penalties and training inside a subspace are the same loop, and a
projection is applied to all clients of the group as one matrix product.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.models import Layout, ModelFactory, State, layout_of
from fedrp.rng import RunSeed
from fedrp.types import Vector

_log = logging.getLogger(__name__)

Stack = npt.NDArray[np.float32]  # (clients, numbers)
Rows = slice | npt.NDArray[np.intp]  # which clients of the group a step is about
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_ALIGNMENT = 16  # floats: rows start at 64-byte boundaries, so arithmetic does not depend on a client's place
_DIVERGED = 1000.0  # times the loss at the start of a round (plus 1): far beyond what a bad batch does


class Examples(NamedTuple):
    """Inputs and targets of one client, or of the test set."""

    x: torch.Tensor
    y: torch.Tensor


def described(values: torch.Tensor) -> str:
    """Shape and type of a tensor, as errors name them."""
    return f"{tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"


class Objective(NamedTuple):
    """What a group minimises.

    `gradient(variables, loss_gradients, rows)` turns gradients of the loss with respect to the weights (k x n) into
    gradients with respect to the variables (k x d). `weights(variables, rows)` maps variables to weights; None means
    that the variables are the weights. `step_size(steps)`, from how many steps a client takes in the round, replaces
    the configured learning rate.
    """

    gradient: Callable[[Stack, Stack, Rows], Stack]
    weights: Callable[[Stack, Rows], Stack] | None = None
    step_size: Callable[[int], float] | None = None


def _loss_only(_variables: Stack, gradients: Stack, _rows: Rows) -> Stack:
    return gradients


PLAIN = Objective(_loss_only)


class LocalSGD(NamedTuple):
    """Settings of local training; the optimiser's state is fresh in every round."""

    lr: float
    momentum: float
    batch_size: int
    epochs: int
    grad_clip: float = 0.0  # largest norm of a gradient with respect to the variables; 0 for no limit
    discreet: bool = False  # divergence is logged, not raised: where a stop would tell what the result must not


@dataclass(frozen=True)
class Trainer:
    """A model, its loss and a device, ready to train groups of clients.

    Guarantees: a client's result depends on its start, its data, the seed, the round and its index, not on which
    clients it is grouped with (exactly, where the objective treats rows independently).
    """

    module: nn.Module  # scratch: bound to one client's row after the other
    loss: Loss
    layout: Layout
    device: torch.device
    seed: RunSeed

    def train(
        self,
        start: Stack,
        data: Sequence[Examples],
        clients: Sequence[int],
        round_: int,
        sgd: LocalSGD,
        objective: Objective = PLAIN,
    ) -> Stack:
        """Run `sgd.epochs` local epochs from `start` (k x d) and return the variables reached (k x d)."""
        weights, gradients = self._matrix(len(start)), self._matrix(len(start))
        # On the CPU, variables that are weights live in the matrix that the model is bound to: no copy per step.
        in_place = objective.weights is None and self.device.type == "cpu"
        variables = _as_numpy(weights) if in_place else start.copy()
        variables[:] = start
        velocity = np.zeros_like(variables)
        batches = [self._batches(len(d.y), client, round_, sgd) for d, client in zip(data, clients, strict=True)]
        steps = np.array([len(plan) for plan in batches])
        rule = objective.step_size or (lambda _steps: sgd.lr)
        lr = np.array([[rule(count)] for count in steps.tolist()], np.float32)
        losses: list[list[torch.Tensor]] = [[] for _ in batches]  # of each client's first and last step
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        self.module.train()
        with torch.random.fork_rng(devices=[]):
            for step in range(steps.max()):
                active = np.flatnonzero(steps > step)
                rows: Rows = slice(None) if len(active) == len(start) else active
                if not in_place:
                    chart = variables[rows] if objective.weights is None else objective.weights(variables[rows], rows)
                    weights[rows] = torch.from_numpy(chart).to(self.device)
                gradients.zero_()
                for row in active.tolist():
                    self.layout.bind(self.module, weights[row], gradients[row])
                    # Dropout and its like only know torch's global generator: give each client-step its own stream.
                    torch.random.manual_seed(self.seed.integer("layers", round_, clients[row], step))
                    loss = self._backward(data[row], batches[row][step])
                    if step in (0, steps[row] - 1):
                        losses[row].append(loss)
                direction = objective.gradient(variables[rows], _as_numpy(gradients)[rows], rows)
                velocity[rows] *= np.float32(sgd.momentum)
                velocity[rows] += _clipped(direction, sgd.grad_clip)
                variables[rows] -= np.multiply(velocity[rows], lr[rows], out=direction)  # reuses memory: n may be 10^8
        self.module.zero_grad(set_to_none=True)  # lets go of the matrix of gradients
        self._require_unchanged(buffers)
        self._look_for_divergence(variables, losses, clients, round_, sgd)
        return variables

    def state(self, model: Vector) -> State:
        """The whole `state_dict` of a model: its weights, and frozen layers and buffers as they are trained with.

        Each tensor has memory of its own on the CPU, as files want it; tied parameters are there under all their names.
        """
        self.layout.bind(self.module, torch.from_numpy(np.array(model, np.float32)).to(self.device))
        saved = {name: tensor for name, tensor in self.module.state_dict().items() if isinstance(tensor, torch.Tensor)}
        return {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in saved.items()}

    def _buffers(self) -> State:
        saved = self.module.state_dict().keys()  # others are caches, and may change
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    def _require_unchanged(self, before: State) -> None:
        for name, buffer in self._buffers().items():
            if name not in before or not torch.equal(buffer, before[name]):
                # All clients of a process would share it, and none would send it.
                raise ConfigError(
                    f"buffer '{name}' changes while the model trains, but clients exchange parameters only: "
                    "use layers without running statistics (or persistent=False if outputs do not depend on it)"
                )

    def _matrix(self, rows: int) -> torch.Tensor:
        padded = -(-self.layout.size // _ALIGNMENT) * _ALIGNMENT
        return torch.zeros(rows, padded, device=self.device)[:, : self.layout.size]

    def _batches(self, size: int, client: int, round_: int, sgd: LocalSGD) -> list[torch.Tensor]:
        rng = self.seed.generator("batches", round_, client)
        orders = [torch.from_numpy(rng.permutation(size)) for _ in range(sgd.epochs)]
        return [batch for order in orders for batch in torch.split(order, sgd.batch_size)]

    def _backward(self, data: Examples, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch_input(data.x[batch], self.device)
        loss = self.loss(self.module(inputs), data.y[batch].to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _look_for_divergence(
        self,
        variables: Stack,
        losses: Sequence[Sequence[torch.Tensor]],
        clients: Sequence[int],
        round_: int,
        sgd: LocalSGD,
    ) -> None:
        troubles = []
        for row, client in enumerate(clients):
            if not np.isfinite(variables[row]).all():
                troubles.append(f"client {client} has values that are not finite in round {round_}")
            elif (last := float(losses[row][-1])) > _DIVERGED * (1 + abs(first := float(losses[row][0]))):
                # Clipped gradients hardly overflow, however long the steps: the loss tells.
                troubles.append(f"the loss of client {client} went from {first:.3g} to {last:.3g} in round {round_}")
        if troubles:
            text = f"training diverged: {troubles[0]} (lr={sgd.lr}, momentum={sgd.momentum}): lower --lr"
            if not sgd.discreet:
                raise DivergenceError(text)
            _log.warning("%s (%d of %d clients; the run goes on)", text, len(troubles), len(clients))


def _clipped(gradients: Stack, limit: float) -> Stack:
    """The gradients, each row scaled down to norm `limit` where it is longer; in place."""
    for row in gradients if limit else ():
        with np.errstate(over="ignore"):
            norm = np.linalg.norm(row)
        if not np.isfinite(norm):  # of numbers whose squares overflow: scaled by 1/inf they would vanish
            norm = np.linalg.norm(row.astype(np.float64))
        if norm > limit:
            row *= np.float32(limit) / norm
    return gradients


def _as_numpy(matrix: torch.Tensor) -> Stack:
    return matrix.cpu().numpy()


def make_trainer(factory: ModelFactory, loss: Loss, device: torch.device, seed: RunSeed) -> Trainer:
    """A trainer for models built by `factory`; refuses models that cannot be trained this way."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed.integer("initial-model"))  # for what is not in the vector: frozen layers, buffers
        module = factory().to(device)
    return Trainer(module, loss, layout_of(module), device, seed)


def batch_input(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A batch on its device, pictures in the memory order that convolutions run fastest in."""
    moved = x.to(device)
    return moved.contiguous(memory_format=torch.channels_last) if moved.ndim == 4 else moved
