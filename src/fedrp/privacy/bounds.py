"""What a release is worth: the BOUNDS table, event -> interval of epsilon or a refusal with its reason.

To add a bound: one function `(leaves, delta) -> EpsilonInterval | Refused` and one line in BOUNDS. A bound sees only
leaves that can be bounded at all; `bound` has answered the others before: nothing released is 0, non-private is
infinite, unsupported, unknown and unbounded releases are refused.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedrp.errors import ConfigError
from fedrp.privacy import _checks, events, pld
from fedrp.privacy.composition import advanced_epsilon, basic_epsilon, renyi_epsilon
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.joint_view import joint_epsilon
from fedrp.privacy.projection_loss import dominating_losses, growing_losses
from fedrp.privacy.projection_mechanism import (
    LARGEST_RATIO,
    exact_epsilon,
    highest_order,
    paper_epsilon,
    renyi_divergence,
)


class EpsilonInterval(NamedTuple):
    """The smallest epsilon that holds at the given delta is between `lower` and `upper`; `upper` is what is claimed."""

    lower: float
    estimate: float
    upper: float


class Refused(NamedTuple):
    """The bound says nothing about this event."""

    reason: str


Answer = EpsilonInterval | Refused
Leaf = events.GaussianRelease | events.PoissonSampled | events.ProjectedRelease
Leaves = Mapping[Leaf, int]  # how often each happens


def bound(name: str, event: events.Event, delta: float) -> Answer:
    """Ask one entry of BOUNDS about an event.

    Guarantees: 0 <= lower <= estimate <= upper; pure; an event that happens zero times costs nothing.
    """
    delta = _checks.probability("delta", delta)
    if name not in BOUNDS:
        raise ConfigError(f"bound must be one of {', '.join(BOUNDS)}, got bound={name!r}")
    leaves: dict[Leaf, int] = {}
    exposed = False
    for leaf, count in events.leaves(event):
        if isinstance(leaf, events.NonPrivate) or _noise_free(leaf):
            exposed = True
        elif isinstance(leaf, events.Unsupported):
            return Refused(leaf.reason)
        elif not isinstance(leaf, Leaf):
            return Refused(f"unknown event {leaf!r}")
        elif isinstance(leaf, events.ProjectedRelease) and leaf.ratio is None:
            return Refused("nothing bounds the sensitivity-to-norm ratio of the projected vector")
        elif isinstance(leaf, events.ProjectedRelease) and _ratio(leaf) > LARGEST_RATIO:
            return Refused(too_large(_ratio(leaf)))
        elif not _harmless(leaf):
            leaf = leaf.event if isinstance(leaf, events.PoissonSampled) and leaf.rate == 1 else leaf
            leaves[leaf] = leaves.get(leaf, 0) + count
    if exposed:
        return EpsilonInterval(math.inf, math.inf, math.inf)
    return BOUNDS[name](leaves, delta) if leaves else EpsilonInterval(0.0, 0.0, 0.0)


def too_large(ratio: float) -> str:
    """Why nothing is said about a projected vector that may change by so much."""
    return f"the projected vector may change by {ratio:.3g} times its norm floor, more than {LARGEST_RATIO:g} times"


def tightest(event: events.Event, delta: float, adversary: events.Adversary) -> tuple[str, EpsilonInterval] | Refused:
    """The entry of BOUNDS with the smallest upper end, and its answer, for what `adversary` sees.

    Guarantees: refused where all bounds refuse, and for a projected vector in the eyes of anyone but the server alone,
    because everyone else may know the matrix.
    """
    projected = any(isinstance(leaf, events.ProjectedRelease) for leaf, _ in events.leaves(event))
    if projected and adversary not in (events.Adversary.SERVER, events.Adversary.ONE_VECTOR):
        return Refused("this adversary may know the secret matrix")
    answers = {name: bound(name, event, delta) for name in BOUNDS}
    found = {name: answer for name, answer in answers.items() if isinstance(answer, EpsilonInterval)}
    if found:
        return min(found.items(), key=lambda item: item[1].upper)  # the first of equals
    reasons = dict.fromkeys(answer.reason for answer in answers.values() if isinstance(answer, Refused))
    return Refused("; ".join(reasons))


def _paper(leaves: Leaves, delta: float) -> Answer:
    """Theorem 2 of the paper: one projected vector, seen alone."""
    leaf, count = _only(leaves)
    if type(leaf) is not events.ProjectedRelease or count != 1:
        return Refused("the paper's theorem is about one projected vector, seen alone, in one round")
    return _upper(paper_epsilon(leaf.rows, _ratio(leaf), delta))


def _exact(leaves: Leaves, delta: float) -> Answer:
    """The hockey-stick divergence itself, where it is known."""
    leaf, count = _only(_as_one_gaussian(leaves))
    if isinstance(leaf, events.GaussianRelease):
        epsilon = gaussian_epsilon(leaf.noise_multiplier, delta, count)
        return EpsilonInterval(epsilon, epsilon, epsilon)
    if isinstance(leaf, events.PoissonSampled) and not leaf.participation_hidden:
        epsilon = gaussian_epsilon(leaf.event.noise_multiplier, delta, count, leaf.rate)
        return EpsilonInterval(epsilon, epsilon, epsilon)
    if isinstance(leaf, events.ProjectedRelease) and count == 1:
        straight = exact_epsilon(leaf.rows, _ratio(leaf), delta)
        if isinstance(leaf, events.JointProjectedRelease):
            joint = joint_epsilon(leaf.rows, _ratio(leaf), delta)
            return EpsilonInterval(straight, joint, joint)
        return EpsilonInterval(straight, straight, straight)
    return Refused("the divergence is not known exactly for this event or for a composition of it")


def _basic(leaves: Leaves, delta: float) -> Answer:
    """Sum of the exact epsilons, delta shared equally by all releases."""
    if any(_amplified(leaf) for leaf in leaves):
        return Refused("basic composition needs the exact epsilon of one release")
    releases = sum(leaves.values())
    return _upper(sum(basic_epsilon(_exact_at(leaf), n, delta * n / releases) for leaf, n in leaves.items()))


def _advanced(leaves: Leaves, delta: float) -> Answer:
    """Dwork, Rothblum and Vadhan's theorem for equal releases."""
    leaf, count = _only(leaves)
    if leaf is None or _amplified(leaf):
        return Refused("advanced composition is applied to equal releases with a known epsilon")
    return _upper(advanced_epsilon(_exact_at(leaf), count, delta))


