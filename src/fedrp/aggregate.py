"""The server's arithmetic: a weighted mean of what it cannot read."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedrp.errors import ProtocolError

Vector = npt.NDArray[np.float32]

_CHUNK = 1 << 20


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float], divisor: float = 1.0) -> Vector:
    """The sum of `weight * vector`, accumulated in float64 in the order given, by `divisor`.

    Guarantees: the order of the vectors changes nothing but rounding below float32. With weights of 1 and multiples of
    a power of two, which float64 adds exactly, the result is a function of the sum: it does not tell how many they are.
    """
    result = np.empty(vectors[0].shape, np.float32)
    for start in range(0, result.size, _CHUNK):  # a float64 copy of 134 million numbers would be a gigabyte
        part = slice(start, start + _CHUNK)
        total = np.zeros(result[part].shape, np.float64)
        for vector, weight in zip(vectors, weights, strict=True):
            total += np.multiply(vector[part], weight, dtype=np.float64)
        result[part] = total / divisor
    return result


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float], divisor: float | None = None) -> Vector:
    """The mean with the given weights, which need not sum to one; or the sum by another `divisor` than their sum."""
    whole = float(sum(weights))
    if not vectors or whole <= 0:
        raise ProtocolError(f"nothing to average: {len(vectors)} uploads with a total weight of {whole:g}")
    if divisor is not None:
        return weighted_sum(vectors, weights, divisor)
    return weighted_sum(vectors, [weight / whole for weight in weights])
