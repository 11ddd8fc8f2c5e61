"""Evaluation: how good a model is, always saying which model it was."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from fedrp.config.checks import require_choice
from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.learning.objective import Examples, described
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.types import Vector

EVALUATION_BATCH = 250  # fastest of 100 to 1,000 on two cores; the result does not depend on it

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]  # (outputs, targets) of all test examples
Metrics = Mapping[str, Metric]
Goal = Literal["max", "min"]

ACCURACY, LOSS = "accuracy", "loss"
_AVERAGE = "_average"
_CLIENTS = ("_client_mean", "_client_min", "_client_max")
# What results, lines of `metrics.jsonl` and the status of a site hold beside metrics, in one flat object.
_TAKEN = """
    sites dp_unit epsilon_by_unit accuracy adjacency adversary aggregation algorithm ball batch_size bytes_delivery_down
    bytes_delivery_framing_down bytes_delivery_framing_up bytes_delivery_keys_down bytes_delivery_keys_up
    bytes_delivery_up bytes_down bytes_down_total bytes_framing_down bytes_framing_down_total bytes_framing_up
    bytes_framing_up_total bytes_keys_down bytes_keys_down_total bytes_keys_per_client bytes_keys_up
    bytes_keys_up_total bytes_payload_down bytes_payload_up bytes_up bytes_up_total client clients clip
    consensus_bound dataset deliver delivered_round delivery_participants delta dim dropped epsilon
    evaluation_seconds event finished goal headline history images_per_second local_epochs loss lr model momentum
    name noise_multiplier outlook parameters participants participation partition peak_rss_mb privacy projection rho
    role round rounds rounds_done run seconds seconds_per_round secure_aggregation seed signal_to_noise time
    train_examples updated warnings
