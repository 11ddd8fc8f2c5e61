"""Stacked engine: SGD with momentum for a group of clients, a few of whose models are computed as one at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedrp.engines.augment import taken
from fedrp.engines.descent import advance, batches, learning_rates, look_for_divergence, matrix
from fedrp.learning.layout import Layout, trainable
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Loss, Objective, Rows, Stack, on_device
from fedrp.learning.pixels import floats
from fedrp.learning.trainer import LocalModel
from fedrp.rng import RunSeed
from fedrp.stacking.rewrite import Program
from fedrp.stacking.values import Pass, Stacked

_WINDOW = 2**23  # bytes of examples that are put side by side at once
_NUMBER_BYTES = 4  # of an example's number
_IGNORED = -100  # the class of examples that torch's cross-entropy leaves out

Plan = list[torch.Tensor]  # the examples of each step


class _Batch(NamedTuple):
    """One step's examples of clients that step together."""

    x: Stacked
    y: torch.Tensor  # (k, size, ...)
    sizes: tuple[int, ...]  # how many are real; those after them repeat some, and must not count
    share: torch.Tensor  # (k, size): what each counts in the mean over its client's batch


@dataclass(frozen=True)
class StackedTrainer:
    """A `Trainer` that computes the gradients of `chunk` clients at once, in grouped operations.

    A client's result depends on whom it is grouped with, but only by rounding.
    """

    model: LocalModel
    seed: RunSeed
    program: Program
    chunk: int

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
        data = [part.on(self.model.device) for part in data]
        plans = batches(self.seed, data, clients, round_, sgd)
        # By falling number of steps: those who are still at work come first, and similar clients step together.
        order = sorted(range(len(plans)), key=lambda row: -len(plans[row]))
        group = _Group(
            self,
            [data[row] for row in order],
            [plans[row] for row in order],
            [clients[row] for row in order],
            round_,
            sgd,
            objective,
            None if order == sorted(order) else torch.tensor(order, device=self.model.device),
        )
        begin = on_device(start, self.model.device)
        variables, losses = group.descend(begin if group.order is None else begin[group.order])
        reached = np.empty_like(start)
        reached[order] = variables.cpu().numpy()
        look_for_divergence(reached[order], losses, group.clients, round_, sgd)
        return reached


@dataclass(frozen=True)
class _Group:
    """A round of the clients that are trained together, by falling number of steps."""

    trainer: StackedTrainer
    data: Sequence[Examples]
    plans: Sequence[Plan]
    clients: Sequence[int]
    round_: int
    sgd: LocalSGD
    objective: Objective
    order: torch.Tensor | None  # the rows that the objective knows the clients by; None where they are the same

    def descend(self, variables: torch.Tensor) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """The variables that are reached, and the losses of each client's first and last step."""
        steps = [len(plan) for plan in self.plans]
        lr = learning_rates(steps, self.sgd, self.objective, variables)
        losses: list[list[torch.Tensor]] = [[] for _ in steps]
        size, chunk = self.trainer.model.layout.size, self.trainer.chunk
        # Products with a matrix are cheapest for all rows at once; else fewer rows stay in the cache.
        block = len(steps) if self.objective.at_once else chunk
        reached = torch.empty_like(variables)
        for first in range(0, len(steps), block):
            last = min(first + block, len(steps))
            weights, gradients = (matrix(last - first, size, variables) for _ in range(2))
            moving = weights if self.objective.weights is None else torch.empty_like(variables[first:last])
            moving.copy_(variables[first:last])
            velocity = torch.zeros_like(moving)
            parts = [
                _Chunk.of(self, weights, gradients, first, slice(row, min(row + chunk, last)))
                for row in range(first, last, chunk)
            ]
            for step in range(steps[first]):
                active = sum(count > step for count in steps[first:last])
                rows = self._rows(first, first + active)
                if self.objective.weights is not None:
                    weights[:active] = self.objective.weights(moving[:active], rows)
                for part in parts:
                    part.backward(step, losses)
                direction = self.objective.direction(moving[:active], gradients[:active], rows)
                advance(moving[:active], velocity[:active], direction, lr[first : first + active], self.sgd)
            reached[first:last] = moving
        return reached, losses

    def _rows(self, first: int, last: int) -> Rows:
        if self.order is not None:
            return self.order[first:last]
        return slice(None) if last - first == len(self.plans) else slice(first, last)


