"""Engines of local training by name: `sequential`, and `stacked:K`, which computes K clients as one."""

import torch

from fedrp.engines.memory import keep_freed_memory
from fedrp.engines.sequential import SequentialTrainer
from fedrp.engines.stacked import StackedTrainer
from fedrp.errors import ConfigError
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Loss
from fedrp.learning.trainer import LocalModel, Trainer, make_local_model
from fedrp.rng import RunSeed
from fedrp.stacking.rewrite import rewritten
from fedrp.stacking.values import NotStackableError

AUTO, SEQUENTIAL, STACKED = "auto", "sequential", "stacked"  # of `fedrp.config.ENGINES`


def make_trainer(
    factory: ModelFactory, loss: Loss, device: torch.device, seed: RunSeed, engine: str = SEQUENTIAL
) -> Trainer:
    """A trainer for models built by `factory`; refuses models that cannot be trained this way."""
    keep_freed_memory()
    return trainer_of(make_local_model(factory, loss, device, seed), seed, engine)


def trainer_of(model: LocalModel, seed: RunSeed, engine: str) -> Trainer:
    """An engine that trains a given model.

    Raises:
        ConfigError: it is a stacked engine, and the model cannot be stacked.
    """
    chunk = stacked_clients(engine)
    if chunk is None:
        return SequentialTrainer(model, seed)
    try:
        return StackedTrainer(model, seed, rewritten(model.module), chunk)
    except NotStackableError as error:
        raise refused(engine, error) from None


def stacked_clients(engine: str) -> int | None:
    """How many clients an engine computes as one: K of `stacked:K`; None for every other engine."""
    name, _, count = engine.partition(":")
    return int(count) if name == STACKED and count else None


def refused(engine: str, error: NotStackableError) -> ConfigError:
    """What a user is told whose model is not made of known layers."""
    return ConfigError(f"engine '{engine}' cannot train this model: {error}; use engine='auto'")
