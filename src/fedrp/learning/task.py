"""A learning task: a model, a loss, who holds which examples, and the test set."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, default_collate

from fedrp.config.checks import require_choice
from fedrp.config.run import RunConfig
from fedrp.errors import ConfigError, DataError, first_line
from fedrp.learning.data import Dataset, load_dataset
from fedrp.learning.evaluate import Goal, Metrics, require_metrics
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, Loss, described
from fedrp.learning.partition import Integers, parse_partition, partition
from fedrp.learning.pixels import Pixels, Scale
from fedrp.learning.zoo import MODELS, InputShape
from fedrp.rng import RunSeed

Source = tuple[object, object] | TorchDataset[tuple[object, object]]  # (inputs, targets), or a map-style data set


@dataclass(frozen=True)
class Task:
    """What is to be learned.

    Args:
        model: builds a new network in every call, e.g. the class itself; called without arguments.
        train: all training examples, to be split by `RunConfig.partition`; or a list with the examples of each client;
            or a dict of them, by the name of the site.
            Inputs become float32, unless they are int32 or int64: then they stay whole, as embeddings want them. Bytes
            that are to be scaled and centred batch by batch come as `Pixels`.
        test: the examples that models are scored on.
        loss: mean loss of (outputs, targets).
        metrics: functions of (outputs, targets) by name, each of all test examples at once, e.g. those of
            `torchmetrics.functional`. Accuracy is there without asking where targets are classes.
        goal: whether more ("max") or less ("min") of the first metric is better: it is what a run is judged by.
            Without metrics that is the accuracy, and where targets are no classes the loss.
        dataset: what results call the data; `model_name` likewise the model.
    """

    model: ModelFactory
    train: Source | Sequence[Source] | Mapping[str, Source]
    test: Source
    loss: Loss = nn.functional.cross_entropy
    metrics: Metrics = field(default_factory=dict)
    goal: Goal = "max"
    dataset: str = "custom"
    model_name: str = "custom"

    def __post_init__(self) -> None:
        require_metrics(self.metrics, self.goal)


@dataclass(frozen=True)
class _NamedModel:
    """Builds a model of the table; a class and not a closure, so that it can be sent to worker processes."""

    name: str
    shape: InputShape
    classes: int

    def __call__(self) -> nn.Module:
        return MODELS[self.name].build(self.shape, self.classes)


def named_task(config: RunConfig, data_dir: Path | None = None) -> Task:
    """The task that a config names: a data set and a model of the tables."""
    require_choice("model", config.model, MODELS)
    dataset = load_dataset(config.dataset, data_dir, config.relabel)
    train, test = _inputs(dataset, dataset.train_x), _inputs(dataset, dataset.test_x)
    factory = _NamedModel(config.model, tuple(train.shape[1:]), dataset.classes)
    parts = (train, dataset.train_y), (test, dataset.test_y)
    return Task(factory, *parts, dataset=config.dataset, model_name=config.model)


def _inputs(dataset: Dataset, x: npt.NDArray[np.uint8 | np.float32]) -> Pixels | npt.NDArray[np.float32]:
    """Normalised inputs: bytes stay bytes until a batch of them is taken."""
    if x.dtype != np.uint8:
        return dataset.normalised(x)
    return Pixels(torch.from_numpy(x), Scale(dataset.mean, dataset.std))


def split_among_clients(task: Task, config: RunConfig) -> list[Examples]:
    """The examples of each client.

    Raises:
        DataError: a client would have none.
        ConfigError: the task comes split for another number of clients.
    """
    if parts := split_already(task):
        if len(parts) != config.clients:
            raise ConfigError(
                f"clients={config.clients}, but the task holds examples of {len(parts)} clients: use "
                f"clients={len(parts)}, or give all examples as one (inputs, targets)"
            )
        if config.train_examples:
            raise ConfigError(f"train_examples={config.train_examples}, but the task comes split among its clients")
        if config.partition != "iid":
            raise ConfigError(f"partition='{config.partition}', but the task comes split among its clients")
        return [examples(source, owner) for owner, source in parts.items()]
    whole, seed = _limited(examples(cast("Source", task.train), "the training set"), config), RunSeed(config.seed)
    shares = partition(config.partition, _labels(whole.y, config), config.clients, seed.generator("partition"))
    order, sizes = torch.from_numpy(np.concatenate(shares)), [len(share) for share in shares]
    x, y = whole.x[order], whole.y[order]
    cuts = itertools.pairwise([0, *itertools.accumulate(sizes)])
    return [Examples(x[first:last], y[first:last]) for first, last in cuts]  # views of two tensors, however many


def split_already(task: Task) -> dict[str, Source]:
    """The examples of each client by what errors call it, if the task comes split; else nothing."""
    parts: dict[str, Source] = {}
    if isinstance(task.train, Mapping):
        parts = {f"site '{name}'": source for name, source in task.train.items()}
    elif isinstance(task.train, Sequence) and not isinstance(task.train, tuple | str):
        parts = {f"client {number}": source for number, source in enumerate(task.train)}
    else:
        return {}
    if not parts:
        raise DataError(f"train is an empty {type(task.train).__name__}: expected the examples of each client")
    for owner, source in parts.items():
        if isinstance(source, torch.Tensor | np.ndarray):
            raise ConfigError(
                f"train is a {type(task.train).__name__}, and {owner} in it one array: give (inputs, targets) of each "
                "client, or of all of them as a tuple"
            )
    return parts


def _labels(targets: torch.Tensor, config: RunConfig) -> Integers:
    """One class per example, to split by; where targets are no class labels, the same for all."""
    column = targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets
    if column.ndim == 1 and not column.is_floating_point():
        return column.numpy()
    if parse_partition(config.partition)[0].by_class:
        raise ConfigError(
            f"partition '{config.partition}' splits by class, but targets are {described(targets)}, no class labels: "
            "use iid, or give a list with the examples of each client"
        )
    return np.zeros(len(targets), np.int64)


def _limited(whole: Examples, config: RunConfig) -> Examples:
    if not config.train_examples:
        return whole
    asked, count = config.train_examples, len(whole.y)
    if asked > count:
        raise ConfigError(f"train_examples={asked}, but '{config.dataset}' has {count}: use at most that")
    chosen = torch.from_numpy(RunSeed(config.seed).generator("train-examples").permutation(count)[:asked])
    return Examples(whole.x[chosen], whole.y[chosen])


def examples(source: Source, owner: str) -> Examples:
    """Inputs and targets as tensors; errors name their owner, e.g. "the test set".

    Guarantees: as many inputs as targets and at least one; numbers are finite; inputs are float32, `Pixels`, or int64
    where they came as int32 or int64 (indices of an embedding); targets are float32 or int64.

    Raises:
        ConfigError: the source is of no kind that `Task` takes.
        DataError: it is empty, uneven or not finite.
    """
    pair = _pair(source, owner)
    for name, part in zip(("inputs", "targets"), pair, strict=True):
        _require_no_text(part, f"{owner} has {name}")
    try:
        given_x, given_y = pair
        x, y = given_x if isinstance(given_x, Pixels) else torch.as_tensor(given_x), torch.as_tensor(given_y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{owner} cannot be made tensors: {first_line(error)}") from error
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise DataError(
            f"{owner} has inputs {described(x)} but targets {described(y)}: expected one of each an example"
        )
    if 0 in x.shape or y.numel() == 0:
        raise DataError(f"{owner} has no examples")
    if not isinstance(x, Pixels):
        x = x.long() if x.dtype in (torch.int32, torch.int64) else x.float()
    y = y.float() if y.is_floating_point() else y.long()
    for name, values in (("inputs", x), ("targets", y)):
        if isinstance(values, Pixels):
            continue
        if not all(math.isfinite(bound) for bound in torch.aminmax(values)):
            raise DataError(f"{owner} has {name} that are not finite (NaN or infinite): remove or replace them")
    return Examples(x, y)


def _pair(source: Source, owner: str) -> Sequence[object]:
    """Inputs and targets of a source, each in one piece."""
    if isinstance(source, tuple):
        if any(_is_source(part) for part in source):
            raise ConfigError(
                f"{owner} is a tuple of {len(source)} sets of examples: make it a list, one for each client"
            )
        if len(source) == 2:
            return source
        raise _no_source(owner, f"a tuple of {len(source)}")
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise _no_source(owner, f"a {type(source).__name__}")
    samples = [source[index] for index in range(len(source))]
    if not samples:
        raise DataError(f"{owner} has no examples")
    if not isinstance(samples[0], tuple | list) or len(samples[0]) != 2:
        raise _no_source(owner, f"a {type(source).__name__} of {_kind(samples[0])}")
    pair: Sequence[object] = default_collate(samples)
    return pair


def _is_source(part: object) -> bool:
    """Whether this is itself inputs and targets, not one of them."""
    return isinstance(part, TorchDataset) or (
        isinstance(part, tuple) and len(part) == 2 and all(np.ndim(half) > 0 for half in part)
    )


def _require_no_text(part: object, what: str) -> None:
    if isinstance(part, torch.Tensor):
        return
    first = next(iter(part), None) if isinstance(part, np.ndarray | Sequence) and not isinstance(part, str) else part
    if isinstance(first, str):
        raise DataError(
            f"{what} that are text, e.g. '{first}': number them from 0, as numpy.unique(..., return_inverse=True) does"
        )


def _kind(sample: object) -> str:
    return f"{len(sample)}-tuples" if isinstance(sample, tuple | list) else f"{type(sample).__name__}s"


def _no_source(owner: str, got: str) -> ConfigError:
    return ConfigError(f"{owner} is {got}: expected (inputs, targets), or a map-style torch data set of such pairs")
