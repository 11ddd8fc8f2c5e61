"""A statement about privacy: a number or "no guarantee", against whom, for which neighbours, assuming what."""

import math
from dataclasses import dataclass
from typing import Any

from fedrp.privacy import _checks
from fedrp.privacy.assumptions import implied_assumptions
from fedrp.privacy.bounds import Refused, tightest
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, leaves


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) by the tightest bound, or no guarantee: then `epsilon` is None and `reason` says why."""

    epsilon: float | None
    delta: float
    bound: str | None
    adversary: Adversary
    adjacency: Adjacency
    assumptions: tuple[str, ...]
    reason: str | None = None

    def __str__(self) -> str:
        whom = f"against {self.adversary.value}; neighbours: {self.adjacency.value}"
        if self.epsilon is None:
            return f"no guarantee {whom}; because {self.reason}"
        assumed = "".join(f"; assuming that {assumption}" for assumption in self.assumptions)
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} {whom}{assumed}"

    def as_json(self) -> dict[str, Any]:
        """The statement as a JSON object."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "bound": self.bound,
            "adversary": self.adversary.value,
            "adjacency": self.adjacency.value,
            "assumptions": list(self.assumptions),
            "reason": self.reason,
        }


def guarantee(
    event: Event, delta: float, adversary: Adversary, adjacency: Adjacency, assumptions: tuple[str, ...] = ()
) -> Guarantee:
    """The tightest statement that BOUNDS supports about what `adversary` sees, `event`.

    `assumptions` are the caller's; what the event itself takes for granted is added.

    Guarantees: never a number where no bound applies or epsilon is infinite.
    """
    delta = _checks.probability("delta", delta)
    everything = tuple(dict.fromkeys((*assumptions, *implied_assumptions(event))))
    answer = tightest(event, delta, adversary)
    if isinstance(answer, Refused):
        return Guarantee(None, delta, None, adversary, adjacency, everything, answer.reason)
    name, interval = answer
    if math.isinf(interval.upper):
        exposed = dict.fromkeys(leaf.reason for leaf, _ in leaves(event) if isinstance(leaf, NonPrivate))
        reason = "; ".join(exposed) or "the release carries no noise"
        return Guarantee(None, delta, None, adversary, adjacency, everything, reason)
    return Guarantee(interval.upper, delta, name, adversary, adjacency, everything)
