"""Projections of tensors: A w and A' theta where training holds its numbers.

On the CPU the compiled kernels read the tensors' own memory. On another device A is there too, as tensors that are made
from the same secrets and moved once: no number comes to the host in a step of training. Sums are taken in the type of
what is projected and in the device's own order, so results differ from those of the kernels by rounding.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Map = Callable[[torch.Tensor], torch.Tensor]
ArrayMap = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


class Operator(NamedTuple):
    """A matrix on a device, for float tensors of that device."""

    forward: Map  # A w for each row of a stack (k, n) -> (k, m)
    adjoint: Map  # A' theta for each row of a stack (k, m) -> (k, n)


def by_host(forward: ArrayMap, adjoint: ArrayMap) -> Operator:
    """An operator of functions of arrays: float32 only, and from another device all numbers move here and back."""

    def of_tensors(function: ArrayMap, stack: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(function(stack.cpu().numpy())).to(stack.device)

    return Operator(lambda vectors: of_tensors(forward, vectors), lambda thetas: of_tensors(adjoint, thetas))


def dense(matrix: torch.Tensor) -> Operator:
    """A matrix (m, n) as it is: one matrix product each way, for all rows of a stack."""
    return Operator(
        lambda vectors: vectors @ matrix.to(vectors.dtype).T, lambda thetas: thetas @ matrix.to(thetas.dtype)
    )


def one_per_column(
    rows: npt.NDArray[np.int32],
    signs: npt.NDArray[np.int8],
    columns: npt.NDArray[np.int32],
    entries: npt.NDArray[np.int8],
    device: torch.device,
) -> Operator:
    """A matrix whose column j has one entry, `signs[j]` in row `rows[j]`; known from its rows, too.

    Both ways numbers are fetched, never scattered, so that no result depends on the order of threads. Row i has the
    `entries[:, i]` in the columns `columns[:, i]`; one that is shorter than others is filled up with zeros.
    """
    depth, count = columns.shape
    fetched, weights = _moved(columns.ravel(), device), _moved(entries.ravel(), device)
    places, flips = _moved(rows, device), _moved(signs, device)

    def forward(vectors: torch.Tensor) -> torch.Tensor:
        return (vectors.index_select(1, fetched) * weights).view(len(vectors), depth, count).sum(dim=1)

    def adjoint(thetas: torch.Tensor) -> torch.Tensor:
        return thetas.index_select(1, places) * flips

    return Operator(forward, adjoint)


def after_mixing(operator: Operator, signs: npt.NDArray[np.int8], columns: int, device: torch.device) -> Operator:
    """An operator after the orthonormal mixing of `HadamardProjection`, whose blocks have these signs (blocks, P)."""
    size = signs.shape[1]
    flips, whole = _moved(signs, device), columns // size
    tail = whole * size

    def forward(vectors: torch.Tensor) -> torch.Tensor:
        blocks = transformed(vectors[:, :tail].reshape(-1, whole, size) * flips[:whole])
        mixed = torch.cat([blocks.flatten(1), vectors[:, tail:]], dim=1)
        if tail < columns:
            mixed[:, -size:] = transformed(mixed[:, -size:] * flips[-1])
        return operator.forward(mixed)

    def adjoint(thetas: torch.Tensor) -> torch.Tensor:
        mixed = operator.adjoint(thetas)
        if tail < columns:
            mixed[:, -size:] = transformed(mixed[:, -size:]) * flips[-1]
        blocks = transformed(mixed[:, :tail].reshape(-1, whole, size)) * flips[:whole]
        return torch.cat([blocks.flatten(1), mixed[:, tail:]], dim=1)

    return Operator(forward, adjoint)


def transformed(values: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, whose size is a power of two."""
    size, step = values.shape[-1], 1
    while step < size:
        pairs = values.reshape(*values.shape[:-1], size // (2 * step), 2, step)
        left, right = pairs.unbind(dim=-2)
        values = torch.stack([left + right, left - right], dim=-2).reshape(values.shape)
        step *= 2
    return values / math.sqrt(size)


def _moved(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
