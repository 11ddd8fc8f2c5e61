"""Secret random projections: A w and A' theta for an m x n matrix A that is a function of a key.

Three families, each made from the AES-256-CTR streams of keys derived for (family, version, m, n):

- `gaussian`: independent N(0, 1/m) entries, as in the paper. Costs m * n.
- `sign`: one +-1 per column, spread evenly over the rows. Costs n; the same bits on every machine.
- `hadamard`: `sign` after an orthonormal mixing of the coordinates. Costs n log n; the same bits on every machine.

E ||A w||^2 = ||w||^2 for every w in each of them.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.config.checks import require_choice
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.projection import kernels
from fedrp.projection.base import FloatArray as FloatArray
from fedrp.projection.base import Projection as Projection
from fedrp.projection.deviates import UNIT, fill_normals
from fedrp.projection.tags import TAGS
from fedrp.projection.tensors import Operator, after_mixing, dense, one_per_column

DEFAULT_MEMORY = 1 << 30  # bytes that a `gaussian` matrix may occupy; a larger one is generated anew at each use


class GaussianProjection(Projection):
    """Independent N(0, 1/m) entries by Box-Muller, 32 bits of the stream for each.

    Row i of A is made from the stream's bytes from 4 * i * pitch on, where pitch is n rounded up to whole units of
    `kernels.normals`; so any part can be generated on its own. A is kept if it fits into `memory_bytes`, else
    generated in tiles of 8 MiB at each use. Entries are the same bits in both cases; products are rounded differently.
    """

    def __init__(self, key: SecretKey, columns: int, rows: int, memory_bytes: int) -> None:
        super().__init__(columns, rows)
        self.norm_bound = _gaussian_norm(columns, rows)
        self._key = key
        self._pitch = _round_up(columns, UNIT)
        self._matrix: FloatArray | None = None
        if 4 * rows * self._pitch <= memory_bytes:
            self._matrix = np.empty((rows, self._pitch), np.float32)
            self._generate(self._matrix, 0, 0)

    def native(self, device: torch.device) -> Operator | None:
        """One matrix product each way; None where A is streamed."""
        if self._matrix is None:
            return None
        return dense(torch.from_numpy(self._matrix).to(device)[:, : self.columns])

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        out[:] = 0
        for i, j, tile in self._tiles():
            vectors = _tensor(stack[:, j : j + tile.shape[1]])
            out[:, i : i + tile.shape[0]] += torch.mm(vectors, _tensor(tile).T).numpy()

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        out[:] = 0
        width = _STRIP_COLUMNS if len(stack) >= _MANY_ROWS else _TILE_COLUMNS
        for i, j, tile in self._tiles():
            theta = _tensor(stack[:, i : i + tile.shape[0]])
            for start in range(0, tile.shape[1], width):
                strip = tile[:, start : start + width]
                out[:, j + start : j + start + strip.shape[1]] += torch.mm(theta, _tensor(strip)).numpy()

    def _tiles(self) -> Iterator[tuple[int, int, FloatArray]]:
        """A in parts that cover it, each as (first row, first column, entries); rows run fastest."""
        width = min(self._pitch, _TILE_COLUMNS)
        height = self.rows if self._matrix is not None else min(self.rows, _TILE_ENTRIES // width)
        buffer = np.empty((0 if self._matrix is not None else height, width), np.float32)
        for j in range(0, self.columns, width):
            for i in range(0, self.rows, height):
                if self._matrix is not None:
                    tile = self._matrix[:, j : j + width]
                else:
                    tile = buffer[: self.rows - i, : self._pitch - j]
                    self._generate(tile, i, j)
                yield i, j, tile[:, : self.columns - j]

    def _generate(self, tile: FloatArray, row: int, column: int) -> None:
        """Fill a tile of whole units with A's entries from (row, column) on."""
        fill_normals(self._key, tile, row * self._pitch + column, self._pitch, 1 / math.sqrt(self.rows))


