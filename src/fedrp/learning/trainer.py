"""Trainer: the seam between algorithms and the engines that train a group of clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from fedrp.learning.layout import Layout, ModelFactory, State, layout_of
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Loss, Objective, Stack
from fedrp.learning.pixels import Inputs, floats
from fedrp.rng import RunSeed
from fedrp.types import Vector


@dataclass(frozen=True)
class LocalModel:
    """A module and its loss on the training device, to be bound to any vector of its layout."""

    module: nn.Module  # scratch: bound to one vector after the other
    loss: Loss
    layout: Layout
    device: torch.device

    def bind(self, vector: Vector) -> nn.Module:
        """The module with a copy of a vector as its weights."""
        self.layout.bind(self.module, torch.from_numpy(np.array(vector, np.float32)).to(self.device))
        return self.module

    def state(self, vector: Vector) -> State:
        """The whole `state_dict` of a model: its weights, and frozen layers and buffers as they are trained with.

        Each tensor has memory of its own on the CPU, as files want it; tied parameters are there under all their names.
        """
        saved = self.bind(vector).state_dict()
        tensors = {name: tensor for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
        return {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


class Trainer(Protocol):
    """An engine of local training: any that keeps the guarantee can take the place of another.

    Guarantees: a client's result depends on its start, its data, the seed, the round and its index, not on which
    clients it is grouped with (exactly, where the objective treats rows independently).
    """

    @property
    def model(self) -> LocalModel:
        """What is trained, for those who score it or write it to a file."""

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


def make_local_model(factory: ModelFactory, loss: Loss, device: torch.device, seed: RunSeed) -> LocalModel:
    """The model that `factory` builds; refuses one that cannot be trained here."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed.integer("initial-model"))  # for what is not in the vector: frozen layers, buffers
        module = factory().to(device)
    return LocalModel(module, loss, layout_of(module), device)


def batch_input(x: Inputs, device: torch.device) -> torch.Tensor:
    """A batch on its device, images in the memory order that convolutions run fastest in."""
    moved = floats(x.to(device))
    return moved.contiguous(memory_format=torch.channels_last) if moved.ndim == 4 else moved
