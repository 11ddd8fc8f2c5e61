"""The search of a trellis, compiled: the same codes as `trellis.search`, a hundred times as fast.

For clients, of whom a machine may simulate hundreds; a server loads no compiler (docs/architecture.md).
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from fedrp.compiled import compiled
from fedrp.compression.coding import Coding
from fedrp.compression.eden import Eden, Trellis
from fedrp.compression.trellis import costs
from fedrp.types import Codes, Vector

_Search = Callable[[Vector, Vector, Vector, Codes], None]


def with_compiled_search(coding: Coding) -> Coding:
    """The same code, found faster where there is something to search for."""
    if isinstance(coding, Eden) and isinstance(coding.quantiser, Trellis):
        return dataclasses.replace(coding, quantiser=dataclasses.replace(coding.quantiser, search=search))
    return coding


def search(numbers: Vector, window: int, bits: int) -> Codes:
    """The codes whose values are closest to the numbers, of all strings of codes."""
    codes = np.empty(numbers.size, np.uint32)
    _search_of(1 << bits)(numbers, *costs(window, bits), codes)
    return codes


@functools.cache
def _search_of(ways: int) -> _Search:
    """The loops for codes of one size: `ways` is a constant there, so that they vectorise."""

    def found(numbers: Vector, squares: Vector, doubled: Vector, codes: Codes) -> None:
        shared = squares.shape[1]  # windows that one window may become, but for their last code
        errors = np.full(ways * shared, np.inf, np.float32)
        errors[0] = 0
        best = np.empty((numbers.size, shared), np.uint8)
        shortest = np.empty(shared, np.float32)
        for at in range(numbers.size):
            number, chosen = numbers[at], best[at]
            for s in range(shared):
                first, other = errors[s], errors[s + shared]
                chosen[s] = np.uint8(other < first)
                shortest[s] = min(first, other)
            for way in range(2, ways):
                for s in range(shared):
                    so_far, other = shortest[s], errors[s + way * shared]
                    chosen[s] = np.uint8(way) if other < so_far else chosen[s]
                    shortest[s] = min(so_far, other)
            least = shortest[0]
            for s in range(shared):
                least = min(least, shortest[s])
            for s in range(shared):
                for way in range(ways):
                    errors[ways * s + way] = (shortest[s] - least) + (squares[way, s] - doubled[way, s] * number)
        place = np.int64(errors.argmin())
        for at in range(numbers.size - 1, -1, -1):
            codes[at] = place % ways
            place = place // ways + np.int64(best[at, place // ways]) * shared

    return compiled(found)
