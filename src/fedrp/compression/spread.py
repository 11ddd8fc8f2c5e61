"""Spread a vector evenly over its coordinates: a public randomised Hadamard transform.

Random signs and a Walsh-Hadamard transform, twice: after one of them, a vector with one large number has coordinates of
two sizes only. Where the size is no power of two, each time of the first and then of the last 2^k coordinates, 2^k
being the largest power of two within the size. Orthogonal, and every coordinate is close to normal, whatever the vector
was. The randomness is public: it makes errors of different senders
independent, and hides nothing. NumPy only and in a fixed order: the same bits on every machine.
"""

import numpy as np
import numpy.typing as npt

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
    size = vector.size
    wide = 1 << (size.bit_length() // 2)  # a matrix, so that sums go over long rows in both directions
    once = _over_rows(vector.reshape(-1, wide))
    both = _over_rows(np.ascontiguousarray(once.T))
    return np.ascontiguousarray(both.T).reshape(size) * np.float32(1 / np.sqrt(size))


def _over_rows(matrix: Vector) -> Vector:
    """The transform of every column, without its scale."""
    rows, result = len(matrix), matrix
    for step in (1 << k for k in range(rows.bit_length() - 1)):
        pairs, sums = result.reshape(rows // (2 * step), 2, -1), np.empty_like(matrix)
        into = sums.reshape(pairs.shape)
        np.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        result = sums
    return result
