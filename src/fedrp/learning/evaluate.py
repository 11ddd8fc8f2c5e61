"""Evaluation: how good a model is, always saying which model it was."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fedrp.errors import ConfigError
from fedrp.learning.objective import Examples, described
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.types import Vector

EVALUATION_BATCH = 250  # fastest of 100 to 1,000 on two cores; the result does not depend on it

Correct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (outputs, targets) -> one number in [0, 1] per example


class Score(NamedTuple):
    """Accuracy in percent, and mean loss."""

    accuracy: float
    loss: float


class Evaluation(NamedTuple):
    """Scores of a round, by model.

    `delivered` is the model that the algorithm delivers: the consensus, or, where every client keeps its own, a client
    drawn at random. `average` is the average of all clients' models. The client fields cover all clients.
    """

    delivered: Score
    average: Score
    client_mean: float | None = None
    client_min: float | None = None
    client_max: float | None = None


def classified(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 where the largest output is the target class; of several targets per example, the share for which it is."""
    if outputs.ndim < 2 or outputs.shape[1] < 2 or targets.shape != outputs[:, 0].shape or targets.is_floating_point():
        raise ConfigError(
            f"outputs {described(outputs)} do not choose among classes {described(targets)}: say what counts as right "
            "with Task(correct=...)"
        )
    return (outputs.argmax(dim=1) == targets).float().reshape(len(targets), -1).mean(dim=1)


def score(local: LocalModel, model: Vector, test: Examples, correct: Correct) -> Score:
    """Accuracy and loss of a model on a test set."""
    module = local.bind(model).eval()
    right, loss = 0.0, 0.0
    with torch.inference_mode():
        for start in range(0, len(test.y), EVALUATION_BATCH):
            batch = slice(start, start + EVALUATION_BATCH)
            targets = test.y[batch].to(local.device)
            outputs = module(batch_input(test.x[batch], local.device))
            right += number_right(correct, outputs, targets)
            loss += float(local.loss(outputs, targets)) * len(targets)
    return Score(100.0 * right / len(test.y), loss / len(test.y))


def number_right(correct: Correct, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """How many examples of a batch count as right.

    Raises:
        ConfigError: `correct` gave anything but one number in [0, 1] per example, which would be no accuracy.
    """
    right = correct(outputs, targets)
    count = len(targets)
    if not isinstance(right, torch.Tensor) or right.shape not in ((count,), (count, 1)):
        got = described(right) if isinstance(right, torch.Tensor) else f"a {type(right).__name__}"
        raise ConfigError(f"Task(correct=...) gave {got} for {count} examples: expected one number for each")
    if not bool(((right >= 0) & (right <= 1)).all()):
        low, high = float(right.min()), float(right.max())
        raise ConfigError(f"Task(correct=...) gave {low:g} to {high:g}: expected numbers from 0 (wrong) to 1 (right)")
    return float(right.sum())
