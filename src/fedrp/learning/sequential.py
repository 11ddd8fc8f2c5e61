"""Sequential engine: SGD with momentum for a group of clients, whose models take turns in one module of any kind."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.layout import ModelFactory, State
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Loss, Objective, Rows, Stack, on_device
from fedrp.learning.trainer import LocalModel, batch_input, make_local_model
from fedrp.rng import RunSeed

_log = logging.getLogger(__name__)

_ALIGNMENT = 16  # floats: rows start at 64-byte boundaries, so arithmetic does not depend on a client's place
_DIVERGED = 1000.0  # times the loss at the start of a round (plus 1): far beyond what a bad batch does


@dataclass(frozen=True)
class SequentialTrainer:
    """A `Trainer` that computes the gradients of one client after the other, and all else for the group at once."""

    model: LocalModel
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
        layout, module, device = self.model.layout, self.model.module, self.model.device
        weights, gradients = self._matrix(len(start)), self._matrix(len(start))
        # Variables that are weights live in the matrix that the model is bound to: no copy per step.
        variables = weights if objective.weights is None else torch.empty(start.shape, device=device)
        variables.copy_(on_device(start, device))
        velocity = torch.zeros_like(variables)
        batches = [self._batches(len(d.y), client, round_, sgd) for d, client in zip(data, clients, strict=True)]
        steps = np.array([len(plan) for plan in batches])
        rule = objective.step_size or (lambda _steps: sgd.lr)
        lr = torch.tensor([[rule(count)] for count in steps.tolist()], dtype=torch.float32, device=device)
        losses: list[list[torch.Tensor]] = [[] for _ in batches]  # of each client's first and last step
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        module.train()
        with torch.random.fork_rng(devices=[]):
            for step in range(steps.max()):
                active = np.flatnonzero(steps > step)
                everyone = len(active) == len(start)
                rows: Rows = slice(None) if everyone else torch.from_numpy(active).to(device)
                moving, speed = variables[rows], velocity[rows]  # views, or copies where some clients are done
                if objective.weights is not None:
                    weights[rows] = objective.weights(moving, rows)
                gradients.zero_()
                for row in active.tolist():
                    layout.bind(module, weights[row], gradients[row])
                    # Dropout and its like only know torch's global generator: give each client-step its own stream.
                    torch.random.manual_seed(self.seed.integer("layers", round_, clients[row], step))
                    loss = self._backward(data[row], batches[row][step])
                    if step in (0, steps[row] - 1):
                        losses[row].append(loss)
                direction = _clipped(objective.gradient(moving, gradients[rows], rows), sgd.grad_clip)
                speed.mul_(sgd.momentum).add_(direction)
                moving.sub_(torch.mul(speed, lr[rows], out=direction))  # reuses memory: n may be 10^8
                if not everyone:
                    variables[rows], velocity[rows] = moving, speed
        module.zero_grad(set_to_none=True)  # lets go of the matrix of gradients
        self._require_unchanged(buffers)
        reached: Stack = variables.cpu().numpy()
        _look_for_divergence(reached, losses, clients, round_, sgd)
        return reached

    def _buffers(self) -> State:
        saved = self.model.module.state_dict().keys()  # others are caches, and may change
        return {name: buffer for name, buffer in self.model.module.named_buffers() if name in saved}

    def _require_unchanged(self, before: State) -> None:
        for name, buffer in self._buffers().items():
            if name not in before or not torch.equal(buffer, before[name]):
                # All clients of a process would share it, and none would send it.
                raise ConfigError(
                    f"buffer '{name}' changes while the model trains, but clients exchange parameters only: "
                    "use layers without running statistics (or persistent=False if outputs do not depend on it)"
                )

    def _matrix(self, rows: int) -> torch.Tensor:
        size = self.model.layout.size
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.zeros(rows, padded, device=self.model.device)[:, :size]

    def _batches(self, size: int, client: int, round_: int, sgd: LocalSGD) -> list[torch.Tensor]:
        rng = self.seed.generator("batches", round_, client)
        orders = [torch.from_numpy(rng.permutation(size)) for _ in range(sgd.epochs)]
        return [batch for order in orders for batch in torch.split(order, sgd.batch_size)]

    def _backward(self, data: Examples, batch: torch.Tensor) -> torch.Tensor:
        outputs = self.model.module(batch_input(data.x[batch], self.model.device))
        loss = self.model.loss(outputs, data.y[batch].to(self.model.device))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def make_trainer(factory: ModelFactory, loss: Loss, device: torch.device, seed: RunSeed) -> SequentialTrainer:
    """A trainer for models built by `factory`; refuses models that cannot be trained this way."""
    return SequentialTrainer(make_local_model(factory, loss, device, seed), seed)


def _look_for_divergence(
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
        if not sgd.log_divergence:
            raise DivergenceError(text)
        _log.warning("%s (%d of %d clients; the run goes on)", text, len(troubles), len(clients))


def _clipped(gradients: torch.Tensor, limit: float) -> torch.Tensor:
    """The gradients, each row scaled down to norm `limit` where it is longer; in place."""
    for row in gradients if limit else ():
        norm = _norm(row)
        if not math.isfinite(norm):  # of numbers whose squares overflow: scaled by 1/inf they would vanish
            wide = row.double()
            if (norm := _norm(wide)) > limit:
                row.copy_(wide.mul_(float(np.float32(limit)) / norm))
        elif norm > limit:
            row.mul_(float(np.float32(limit) / np.float32(norm)))
    return gradients


def _norm(row: torch.Tensor) -> float:
    """The Euclidean norm: on the CPU as NumPy sums it, which published results rest on; else where the row is."""
    if row.device.type != "cpu":
        return float(torch.linalg.vector_norm(row))
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(row.numpy()))