class SignProjection(Projection):
    """One +-1 per column: cut w into blocks, flip signs, roll the blocks, add them up; cut the sum, permute, add up.

    A block has `pieces` * m coordinates: m, or for small m the multiple that makes it long enough to be fast. The sum
    of the blocks is cut into its pieces of m numbers; these are permuted and added up. Signs (one per coordinate),
    rolls (one per block but the last) and permutations (one per piece) are secret, uniform and independent. Hence
    - two coordinates meet in one row with probability at most 1/m, so Var ||A w||^2 <= 2 ||w||^4 / m;
    - A and D P A have one distribution for every permutation P and diagonal D of signs: order and signs of the m
      numbers say nothing. Their sizes do say something, where `gaussian` hides all but the norm;
    - rows hold floor(n/m) or ceil(n/m) entries and are exactly orthogonal.

    Sums are taken in float64, group of blocks by group and piece by piece, and rounded once.
    """

    def __init__(self, key: SecretKey, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self.norm_bound = _balanced_norm(columns, rows)
        pieces = -(-min(columns, max(rows, _BLOCK)) // rows)
        width = pieces * rows
        blocks = -(-columns // width)
        self._signs = key.derive("signs").keystream(_round_up(blocks, 8) // 8 * width).reshape(-1, width)
        self._rolls = _below(width, key.derive("rolls").keystream(8 * blocks).view("<u8"))
        self._rolls[-1] = 0  # the last block may be short; unrolled, it misses whole pieces and the end of one
        order = np.argsort(key.derive("order").keystream(8 * width).view("<u8").reshape(pieces, rows), kind="stable")
        self._order = order + rows * np.arange(pieces)[:, None]  # (pieces, m): the sums that make up each row
        self._group = max(32, -(-blocks // 64))  # sums of a group are 1/16 of its blocks' memory or less
        self._groups = -(-blocks // self._group)

    def native(self, device: torch.device) -> Operator:
        """The row and the sign of each column, and the columns of each row: 10 n bytes."""
        n, (pieces, rows), blocks = self.columns, self._order.shape, self._rolls.size
        width, rolls, order = pieces * rows, self._rolls.astype(np.int32), self._order.astype(np.int32)
        row_of = np.empty(width, np.int32)  # of each sum
        row_of[order] = np.arange(rows, dtype=np.int32)
        signs = _unpacked(self._signs, blocks).ravel()[:n]
        places = row_of[(np.arange(width, dtype=np.int32) + rolls[:, None]) % width].ravel()[:n]
        first = np.arange(0, blocks * width, width, dtype=np.int32)
        columns = ((order - rolls[:, None, None]) % width + first[:, None, None]).reshape(-1, rows)[: -(-n // rows)]
        missing = columns >= n  # of the last block
        columns[missing] = 0
        return one_per_column(places, signs, columns, np.where(missing, np.int8(0), signs[columns]), device)

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        width = self._order.size
        sums = np.empty((len(stack), self._groups, width), np.float64)
        flat, stride = _flat(stack)
        tasks = len(stack) * self._groups * -(-width // kernels.TILE)
        secrets = (self._signs, self._rolls, self._group)
        kernels.run(kernels.fold, tasks, stack.size, flat, stride, self.columns, *secrets, sums)
        kernels.run(kernels.collect, len(stack), sums.size, sums, self._order, out)

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        sums = np.empty((len(stack), self._order.size), np.float32)
        sums[:, self._order] = stack[:, None]
        flat, stride = _flat(out, writeable=True)
        tasks = len(stack) * self._rolls.size
        kernels.run(kernels.unfold, tasks, out.size, sums, self.columns, self._signs, self._rolls, flat, stride)


class HadamardProjection(Projection):
    """`sign` after mixing: secret signs and an orthonormal Walsh-Hadamard transform in blocks of P coordinates.

    P is the largest power of four up to n and 65,536. If it does not divide n, a last block with signs of its own
    covers the last P coordinates and is transformed after the others. Mixing is orthogonal, so rows stay exactly
    as orthogonal as those of `sign`; it spreads each coordinate over P, so sparse vectors keep their length
    as well as dense ones, and the m numbers have sizes that say little about single coordinates.

    `forward` needs memory for one more vector.
    """

    def __init__(self, key: SecretKey, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self._sign = SignProjection(key.derive("sign"), columns, rows)
        self.norm_bound = self._sign.norm_bound
        size = 4 ** min(8, (columns.bit_length() - 1) // 2)
        self._whole, self._blocks = columns // size, -(-columns // size)
        self._signs = key.derive("mix").keystream(_round_up(self._blocks, 8) // 8 * size).reshape(-1, size)

    def native(self, device: torch.device) -> Operator:
        """Butterflies of whole blocks, then those of `sign`."""
        signs = _unpacked(self._signs, self._blocks)
        return after_mixing(self._sign.native(device), signs, self.columns, device)

    def _forward(self, stack: FloatArray, out: FloatArray) -> None:
        mixed = np.empty((1, self.columns), np.float32)
        tail = self._whole * self._signs.shape[1]
        for i in range(len(stack)):
            flat, _ = _flat(stack[i : i + 1])
            kernels.run(kernels.mix, self._whole, self.columns, flat, mixed[0], self._signs, False)
            mixed[0, tail:] = flat[tail:]
            kernels.mix(_flat(mixed)[0], mixed[0], self._signs, False, self._whole, self._blocks)
            self._sign._forward(mixed, out[i : i + 1])

    def _adjoint(self, stack: FloatArray, out: FloatArray) -> None:
        self._sign._adjoint(stack, out)
        for i in range(len(stack)):
            flat, _ = _flat(out[i : i + 1])
            kernels.mix(flat, out[i], self._signs, True, self._whole, self._blocks)
            kernels.run(kernels.mix, self._whole, self.columns, flat, out[i], self._signs, True)


def _gaussian_norm(columns: int, rows: int) -> float:
    """1 + sqrt(n/m) + t/sqrt(m) with t = 8; ||A|| exceeds it with probability at most exp(-t^2/2) = 1.3e-14.

    Davidson and Szarek, "Local operator theory, random matrices and Banach spaces", 2001, Theorem II.13.
    """
    return 1 + math.sqrt(columns / rows) + 8 / math.sqrt(rows)


def _balanced_norm(columns: int, rows: int) -> float:
    """sqrt(ceil(n/m)): the length of the longest of orthogonal rows."""
    return math.sqrt(-(-columns // rows))


class Family(NamedTuple):
    """One way to make A: its norm bound and its maker. Its code on the wire is in `fedrp.projection.tags`."""

    norm_bound: Callable[[int, int], float]  # of (columns, rows)
    make: Callable[[SecretKey, int, int, int], Projection]  # of (key, columns, rows, memory_bytes)
    hiding_ratio: int  # n/m from which A w for one known w leaves A undetermined; see `fedrp.algorithms.given_start`
    same_bits: bool = False  # products are the same bits on every machine, so that copies of a model stay equal


FAMILIES = {
    "gaussian": Family(_gaussian_norm, GaussianProjection, 1),
    "sign": Family(_balanced_norm, lambda key, columns, rows, _: SignProjection(key, columns, rows), 24, True),
    "hadamard": Family(_balanced_norm, lambda key, columns, rows, _: HadamardProjection(key, columns, rows), 12, True),
}


def norm_bound(family: str, columns: int, rows: int) -> float:
    """The bound on ||A|| that every matrix of this family and shape has."""
    return FAMILIES[family].norm_bound(columns, rows)


def make_projection(
    family: str, key: SecretKey, columns: int, rows: int, memory_bytes: int = DEFAULT_MEMORY
) -> Projection:
    """The matrix A (rows x columns) that a family makes from a round's key."""
    require_choice("projection", family, FAMILIES)
    if not 1 <= rows <= columns:
        raise ConfigError(f"dim={rows}: must be from 1 to the number of parameters, {columns}")
    label = f"projection/{family}/v{TAGS[family].version}/{rows}x{columns}"
    return FAMILIES[family].make(key.derive(label), columns, rows, memory_bytes)


_BLOCK = 1 << 13  # coordinates per block of `sign` at least; part of its definition
_TILE_COLUMNS = 1 << 17
_STRIP_COLUMNS = 1 << 11  # a product with many rows is fastest where its other factor stays in the cache
_MANY_ROWS = 8
_TILE_ENTRIES = 1 << 21


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _below(bound: int, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The top 64 of the 128 bits of word * bound, for bound < 2**32: uniform in [0, bound) up to 2**-32."""
    high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    return ((high * np.uint64(bound) + (low * np.uint64(bound) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def _unpacked(signs: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.int8]:
    """+-1 for each coordinate of each block (blocks, width), from bits as `kernels` reads them."""
    bits = np.unpackbits(signs[:, None], axis=1, bitorder="little").reshape(-1, signs.shape[1])
    return (1 - 2 * bits[:blocks].astype(np.int8)).astype(np.int8)


def _tensor(array: FloatArray) -> torch.Tensor:
    """The array as a tensor on the same memory; torch does not take read-only memory, so that is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _flat(stack: FloatArray, writeable: bool = False) -> tuple[FloatArray, int]:
    """The memory from the first to the last entry of a stack as one array, and the distance of its rows there."""
    stride = stack.strides[0] // stack.itemsize
    size = (len(stack) - 1) * stride + stack.shape[1] if len(stack) else 0
    return np.lib.stride_tricks.as_strided(stack, (size,), (stack.itemsize,), writeable=writeable), stride
