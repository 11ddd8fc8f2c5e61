"""The inner loops of the projections, compiled by Numba on first use and kept on disk for the next process.

Every kernel works through tasks [start, stop) of a list whose length and order depend on the problem alone, releases
the GIL, and gives each task its own output. So results do not depend on how many threads share the tasks, and no
kernel needs a threading layer. `run` shares them out; `set_threads` says over how many threads.

Arithmetic is plain IEEE float32/float64 in a fixed order, without fused or reordered operations: the same bits on
every machine.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., None])

PAIRS = 64  # normals come in units of 2 * PAIRS: so many radius words, then as many angle words
TILE = 1 << 14  # buckets that one task sums; their float64 sums stay in the cache
_INLINE = 1 << 18  # values below which a second thread costs more than it saves

_threads: int = numba.config.NUMBA_NUM_THREADS


def set_threads(count: int) -> None:
    """Use up to `count` threads in this process (at first `NUMBA_NUM_THREADS`, or one per core)."""
    global _threads
    if count < 1:
        raise ValueError(f"threads={count}: must be at least 1")
    _threads = count


def run(kernel: Callable[..., None], tasks: int, values: int, *arguments: object) -> None:
    """Call `kernel(*arguments, start, stop)` on consecutive parts of [0, tasks), one part per thread.

    `values` is the number of vector entries touched in all: little work stays on the calling thread.
    """
    count = max(1, min(_threads, tasks, values // _INLINE))
    cuts = [tasks * i // count for i in range(count + 1)]
    others = [
        threading.Thread(target=kernel, args=(*arguments, start, stop))
        for start, stop in zip(cuts[1:], cuts[2:], strict=False)
    ]
    for thread in others:
        thread.start()
    kernel(*arguments, cuts[0], cuts[1])
    for thread in others:
        thread.join()


def tiles(buckets: int) -> int:
    """How many tiles `fold` cuts so many buckets into."""
    return -(-buckets // TILE)


def _kernel(function: Kernel) -> Kernel:
    """Compile on first call. Without any writable cache folder, compile anew in each process."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return cast(Kernel, compiled)


_HALF = np.float32(0.5)
_ONE = np.float32(1)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_U_HIGH, _U_LOW, _U_HALF = np.float32(2.0**-32), np.float32(2.0**-40), np.float32(2.0**-41)
_ANGLE = np.float32(np.pi / 2**23)


# --- sign: blocks of `buckets` coordinates, each with secret signs and a secret roll, added up ---
# Block b holds coordinates [b * buckets, (b + 1) * buckets); its coordinate c has the sign in bit b % 8 of
# signs[b // 8, c] and falls into bucket (c + rolls[b]) % buckets.


@_kernel
def _add_run(sums: Array, values: Array, signs: Array, bit: int) -> None:
    for i in range(values.size):
        sums[i] += values[i] * np.float32(1 - 2 * ((signs[i] >> bit) & 1))


@_kernel
def _copy_run(out: Array, values: Array, signs: Array, bit: int) -> None:
    for i in range(out.size):
        out[i] = values[i] * np.float32(1 - 2 * ((signs[i] >> bit) & 1))


