"""Secret rotations: Q x and Q' x for an orthogonal m x m matrix Q that is a function of a key.

Clients turn what they upload by Q and turn back what they download, so that the server's view of a round depends on the
uploads through their inner products alone, whatever made them (docs/privacy-proofs.md, "Rotation").

- `haar`: uniformly distributed among all orthogonal matrices. Costs m^2 for each vector, and m^2/2 normal deviates.
- `hadamard`: secret signs and Walsh-Hadamard transforms, three times. Costs m log m; not uniform, nothing is proved.
- `none`: the identity.

All give the same bits on every machine, alone or in any stack, with any number of threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from fedrp.config.checks import require_choice
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.projection import kernels
from fedrp.projection.base import FloatArray, as_stack
from fedrp.projection.deviates import UNIT, fill_normals

VERSION = 1  # of the maps from keys to matrices
_ROUNDS = 3  # of `hadamard`: two spread each coordinate over all; the third is in reserve


class Rotation(ABC):
    """An orthogonal m x m matrix Q as an operator on float32 arrays; m is `size`.

    Guarantees: Q depends on the key, the kind, its version and m alone. Cannot be pickled or copied.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def forward(self, vectors: FloatArray) -> FloatArray:
        """Q x, for one vector (m,) or for each row of a stack (k, m)."""
        return self._turned(as_stack("vectors", vectors, self.size), undo=False).reshape(vectors.shape)

    def adjoint(self, vectors: FloatArray) -> FloatArray:
        """Q' x, which undoes `forward`, for one vector (m,) or for each row of a stack (k, m)."""
        return self._turned(as_stack("vectors", vectors, self.size), undo=True).reshape(vectors.shape)

    @abstractmethod
    def _turned(self, stack: FloatArray, undo: bool) -> FloatArray:
        """The rows of a stack times Q, or to undo that, times Q'; the stack stays as it is."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a rotation cannot be pickled or copied: make it again from its key")


class HaarRotation(Rotation):
    """Q = H_0 H_1 .. H_{m-2} D with independent reflections H_j and signs D: Haar's measure (Stewart 1980).

    H_j keeps the first j coordinates and maps e_j to s x/||x|| with x normal in the other m - j, s = +-1. So the first
    column of H_0 D is x/||x|| times a sign that D makes independent of x: uniform on the sphere. The other columns are
    H_0 times those of the same construction in m - 1 dimensions, which gives the uniform distribution by induction. D
    must be random: s depends on x (it is chosen to avoid cancellation).

    A block has UNIT reflections over one range of coordinates, which starts at the block's first one. Their normals are
    one stretch of the key's stream, made when they are needed: memory is 4 * UNIT * m bytes, not m^2.
    """

    def __init__(self, key: SecretKey, size: int) -> None:
        super().__init__(size)
        self._normals = key.derive("normals")
        bits = np.unpackbits(key.derive("signs").keystream(-(-size // 8)), count=size, bitorder="little")
        self._signs = 1 - 2 * bits.astype(np.float64)

    def _turned(self, stack: FloatArray, undo: bool) -> FloatArray:
        blocks = -(-(self.size - 1) // UNIT)
        pitch = -(-self.size // UNIT) * UNIT
        turned = np.zeros((len(stack), pitch), np.float64)
        turned[:, : self.size] = stack
        buffer = np.empty(UNIT * pitch, np.float32)
        if not undo:
            turned[:, : self.size] *= self._signs
        for block in range(blocks) if undo else reversed(range(blocks)):
            vectors, factors = self._reflections(block, pitch, buffer)
            kernels.run(kernels.reflect, len(stack), len(stack) * vectors.size, vectors, factors, turned, undo)
        if undo:
            turned[:, : self.size] *= self._signs
        return turned[:, : self.size].astype(np.float32)

    def _reflections(self, block: int, pitch: int, buffer: FloatArray) -> tuple[FloatArray, kernels.Array]:
        """The vectors of a block, in the buffer, and the factors that go with them."""
        first, width = block * UNIT, pitch - block * UNIT
        count = min(UNIT, self.size - 1 - first)
        vectors = buffer[: count * width].reshape(count, width)
        factors = np.empty(count, np.float64)
        before = UNIT * (block * pitch - UNIT * (block * (block - 1) // 2))  # words of the blocks before
        fill_normals(self._normals, vectors, before, width, 1.0)
        kernels.run(kernels.reflectors, count, vectors.size, vectors, self.size - first, factors)
        return vectors, factors


class HadamardRotation(Rotation):
    """Three times: secret signs and an orthonormal Walsh-Hadamard transform, of the first P coordinates, then the last.

    P is the largest power of two up to m, so that the two ranges overlap, or are one.
    """

    def __init__(self, key: SecretKey, size: int) -> None:
        super().__init__(size)
        length = 1 << (size.bit_length() - 1)
        self._ranges = 1 if length == size else 2
        self._signs = [key.derive(f"signs/{number}").keystream(length)[None] for number in range(_ROUNDS)]

    def _turned(self, stack: FloatArray, undo: bool) -> FloatArray:
        turned = np.array(stack, order="C")
        kernels.run(self._turn_rows, len(stack), turned.size, turned, undo)
        return turned

    def _turn_rows(self, stack: FloatArray, undo: bool, start: int, stop: int) -> None:
        steps = [(signs, number) for signs in self._signs for number in range(self._ranges)]
        for row in stack[start:stop]:
            for signs, number in reversed(steps) if undo else steps:
                kernels.mix(row, row, signs, undo, number, number + 1)


class NoRotation(Rotation):
    """The identity."""

    def __init__(self, _key: SecretKey, size: int) -> None:
        super().__init__(size)

    def _turned(self, stack: FloatArray, undo: bool) -> FloatArray:  # noqa: ARG002 - it is its own inverse
        return stack


ROTATIONS: dict[str, Callable[[SecretKey, int], Rotation]] = {
    "haar": HaarRotation,
    "hadamard": HadamardRotation,
    "none": NoRotation,
}


def make_rotation(kind: str, key: SecretKey, size: int) -> Rotation:
    """The orthogonal matrix of this kind and size that a round's key stands for."""
    require_choice("rotation", kind, ROTATIONS)
    if size < 1:
        raise ConfigError(f"dim={size}: must be at least 1")
    return ROTATIONS[kind](key.derive(f"rotation/{kind}/v{VERSION}/{size}"), size)
