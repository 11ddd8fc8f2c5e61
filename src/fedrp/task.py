"""A learning task: a model, a loss, who holds which examples, and the test set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from fedrp.config import RunConfig, require_choice
from fedrp.data import load_dataset
from fedrp.errors import ConfigError, DataError
from fedrp.evaluate import Correct, classified
from fedrp.models import MODELS, InputShape, ModelFactory
from fedrp.partition import Integers, parse_partition, partition
from fedrp.rng import RunSeed
from fedrp.training import Examples, Loss, described

Source = tuple[object, object] | TorchDataset[tuple[object, object]]  # (inputs, targets), or a map-style data set


@dataclass(frozen=True)
class Task:
    """What is to be learned.

    Args:
        model: builds the network, e.g. the class itself; called without arguments.
        train: all training examples, to be split by `RunConfig.partition`; or a list with the examples of each client.
        test: the examples that models are scored on.
        loss: mean loss of (outputs, targets).
        correct: what counts as right, one number in [0, 1] per example; by default the largest output's class.
        dataset: what results call the data; `model_name` likewise the model.
    """

    model: ModelFactory
    train: Source | Sequence[Source]
    test: Source
    loss: Loss = nn.functional.cross_entropy
    correct: Correct = classified
    dataset: str = "custom"
    model_name: str = "custom"


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
    dataset = load_dataset(config.dataset, data_dir)
    train, test = dataset.normalised(dataset.train_x), dataset.normalised(dataset.test_x)
    factory = _NamedModel(config.model, tuple(train.shape[1:]), dataset.classes)
    parts = (train, dataset.train_y), (test, dataset.test_y)
    return Task(factory, *parts, dataset=config.dataset, model_name=config.model)


def split_among_clients(task: Task, config: RunConfig) -> list[Examples]:
    """The examples of each client.

    Raises:
        DataError: a client would have none.
        ConfigError: the task comes split for another number of clients.
    """
    if isinstance(task.train, Sequence) and not isinstance(task.train, tuple):
        parts = [examples(source) for source in task.train]
        if len(parts) != config.clients:
            raise ConfigError(f"clients={config.clients}, but the task holds examples of {len(parts)} clients")
        empty = next((client for client, part in enumerate(parts) if len(part.y) == 0), None)
        if empty is not None:
            raise DataError(f"client {empty} has no examples")
        if config.train_examples is not None:
            raise ConfigError(f"train_examples={config.train_examples}, but the task comes split among its clients")
        return parts
    whole, seed = _limited(examples(task.train), config), RunSeed(config.seed)
    shares = partition(config.partition, _labels(whole.y, config), config.clients, seed.generator("partition"))
    return [Examples(whole.x[torch.from_numpy(share)], whole.y[torch.from_numpy(share)]) for share in shares]


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
    if config.train_examples is None:
        return whole
    asked, count = config.train_examples, len(whole.y)
    if asked > count:
        raise ConfigError(f"train_examples={asked}, but '{config.dataset}' has {count}: use at most that")
    chosen = torch.from_numpy(RunSeed(config.seed).generator("train-examples").permutation(count)[:asked])
    return Examples(whole.x[chosen], whole.y[chosen])


def examples(source: Source) -> Examples:
    """Inputs and targets as tensors."""
    if isinstance(source, tuple):
        x, y = (torch.as_tensor(part) for part in source)
    else:
        count = len(source)  # type: ignore[arg-type]  # map-style data sets have a length
        x, y = (torch.as_tensor(part) for part in default_collate([source[index] for index in range(count)]))
    if len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} targets")
    return Examples(_single(x), _single(y))


def _single(values: torch.Tensor) -> torch.Tensor:
    """Floats as float32, as models are; integers as int64, as losses and embeddings want them."""
    return values.float() if values.is_floating_point() else values.long()
