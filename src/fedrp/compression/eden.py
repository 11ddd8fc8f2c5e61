"""A vector in a few bits a number: EDEN (Vargaftik et al. 2022), unbiased and with errors that average out.

The vector x is spread (`fedrp.compression.spread`), so that its coordinates are close to N(0, ||x||^2 / m). A
quantiser gives each a value c, and one number is sent with them, the scale S = ||x||^2 / <c, x>: S c is unbiased over
the randomness of the transform. With the nearest Lloyd-Max centroids, which cost next to nothing, the squared error is
0.571, 0.133, 0.036, 0.0096 ||x||^2 for 1 to 4 bits; with a trellis, a search, 0.41, 0.088, 0.022, 0.0059 with windows
of 8 bits and 0.37, 0.076, 0.019, 0.0048 with 12. Below one bit a random part of the coordinates is sent, with one bit
each; the others count as 0.

A payload is the scale (float32), then the packed codes.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedrp.compression import trellis
from fedrp.compression.lloyd_max import nearest, of_codes
from fedrp.compression.packing import Bytes, pack, packed_bytes, unpack
from fedrp.compression.spread import gathered, spread
from fedrp.errors import WireError
from fedrp.rng import public_words
from fedrp.types import Codes, Vector

SCALE_BYTES = 4


@dataclass(frozen=True)
class Scalar:
    """Number by number the nearest Lloyd-Max centroid."""

    def codes(self, numbers: Vector, bits: int) -> Codes:
        """The code of each number."""
        return nearest(numbers, bits)

    def values(self, codes: Codes, bits: int) -> Vector:
        """The number that each code stands for."""
        return of_codes(codes, bits)


@dataclass(frozen=True)
class Trellis:
    """All numbers together (`fedrp.compression.trellis`)."""

    window: int  # bits that a value depends on: more are closer to the bound, and twice the work each

    def codes(self, numbers: Vector, bits: int) -> Codes:
        """The codes that stand for numbers closest to these."""
        return trellis.search(numbers, self.window, bits)

    def values(self, codes: Codes, bits: int) -> Vector:
        """The numbers that the codes stand for."""
        return trellis.decoded(codes, self.window, bits)


@dataclass(frozen=True)
class Eden:
    """A code for vectors of one size.

    Guarantees: what `decode` gives depends on payload and place alone, and has the same bits on every machine; over
    random places its mean is the vector.
    """

    size: int
    bits: float  # a number, 1 to 8, or a fraction below 1
    quantiser: Scalar | Trellis = Scalar()

    @property
    def width(self) -> int:
        """Bits of a number that is sent."""
        return max(1, int(self.bits))

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return SCALE_BYTES + packed_bytes(self._kept, self.width)

    def encode(self, vector: Vector, place: bytes) -> Bytes:
        """A payload that stands for the vector, spread with the public randomness of a place."""
        x = spread(vector, place)[self._indices(place)]
        length = math.sqrt(_dot(vector, vector))
        if not length:
            return np.zeros(self.nbytes, np.uint8)
        codes = self.quantiser.codes(x * np.float32(np.sqrt(self.size) / length), self.width)
        along = _dot(self.quantiser.values(codes, self.width), x)
        scale = np.array([length * length / along if along > 0 else 0.0], "<f4")
        return np.concatenate([scale.view(np.uint8), pack(codes, self.width)])

    def decode(self, payload: Bytes, place: bytes) -> Vector:
        """The vector that a payload stands for.

        Raises:
            WireError: it is no such payload.
        """
        if payload.size != self.nbytes:
            raise WireError(f"a quantised vector of {payload.size} bytes, expected {self.nbytes}")
        scale = payload[:SCALE_BYTES].copy().view("<f4")[0]
        if not (np.isfinite(scale) and scale >= 0):
            raise WireError(f"a quantised vector has a scale of {scale}: expected a finite number of at least 0")
        codes = unpack(payload[SCALE_BYTES:], self.width, self._kept)
        whole = np.zeros(self.size, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            whole[self._indices(place)] = self.quantiser.values(codes, self.width) * scale
            result = gathered(whole, place)
        if not np.isfinite(result).all():
            raise WireError("a quantised vector holds values that are not finite")
        return result

    @property
    def _kept(self) -> int:
        """How many coordinates are sent."""
        return self.size if self.bits >= 1 else max(1, round(self.bits * self.size))

    def _indices(self, place: bytes) -> npt.NDArray[np.intp] | slice:
        """Which coordinates are sent."""
        if self._kept == self.size:
            return slice(None)
        order = np.argsort(public_words(b"kept|" + place, self.size), kind="stable")
        return np.sort(order[: self._kept])


def _dot(x: Vector, y: Vector) -> float:
    return float(np.multiply(x, y, dtype=np.float64).sum())
