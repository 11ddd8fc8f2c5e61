"""The ledger of a run: who learns what, as the algorithm declares it, and what each of these releases is worth."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedrp.privacy import events
from fedrp.privacy.assumptions import implied_assumptions
from fedrp.privacy.bounds import Refused, tightest
from fedrp.privacy.events import Adjacency, Adversary, Event


class Release(NamedTuple):
    """What one adversary learns in a whole run."""

    adversary: Adversary
    adjacency: Adjacency
    event: Event
    assumptions: tuple[str, ...] = ()  # the algorithm's own; what the event takes for granted is added


class Statement(NamedTuple):
    """(epsilon, delta) by the tightest bound, or no guarantee: then `epsilon` is None and `reason` says why."""

    adversary: Adversary
    adjacency: Adjacency
    epsilon: float | None
    delta: float
    bound: str | None
    assumptions: tuple[str, ...]
    reason: str | None

    def __str__(self) -> str:
        whom = f"against {self.adversary.value}; neighbours: {self.adjacency.value}"
        if self.epsilon is None:
            return f"no guarantee {whom}; because {self.reason}"
        assumed = "".join(f"; assuming that {assumption}" for assumption in self.assumptions)
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.bound}) {whom}{assumed}"

    def as_json(self) -> dict[str, Any]:
        """The statement as a JSON object."""
        return {**self._asdict(), "adversary": self.adversary.value, "adjacency": self.adjacency.value}


def statements(releases: Iterable[Release], delta: float) -> tuple[Statement, ...]:
    """What is proved about each release."""
    return tuple(_statement(release, delta) for release in releases)


def _statement(release: Release, delta: float) -> Statement:
    adversary, adjacency, event, own = release
    assumptions = tuple(dict.fromkeys((*own, *implied_assumptions(event))))

    def none(reason: str) -> Statement:
        return Statement(adversary, adjacency, None, delta, None, assumptions, reason)

    answer = tightest(event, delta, adversary)
    if isinstance(answer, Refused):
        return none(answer.reason)
    name, interval = answer
    if math.isinf(interval.upper):
        reasons = [leaf.reason for leaf, _ in events.leaves(event) if isinstance(leaf, events.NonPrivate)]
        return none("; ".join(dict.fromkeys(reasons)) or "nothing hides what is released")
    return Statement(adversary, adjacency, interval.upper, delta, name, assumptions, None)


def headline(ledger: Sequence[Statement]) -> Statement | None:
    """The statement that a one-line result quotes: the smallest epsilon above 0, the strongest adversary first.

    None where nothing is guaranteed, or where nothing was released that could need a guarantee.
    """
    proved = [item for item in ledger if item.epsilon]
    return min(proved, key=lambda item: item.epsilon or 0.0) if proved else None
