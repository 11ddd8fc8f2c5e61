"""The ledger of a run: who learns what, as the algorithm declares it, and what each of these releases is worth."""

from collections.abc import Iterable, Sequence

from fedrp.privacy.events import Adjacency, Release
from fedrp.privacy.guarantee import Guarantee, guarantee


def statements(releases: Iterable[Release], delta: float) -> tuple[Guarantee, ...]:
    """What is proved about each release."""
    return tuple(guarantee(r.event, delta, r.adversary, r.adjacency, r.assumptions) for r in releases)


def headline(ledger: Sequence[Guarantee]) -> Guarantee | None:
    """The statement that a one-line result quotes: the worst one, the largest epsilon over all adversaries.

    Where noise protects records it is about these. None if one adversary has no guarantee. What holds against a server
    that looks at one vector alone is not counted: where it is stated at all, the server has more than that.
    """
    of_records = [item for item in ledger if item.adjacency is Adjacency.RECORD_ADD_REMOVE]
    real = of_records or [item for item in ledger if item.adversary.real]
    if any(item.epsilon is None for item in real):
        return None
    return max(real, key=lambda item: item.epsilon or 0.0, default=None)


def by_unit(ledger: Sequence[Guarantee]) -> dict[str, float | None]:
    """The largest epsilon over all adversaries that records are promised, and clients; None: one has no guarantee."""
    real = [item for item in ledger if item.adversary.real]
    found: dict[str, float | None] = {}
    for unit in dict.fromkeys(item.adjacency.unit for item in real):
        worst = [item.epsilon for item in real if item.adjacency.unit == unit]
        found[unit] = None if None in worst else max(epsilon or 0.0 for epsilon in worst)
    return found


def delta_warnings(ledger: Iterable[Guarantee], clients: int, records: int) -> tuple[str, ...]:
    """What to say of a delta that is too large for how many there are of whom the neighbours differ in one."""
    texts = []
    for item in ledger:
        of_records = item.adjacency.unit == "record"
        whom, count = ("record", records) if of_records else ("client", clients)
        if item.epsilon and item.delta * count > 1:
            texts.append(
                f"delta {item.delta:g} is above 1/{count}, and there are {count} {whom}s: a mechanism that gives one "
                f"of them away entirely would keep this promise; choose a dp_delta far below {1 / count:.1g}"
            )
    return tuple(dict.fromkeys(texts))
