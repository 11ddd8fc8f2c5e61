"""Sequential engine: SGD with momentum for a group of clients, whose models take turns in one module of any kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.engines.augment import taken
from fedrp.engines.descent import advance, batches, learning_rates, look_for_divergence, matrix
from fedrp.errors import ConfigError
from fedrp.learning.layout import State, trainable
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective, Rows, Stack, on_device
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.rng import RunSeed


class _Group(NamedTuple):
    """A round of the clients that are trained together."""

    data: Sequence[Examples]
    clients: Sequence[int]
    round_: int
    sgd: LocalSGD
    objective: Objective
    plans: Sequence[Sequence[torch.Tensor]]  # the examples of each step
    steps: npt.NDArray[np.int64]  # how many each client takes


class _Space(NamedTuple):
    """Memory for the clients that step together, used by one group of them after the other."""

    weights: torch.Tensor  # (k, n), which the model is bound to
    gradients: torch.Tensor  # (k, n)
    variables: torch.Tensor  # (k, d)
    velocity: torch.Tensor  # (k, d)

    @classmethod
    def of(cls, variables: torch.Tensor, size: int, objective: Objective) -> "_Space":
        """For so many variables of models of `size` parameters."""
        weights, gradients = (matrix(len(variables), size, variables) for _ in range(2))
        # Variables that are weights live in the matrix that the model is bound to: no copy per step.
        moving = weights if objective.weights is None else torch.empty_like(variables)
        return cls(weights, gradients, moving, torch.empty_like(moving))


@dataclass(frozen=True)
class SequentialTrainer:
    """A `Trainer` that trains one client after the other, or step by step where the objective wants all at once."""

    model: LocalModel
    seed: RunSeed
    _spaces: dict[tuple[int, int, bool], _Space] = field(default_factory=dict, repr=False)  # the last one, if any

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
        module, begin = self.model.module, on_device(start, self.model.device)
        data = [part.on(self.model.device) for part in data]
        plans = batches(self.seed, data, clients, round_, sgd)
        steps = np.array([len(plan) for plan in plans])
        group = _Group(data, clients, round_, sgd, objective, plans, steps)
        losses: list[list[torch.Tensor]] = [[] for _ in plans]  # of each client's first and last step
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        reached = np.empty_like(start)
        module.train()
        module.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            # Products with a matrix are cheapest for all rows at once; else one client's numbers stay in the cache.
            size = len(start) if objective.at_once else 1
            space = self._space(begin[:size], objective)
            for first in range(0, len(start), size):
                part = slice(first, first + size)
                reached[part] = self._descend(begin[part], group, first, losses, space).cpu().numpy()
        self._require_unchanged(buffers)
        look_for_divergence(reached, losses, clients, round_, sgd)
        return reached

    def _descend(
        self, begin: torch.Tensor, group: _Group, first: int, losses: list[list[torch.Tensor]], space: _Space
    ) -> torch.Tensor:
        """The variables that clients `first` and after it reach from `begin`."""
        layout, module, device, objective = self.model.layout, self.model.module, self.model.device, group.objective
        count = len(begin)
        weights, gradients, variables, velocity = space
        variables.copy_(begin)
        velocity.zero_()
        steps = group.steps[first : first + count]
        lr = learning_rates(steps.tolist(), group.sgd, objective, begin)
        for step in range(steps.max()):
            active = np.flatnonzero(steps > step)
            everyone = len(active) == count
            rows: Rows = slice(None) if everyone else torch.from_numpy(active).to(device)
            # Whom the objective knows them as: a part that is not the whole group is one client.
            known: Rows = rows if count == len(group.plans) else slice(first, first + count)
            moving, speed = variables[rows], velocity[rows]  # views, or copies where some clients are done
            if objective.weights is not None:
                weights[rows] = objective.weights(moving, known)
            for row in active.tolist():
                if step == 0 or count > 1:  # a single client's model stays bound
                    layout.bind(module, weights[row])
                # Dropout and its like only know torch's global generator: give each client-step its own stream.
                seed = self.seed.integer("layers", group.round_, group.clients[first + row], step)
                torch.random.manual_seed(seed)
                batch = taken(group.data[first + row], group.plans[first + row][step], group.sgd.augment)
                loss = self._backward(batch, gradients[row])
                if step in (0, steps[row] - 1):
                    losses[first + row].append(loss)
            advance(moving, speed, objective.direction(moving, gradients[rows], known), lr[rows], group.sgd)
            if not everyone:
                variables[rows], velocity[rows] = moving, speed
        return variables

    def _space(self, variables: torch.Tensor, objective: Objective) -> _Space:
        """Memory for a group, that of the last round where it fits: new pages cost a large model a few percent."""
        kind = (*variables.shape, objective.weights is None)
        if kind not in self._spaces:
            self._spaces.clear()
            self._spaces[kind] = _Space.of(variables, self.model.layout.size, objective)
        return self._spaces[kind]

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

    def _backward(self, batch: Examples, into: torch.Tensor) -> torch.Tensor:
        """Write the gradient of a batch into a row; returns the loss."""
        outputs = self.model.module(batch_input(batch.x, self.model.device))
        loss = self.model.loss(outputs, batch.y)
        loss.backward()  # type: ignore[no-untyped-call]
        # Copied: to let torch add to zeros in the row would go through memory twice as often.
        for parameter, view in zip(trainable(self.model.module), self.model.layout.views(into), strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            parameter.grad = None
        return loss.detach()
