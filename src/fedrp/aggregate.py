"""The server's arithmetic: a weighted mean of what it cannot read."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedrp.errors import ProtocolError

Vector = npt.NDArray[np.float32]


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The sum of `weight * vector`, accumulated in float64 in the order given.

    Guarantees: the order of the vectors changes nothing but rounding below float32.
    """
    total = np.zeros(vectors[0].shape, np.float64)
    for vector, weight in zip(vectors, weights, strict=True):
        total += np.multiply(vector, weight, dtype=np.float64)
    return total.astype(np.float32)


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The mean with the given weights, which need not sum to one."""
    whole = float(sum(weights))
    if not vectors or whole <= 0:
        raise ProtocolError(f"nothing to average: {len(vectors)} uploads with a total weight of {whole:g}")
    return weighted_sum(vectors, [weight / whole for weight in weights])
