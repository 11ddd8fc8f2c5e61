"""Secret random projections: A w and A' theta for an m x n matrix A that is a function of a key and never leaves it.

Three families make A, each from the AES-256-CTR stream of a key derived for (family, version, n, m):

- `gaussian`: independent N(0, 1/m) entries, as in the paper. Cost m * n.
- `sign`: one +-1 per column, balanced over the rows. Cost n, the same bits on every machine.
- `hadamard`: `sign` after an orthonormal transform that spreads each coordinate over a block. Cost n log n.

In each, E ||A w||^2 = ||w||^2 for every w.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from fedrp import kernels
from fedrp.errors import ConfigError
from fedrp.secret import SecretKey

FloatArray = npt.NDArray[np.float32]

DEFAULT_MEMORY = 1 << 30  # bytes that a `gaussian` matrix may occupy; larger ones are generated anew for each use


class Projection(ABC):
    """The matrix A, with m = `rows` and n = `columns`, as an operator on float32 arrays.

    Guarantees:
    - A depends on the key, the family's version, n and m alone: not on memory, threads, chunks or the machine.
    - `norm_bound` is at least the largest singular value of A (`gaussian`: but for probability 1.3e-14 over keys).
    - Rows of a stack are projected independently of each other; `sign` and `hadamard` give each row the same bits in
      any stack and with any number of threads, `gaussian` the same up to rounding.
    - Holds the matrix's secret: cannot be pickled or copied, and its repr shows the shape alone.
    """

    version: ClassVar[int]  # of the map from key to A; part of the key derivation and of the wire format
    norm_bound: float
    row_energy: npt.NDArray[np.float64] | None = None  # the diagonal of A A' where that is diagonal, else None

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows

    def forward(self, vectors: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """A w for one vector (n,) -> (m,) or for the rows of a stack (k, n) -> (k, m)."""
        stack = _checked("vectors", vectors, self.columns)
        result = _target(out, vectors.shape[:-1] + (self.rows,))
        self._forward(stack, result.reshape(-1, self.rows))
        return result

    def adjoint(self, coefficients: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """A' theta for one vector (m,) -> (n,) or for the rows of a stack (k, m) -> (k, n)."""
        stack = _checked("coefficients", coefficients, self.rows)
        result = _target(out, coefficients.shape[:-1] + (self.columns,))
        self._adjoint(stack, result.reshape(-1, self.columns))
        return result

    def pseudo_inverse(self, coefficients: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """The shortest w with A w = theta, for families with orthogonal rows; others raise `TypeError`."""
        if self.row_energy is None:
            raise TypeError(f"{type(self).__name__} has no exact pseudo-inverse: its rows are not orthogonal")
        scaled = _checked("coefficients", coefficients, self.rows) / self.row_energy
        return self.adjoint(scaled.astype(np.float32).reshape(coefficients.shape), out)

    @abstractmethod
    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        """Write A w for each row w of `stack` (k, n) into `out` (k, m). Rows are contiguous, their distance free."""

    @abstractmethod
    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        """Write A' theta for each row theta of `stack` (k, m) into `out` (k, n)."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows}x{self.columns})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a projection cannot be pickled or copied: make it again from its key")


class GaussianProjection(Projection):
    """Independent N(0, 1/m) entries, exact to float32, from Box-Muller on 32 bits of the stream per entry.

    Row i is the stream from byte 4 * i * pitch, with the pitch n rounded up to whole units of `kernels.normals`, so any
    part of A can be generated on its own. A is kept if it fits the memory budget, else generated in tiles at each use.

    Norm: ||A|| <= 1 + sqrt(n/m) + t/sqrt(m) but for probability exp(-t^2/2) (Davidson and Szarek 2001, Theorem II.13);
    t = 8.
    """

    version = 1

    def __init__(self, key: SecretKey, columns: int, rows: int, memory_bytes: int) -> None:
        super().__init__(columns, rows)
        self.norm_bound = 1 + math.sqrt(columns / rows) + 8 / math.sqrt(rows)
        self._key = key
        self._pitch = -(-columns // _UNIT) * _UNIT
        self._tile_columns = min(self._pitch, _TILE_COLUMNS)
        self._tile_rows = min(rows, max(1, _TILE_ENTRIES // self._tile_columns))
        self._dense = 4 * rows * self._pitch <= memory_bytes
        if self._dense:
            self._tile_columns, self._tile_rows = self._pitch, rows
        self._tile = np.empty((self._tile_rows, self._tile_columns), np.float32)
        if self._dense:
            self._generate(self._tile, 0, 0)

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        out[:] = 0
        for i, j, tile in self._tiles():
            part = torch.mm(torch.from_numpy(tile), torch.from_numpy(stack[:, j : j + tile.shape[1]]).T)
            out[:, i : i + tile.shape[0]] += part.numpy().T

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        out[:] = 0
        for i, j, tile in self._tiles():
            part = torch.mm(torch.from_numpy(tile).T, torch.from_numpy(stack[:, i : i + tile.shape[0]]).T)
            out[:, j : j + tile.shape[1]] += part.numpy().T

    def _tiles(self) -> Any:
        """The parts of A in a fixed order, each as (first row, first column, entries)."""
        for j in range(0, self.columns, self._tile_columns):
            for i in range(0, self.rows, self._tile_rows):
                tile = self._tile[: self.rows - i, : self._pitch - j]
                if not self._dense:
                    self._generate(tile, i, j)
                yield i, j, tile[:, : self.columns - j]

    def _generate(self, tile: FloatArray, row: int, column: int) -> None:
        """Fill a tile with A's entries from (row, column) on; columns are cut at whole units."""
        kernels.run(self._generate_rows, tile.shape[0], tile.size, tile, row, column)

    def _generate_rows(self, tile: FloatArray, row: int, column: int, start: int, stop: int) -> None:
        words = np.empty(min(tile.shape[1], _STREAM_WORDS), np.uint32)
        scale = np.float32(1 / math.sqrt(self.rows))
        for i in range(start, stop):
            for j in range(0, tile.shape[1], words.size):
                part = tile[i, j : j + words.size]
                self._key.keystream_into(words[: part.size], 4 * ((row + i) * self._pitch + column + j))
                kernels.normals(words[: part.size], scale, part)


class SignProjection(Projection):
    """One +-1 per column. In words: cut w into blocks, flip signs, roll the blocks, add them up; then cut the sum into
    pieces of m, permute the pieces, add them up.

    A block holds `pieces` * m coordinates: one piece, or for small m as many as make it long enough to be fast. Signs
    (one per coordinate), rolls (one per block but the last) and permutations (one per piece) are secret, uniform and
    independent. So two coordinates meet in a row with probability at most 1/m, whence Var ||A w||^2 <= 2 ||w||^4 / m;
    and A is distributed like D P A for every permutation P and diagonal of signs D: the order and the signs of the m
    numbers say nothing, though their sizes do, where `gaussian` hides all but the norm.

    Rows hold floor(n/m) or ceil(n/m) entries and are exactly orthogonal. Sums are taken in float64, by groups of
    blocks in order, and rounded once.
    """

    version = 1

    def __init__(self, key: SecretKey, columns: int, rows: int, _: int = 0) -> None:
        super().__init__(columns, rows)
        pieces = min(-(-_BLOCK // rows), -(-columns // rows))
        width = pieces * rows
        blocks = -(-columns // width)
        self.norm_bound = math.sqrt(-(-columns // rows))
        self._signs = key.derive("signs").keystream(-(-blocks // 8) * width).reshape(-1, width)
        self._rolls = _uniform_below(width, key.derive("rolls").keystream(8 * blocks).view("<u8"))
        self._rolls[-1] = 0  # what the last, shorter block lacks, all of it lies in one piece: rows stay balanced
        order = np.argsort(key.derive("order").keystream(8 * width).view("<u8").reshape(pieces, rows), kind="stable")
        self._order = order + rows * np.arange(pieces)[:, None]  # (pieces, m): which sums of the blocks make a row
        self._group = max(32, -(-blocks // 64))
        self._groups = -(-blocks // self._group)
        filled = columns - (blocks - 1) * width  # by the last block
        self.row_energy = ((blocks - 1.0) + (self._order < filled)).sum(0)

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        sums = np.empty((len(stack), self._groups, self._order.size), np.float64)
        flat, stride = _flat(stack)
        tasks = len(stack) * self._groups * kernels.tiles(self._order.size)
        secrets = (self._signs, self._rolls, self._group)
        kernels.run(kernels.fold, tasks, stack.size, flat, stride, self.columns, *secrets, sums)
        total = _ordered_sum(sums[:, g] for g in range(self._groups))
        out[:] = _ordered_sum(total[:, piece] for piece in self._order)

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        sums = np.empty((len(stack), self._order.size), np.float32)
        for piece in self._order:
            sums[:, piece] = stack
        flat, stride = _flat(out)
        tasks = len(stack) * self._groups
        kernels.run(
            kernels.unfold, tasks, out.size, sums, self.columns, self._signs, self._rolls, self._group, flat, stride
        )


class HadamardProjection(Projection):
    """`sign` after mixing: secret signs and an orthonormal Walsh-Hadamard transform in blocks.

    The block length P is the largest power of four up to n and 65,536. Blocks lie side by side; if P does not divide n,
    one more, with signs of its own, covers the last P coordinates after the others. The mixing is orthogonal, so
    rows are as orthogonal as those of `sign`; it spreads every coordinate over P, so sparse vectors are projected
    as well as any.
    """

    version = 1

    def __init__(self, key: SecretKey, columns: int, rows: int, memory_bytes: int) -> None:
        super().__init__(columns, rows)
        self._sign = SignProjection(key.derive("sign"), columns, rows)
        self.norm_bound, self.row_energy = self._sign.norm_bound, self._sign.row_energy
        size = 4 ** min(8, (columns.bit_length() - 1) // 2)
        blocks = -(-columns // size)
        self._signs = key.derive("mix").keystream(-(-blocks // 8) * size).reshape(-1, size)
        self._whole = columns // size
        self._blocks = blocks

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        mixed = np.empty(self.columns, np.float32)
        for vector, result in zip(stack, out, strict=True):
            kernels.run(kernels.mix, self._whole, self.columns, vector, mixed, self._signs, False)
            mixed[self._whole * self._signs.shape[1] :] = vector[self._whole * self._signs.shape[1] :]
            kernels.mix(mixed, mixed, self._signs, False, self._whole, self._blocks)
            self._sign._forward(mixed[None], result[None])

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        self._sign._adjoint(stack, out)
        for vector in out:
            kernels.mix(vector, vector, self._signs, True, self._whole, self._blocks)
            kernels.run(kernels.mix, self._whole, self.columns, vector, vector, self._signs, True)


FAMILIES: dict[str, type[GaussianProjection] | type[SignProjection] | type[HadamardProjection]] = {
    "gaussian": GaussianProjection,
    "sign": SignProjection,
    "hadamard": HadamardProjection,
}


def make_projection(
    family: str, key: SecretKey, columns: int, rows: int, memory_bytes: int = DEFAULT_MEMORY
) -> Projection:
    """The family's matrix A (rows x columns) for this round key."""
    if family not in FAMILIES:
        raise ConfigError(f"projection={family!r}: expected one of {', '.join(FAMILIES)}")
    if not 1 <= rows <= columns:
        raise ConfigError(f"dim={rows}: must be from 1 to the number of parameters, {columns}")
    kind = FAMILIES[family]
    return kind(key.derive(f"projection/{family}/v{kind.version}/{rows}x{columns}"), columns, rows, memory_bytes)


_BLOCK = 1 << 13
_UNIT = 2 * kernels.PAIRS
_TILE_COLUMNS = 1 << 17
_TILE_ENTRIES = 1 << 21
_STREAM_WORDS = 1 << 15


def _uniform_below(bound: int, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Integers in [0, bound), for bound < 2**32: the high half of word * bound, uniform up to 2**-32."""
    high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    return ((high * np.uint64(bound) + (low * np.uint64(bound) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def _ordered_sum(terms: Iterable[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The sum of arrays, added in order whatever their shape."""
    first, *others = terms
    total = first.copy()
    for term in others:
        total += term
    return total


def _checked(name: str, array: FloatArray, length: int) -> FloatArray:
    """The array as a stack of contiguous rows."""
    if array.dtype != np.float32 or array.ndim not in (1, 2) or array.shape[-1] != length:
        raise ValueError(
            f"{name}: expected float32 of shape ({length},) or (k, {length}), got {array.dtype} of shape {array.shape}"
        )
    return (array if _has_plain_rows(array) else np.ascontiguousarray(array)).reshape(-1, length)


def _has_plain_rows(array: FloatArray) -> bool:
    """Whether rows are contiguous, aligned and in order, so that one flat view with a stride covers them."""
    step, ahead = array.strides[-1], array.strides[0]
    return array.flags.aligned and step == 4 and (array.ndim == 1 or (ahead % 4 == 0 and ahead >= 4 * array.shape[1]))


def _target(out: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    if out is None:
        return np.empty(shape, np.float32)
    if out.dtype != np.float32 or out.shape != shape or not _has_plain_rows(out):
        raise ValueError(f"out: expected float32 of shape {shape}, rows contiguous, got {out.dtype} of {out.shape}")
    return out


def _flat(stack: FloatArray) -> tuple[FloatArray, int]:
    """The memory from the first to the last entry of a stack, and the distance of its rows in it."""
    stride = stack.strides[0] // 4
    count = (len(stack) - 1) * stride + stack.shape[1] if len(stack) else 0
    return np.lib.stride_tricks.as_strided(stack, (count,), (4,)), stride


def projection_tag(family: str) -> int:
    """The code of a family and its version on the wire: both sides must mean the same matrix."""
    return (list(FAMILIES).index(family) + 1) << 8 | FAMILIES[family].version


def norm_bound(family: str, columns: int, rows: int) -> float:
    """The bound on ||A|| that holds for every matrix of this family and shape."""
    if family == "gaussian":
        return 1 + math.sqrt(columns / rows) + 8 / math.sqrt(rows)
    return math.sqrt(-(-columns // rows))
