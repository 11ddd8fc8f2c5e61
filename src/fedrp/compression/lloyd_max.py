"""Lloyd-Max centroids: the 2^b numbers that stand for a standard normal with the least squared error (Max 1960)."""

import functools

import numpy as np
from scipy.special import ndtr

from fedrp.types import Codes, Precise, Vector

MOST_BITS = 8
_CLOSE = 1e-10
_GRID = 2.0**-20  # centroids are multiples of it: machines whose last digits differ have the same ones


@functools.cache
def centroids(bits: int) -> Vector:
    """The centroids in increasing order, for 1 to 8 bits: 0.79788; 0.45278, 1.51042; ... and their negatives."""
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits={bits}: expected 1 to {MOST_BITS}")
    found = np.linspace(-3, 3, 2**bits) if bits > 1 else np.array([-1.0, 1.0])
    while True:
        better = _means(_between(found))
        if np.abs(better - found).max() < _CLOSE:
            break
        found = better
    result = (np.rint(better / _GRID) * _GRID).astype(np.float32)
    result.flags.writeable = False
    return result


@functools.cache
def thresholds(bits: int) -> Vector:
    """Where one centroid's numbers end and the next one's begin."""
    result = _between(centroids(bits).astype(np.float64)).astype(np.float32)
    result.flags.writeable = False
    return result


def nearest(numbers: Vector, bits: int) -> Codes:
    """For each number its nearest centroid's place in the order."""
    return np.searchsorted(thresholds(bits), numbers).astype(np.uint32)


def of_codes(codes: Codes, bits: int) -> Vector:
    """The centroids in these places."""
    result: Vector = centroids(bits)[codes]
    return result


def _between(found: Precise) -> Precise:
    middles: Precise = (found[1:] + found[:-1]) / 2
    return middles


def _means(edges: Precise) -> Precise:
    """The mean of a standard normal between each two neighbouring edges, the outermost being infinite."""
    density = np.concatenate([[0.0], np.exp(-edges * edges / 2) / np.sqrt(2 * np.pi), [0.0]])
    below, above = np.concatenate([[0.0], ndtr(edges)]), np.concatenate([ndtr(-edges), [0.0]])
    # Of the two tails the smaller one: differences of numbers near 1 would lose digits.
    left, right = np.append(below, 1.0), np.append(1.0, above)
    mass = np.where(left[:-1] < 0.5, left[1:] - left[:-1], right[:-1] - right[1:])
    means: Precise = (density[:-1] - density[1:]) / mass
    return means
