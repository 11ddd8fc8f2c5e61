"""Spread a vector evenly over its coordinates: a public randomised Hadamard transform.

Random signs and a Walsh-Hadamard transform, twice: after one of them, a vector with one large number has coordinates of
two sizes only. Where the size is no power of two, each time of the first and then of the last 2^k coordinates, 2^k
being the largest power of two within the size. Orthogonal, and every coordinate is close to normal, whatever the vector
was. The randomness is public: it makes errors of different senders
independent, and hides nothing. In a fixed order: the same bits on every machine.
"""

import numpy as np
import numpy.typing as npt

from fedrp.compiled import compiled
from fedrp.rng import public_words
from fedrp.types import Vector

_TIMES = 2
Signs = npt.NDArray[np.float32]


def spread(vector: Vector, place: bytes) -> Vector:
    """The vector, spread with the randomness of a place."""
    result = vector.astype(np.float32)
    for signs in _signs(place, vector.size):
        result = np.roll(result, result.size // 2)  # so that the blocks of the second time have parts of both before
        for part, sign in zip(_blocks(result), signs, strict=True):
            part[:] = _hadamard(part * sign)
    return result


def gathered(vector: Vector, place: bytes) -> Vector:
    """The inverse of `spread`."""
    result = vector.astype(np.float32)
    for signs in reversed(_signs(place, vector.size)):
        for part, sign in zip(reversed(_blocks(result)), reversed(signs), strict=True):
            part[:] = _hadamard(part) * sign
        result = np.roll(result, -(result.size // 2))
    return result


def _blocks(vector: Vector) -> list[Vector]:
    """The first and the last 2^k numbers, which overlap; once all of them, if there are so many."""
    size = _power(vector.size)
    return [vector] if size == vector.size else [vector[:size], vector[-size:]]


def _power(size: int) -> int:
    """The largest power of two up to a size."""
    return 1 << (size.bit_length() - 1)


def _signs(place: bytes, total: int) -> list[list[Signs]]:
    """For each time, the signs of each block."""
    size = _power(total)
    blocks, words = (1 if size == total else 2), -(-size // 64)
    each = public_words(place, _TIMES * blocks * words).astype("<u8").view(np.uint8).reshape(_TIMES, blocks, 8 * words)
    bits = np.unpackbits(each, axis=2, count=size, bitorder="little")
    return [list(signs) for signs in 1 - 2 * bits.astype(np.float32)]


def _hadamard(vector: Vector) -> Vector:
    """The orthonormal Walsh-Hadamard transform, of a power of two."""
    result = vector.astype(np.float32)
    _butterflies(result, 1 << (result.size.bit_length() // 2))
    return result * np.float32(1 / np.sqrt(result.size))


@compiled
def _butterflies(vector: Vector, middle: int) -> None:
    """The transform without its scale, in place: distances from `middle` on upwards, then those from 1 to there."""
    for begin, end in ((middle, vector.size), (1, middle)):
        step = begin
        while step < end:
            for first in range(0, vector.size, 2 * step):
                lefts, rights = vector[first : first + step], vector[first + step : first + 2 * step]
                for i in range(step):
                    left, right = lefts[i], rights[i]
                    lefts[i], rights[i] = left + right, left - right
            step *= 2
