"""Objective of local training: what the clients of a group minimise, on torch tensors. Knows no algorithm.

Rows are clients. An `Objective` says how variables become weights and what is added to the loss gradient, so that plain
SGD, ADMM penalties and training inside a subspace are the same loop, and a projection is applied to all clients of the
group as one matrix product.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.learning.pixels import Inputs

Stack = npt.NDArray[np.float32]  # (clients, numbers), as it comes into training and out of it
Rows = slice | torch.Tensor  # which clients of the group a step is about; a tensor of indices where some are done
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Examples(NamedTuple):
    """Inputs and targets of one client, or of the test set."""

    x: Inputs
    y: torch.Tensor

    def on(self, device: torch.device) -> "Examples":
        """The same examples on a device; nothing is copied if they are there."""
        return Examples(self.x.to(device), self.y.to(device))


def described(values: Inputs) -> str:
    """Shape and type of a tensor, as errors name them."""
    return f"{tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"


def on_device(values: Stack, device: torch.device) -> torch.Tensor:
    """An array as a tensor of the training device, to be read only: on the CPU it shares the array's memory."""
    # torch does not take read-only memory, such as that of a received packet.
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(device)


class Objective(NamedTuple):
    """What a group minimises; all tensors are float32 on the training device.

    `gradient(variables, loss_gradients, rows)` turns gradients of the loss with respect to the weights (k x n) into
    gradients with respect to the variables (k x d); it may write over the gradients, not over the variables.
    `weights(variables, rows)` maps variables to weights; None means that the variables are the weights.
    `project(loss_gradients)`, a linear map, is applied to them first: `gradient` is told what it gives (k x d). Where
    records are protected, it is applied to the gradient of each example.
    `step_size(steps)`, from how many steps a client takes in the round, replaces the configured learning rate.
    `at_once` asks for all rows of the group in one call, because both functions cost less per row that way.
    """

    gradient: Callable[[torch.Tensor, torch.Tensor, Rows], torch.Tensor]
    weights: Callable[[torch.Tensor, Rows], torch.Tensor] | None = None
    step_size: Callable[[int], float] | None = None
    at_once: bool = False
    project: Callable[[torch.Tensor], torch.Tensor] | None = None

    def direction(self, variables: torch.Tensor, gradients: torch.Tensor, rows: Rows) -> torch.Tensor:
        """What a step goes along, from gradients of the loss with respect to the weights."""
        return self.gradient(variables, gradients if self.project is None else self.project(gradients), rows)


def _loss_only(_variables: torch.Tensor, gradients: torch.Tensor, _rows: Rows) -> torch.Tensor:
    return gradients


PLAIN = Objective(_loss_only)


class LocalSGD(NamedTuple):
    """Settings of local training; the optimiser's state is fresh in every round."""

    lr: float
    momentum: float
    batch_size: int
    epochs: int
    grad_clip: float = 0.0  # largest norm of a gradient with respect to the variables; 0 for no limit
    # Logs divergence instead of raising, because stopping would leak one bit of the client's data.
    log_divergence: bool = False
    lr_scale: float = 1.0  # what the learning rate of this round is multiplied by, also one that the objective chooses
    augment: str = "none"  # what happens to an image when it is taken for a batch
