"""The inner loops of the projections, compiled (`fedrp.compiled`).

A kernel works through tasks [start, stop) of a list that the problem alone decides, gives each task its own part of
the output, and releases the GIL. `run` shares the tasks out over threads; results cannot depend on how many.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedrp.compiled import compiled

Array = npt.NDArray[Any]

TILE = 1 << 14  # sums per task of `fold`: their 128 KiB stay in the second-level cache
PAIRS = 64  # `normals` works in units of this many radius words followed by as many angle words
LANES = 128  # partial sums of `reflect`: as many as hide the time that an addition takes
_VALUES_PER_THREAD = 1 << 18  # with less work than this, a thread costs more time than it saves

_threads: int = vars(numba.config)["NUMBA_NUM_THREADS"]


def set_threads(count: int) -> None:
    """Let this process use up to `count` threads. Until then: `NUMBA_NUM_THREADS`, or one per core."""
    global _threads
    if count < 1:
        raise ValueError(f"count={count}: a process needs at least one thread")
    _threads = count


def get_threads() -> int:
    """How many threads this process may use."""
    return _threads


def run(kernel: Callable[..., None], tasks: int, values: int, *arguments: object) -> None:
    """Call `kernel(*arguments, start, stop)` on consecutive parts of [0, tasks), at once if the work is worth it.

    `values` is how many vector entries all tasks touch together.
    """
    parts = max(1, min(_threads, tasks, values // _VALUES_PER_THREAD))
    if parts == 1:
        kernel(*arguments, 0, tasks)
        return
    cuts = [tasks * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        for future in [pool.submit(kernel, *arguments, cuts[part], cuts[part + 1]) for part in range(parts)]:
            future.result()


# sign: coordinate c of block b (of `width` coordinates, the last block may be shorter) is negated if bit b % 8 of
# signs[b // 8, c] is set, and added to sum (c + rolls[b]) % width. Eight blocks share a row of bytes, so that
# neighbouring coordinates find their bits in neighbouring bytes and the loops vectorise.


@compiled
def _add_signed(sums: Array, values: Array, signs: Array, bit: int) -> None:
    for i in range(values.size):
        sums[i] += values[i] * np.float32(1 - 2 * ((signs[i] >> bit) & 1))


@compiled
def _copy_signed(out: Array, values: Array, signs: Array, bit: int, scale: np.float32) -> None:
    for i in range(out.size):
        out[i] = values[i] * (np.float32(1 - 2 * ((signs[i] >> bit) & 1)) * scale)


@compiled
def fold(
    flat: Array, stride: int, columns: int, signs: Array, rolls: Array, group: int, sums: Array, start: int, stop: int
) -> None:
    """Add up the signed and rolled blocks: sums[row, g, j] is sum j of the g-th group of `group` blocks of a row.

    Row r of the input starts at flat[r * stride]. A task is one tile of sums of one group of one row. Every sum adds
    its blocks in order, in float64.
    """
    groups, width = sums.shape[1:]
    tiles = -(-width // TILE)
    tile = np.empty(min(TILE, width), np.float64)
    for task in range(start, stop):
        row, g, low = task // (groups * tiles), task // tiles % groups, task % tiles * TILE
        size = min(TILE, width - low)
        tile[:] = 0
        for block in range(g * group, min((g + 1) * group, rolls.size)):
            base = row * stride + block * width
            length = min(width, columns - block * width)
            first = (low - rolls[block]) % width  # this coordinate belongs to sum `low`, the next to the next one ...
            last = min(first + size, length)
            if first < last:
                _add_signed(tile, flat[base + first : base + last], signs[block // 8, first:last], block % 8)
            last = min(first + size - width, length)  # ... and after coordinate width - 1 comes coordinate 0
            if last > 0:
                _add_signed(tile[width - first :], flat[base : base + last], signs[block // 8, :last], block % 8)
        sums[row, g, low : low + size] = tile[:size]


@compiled
def collect(sums: Array, order: Array, out: Array, start: int, stop: int) -> None:
    """Add up the groups of `fold`, then the pieces: out[row, j] is the total of sums order[:, j]. A task is one row.

    Groups and pieces are added in order, in float64, and rounded once. The sums of the first group are overwritten.
    """
    for row in range(start, stop):
        total = sums[row, 0]
        for g in range(1, sums.shape[1]):
            for i in range(total.size):
                total[i] += sums[row, g, i]
        for j in range(order.shape[1]):
            value = total[order[0, j]]
            for piece in range(1, order.shape[0]):
                value += total[order[piece, j]]
            out[row, j] = value


@compiled
def unfold(
    sums: Array, columns: int, signs: Array, rolls: Array, flat: Array, stride: int, start: int, stop: int
) -> None:
    """The adjoint of `fold`: each coordinate gets the signed value of its sum. A task is one block of one row."""
    width = sums.shape[1]
    one = np.float32(1)
    for task in range(start, stop):
        row, block = task // rolls.size, task % rolls.size
        length = min(width, columns - block * width)
        out = flat[row * stride + block * width : row * stride + block * width + length]
        cut = min(width - rolls[block], length)
        _copy_signed(out[:cut], sums[row, rolls[block] :], signs[block // 8, :cut], block % 8, one)
        _copy_signed(out[cut:], sums[row], signs[block // 8, cut:length], block % 8, one)


# hadamard: blocks of 2**k coordinates, negated as above and transformed. The blocks lie side by side, but the last
# is moved back to end with the vector, so it may overlap the one before and must be done after it (undone before it).


@compiled
def _transform(x: Array) -> None:
    """The Walsh-Hadamard transform in place, without scaling: two levels at a time, and an odd one first."""
    step = 1
    while step < x.size:
        step *= 4
    odd = step > x.size
    step = 1
    if odd:
        for i in range(0, x.size, 2):
            x[i], x[i + 1] = x[i] + x[i + 1], x[i] - x[i + 1]
        step = 2
    while step < x.size:
        for i in range(0, x.size, 4 * step):
            a, b = x[i : i + step], x[i + step : i + 2 * step]
            c, d = x[i + 2 * step : i + 3 * step], x[i + 3 * step : i + 4 * step]
            for j in range(step):
                p, q, r, s = a[j] + b[j], a[j] - b[j], c[j] + d[j], c[j] - d[j]
                a[j], b[j], c[j], d[j] = p + r, q + s, p - r, q - s
        step *= 4


@compiled
def mix(flat: Array, out: Array, signs: Array, undo: bool, start: int, stop: int) -> None:
    """Negate and transform the blocks of a vector, orthonormally, or undo it. `out` may be the same memory."""
    size = signs.shape[1]
    scale = np.float32(1 / np.sqrt(size))
    scratch = np.empty(size, np.float32)
    for block in range(start, stop):
        base = min(block * size, flat.size - size)
        if undo:
            scratch[:] = flat[base : base + size]
            _transform(scratch)
            _copy_signed(out[base : base + size], scratch, signs[block // 8], block % 8, scale)
        else:
            _copy_signed(scratch, flat[base : base + size], signs[block // 8], block % 8, scale)
            _transform(scratch)
            out[base : base + size] = scratch


# gaussian: Box-Muller with polynomials (from Cephes' logf, sinf, cosf) instead of libm, so that it vectorises.

_LOG = tuple(
    np.float32(c)
    for c in (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )
)  # fmt: skip
_SINE = tuple(np.float32(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
_COSINE = tuple(np.float32(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_HALF, _ONE, _TWO, _BYTE = np.float32(0.5), np.float32(1), np.float32(2), np.float32(255)
_2_32, _2_40, _2_41 = np.float32(2.0**-32), np.float32(2.0**-40), np.float32(2.0**-41)
_STEP = np.float32(np.pi / 2**23)  # a quarter turn in 2**22 steps


@compiled
def normals(words: Array, scale: np.float32, out: Array) -> None:
    """Turn random 32-bit words into as many normal deviates with standard deviation `scale`.

    Of a pair of words, 40 bits make u in (0, 1) and the radius sqrt(-2 ln u), which reaches 7.5; 22 bits make an angle
    within a quarter turn and 2 bits choose the quarter.
    """
    for unit in range(0, words.size, 2 * PAIRS):
        first, second = words[unit : unit + PAIRS], words[unit + PAIRS : unit + 2 * PAIRS]
        left, right = out[unit : unit + PAIRS], out[unit + PAIRS : unit + 2 * PAIRS]
        for i in range(PAIRS):
            a, b = first[i], second[i]
            low = np.float32(b & 255)
            u = np.float32(a) * _2_32 + (low * _2_40 + _2_41)
            rest = np.float32(np.uint32(~a)) * _2_32 + ((_BYTE - low) * _2_40 + _2_41)  # 1 - u without cancellation
            bits = np.float32(u).view(np.int32)
            exponent = np.int32((bits - 0x3F3504F3) >> 23)  # u = (1 + f) 2^exponent with 1 + f around 1
            f = np.int32(bits - (exponent << 23)).view(np.float32) - _ONE
            f = -rest if exponent == 0 else f
            e = np.float32(exponent)
            p = _LOG[0] * f + _LOG[1]
            p = (p * f + _LOG[2]) * f + _LOG[3]
            p = (p * f + _LOG[4]) * f + _LOG[5]
            p = (p * f + _LOG[6]) * f + _LOG[7]
            p = (p * f + _LOG[8]) * f
            square = f * f
            log = (f + (p * square + e * _LN2_LOW - _HALF * square)) + e * _LN2_HIGH
            radius = np.sqrt(-_TWO * log) * scale
            x = (np.float32(np.int32((b >> 8) & 0x3FFFFF) - (1 << 21)) + _HALF) * _STEP
            square = x * x
            sine = ((_SINE[0] * square + _SINE[1]) * square + _SINE[2]) * square * x + x
            cosine = (_COSINE[0] * square + _COSINE[1]) * square + _COSINE[2]
            cosine = cosine * square * square - _HALF * square + _ONE
            radius = -radius if b >> 31 else radius
            swap = (b >> 30) & 1
            left[i] = radius * (sine if swap else cosine)
            right[i] = radius * (cosine if swap else sine)


# haar: reflections I - f v v' of vectors that normals make, in float64. Widths are multiples of LANES.


@compiled
def _dot(a: Array, b: Array, lanes: Array) -> None:
    """Leave the inner product in lanes[0]: LANES sums of every LANES-th product, then halves added to halves."""
    lanes[:] = 0
    for i in range(0, a.size, LANES):
        left, right = a[i : i + LANES], b[i : i + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(left[j]) * np.float64(right[j])
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[half + j]
        half //= 2


@compiled
def reflectors(vectors: Array, size: int, factors: Array, start: int, stop: int) -> None:
    """Turn rows x of normals, of which row r is x[r : size], into reflections that map e_r to +-x/||x||.

    That is v = x + sign(x_r) ||x|| e_r, zero outside [r, size), and f = 2/||v||^2. A task is one row.
    """
    lanes = np.empty(LANES, np.float64)
    for r in range(start, stop):
        v = vectors[r]
        v[:r] = 0
        v[size:] = 0
        _dot(v, v, lanes)
        length = np.sqrt(lanes[0])
        v[r] = np.float32(v[r] + length if v[r] >= 0 else v[r] - length)
        _dot(v, v, lanes)
        factors[r] = 2 / lanes[0]


@compiled
def reflect(vectors: Array, factors: Array, stack: Array, undo: bool, start: int, stop: int) -> None:
    """Apply reflections to the last coordinates of each row in place, the last one first; to undo, the first one.

    A task is one row of the stack, which is as long as the vectors or longer.
    """
    lanes = np.empty(LANES, np.float64)
    count, width = vectors.shape
    for row in range(start, stop):
        y = stack[row, stack.shape[1] - width :]
        for step in range(count):
            r = step if undo else count - 1 - step
            v = vectors[r]
            _dot(v, y, lanes)
            c = lanes[0] * factors[r]
            for i in range(width):
                y[i] -= c * np.float64(v[i])
