"""Standard normals in a few bits each, chosen together: trellis-coded quantisation (Marcellin and Fischer 1990).

The last twelve bits of a code stand for one of 4,096 public values, so that each bit has a say in twelve numbers. The
coder finds the string of bits whose values are closest to the vector (Viterbi 1967). With 1 bit a number the squared
error is 0.273 of the vector's; number by number it is 0.363, and no code can do better than 0.25.
"""

import functools

import numpy as np
from scipy.special import ndtri

from fedrp.rng import public_words
from fedrp.types import Codes, Vector

_WINDOW = 12  # bits that a value depends on: one more halves the distance to the bound by a tenth, for twice the work
_STATES = 1 << _WINDOW
_GRID = 2.0**-20  # values are multiples of it: machines whose last digits differ have the same ones


@functools.cache
def _values(bits: int) -> Vector:
    """The value of each window: quantiles of N(0, 1 - 4^-b), the spread of the best code, in a random public order."""
    quantiles = ndtri((np.arange(_STATES) + 0.5) / _STATES) * np.sqrt(1 - 4.0**-bits)
    order = np.argsort(public_words(b"trellis", _STATES), kind="stable")
    result: Vector = (np.rint(quantiles / _GRID) * _GRID).astype(np.float32)[order]
    result.flags.writeable = False
    return result


def trellis_values(codes: Codes, bits: int) -> Vector:
    """The numbers that codes of so many bits stand for."""
    window = np.zeros(codes.size, np.uint32)
    for back in range(min(codes.size, -(-_WINDOW // bits))):
        window[back:] |= codes[: codes.size - back] << np.uint32(back * bits)
    result: Vector = _values(bits)[window & np.uint32(_STATES - 1)]
    return result


def trellis_codes(numbers: Vector, bits: int) -> Codes:
    """The codes whose values are closest to the numbers, of all strings of codes."""
    ways = 1 << bits  # a window is reached from `ways` others, which differ in the bits that it has forgotten
    squares, doubled = _values(bits) ** 2, 2 * _values(bits)
    errors = np.full(_STATES, np.inf, np.float32)  # of the best string that ends in each window, up to a constant
    errors[0] = 0
    before, after = errors.reshape(ways, -1), errors.reshape(-1, ways)
    best = np.empty((numbers.size, _STATES // ways), np.uint8)  # what the window before had in the forgotten bits
    own = np.empty(_STATES, np.float32)
    for number, chosen in zip(numbers, best, strict=True):
        chosen[:] = before[1] < before[0] if ways == 2 else before.argmin(0)  # the former is much faster
        shortest = before.min(0)
        shortest -= shortest.min()
        np.multiply(doubled, number, out=own)
        np.subtract(squares, own, out=own)
        np.add(own.reshape(-1, ways), shortest[:, None], out=after)
    codes = np.empty(numbers.size, np.uint32)
    window = int(errors.argmin())
    for at in range(numbers.size - 1, -1, -1):
        codes[at] = window & (ways - 1)
        window = window >> bits | int(best[at, window >> bits]) << (_WINDOW - bits)
    return codes
