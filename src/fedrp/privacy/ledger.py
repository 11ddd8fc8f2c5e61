"""The ledger of a run: who learns what, as the algorithm declares it, and what each of these releases is worth."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedrp.privacy.events import Adjacency, Adversary, Event
from fedrp.privacy.guarantee import Guarantee, guarantee


class Release(NamedTuple):
    """What one adversary learns in a whole run."""

    adversary: Adversary
    adjacency: Adjacency
    event: Event
    assumptions: tuple[str, ...] = ()  # the algorithm's own; what the event takes for granted is added


def statements(releases: Iterable[Release], delta: float) -> tuple[Guarantee, ...]:
    """What is proved about each release."""
    return tuple(guarantee(r.event, delta, r.adversary, r.adjacency, r.assumptions) for r in releases)


def headline(ledger: Sequence[Guarantee]) -> Guarantee | None:
    """The statement that a one-line result quotes: the smallest epsilon above 0, of equal ones the first.

    None where nothing is guaranteed, or where nothing was released that could need a guarantee. What holds against a
    server that looks at one vector alone is not quoted: where it is stated at all, the server has more than that.
    """
    proved = [item for item in ledger if item.epsilon and item.adversary.real]
    return min(proved, key=lambda item: item.epsilon or 0.0) if proved else None
