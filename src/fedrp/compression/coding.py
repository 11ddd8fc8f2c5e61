"""How the numbers of an upload or an aggregate are written: float32, words for masks, or few bits."""

import bisect
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fedrp.compression.eden import SCALE_BYTES, Eden, Trellis
from fedrp.compression.lloyd_max import MOST_BITS
from fedrp.compression.packing import pack, packed_bytes, unpack
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


@dataclass(frozen=True)
class MaskedWords:
    """The lowest bits of words, packed tightly: sums modulo 2^width need no others. The last ones may be whole."""

    size: int
    width: int
    whole: int = 0  # how many of the words, at the end, keep all 32 bits

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return packed_bytes(self.size - self.whole, self.width) + 4 * self.whole

    def encode(self, vector: Numbers, place: bytes) -> Numbers:  # noqa: ARG002 - nothing is random
        """The words."""
        few = self.size - self.whole
        return np.concatenate([pack(vector[:few], self.width), vector[few:].astype("<u4").view(np.uint8)])

    def decode(self, payload: Numbers, place: bytes) -> Numbers:  # noqa: ARG002 - as above
        """The words, of packed ones the bits that were sent."""
        if payload.size != self.nbytes:
            raise WireError(f"masked words of {payload.size} bytes, expected {self.nbytes}")
        end = payload.size - 4 * self.whole
        few = unpack(payload[:end], self.width, self.size - self.whole)
        return np.concatenate([few, payload[end:].copy().view("<u4").astype(np.uint32)])


@dataclass(frozen=True)
class WithExact:
    """A code whose last numbers are written as float32: those that mechanisms tell."""

    coding: Coding
    exact: int

    @property
    def size(self) -> int:
        """How many numbers a vector has."""
        return self.coding.size + self.exact

    @property
    def width(self) -> int:
        """Bits of the packed numbers."""
        return self.coding.width

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return self.coding.nbytes + 4 * self.exact

    def encode(self, vector: Numbers, place: bytes) -> Numbers:
        """The code of the first numbers, then the others."""
        few = self.coding.size
        return np.concatenate([self.coding.encode(vector[:few], place), vector[few:].astype("<f4").view(np.uint8)])

    def decode(self, payload: Numbers, place: bytes) -> Numbers:
        """The vector."""
        if payload.size != self.nbytes:
            raise WireError(f"a vector of {payload.size} bytes, expected {self.nbytes}")
        end = self.coding.nbytes
        exact = payload[end:].copy().view("<f4").astype(np.float32)
        if not np.isfinite(exact).all():
            raise WireError("payload holds values that are not finite")
        return np.concatenate([self.coding.decode(payload[:end], place), exact])


def place_of(run: bytes, round_: int, sender: int) -> bytes:
    """What the public randomness of a message's code belongs to."""
    return run + struct.pack("<II", round_, sender)


# Numbers of a vector that a trellis pays for: fewer gain less, more take the memory of a byte for each state.
_SEARCHED = range(128, 2**16 + 1)
_UP, _DOWN = 8, 12  # bits of a window: a client has one vector, all of a round's error comes from one aggregate
_FEWEST_CODES = 2  # of a window: with fewer a trellis is hardly better than its values are badly placed


def upload_coding_of(size: int, bits: float) -> Coding:
    """The code of uploads with so many bits a number."""
    return _coding_of(size, bits, _UP)


def aggregate_coding_of(size: int, bits: float) -> Coding:
    """The code of aggregates with so many bits a number."""
    return _coding_of(size, bits, _DOWN)


def _coding_of(size: int, bits: float, window: int) -> Coding:
    if bits == FULL:
        return Plain(size)
    if bits == HALF:
        return Halves(size)
    if size in _SEARCHED and bits >= 1 and _FEWEST_CODES * bits <= window:
        return Eden(size, bits, Trellis(window))
    return Eden(size, bits)


Cost = Callable[[int, float], int]  # bytes of a vector of so many numbers, with so many bits each
_WIDTHS = (*map(float, range(1, MOST_BITS + 1)), HALF, FULL)


class Size(NamedTuple):
    """How many numbers are sent, and with how many bits each; None where it is still open."""

    numbers: int | None
    bits: float | None
    bits_down: float | None


def within_budget(nbytes: int, parameters: int, given: Size, up: Cost, down: Cost) -> Size:
    """Numbers and bits that a budget of bytes each way buys: as many numbers of one bit as go in. What is given stays.

    One bit for each of many numbers teaches more than many bits of few (docs/results.md). What is left over goes into
    more bits.

    Raises:
        ConfigError: the budget is too small.
    """

    def least(numbers: int) -> int:
        return max(up(numbers, given.bits or 1.0), down(numbers, given.bits_down or 1.0))

    numbers = given.numbers or bisect.bisect_right(range(1, parameters + 1), nbytes, key=least)
    if nbytes < least(max(1, numbers)):
        raise ConfigError(f"bytes={nbytes} is too few: dim={max(1, numbers)} takes {least(max(1, numbers))}")
    ways = ((up, given.bits), (down, given.bits_down))
    bits, bits_down = (own or max(b for b in _WIDTHS if cost(numbers, b) <= nbytes) for cost, own in ways)
    return Size(numbers, bits, bits_down)
