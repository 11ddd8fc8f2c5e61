"""Projections of tensors: A w and A' theta where training holds its numbers.

On the CPU a projection reads the tensor's own memory, and its result is a tensor on the memory that it wrote. From
another device the rows of a step move here and back, n floats of each client one way and m the other: projections that
run on the device itself would save that, and would be made here.
"""

import torch

from fedrp.projection.families import Projection


def forward(projection: Projection, vectors: torch.Tensor) -> torch.Tensor:
    """A w for each row of a stack (k, n) -> (k, m), on the device of the stack."""
    return torch.from_numpy(projection.forward(vectors.cpu().numpy())).to(vectors.device)


def adjoint(projection: Projection, coefficients: torch.Tensor) -> torch.Tensor:
    """A' theta for each row of a stack (k, m) -> (k, n), on the device of the stack."""
    return torch.from_numpy(projection.adjoint(coefficients.cpu().numpy())).to(coefficients.device)