@_kernel
def fold(
    flat: Array, stride: int, columns: int, signs: Array, rolls: Array, group: int, parts: Array, start: int, stop: int
) -> None:
    """Sums of the signed, rolled blocks, per row of `flat` and group of blocks: parts[row, group, bucket].

    A task is one tile of buckets of one group; each bucket adds its group's blocks in order, in float64.
    """
    _, groups, buckets = parts.shape
    tiles = -(-buckets // TILE)
    sums = np.empty(min(TILE, buckets), np.float64)
    for task in range(start, stop):
        row, rest = divmod(task, groups * tiles)
        g, low = rest // tiles, rest % tiles * TILE
        width = min(TILE, buckets - low)
        sums[:] = 0
        for block in range(g * group, min((g + 1) * group, rolls.size)):
            base = row * stride + block * buckets
            length = min(buckets, columns - block * buckets)
            first = (low + buckets - rolls[block]) % buckets  # the coordinate that falls into bucket `low`
            wrap = buckets - first
            end = min(first + width, length)
            if end > first:
                _add_run(sums, flat[base + first : base + end], signs[block >> 3, first:end], block & 7)
            end = min(width - wrap, length)
            if end > 0:
                _add_run(sums[wrap:], flat[base : base + end], signs[block >> 3, :end], block & 7)
        parts[row, g, low : low + width] = sums[:width]


@_kernel
def unfold(
    theta: Array, columns: int, signs: Array, rolls: Array, group: int, flat: Array, stride: int, start: int, stop: int
) -> None:
    """The adjoint of `fold`: every coordinate of every row of `flat` gets the signed value of its bucket."""
    buckets = theta.shape[1]
    groups = -(-rolls.size // group)
    for task in range(start, stop):
        row, g = divmod(task, groups)
        for block in range(g * group, min((g + 1) * group, rolls.size)):
            base = row * stride + block * buckets
            length = min(buckets, columns - block * buckets)
            roll = rolls[block]
            wrap = min(buckets - roll, length)
            _copy_run(flat[base : base + wrap], theta[row, roll:], signs[block >> 3, :wrap], block & 7)
            _copy_run(flat[base + wrap : base + length], theta[row], signs[block >> 3, wrap:length], block & 7)


# --- hadamard: blocks of 4**k coordinates, each with secret signs and an orthonormal Walsh-Hadamard transform ---


@_kernel
def _transform(x: Array) -> None:
    """Walsh-Hadamard transform in place, scaled by 1/sqrt(size), which is exact for a power of four."""
    step = 1
    while step < x.size:
        for i in range(0, x.size, 4 * step):
            a, b = x[i : i + step], x[i + step : i + 2 * step]
            c, d = x[i + 2 * step : i + 3 * step], x[i + 3 * step : i + 4 * step]
            for j in range(step):
                p, q, r, s = a[j] + b[j], a[j] - b[j], c[j] + d[j], c[j] - d[j]
                a[j], b[j], c[j], d[j] = (p + r) * _HALF, (q + s) * _HALF, (p - r) * _HALF, (q - s) * _HALF
        step *= 4


@_kernel
def mix(flat: Array, out: Array, signs: Array, inverse: bool, start: int, stop: int) -> None:
    """Flip signs and transform blocks [start, stop) of `flat` into `out`, which may be `flat`; or undo both.

    Blocks lie side by side from 0, but none reaches beyond the end: the last one is moved back to end there.
    """
    size = signs.shape[1]
    scratch = np.empty(size, np.float32)
    for block in range(start, stop):
        base = min(block * size, flat.size - size)
        if inverse:
            scratch[:] = flat[base : base + size]
            _transform(scratch)
            _copy_run(out[base : base + size], scratch, signs[block >> 3], block & 7)
        else:
            _copy_run(scratch, flat[base : base + size], signs[block >> 3], block & 7)
            _transform(scratch)
            out[base : base + size] = scratch


# --- gaussian: Box-Muller with polynomials instead of libm, so that it vectorises and repeats to the bit ---

@_kernel
def normals(words: Array, scale: float, out: Array) -> None:
    """Turn random 32-bit words into as many normal deviates of standard deviation `scale`.

    Of a pair (a, b), 40 bits (a and the low byte of b) make u in (0, 1) and the radius sqrt(-2 ln u), up to 7.5;
    22 bits make an angle within a quarter turn, 2 bits choose the quarter.
    """
    for base in range(0, words.size, 2 * PAIRS):
        first, second = words[base : base + PAIRS], words[base + PAIRS : base + 2 * PAIRS]
        left, right = out[base : base + PAIRS], out[base + PAIRS : base + 2 * PAIRS]
        for i in range(PAIRS):
            a, b = first[i], second[i]
            low = np.float32(b & 255)
            u = np.float32(a) * _U_HIGH + (low * _U_LOW + _U_HALF)
            rest = np.float32(np.uint32(~a)) * _U_HIGH + ((np.float32(255) - low) * _U_LOW + _U_HALF)  # 1 - u, without cancelling
            bits = np.float32(u).view(np.int32)
            exponent = np.int32((bits - 0x3F3504F3) >> 23)
            f = np.int32(bits - (exponent << 23)).view(np.float32) - _ONE
            f = -rest if exponent == 0 else f
            e = np.float32(exponent)
            # ln(1 + f) on [sqrt(1/2) - 1, sqrt(2) - 1], after Cephes logf
            z = f * f
            p = np.float32(7.0376836292e-2)
            p = p * f + np.float32(-1.1514610310e-1)
            p = p * f + np.float32(1.1676998740e-1)
            p = p * f + np.float32(-1.2420140846e-1)
            p = p * f + np.float32(1.4249322787e-1)
            p = p * f + np.float32(-1.6668057665e-1)
            p = p * f + np.float32(2.0000714765e-1)
            p = p * f + np.float32(-2.4999993993e-1)
            p = p * f + np.float32(3.3333331174e-1)
            log = (f + (p * f * z + e * _LN2_LOW - _HALF * z)) + e * _LN2_HIGH
            radius = np.sqrt(np.float32(-2) * log) * scale
            # sine and cosine on (-pi/4, pi/4), after Cephes sinf and cosf
            x = (np.float32(np.int32((b >> 8) & 0x3FFFFF) - (1 << 21)) + _HALF) * _ANGLE
            z = x * x
            sine = (np.float32(-1.9515295891e-4) * z + np.float32(8.3321608736e-3)) * z + np.float32(-1.6666654611e-1)
            sine = sine * z * x + x
            cosine = np.float32(2.443315711809948e-5) * z + np.float32(-1.388731625493765e-3)
            cosine = (cosine * z + np.float32(4.166664568298827e-2)) * z * z - _HALF * z + _ONE
            radius = -radius if (b >> 31) & 1 else radius
            swap = (b >> 30) & 1
            left[i] = radius * (sine if swap else cosine)
            right[i] = radius * (cosine if swap else sine)