def _renyi(leaves: Leaves, delta: float) -> Answer:
    """Sum of the Renyi curves, converted at the best order."""
    highest = math.inf
    for leaf in leaves:
        if _amplified(leaf):
            return Refused("the Renyi curve of an amplified release is not implemented; pld is tighter")
        if isinstance(leaf, events.ProjectedRelease):
            highest = min(highest, highest_order(_ratio(leaf)))

    def divergence(order: float) -> float:
        return sum(count * _leaf_divergence(leaf, order) for leaf, count in leaves.items())

    return _upper(renyi_epsilon(divergence, delta, highest))


def _pld(leaves: Leaves, delta: float) -> Answer:
    """Privacy-loss distributions composed by FFT."""
    leaf, count = _only(leaves)
    if delta < pld.SMALLEST_DELTA:
        return Refused(f"privacy-loss distributions are composed for delta >= {pld.SMALLEST_DELTA:g} only")
    kinds = {kind: number for part, number in leaves.items() if (kind := _sampled(part))}
    if not pld.fits(kinds):
        return Refused("there is too little noise for a privacy-loss distribution")
    if isinstance(leaf, events.GaussianRelease):
        return _upper(pld.sampled_gaussian_epsilon(leaf.noise_multiplier / math.sqrt(count), delta, 1, 1.0))
    if isinstance(leaf, events.PoissonSampled) and leaf.participation_hidden:
        return _upper(pld.sampled_gaussian_epsilon(leaf.event.noise_multiplier, delta, count, leaf.rate))
    if leaf is None and len(kinds) == len(leaves):
        return _upper(pld.sampled_gaussians_epsilon(kinds, delta))
    if type(leaf) is events.ProjectedRelease:
        tail = 1e-4 * delta / count
        lower = pld.composed_epsilon(growing_losses(leaf.rows, _ratio(leaf), tail), count, delta)
        upper = pld.composed_epsilon(dominating_losses(leaf.rows, _ratio(leaf), tail), count, delta)
        same_direction = exact_epsilon(leaf.rows * count, _ratio(leaf), delta)  # T equal rounds are T m rows
        return EpsilonInterval(min(lower, same_direction), min(same_direction, upper), upper)
    return Refused("no privacy-loss distribution is implemented for this event")


