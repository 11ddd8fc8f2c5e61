"""What was released, as data. An event says what happened; `fedrp.privacy.bounds` says what that is worth.

Rules: an event never changes its meaning; new fields are optional; a bound that does not know an event refuses it, and
what no bound knows has no guarantee. Numbers are coerced and checked when the event is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from fedrp.errors import ConfigError
from fedrp.privacy import _checks


class Adversary(Enum):
    """Who looks. The value completes "... against ..."."""

    SERVER = "the server alone, honest but curious"
    ONE_VECTOR = "a server that looks at one client's vector alone, as the paper assumes"
    SERVER_AND_CLIENT = "the server together with a client, who knows the secret matrices"
    CLIENTS = "the other clients, who know the secret matrices and see aggregates"
    MODEL_HOLDER = "whoever gets the final model"

    @property
    def real(self) -> bool:
        """Whether someone has this view; a server that sees several vectors does not look at one alone."""
        return self is not Adversary.ONE_VECTOR


class Adjacency(Enum):
    """Which two data sets must look alike."""

    RECORD_REPLACE = "one record of one client replaced by another"
    RECORD_ADD_REMOVE = "one record of one client added or removed"
    CLIENT_ADD_REMOVE = "one client added or removed, or its contribution set to zero"
    CLIENT_ZEROED = "one client's contributions set to zero; that it takes part is no secret"
    CLIENT_REPLACE = "one client's whole data set replaced by another"

    @property
    def unit(self) -> str:
        """Whom a statement about these neighbours protects: a record, or a client."""
        return self.name.partition("_")[0].lower()


@dataclass(frozen=True)
class NothingReleased:
    """The adversary sees nothing that depends on the data: epsilon 0."""


@dataclass(frozen=True)
class NonPrivate:
    """Something is seen in the clear: epsilon infinity."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """A release for which nothing is claimed: every bound refuses it."""

    reason: str


@dataclass(frozen=True)
class GaussianRelease:
    """x + N(0, (z S)^2 I), where adjacent data sets move x by at most S in Euclidean norm; z is `noise_multiplier`."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _coerce(self, "noise_multiplier", _checks.number("noise_multiplier", self.noise_multiplier, at_least=0))


@dataclass(frozen=True)
class PoissonSampled:
    """`event` happens to a client with probability `rate`, by a coin of its own that does not depend on the data.

    `participation_hidden`: the adversary learns neither who took part nor how many, and neither the noise level nor the
    denominator depends on it. Only then does sampling amplify; otherwise it merely spares rounds.
    """

    event: GaussianRelease
    rate: float
    participation_hidden: bool = False

    def __post_init__(self) -> None:
        _coerce(self, "rate", _checks.number("rate", self.rate, at_least=0, at_most=1))
        if not isinstance(self.event, GaussianRelease):
            raise ConfigError(f"sampling is bounded for a GaussianRelease only, got event={self.event!r}")


@dataclass(frozen=True)
class SampledRecords(PoissonSampled):
    """The noised sum of a batch that each record of a client is in by a coin of its own, which nobody else knows.

    Noise, rate and denominator depend on the number of records that the client states, not on who is in the batch.
    """

    participation_hidden: bool = True


@dataclass(frozen=True)
class ProjectedRelease:
    """One vector times a fresh secret Gaussian matrix: A w in R^rows, entries of A independent N(0, 1/rows).

    `ratio` is alpha = sensitivity / norm floor: ||w - w'|| <= sensitivity and ||w||, ||w'|| >= floor for all adjacent
    data sets. None: nothing bounds it, so there is no guarantee. Also describes a secure aggregate, w being the sum.
    """

    rows: int
    ratio: float | None = None

    def __post_init__(self) -> None:
        _coerce(self, "rows", _checks.whole("rows", self.rows, at_least=1))
        if self.ratio is not None:
            _coerce(self, "ratio", _checks.number("ratio", self.ratio, at_least=0))


@dataclass(frozen=True)
class JointProjectedRelease(ProjectedRelease):
    """A w_1 .. A w_K, all with one A; client i's vector changes. `ratio` is sensitivity / distance floor.

    The distance is that of w_i to the span of the other clients' vectors, for both adjacent data sets.
    """


@dataclass(frozen=True)
class Composed:
    """`event`, `count` times: fresh secrets and noise each time; data and earlier outputs may steer the next."""

    event: "Event"
    count: int

    def __post_init__(self) -> None:
        _coerce(self, "count", _checks.whole("count", self.count, at_least=0))


@dataclass(frozen=True)
class Sequence:
    """All of `events`, one after the other, adaptively."""

    events: tuple["Event", ...]


Event = (
    NothingReleased
    | NonPrivate
    | Unsupported
    | GaussianRelease
    | PoissonSampled
    | SampledRecords
    | ProjectedRelease
    | JointProjectedRelease
    | Composed
    | Sequence
)


class Release(NamedTuple):
    """What one adversary learns in a whole run."""

    adversary: Adversary
    adjacency: Adjacency
    event: Event
    assumptions: tuple[str, ...] = ()  # the algorithm's own; what the event takes for granted is added


def leaves(event: Event, count: int = 1) -> Iterator[tuple[Event, int]]:
    """The events inside compositions, each with how often it happens; nothing for what never happens."""
    if isinstance(event, Composed):
        yield from leaves(event.event, count * event.count)
    elif isinstance(event, Sequence):
        for part in event.events:
            yield from leaves(part, count)
    elif count > 0 and not isinstance(event, NothingReleased):
        yield event, count


def _coerce(event: Any, name: str, value: float) -> None:
    object.__setattr__(event, name, value)
