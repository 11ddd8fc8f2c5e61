"""What a projection is: an m x n matrix as an operator, and the arrays that it takes and gives."""

from abc import ABC, abstractmethod
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from fedrp.projection.tensors import Operator, by_host

FloatArray = npt.NDArray[np.float32]


class Projection(ABC):
    """An m x n matrix A as an operator on float32 arrays; m is `rows`, n is `columns`.

    Guarantees:
    - A depends on the key, the family's version, m and n alone: not on memory, threads or the machine.
    - `norm_bound` is at least A's largest singular value: the value itself where rows are orthogonal, and for
      `gaussian` a bound that fails with probability below 1.3e-14 over keys.
    - In `sign` and `hadamard`, a row of a stack gives the same bits alone or in any stack, with any number of threads.
      In `gaussian` it gives the same up to rounding.
    - Tensors on the CPU give the bits of arrays (`on`); those on another device the same up to rounding.
    - Cannot be pickled or copied; its repr shows the shape alone.

    Arrays may have padding between their rows; nothing is copied for it. `out` receives the result if given.
    """

    norm_bound: float

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._placed: dict[torch.device, Operator | None] = {}

    def on(self, device: torch.device) -> Operator:
        """A for tensors of a device, which it is moved to once. On the CPU that is `forward` and `adjoint`."""
        if device.type != "cpu":
            if device not in self._placed:
                self._placed[device] = self.native(device)
            if (placed := self._placed[device]) is not None:
                return placed
        return by_host(self.forward, self.adjoint)  # not kept: A would hold on to itself

    def native(self, device: torch.device) -> Operator | None:  # noqa: ARG002 - for those that have one
        """A as tensors of a device, or None where it has no such form: then the host computes, at each use."""
        return None

    def forward(self, vectors: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """A w, for one vector (n,) -> (m,) or for each row of a stack (k, n) -> (k, m)."""
        stack = as_stack("vectors", vectors, self.columns)
        result = _result(out, (*vectors.shape[:-1], self.rows))
        self._forward(stack, result.reshape(-1, self.rows))
        return result

    def adjoint(self, coefficients: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """A' theta, for one vector (m,) -> (n,) or for each row of a stack (k, m) -> (k, n)."""
        stack = as_stack("coefficients", coefficients, self.rows)
        result = _result(out, (*coefficients.shape[:-1], self.columns))
        self._adjoint(stack, result.reshape(-1, self.columns))
        return result

    @abstractmethod
    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        """Write A w into out (k, m) for each row w of stack (k, n). Both have contiguous rows."""

    @abstractmethod
    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        """Write A' theta into out (k, n) for each row theta of stack (k, m). Both have contiguous rows."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows}x{self.columns})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a projection cannot be pickled or copied: make it again from its key")


def _has_plain_rows(array: FloatArray) -> bool:
    """Whether rows are contiguous and follow each other without overlap, so that `_flat` can describe them."""
    ahead, step = array.strides[0], array.strides[-1]
    apart = array.ndim == 1 or len(array) < 2 or (ahead % array.itemsize == 0 and ahead >= array[0].nbytes)
    return array.flags.aligned and apart and (step == array.itemsize or array.shape[-1] == 1)


def as_stack(name: str, array: FloatArray, length: int) -> FloatArray:
    """A vector or stack as a stack of contiguous rows."""
    if array.dtype != np.float32 or array.ndim not in (1, 2) or array.shape[-1] != length:
        raise ValueError(
            f"{name}: expected float32 of shape ({length},) or (k, {length}), got {array.dtype} of {array.shape}"
        )
    return (array if _has_plain_rows(array) else np.ascontiguousarray(array)).reshape(-1, length)


def _result(out: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    if out is None:
        return np.empty(shape, np.float32)
    if out.dtype != np.float32 or out.shape != shape or not _has_plain_rows(out) or not out.flags.writeable:
        raise ValueError(f"out: expected float32 of shape {shape} with contiguous rows, got {out.dtype} of {out.shape}")
    return out
