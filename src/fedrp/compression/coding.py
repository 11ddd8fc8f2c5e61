"""How the numbers of an upload or an aggregate are written into a payload: float32, words for masks, or few bits."""

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedrp.compression.eden import SCALE_BYTES, Eden
from fedrp.compression.lloyd_max import MOST_BITS
from fedrp.errors import ConfigError, WireError
from fedrp.types import Vector

Numbers = npt.NDArray[Any]
FULL = 32.0  # bits of a number that is not quantised
HALF = 16.0


class Coding(Protocol):
    """A way to write vectors of one size.

    Guarantees: `decode` depends on payload and place alone, and gives the same bits on every machine; a payload that
    `encode` did not make is refused with a `WireError`, or decodes to finite numbers.
    """

    @property
    def size(self) -> int:
        """How many numbers a vector has."""

    @property
    def width(self) -> int:
        """Bits of the packed numbers of a payload; 0 for items of `dtype`."""

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""

    def encode(self, vector: Numbers, place: bytes) -> Numbers:
        """The payload. A place (run, round, sender) has public randomness of its own."""

    def decode(self, payload: Numbers, place: bytes) -> Numbers:
        """The vector."""


@dataclass(frozen=True)
class Plain:
    """Numbers as they are: float32, or words of 32 bits."""

    size: int
    dtype: str = "<f4"
    width: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return 4 * self.size

    def encode(self, vector: Numbers, place: bytes) -> Numbers:  # noqa: ARG002 - nothing is random
        """The numbers themselves."""
        return vector

    def decode(self, payload: Numbers, place: bytes) -> Numbers:  # noqa: ARG002 - as above
        """The numbers themselves."""
        if payload.dtype != np.dtype(self.dtype) or payload.size != self.size:
            raise WireError(f"{payload.size} numbers of type {payload.dtype}, expected {self.size} of {self.dtype}")
        return payload.view(np.dtype(self.dtype).newbyteorder("="))


@dataclass(frozen=True)
class Halves:
    """Half precision, in units of the largest number."""

    size: int
    width: int = 16

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return SCALE_BYTES + 2 * self.size

    def encode(self, vector: Vector, place: bytes) -> Numbers:  # noqa: ARG002 - nothing is random
        """The largest number, then all of them by it."""
        largest = np.abs(vector).max(initial=0.0).astype("<f4")
        units = vector / largest if largest else vector
        return np.concatenate([largest.reshape(1).view(np.uint8), units.astype("<f2").view(np.uint8)])

    def decode(self, payload: Numbers, place: bytes) -> Vector:  # noqa: ARG002 - as above
        """The numbers."""
        if payload.size != self.nbytes:
            raise WireError(f"a vector of {payload.size} bytes, expected {self.nbytes}")
        largest = payload[:SCALE_BYTES].copy().view("<f4")[0]
        result: Vector = payload[SCALE_BYTES:].copy().view("<f2").astype(np.float32) * largest
        if not np.isfinite(result).all():
            raise WireError("payload holds values that are not finite")
        return result


def place_of(run: bytes, round_: int, sender: int) -> bytes:
    """What the public randomness of a message's code belongs to."""
    return run + struct.pack("<II", round_, sender)


def coding_of(size: int, bits: float) -> Coding:
    """The code of vectors with so many bits a number."""
    if bits == FULL:
        return Plain(size)
    return Halves(size) if bits == HALF else Eden(size, bits)


_WIDTHS = (*map(float, range(1, MOST_BITS + 1)), HALF, FULL)


def within_budget(nbytes: int, parameters: int, dim: int | None = None, bits: float | None = None) -> tuple[int, float]:
    """Numbers and bits that a budget of bytes buys: as many numbers as it has bits, and more bits where that is all.

    One bit for each of many numbers teaches more than many bits of few (docs/results.md). What is given stays.

    Raises:
        ConfigError: the budget is too small.
    """
    if nbytes <= SCALE_BYTES:
        raise ConfigError(f"bytes={nbytes} is not valid: a vector takes at least {SCALE_BYTES + 1}")
    if dim is None:
        dim = _most_numbers(nbytes, parameters, 1.0 if bits is None else bits)
    if bits is None:
        bits = max((bits for bits in _WIDTHS if coding_of(dim, bits).nbytes <= nbytes), default=min(_WIDTHS))
    if dim < 1 or coding_of(dim, bits).nbytes > nbytes:
        least = coding_of(max(1, dim), bits).nbytes
        raise ConfigError(f"bytes={nbytes} is too few: dim={max(1, dim)} with bits={bits:g} takes {least}")
    return dim, bits


def _most_numbers(nbytes: int, parameters: int, bits: float) -> int:
    """The largest number of numbers that fit, up to that of the model."""
    count = min(parameters, int(8 * nbytes / bits))
    while count > 0 and coding_of(count, bits).nbytes > nbytes:
        count -= 1
    return count
