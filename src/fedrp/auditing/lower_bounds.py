"""Empirical lower bounds on epsilon: what a distinguishing game proves about a mechanism, whatever was claimed of it.

An adversary gives a score to every run of two neighbouring worlds. A test "score above t" that is right more often in
one world than (epsilon, delta) allows refutes the claim. Two bounds from the same scores:

- `any`: P(S) <= e^epsilon Q(S) + delta holds for every event S, so epsilon >= ln((P(S) - delta) / Q(S)).
- `family`: if the claim also names the noise (Gaussian; a Gaussian projection), the pair (P(S), Q(S)) must lie under
  the family's own trade-off curve, which few runs can refute where the first bound would need millions.

Rates are replaced by Clopper-Pearson limits on runs that did not choose the threshold, so both bounds hold together
with the stated confidence. See docs/privacy.md, "Audit".
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, gammainccinv, ndtri

from fedrp.errors import ConfigError
from fedrp.privacy import _checks, events
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.projection_mechanism import exact_epsilon

FloatArray = npt.NDArray[np.float64]

_CANDIDATES = 200  # thresholds that are tried
_LIMITS = 4  # confidence limits that must hold together: two rates in each of the two bounds


class LowerBound(NamedTuple):
    """An epsilon that the mechanism has at least, and the test that shows it."""

    epsilon: float
    threshold: float
    above: bool  # the event is "score above threshold", or "not above"
    inside: bool  # it is frequent inside, or outside
    hit_rate: float  # of the event where it is frequent, a lower confidence limit
    false_rate: float  # in the other world, an upper confidence limit


class AuditBounds(NamedTuple):
    """What the scores of two worlds prove at `confidence`, both bounds together."""

    any: LowerBound
    family: LowerBound | None  # None where the claim names no family
    confidence: float

    @property
    def epsilon(self) -> float:
        """The larger of the two."""
        return max(self.any.epsilon, self.family.epsilon if self.family else 0.0)


def audit_bounds(
    inside: npt.ArrayLike, outside: npt.ArrayLike, delta: float, confidence: float, event: events.Event | None = None
) -> AuditBounds:
    """Lower bounds on epsilon at `delta` from the scores of runs in two neighbouring worlds.

    `event` is the claim, if there is one: its kind of noise gives the second bound. The first half of the scores
    chooses the threshold, the second half is measured.

    Guarantees: if runs are independent, each bound is below the true epsilon (the second: of a mechanism of the
    family), both with probability at least `confidence`; unchanged by any increasing function of all scores.
    """
    delta = _checks.probability("delta", delta)
    confidence = _checks.number("confidence", confidence, above=0, below=1)
    worlds = [np.asarray(scores, np.float64) for scores in (inside, outside)]
    if any(scores.ndim != 1 or scores.size < 4 or not np.isfinite(scores).all() for scores in worlds):
        raise ConfigError(f"scores must be finite and of at least 4 runs, got {[scores.shape for scores in worlds]}")
    halves = [np.split(scores, [scores.size // 2]) for scores in worlds]
    chosen, measured = zip(*halves, strict=True)
    risk = (1 - confidence) / _LIMITS

    every_way = [
        _proved(above, inside_, chosen, measured, _any_proof(delta), risk)
        for above in (True, False)
        for inside_ in (True, False)
    ]
    family = _family_proof(event, delta)
    return AuditBounds(
        # By the half that chooses: looking at the measured half would be one more test.
        max(every_way, key=lambda candidate: candidate.expected).bound,
        # In a Gaussian's and a projection's game larger scores mean inside.
        None if family is None else _proved(True, True, chosen, measured, family, risk).bound,
        confidence,
    )


def clopper_pearson(successes: FloatArray, trials: int, risk: float) -> tuple[FloatArray, FloatArray]:
    """Lower and upper limits of a probability, each wrong with probability at most `risk`."""
    counts = np.asarray(successes, np.float64)
    failures = trials - counts
    low = np.where(counts == 0, 0.0, betaincinv(np.maximum(counts, 1), failures + 1, risk))
    high = np.where(failures == 0, 1.0, betaincinv(counts + 1, np.maximum(failures, 1), 1 - risk))
    return low, high


class _Proof(NamedTuple):
    """How far apart two worlds must be, and the epsilon that follows from it.

    `strength` takes the least probability of an event in its own world and the largest in the other, elementwise.
    """

    strength: Callable[[FloatArray, FloatArray], FloatArray]
    epsilon: Callable[[float], float]


class _Candidate(NamedTuple):
    expected: float  # what the half that chooses would prove
    bound: LowerBound


def _proved(
    above: bool,
    inside: bool,
    chosen: tuple[FloatArray, ...],
    measured: tuple[FloatArray, ...],
    proof: _Proof,
    risk: float,
) -> _Candidate:
    """What the event (score above a threshold, or not) proves that is frequent inside, or outside."""
    if not inside:
        chosen, measured = chosen[::-1], measured[::-1]
    thresholds = np.quantile(np.concatenate(chosen), np.linspace(0, 1, _CANDIDATES))
    expected = proof.strength(*_limits(above, chosen, thresholds, risk))
    best = int(np.argmax(expected))
    hits, misses = _limits(above, measured, thresholds[best : best + 1], risk)
    epsilon = proof.epsilon(float(proof.strength(hits, misses)[0]))
    bound = LowerBound(epsilon, float(thresholds[best]), above, inside, float(hits[0]), float(misses[0]))
    return _Candidate(float(expected[best]), bound)


def _limits(
    above: bool, worlds: tuple[FloatArray, ...], thresholds: FloatArray, risk: float
) -> tuple[FloatArray, FloatArray]:
    """The least probability of the event where it is frequent, the largest where it is not."""
    frequent, rare = worlds

    def count(scores: FloatArray) -> FloatArray:
        larger = scores.size - np.searchsorted(np.sort(scores), thresholds, side="right")
        return np.asarray(larger if above else scores.size - larger, np.float64)

    hits, _ = clopper_pearson(count(frequent), frequent.size, risk)
    _, misses = clopper_pearson(count(rare), rare.size, risk)
    return hits, misses


def _any_proof(delta: float) -> _Proof:
    def strength(hits: FloatArray, misses: FloatArray) -> FloatArray:
        return np.log(np.maximum(hits - delta, 1e-300) / misses)

    return _Proof(strength, lambda found: max(0.0, found))


def _family_proof(event: events.Event | None, delta: float) -> _Proof | None:
    """For a claim of equal releases, all of them certain to happen."""
    leaves = list(events.leaves(event)) if event is not None else []
    if len(leaves) != 1:
        return None
    leaf, count = leaves[0]
    if isinstance(leaf, events.GaussianRelease) or (isinstance(leaf, events.PoissonSampled) and leaf.rate == 1):
        return _gaussian_proof(delta)
    if type(leaf) is events.ProjectedRelease:
        return _projection_proof(leaf.rows * count, delta)  # T rounds that all grow are one of T m rows
    return None


def _gaussian_proof(delta: float) -> _Proof:
    """Unit normals at a distance mu exceed t with probabilities Phi(mu - t) and Phi(-t); mu decides epsilon."""

    def strength(hits: FloatArray, misses: FloatArray) -> FloatArray:
        return np.asarray(ndtri(hits) - ndtri(misses), np.float64)

    return _Proof(strength, lambda mu: gaussian_epsilon(1 / mu, delta, 1) if mu > 0 else 0.0)


def _projection_proof(rows: int, delta: float) -> _Proof:
    """Chi-squares of scales q^2 and 1 exceed t with probabilities sf(t / q^2) and sf(t); q decides epsilon."""

    def strength(hits: FloatArray, misses: FloatArray) -> FloatArray:
        return np.sqrt(np.asarray(gammainccinv(rows / 2, misses) / gammainccinv(rows / 2, hits), np.float64))

    return _Proof(strength, lambda q: exact_epsilon(rows, q - 1, delta) if q > 1 else 0.0)
