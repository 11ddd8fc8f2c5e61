"""The server's arithmetic on what it cannot read: the weighted mean and, per coordinate, trimmed means and the median.

The mean follows a single upload anywhere. A trimmed mean (Yin et al., "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018) leaves out the c smallest and the c largest of the k numbers of each coordinate;
the median is the one that leaves out as many as it can.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedrp.types import Precise, Vector

_CHUNK = 1 << 20


def add_weighted(total: Precise, vector: Vector, weight: float) -> None:
    """Add `weight * vector` to a sum in float64, in place.

    Guarantees: as long as the numbers of a coordinate are within a factor of about 2^29 / weight of each other, float64
    adds them exactly, in any order; beyond, the order changes nothing but rounding below float32.
    """
    for start in range(0, total.size, _CHUNK):  # a float64 copy of 134 million numbers would be a gigabyte
        part = slice(start, start + _CHUNK)
        total[part] += np.multiply(vector[part], weight, dtype=np.float64) if weight != 1 else vector[part]


def divided(total: Precise, divisor: float) -> Vector:
    """A sum by a divisor, rounded to float32 once."""
    result = np.empty(total.shape, np.float32)
    for start in range(0, result.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part] = total[part] / divisor
    return result


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float], divisor: float = 1.0) -> Vector:
    """The sum of `weight * vector`, accumulated in float64 in the order given, by `divisor`.

    Guarantees: the order of the vectors changes nothing but rounding below float32. With weights of 1 and multiples of
    a power of two, which float64 adds exactly, the result is a function of the sum: it does not tell how many they are.
    """
    result = np.empty(vectors[0].shape, np.float32)
    for start in range(0, result.size, _CHUNK):  # all vectors are here: no need for a whole sum in float64
        part = slice(start, start + _CHUNK)
        total = np.zeros(result[part].shape, np.float64)
        for vector, weight in zip(vectors, weights, strict=True):
            add_weighted(total, vector[part], weight)
        result[part] = divided(total, divisor)
    return result


def cut_at_each_end(share: float, uploads: int) -> int:
    """How many of `uploads` numbers are left out at each end: floor(share * uploads), and never all of them."""
    exact = math.floor(share * uploads + 1e-9)  # 0.29 * 100 is just below 29 in floating point
    return min(exact, (uploads - 1) // 2)


def trimmed_mean(vectors: Sequence[Vector], share: float) -> Vector:
    """The mean, per coordinate, of the numbers that are left when `share` of them is cut off at each end.

    Guarantees: the order of the vectors changes nothing; equal vectors give that vector; with c left out at each end,
    and up to c of the vectors being anything, every number lies between two of the other vectors' in its coordinate.
    """
    count = len(vectors)
    cut = cut_at_each_end(share, count)
    result = np.empty(vectors[0].shape, np.float32)
    step = max(1, _CHUNK // count)  # sorted in place, a part that stays in the cache: n may be 134 million
    for start in range(0, result.size, step):
        part = slice(start, start + step)
        ordered = np.stack([vector[part] for vector in vectors])
        ordered.sort(axis=0)
        result[part] = ordered[cut : count - cut].mean(axis=0, dtype=np.float64)
    return result