@dataclass
class _Chunk:
    """Clients whose models are computed as one."""

    group: _Group
    weights: torch.Tensor  # (k, n)
    gradients: torch.Tensor  # (k, n)
    first: int  # the number of its first client in the group
    batches: Iterator[_Batch]
    active: int = 0
    leaves: Sequence[torch.Tensor] = ()
    into: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, group: _Group, weights: torch.Tensor, gradients: torch.Tensor, first: int, members: slice) -> "_Chunk":
        """The clients `members` of a group, in matrices that begin with its client `first`."""
        own = slice(members.start - first, members.stop - first)
        as_image = group.trainer.program.takes_image
        plan = _batches(group.data[members], group.plans[members], as_image, group.sgd.augment)
        return cls(group, weights[own], gradients[own], members.start, plan)

    def backward(self, step: int, losses: list[list[torch.Tensor]]) -> None:
        """Write the gradients of a step into the matrix; nothing where all clients are done."""
        batch = next(self.batches, None)
        if batch is None:
            return
        group, program, models = self.group, self.group.trainer.program, len(batch.sizes)
        if models != self.active:  # some clients are done, or it is the first step
            layout = group.trainer.model.layout
            self.leaves = [view.requires_grad_() for view in stacked_views(layout, self.weights[:models])]
            self.into = stacked_views(layout, self.gradients[:models])
            self.active = models
        streams = [self._stream(self.first + row, step) for row in range(models)] if program.draws else None
        parameters = dict(zip(map(id, trainable(group.trainer.model.module)), self.leaves, strict=True))
        outputs = program(Pass(models, parameters, batch.sizes, streams), batch.x)
        found = client_losses(group.trainer.model.loss, outputs, batch)
        for view, gradient in zip(
            self.into, torch.autograd.grad(found.sum(), self.leaves, allow_unused=True), strict=True
        ):
            view.zero_() if gradient is None else view.copy_(gradient)
        for row, loss in enumerate(found.detach(), self.first):
            if step in (0, len(group.plans[row]) - 1):
                losses[row].append(loss)

    def _stream(self, row: int, step: int) -> torch.Generator:
        trainer = self.group.trainer
        seed = trainer.seed.integer("layers", self.group.round_, self.group.clients[row], step)
        return torch.Generator(trainer.model.device).manual_seed(seed)


def stacked_views(layout: Layout, matrix: torch.Tensor) -> list[torch.Tensor]:
    """The parameters of k models as views (k, *shape) of their matrix (k, n)."""
    parts = torch.split(matrix, [shape.numel() for shape in layout.shapes], dim=1)
    return [part.view(len(matrix), *shape) for part, shape in zip(parts, layout.shapes, strict=True)]


def client_losses(loss: Loss, outputs: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """The mean loss of each client's batch (k,), of real examples only."""
    if _is_cross_entropy(loss) and outputs.ndim == 3 and batch.y.ndim == 2 and not batch.y.is_floating_point():
        each = nn.functional.cross_entropy(outputs.flatten(0, 1), batch.y.flatten(), reduction="none")
        return (each.view(batch.y.shape) * batch.share.to(each.dtype)).sum(dim=1)
    parts = zip(outputs, batch.y, batch.sizes, strict=True)
    return torch.stack([loss(output[:size], target[:size]) for output, target, size in parts])


def _is_cross_entropy(loss: Loss) -> bool:
    if type(loss) is nn.CrossEntropyLoss:
        usual = loss.reduction == "mean" and loss.ignore_index == _IGNORED and not loss.label_smoothing
        return usual and loss.weight is None
    return loss is nn.functional.cross_entropy


def _batches(data: Sequence[Examples], plans: Sequence[Plan], takes_image: bool, augment: str) -> Iterator[_Batch]:
    """The batches of all steps, in the memory order that the first layer wants; put together for many steps at once."""
    step = 0
    while step < len(plans[0]):
        active = sum(len(plan) > step for plan in plans)
        bytes_per_step = active * len(plans[0][step]) * data[0].x.shape[1:].numel() * _NUMBER_BYTES
        last = min(step + max(1, _WINDOW // bytes_per_step), len(plans[active - 1]))
        window = [plan[step:last] for plan in plans[:active]]
        yield from _window(data[:active], window, takes_image and data[0].x.ndim > 2, augment)
        step = last


def _window(data: Sequence[Examples], plans: Sequence[Plan], as_image: bool, augment: str) -> Iterator[_Batch]:
    models, steps, device = len(data), range(len(plans[0])), data[0].y.device
    widths = [max(len(plan[step]) for plan in plans) for step in steps]
    numbers = [torch.cat([_padded(plan[step], widths[step]) for step in steps]) for plan in plans]
    parts = [taken(part, own, augment) for part, own in zip(data, numbers, strict=True)]
    inputs = [floats(part.x) for part in parts]
    targets = torch.stack([part.y for part in parts])
    x = _side_by_side(inputs) if as_image else torch.stack(inputs)
    end = 0
    for step in steps:
        begin, end = end, end + widths[step]
        sizes = tuple(len(plan[step]) for plan in plans)
        y = targets[:, begin:end]
        counts = torch.arange(widths[step], device=device) < torch.tensor(sizes, device=device)[:, None]
        if y.ndim == 2 and not y.is_floating_point():
            counts = counts & (y != _IGNORED)
        share = counts.double() / counts.sum(dim=1, keepdim=True)
        own = x[begin:end] if as_image else x[:, begin:end]
        yield _Batch(Stacked(own, models, as_image), y, sizes, share)


def _padded(batch: torch.Tensor, width: int) -> torch.Tensor:
    """A batch of `width` examples; those after the real ones repeat them, so that no layer meets odd numbers."""
    return batch if len(batch) == width else batch[torch.arange(width, device=batch.device) % len(batch)]


def _side_by_side(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inputs (examples, C, *space) of k clients as (examples, k * C, *space), see `fedrp.stacking.values`."""
    if inputs[0].ndim != 4:
        return torch.cat(list(inputs), dim=1)
    last = [part.permute(0, 2, 3, 1) for part in inputs]
    return torch.cat(last, dim=3).permute(0, 3, 1, 2)
