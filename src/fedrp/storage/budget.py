"""What a site has spent on each of its data sets, and what its caps leave."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.total import ADVERSARIES, units
from fedrp.storage.ledger import Caps, Entry, begun_runs, read_caps, spent


@dataclass(frozen=True)
class Budget:
    """What is spent on one data set, and by which caps."""

    data: str
    entries: tuple[Entry, ...]
    totals: tuple[Guarantee, ...]  # one per adversary
    caps: Caps

    @property
    def rounds(self) -> int:
        """Of all runs."""
        return sum(entry.rounds for entry in self.entries)

    def epsilon_left(self, total: Guarantee) -> float | None:
        """What the cap leaves against an adversary; None where there is no cap for that, or no epsilon."""
        cap, capped = self.caps.total_epsilon, total.adversary in self.caps.total_against
        first = next(item for item in self.totals if item.adversary is total.adversary)
        if first.adjacency.unit != total.adjacency.unit:  # a cap is on clients, where runs protect both
            return None
        if cap is None or total.epsilon is None or not capped or total.delta != self.caps.total_delta:
            return None
        return max(0.0, cap - total.epsilon)

    @property
    def runs_left(self) -> int | None:
        """What the cap leaves; None where there is no cap."""
        return None if self.caps.total_runs is None else max(0, self.caps.total_runs - len(self.entries))

    @property
    def rounds_left(self) -> int | None:
        """What the cap leaves; None where there is no cap."""
        return None if self.caps.total_rounds is None else max(0, self.caps.total_rounds - self.rounds)

    def as_json(self) -> dict[str, Any]:
        """The budget as a JSON object."""
        runs = [{k: v for k, v in entry.record().items() if k not in ("data", "releases")} for entry in self.entries]
        totals = [{**item.as_json(), "epsilon_left": self.epsilon_left(item)} for item in self.totals]
        counts = {"runs_spent": len(self.entries), "runs_left": self.runs_left}
        counts |= {"rounds_spent": self.rounds, "rounds_left": self.rounds_left}
        return {
            "role": "budget",
            "data": self.data,
            **counts,
            "agreed": self.caps.source,
            "spent": totals,
            "runs": runs,
        }

    def lines(self) -> list[str]:
        """The budget for people."""
        heading = f"data {self.data!r}: {len(self.entries)} runs{_left(self.runs_left)}"
        heading += f", {self.rounds} rounds{_left(self.rounds_left)} in all"
        told = []
        for item in self.totals:
            told.append(f"against {item.adversary.value}; neighbours: {item.adjacency.value}")
            if item.epsilon is None:
                told.append(f"    no guarantee: {item.reason}")
            else:
                left = self.epsilon_left(item)
                told.append(
                    f"    epsilon {item.epsilon:.4g}{_left(left)} at delta {item.delta:g} (bound: {item.bound})"
                )
        by = f"left by {self.caps.source}" if self.caps.source else "give --agreed FILE to see what is left"
        return [f"{heading} ({by})", *(f"    {line}" for line in told)]


def _totals(entries: tuple[Entry, ...], delta: float) -> tuple[Guarantee, ...]:
    """What runs have cost, by adversary and unit."""
    runs = [entry.releases for entry in entries]
    return tuple(spent(entries, who, delta, unit) for who in ADVERSARIES for unit in units(runs, who))


def _left(amount: float | None) -> str:
    return "" if amount is None else f" ({amount:.4g} left)"


def budgets(state: Path, agreed: Path | None = None, delta: float | None = None) -> list[Budget]:
    """What is spent on each data set of a site, and by the caps of which file: `agreed`, or that of its last run.

    Raises:
        ConfigError: that file cannot be read.
        SiteError: the ledger cannot.
    """
    ledger = begun_runs(state)
    found = []
    for data in dict.fromkeys(entry.data for entry in ledger.entries):
        entries = ledger.on(data)
        source = agreed or (Path(entries[-1].agreed) if entries[-1].agreed else None)
        caps = read_caps(source) if source and (agreed or source.exists()) else Caps()
        level = caps.total_delta if delta is None else delta
        found.append(Budget(data, entries, _totals(entries, level), caps))
    return found