BOUNDS: dict[str, Callable[[Leaves, float], Answer]] = {
    "paper": _paper,
    "exact": _exact,
    "basic": _basic,
    "advanced": _advanced,
    "renyi": _renyi,
    "pld": _pld,
}

# What each of them is, for a reader of a statement; one that is not named here is printed by its name alone.
MEANINGS = {
    "paper": "the theorem of the FedRP paper, for one projected vector seen alone in one round",
    "exact": "the divergence of what is released itself, computed and not estimated from above",
    "basic": "the epsilons of all rounds added up",
    "advanced": "advanced composition (Dwork, Rothblum, Vadhan 2010)",
    "renyi": "Renyi divergences of all rounds added up, converted at the best order",
    "pld": "privacy-loss distributions of all rounds composed numerically, rounded upwards",
}


def _as_one_gaussian(leaves: Leaves) -> Leaves:
    """Gaussian releases of different noise are one: squared separations add up."""
    gaussians = {leaf: count for leaf, count in leaves.items() if isinstance(leaf, events.GaussianRelease)}
    if len(leaves) < 2 or len(gaussians) < len(leaves):
        return leaves
    squared = sum(count / leaf.noise_multiplier**2 for leaf, count in gaussians.items())
    return {events.GaussianRelease(1 / math.sqrt(squared)): 1}


def _sampled(leaf: Leaf) -> pld.Sampled | None:
    if isinstance(leaf, events.PoissonSampled):
        return pld.Sampled(leaf.event.noise_multiplier, leaf.rate, leaf.participation_hidden)
    return pld.Sampled(leaf.noise_multiplier, 1.0, False) if isinstance(leaf, events.GaussianRelease) else None


def _only(leaves: Leaves) -> tuple[Leaf | None, int]:
    return next(iter(leaves.items())) if len(leaves) == 1 else (None, 0)


def _exact_at(leaf: Leaf) -> Callable[[float], float]:
    def epsilon(delta: float) -> float:
        answer = _exact({leaf: 1}, delta)
        return answer.upper if isinstance(answer, EpsilonInterval) else math.inf

    return epsilon


def _leaf_divergence(leaf: Leaf, order: float) -> float:
    if isinstance(leaf, events.ProjectedRelease):
        return renyi_divergence(order, leaf.rows, _ratio(leaf))
    if isinstance(leaf, events.GaussianRelease):
        return order / (2 * leaf.noise_multiplier**2)
    exponent = (order - 1) * order / (2 * leaf.event.noise_multiplier**2)  # the adversary sees whether it happened
    return (exponent if exponent > 500 else math.log1p(leaf.rate * math.expm1(exponent))) / (order - 1)


def _amplified(leaf: Leaf) -> bool:
    return isinstance(leaf, events.PoissonSampled) and leaf.participation_hidden


def _noise_free(leaf: events.Event) -> bool:
    gaussian = leaf.event if isinstance(leaf, events.PoissonSampled) and leaf.rate > 0 else leaf
    return isinstance(gaussian, events.GaussianRelease) and gaussian.noise_multiplier == 0


def _harmless(leaf: Leaf) -> bool:
    if isinstance(leaf, events.PoissonSampled):
        return leaf.rate == 0
    return isinstance(leaf, events.ProjectedRelease) and leaf.ratio == 0


def _ratio(leaf: events.ProjectedRelease) -> float:
    return math.inf if leaf.ratio is None else leaf.ratio


def _upper(epsilon: float) -> EpsilonInterval:
    return EpsilonInterval(0.0, epsilon, epsilon)