"""


class NoAccuracyError(ConfigError, AttributeError):
    """Accuracy was asked for where targets are no classes."""


class Score(NamedTuple):
    """Mean loss, and metrics by name: those of the task, and accuracy in percent where targets are classes."""

    loss: float
    metrics: Mapping[str, float]

    @property
    def accuracy(self) -> float:
        """In percent.

        Raises:
            NoAccuracyError: targets are no classes.
        """
        if ACCURACY not in self.metrics:
            raise NoAccuracyError("there is no accuracy, because targets are no classes: look at loss and metrics")
        return self.metrics[ACCURACY]

    def named(self) -> dict[str, float]:
        """All of it by name, the loss last."""
        return {**self.metrics, LOSS: self.loss}

    def as_json(self) -> dict[str, float | None]:
        """The same; what is not finite, which JSON does not know, is null."""
        return {name: value if math.isfinite(value) else None for name, value in self.named().items()}

    @classmethod
    def of(cls, named: Mapping[str, float]) -> "Score":
        """The inverse of `named`."""
        return cls(named[LOSS], {name: value for name, value in named.items() if name != LOSS})


class Spread(NamedTuple):
    """Scores over all clients, each number by itself."""

    mean: Score
    least: Score
    most: Score

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Spread":
        """Of the scores of all clients."""
        columns = {name: [score.named()[name] for score in scores] for name in scores[0].named()}
        of_each: tuple[Callable[[list[float]], float], ...] = (lambda values: sum(values) / len(values), np.min, np.max)
        return cls(*(Score.of({name: float(of(column)) for name, column in columns.items()}) for of in of_each))


class Evaluation(NamedTuple):
    """Scores of a round, by model.

    `delivered` is the model that the algorithm delivers: the consensus, or, where every client keeps its own, a client
    drawn at random. `average` is the average of all clients' models. `clients` covers all clients' own models.
    """

    delivered: Score
    average: Score
    clients: Spread | None = None

    def as_json(self) -> dict[str, float | None]:
        """One flat object."""
        flat = self.delivered.as_json()
        flat |= {f"{name}{_AVERAGE}": value for name, value in self.average.as_json().items()}
        for end, score in zip(_CLIENTS, self.clients or (None,) * 3, strict=True):
            values = score.as_json() if score else dict.fromkeys(self.delivered.named())
            flat |= {f"{name}{end}": value for name, value in values.items()}
        return flat

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Evaluation | None":
        """The inverse of `as_json`; None where there are no scores in an object."""
        names = [name.removesuffix(_AVERAGE) for name in line if name.endswith(_AVERAGE)]
        if not names:
            return None

        def scored(end: str) -> Score:
            values = {name: line[f"{name}{end}"] for name in names}
            return Score.of({name: math.nan if value is None else value for name, value in values.items()})

        spread = None if line[f"{LOSS}{_CLIENTS[0]}"] is None else Spread(*map(scored, _CLIENTS))
        return cls(scored(""), scored(_AVERAGE), spread)


class Headline(NamedTuple):
    """The one number that a run is judged by, and whether more of it is better."""

    name: str
    goal: Goal

    @classmethod
    def of(cls, metrics: Metrics, goal: Goal, score: Score) -> "Headline":
        """The first metric of a task; without any the accuracy, and the loss where there is none."""
        if metrics:
            return cls(next(iter(metrics)), goal)
        return cls(ACCURACY, "max") if ACCURACY in score.metrics else cls(LOSS, "min")

    def value(self, score: Score) -> float:
        """The number."""
        return score.named()[self.name]

    def better(self, new: float, old: float) -> bool:
        """Whether a value is better than another; one that is not a number never is."""
        return new > old if self.goal == "max" else new < old

    def text(self, score: Score) -> str:
        """The number for people."""
        value = self.value(score)
        return f"{value:.2f} %" if self.name == ACCURACY else f"{self.name} {value:.4g}"


# --- metrics ---------------------------------------------------------------------------------------------------------


def require_metrics(metrics: object, goal: object = "max") -> None:
    """Refuse metrics that cannot be computed or would be taken for something else in a result.

    Raises:
        ConfigError: no functions by name, a name that is taken, or a goal that is none.
    """
    if not isinstance(metrics, Mapping):
        got = f"a {type(metrics).__name__}"
        raise ConfigError(f"metrics is {got}: expected functions by name, as metrics={{'auroc': function}}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ConfigError(f"{name!r} is no name for a metric: give a word, as metrics={{'auroc': function}}")
        if name in _TAKEN.split() or name.endswith((_AVERAGE, *_CLIENTS)):
            raise ConfigError(f"'{name}' is no name for a metric, results use it already: choose another")
        if isinstance(metric, type) or not callable(metric):
            got = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ConfigError(f"metric '{name}' is {got}: expected a function of (outputs, targets)")
    if goal not in ("max", "min"):
        require_choice("goal", str(goal), ("max", "min"))


def metrics_of(metrics: Metrics, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """All metrics, of all outputs and targets at once.

    Raises:
        ConfigError: one of them fails, or gives anything but a number.
    """
    return {name: _number(name, metric, outputs, targets) for name, metric in metrics.items()}


def _number(name: str, metric: Metric, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    about = f"outputs {described(outputs)}, targets {described(targets)}"
    try:
        value = metric(outputs, targets)
    except FedRPError:
        raise
    except Exception as error:  # it is the user's code
        raise ConfigError(f"metric '{name}' does not take the test set: {first_line(error)}; {about}") from error
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = described(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigError(f"metric '{name}' gave {got} for {about}: expected one number") from None


# --- scores ----------------------------------------------------------------------------------------------------------


def predictions(module: nn.Module, test: Examples, device: torch.device) -> Iterator[tuple[Any, torch.Tensor]]:
    """Outputs and targets of a test set, batch by batch; `Any` because models of users may give anything."""
    for start in range(0, len(test.y), EVALUATION_BATCH):
        batch = slice(start, start + EVALUATION_BATCH)
        yield module(batch_input(test.x[batch], device)), test.y[batch].to(device)


def score(local: LocalModel, model: Vector, test: Examples, metrics: Metrics) -> Score:
    """Loss and metrics of a model on a test set. For metrics all outputs are kept, in the machine's memory."""
    module = local.bind(model).eval()
    loss, right, classes, kept = 0.0, 0.0, True, []
    with torch.inference_mode():
        for outputs, targets in predictions(module, test, local.device):
            loss += float(local.loss(outputs, targets)) * len(targets)
            classes = classes and choose_classes(outputs, targets)
            right += number_right(outputs, targets) if classes else 0.0
            if metrics:
                kept.append(outputs.cpu())
        found = metrics_of(metrics, torch.cat(kept), test.y.cpu()) if metrics else {}
    accuracy = {ACCURACY: 100.0 * right / len(test.y)} if classes else {}
    return Score(loss / len(test.y), {**found, **accuracy})


def choose_classes(outputs: Any, targets: torch.Tensor) -> bool:
    """Whether outputs choose among classes, one or several of which each example has as targets."""
    if not isinstance(outputs, torch.Tensor) or targets.is_floating_point():
        return False
    return outputs.ndim >= 2 and outputs.shape[1] >= 2 and targets.shape == outputs[:, 0].shape


def number_right(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Examples of a batch whose largest output is the target class; of several targets each, the share of those."""
    return float((outputs.argmax(dim=1) == targets).float().reshape(len(targets), -1).mean(dim=1).sum())
