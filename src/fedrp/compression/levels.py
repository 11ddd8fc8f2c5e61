"""A vector in levels of a grid that all clients of a cohort share, so that masked uploads of few bits add up.

The vector is spread (`fedrp.compression.spread`) with one public randomness for all, so that its coordinates are close
to normal with deviation ||x|| / sqrt(m). A coordinate x, cut off at +-bound, becomes one of the levels 0 to `steps`:
(x / bound + 1) / 2 * steps, rounded up or down by a coin of the client's own such that its mean is that number. So the
sum of levels is unbiased, and errors of clients are independent: for a coordinate they are (2 bound / steps)^2 / 4 in
the square at most, and 2/3 of that on average where steps are many.
"""

import math
from collections.abc import Callable

import numpy as np

from fedrp.compression.spread import gathered, spread
from fedrp.errors import WireError
from fedrp.types import Vector, Words

_PLACE = b"masked"
_CHUNK = 1 << 20
_COIN = 2.0**-32


def deviations(steps: int) -> float:
    """Beyond how many deviations numbers are cut off: 2.3 with 2 steps, 3.1 with 10.

    With fewer, what many clients have in common is cut off; with more, steps are longer. So many of each are about as
    bad where clients are a hundred.
    """
    return 2 + math.log2(steps) / 3


def cut_share(steps: int) -> float:
    """The share of numbers that are cut off, of a vector that has the norm which the bound is made of."""
    return math.erfc(deviations(steps) / math.sqrt(2))


def bound_of(norm: float, size: int, steps: int) -> float:
    """Where the numbers of vectors with about this norm are cut off, once they are spread."""
    return deviations(steps) * norm / math.sqrt(size)


def to_levels(vector: Vector, bound: float, steps: int, words: Callable[[int, int], Words]) -> tuple[Words, int]:
    """Levels that stand for the vector, and how many numbers had to be cut off; `words(count, start)` are coins."""
    there = spread(vector, _PLACE)
    if not np.isfinite(there).all():
        raise WireError("payload holds values that are not finite")
    levels, cut = np.empty(vector.size, np.uint32), 0
    for start in range(0, vector.size, _CHUNK):
        part = there[start : start + _CHUNK].astype(np.float64)
        cut += int((np.abs(part) > bound).sum())
        units = np.clip(part, -bound, bound) / bound if bound else np.zeros_like(part)
        levels[start : start + _CHUNK] = (units + 1) * (steps / 2) + words(part.size, start) * _COIN
    return levels, cut


def from_levels(total: Words, clients: float, bound: float, steps: int) -> Vector:
    """The sum of the vectors of so many clients, from the sum of their levels."""
    sums = (total * (2 / steps) - clients) * bound
    return gathered(sums.astype(np.float32), _PLACE)
