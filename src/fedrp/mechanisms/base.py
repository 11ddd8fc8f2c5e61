"""What a mechanism is: a client's half, a server's half, and what both must know of the numbers in between.

A client applies the mechanisms of its algorithm in order, the server undoes them in reverse
(`fedrp.algorithms.pipeline`). NumPy only: the server loads them, so none can make a key; a client hands its
own randomness in.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt

from fedrp.compression.grid import WORD_BITS, Scale
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.types import Precise, Vector, Words

Numbers = npt.NDArray[Any]  # an update on its way: float32, float64, or the words that a mechanism makes of it


Purpose = Literal["update", "vote"]  # of a stream of a client's own: what its noise goes on


class Normals(Protocol):
    """Standard normals that are a client's own: those from `start` (an even number) of the stream for a purpose."""

    def __call__(self, purpose: Purpose, count: int, start: int) -> Precise:
        """`count` of them."""


class OwnWords(Protocol):
    """Uniform words that are a client's own: those from `start` (a multiple of 4) of a stream of 32 bits each."""

    def __call__(self, count: int, start: int) -> Words:
        """`count` of them."""


class AtClient(NamedTuple):
    """What a mechanism knows at a client, in a round."""

    previous: Vector | None  # the last aggregate; None before there is one
    participants: int  # how many clients take part, as the server announced
    normals: Normals  # this client's, of this round, known to nobody else
    words: OwnWords  # as above; coins by which numbers are rounded
    warn: Callable[[str], None]  # tell the client's owner
    cohort: Cohort | None = None  # who is summed, where uploads are masked
    weight: int = 1  # this client's, in the mean


class AtServer(NamedTuple):
    """What a mechanism knows at the server, once the uploads of a round are there."""

    previous: Vector | None  # the last aggregate; None before there is one
    weight: float  # of all uploads together; 0 for a round without any
    divisor: float  # of their sum
    cohort: Cohort | None = None  # who was asked, where uploads are masked


class Reach(NamedTuple):
    """How large numbers of honest clients can be: anything beyond was made by someone else."""

    number: float = math.inf  # no number is larger
    norm: float = math.inf


class Mechanism(Protocol):
    """One step between an update and its mean. A mechanism overrides what it has to say something about.

    Guarantees, checked for every mechanism: inputs are not changed; an upload has as many numbers as `size` says.
    """

    def client(self, upload: Numbers, context: AtClient) -> Numbers:
        """What goes on to the next mechanism, or is sent."""

    def server(self, numbers: Numbers, _context: AtServer) -> Numbers:
        """The mean of what clients put in, from the mean (of words: the sum) of what came out."""
        return numbers

    @property
    def told(self) -> int:
        """How many numbers of its own it adds to an upload, and to the aggregate: at the end of both."""
        return 0

    @property
    def checks(self) -> int:
        """How many numbers more it adds to an upload, for the server alone."""
        return 0

    def size(self, numbers: int) -> int:
        """How many numbers it makes of so many."""
        return numbers + self.told + self.checks

    @property
    def width(self) -> int:
        """Bits of the words that its numbers become, so that no sum of a cohort wraps around."""
        return WORD_BITS

    @property
    def divisor(self) -> float | None:
        """What the sum of uploads is divided by, whoever came; None: by their weight."""
        return None

    def scale(self, _previous: Vector | None, _cohort: Cohort) -> Scale | None:
        """How its numbers become whole ones, if it knows of a way that hides or costs less than the stated range."""
        return None

    def reach(self, before: Reach, _round: int, _size: int) -> Reach:
        """How large the mean of a round, of so many numbers, is at most; without this mechanism it is `before`."""
        return before


class Bound(Protocol):
    """What bounds how far a client, or a record, moves an upload, so that noise can be measured: a `Mechanism`, too."""

    @property
    def told(self) -> int:
        """How many of the numbers are not those of the update, but of norm 1/2 each in units of the bound."""

    def bound(self, previous: Vector | None) -> float:
        """The largest such distance, in the round after this aggregate."""

    def largest_bound(self, round_: int) -> float:
        """What `bound` can be up to a round."""
