"""Descent: what every engine does alike, which is all of local training but the gradients."""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from fedrp.config.run import Resolved
from fedrp.config.schedule import lr_scale
from fedrp.engines.augment import require_images, versions
from fedrp.errors import DivergenceError
from fedrp.learning.objective import Examples, LocalSGD, Objective, Stack
from fedrp.rng import RunSeed

_log = logging.getLogger(__name__)

_ALIGNMENT = 16  # floats: rows start at 64-byte boundaries, so arithmetic does not depend on a client's place
_STRETCH = 2**16  # floats of a row that are moved on at once
_DIVERGED = 1000.0  # times the loss at the start of a round (plus 1): far beyond what a bad batch does


def local_sgd(config: Resolved, lr: float, round_: int, log_divergence: bool = False) -> LocalSGD:
    """How a client trains in a round of a run, with the run's learning rate."""
    return LocalSGD(
        lr,
        config.momentum,
        config.batch_size,
        config.local_epochs,
        config.grad_clip,
        log_divergence,
        lr_scale(config.lr_schedule, round_, config.rounds),
        config.augment,
    )


def matrix(rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros (rows, size), a row for each client, with the type and device of `like`."""
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    return torch.zeros(rows, padded, dtype=like.dtype, device=like.device)[:, :size]


def batches(
    seed: RunSeed, data: Sequence[Examples], clients: Sequence[int], round_: int, sgd: LocalSGD
) -> list[list[torch.Tensor]]:
    """Which examples each client takes in each step of a round: numbers for `taken`, where its data are."""
    require_images(sgd.augment, data)
    return [_batches(seed, part, client, round_, sgd) for part, client in zip(data, clients, strict=True)]


def _batches(seed: RunSeed, data: Examples, client: int, round_: int, sgd: LocalSGD) -> list[torch.Tensor]:
    rng = seed.generator("batches", round_, client)
    orders = [rng.permutation(len(data.y)) for _ in range(sgd.epochs)]
    # Drawn after all orders: these are the same with and without augmentation.
    numbers = [order + versions(sgd.augment, len(order), rng) for order in orders]
    on_device = [torch.from_numpy(each).to(data.y.device) for each in numbers]
    return [batch for each in on_device for batch in torch.split(each, sgd.batch_size)]


def learning_rates(steps: Sequence[int], sgd: LocalSGD, objective: Objective, like: torch.Tensor) -> torch.Tensor:
    """The learning rate of each client (k, 1), given how many steps each takes."""
    rule = objective.step_size or (lambda _steps: sgd.lr)
    rates = [[rule(count) * sgd.lr_scale] for count in steps]
    return torch.tensor(rates, dtype=torch.float32, device=like.device).to(like.dtype)


def advance(
    variables: torch.Tensor, velocity: torch.Tensor, gradients: torch.Tensor, lr: torch.Tensor, sgd: LocalSGD
) -> None:
    """One step of SGD with momentum for all rows, in place; writes over the gradients."""
    parts = (torch.split(each, _STRETCH, dim=1) for each in (variables, velocity, clipped(gradients, sgd.grad_clip)))
    for own, speed, direction in zip(*parts, strict=True):  # each stretch goes through the cache once
        speed.mul_(sgd.momentum).add_(direction)
        own.sub_(torch.mul(speed, lr, out=direction))


def clipped(gradients: torch.Tensor, limit: float) -> torch.Tensor:
    """The gradients, each row scaled down to norm `limit` where it is longer; in place."""
    if limit and gradients.device.type != "cpu":  # all rows at once, and no number comes to the host
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True, dtype=torch.float64)
        return gradients.mul_((limit / norms).clamp_(max=1.0).to(gradients.dtype))
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
    """The Euclidean norm as NumPy sums it, which published results rest on."""
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(row.numpy()))


def look_for_divergence(
    variables: Stack,
    losses: Sequence[Sequence[torch.Tensor]],
    clients: Sequence[int],
    round_: int,
    sgd: LocalSGD,
) -> None:
    """Refuse, or only log, results that are not finite or far worse than the start.

    Args:
        variables: what each client reached.
        losses: of each client's first and last step.
        clients: the clients' indices.
        round_: the round.
        sgd: the settings, which say whether divergence is only logged.

    Raises:
        DivergenceError: a client diverged.
    """
    troubles, remedy = [], f"(lr={sgd.lr}, momentum={sgd.momentum}): lower lr"
    for row, client in enumerate(clients):
        first, last = float(losses[row][0]), float(losses[row][-1])
        if round_ == 1 and not math.isfinite(first):
            about = "look at its data and at what the loss makes of them"
            troubles.append(f"the loss of client {client} is {first} before its first step: {about}")
        elif not np.isfinite(variables[row]).all():
            troubles.append(f"client {client} has values that are not finite in round {round_} {remedy}")
        elif last > _DIVERGED * (1 + abs(first)):
            # Clipped gradients hardly overflow, however long the steps: the loss tells.
            troubles.append(
                f"the loss of client {client} went from {first:.3g} to {last:.3g} in round {round_} {remedy}"
            )
    if troubles:
        text = f"training diverged: {troubles[0]}"
        if not sgd.log_divergence:
            raise DivergenceError(text)
        _log.warning("%s (%d of %d clients; the run goes on)", text, len(troubles), len(clients))
