"""Audit of record-level noise: the local steps of a site as they are deployed, with canaries among its records.

Coins, per-example gradients, clip, sum and noise are the real ones (`fedrp.records.training.SiteRound`). A stand-in
model makes the gradient of a record the record itself, so that an adversary can choose it. It sees every single step,
which is more than leaves a site, and exactly what the claim covers. Two games:

- *Many runs*: one canary is there or not, alone or in the company of records that pull the other way. Its score is the
  likelihood ratio of all steps. The rates of a test by that score give two bounds: *any*, of whatever mechanism
  (`fedrp.auditing.lower_bounds`), and *family*: if the noise is Gaussian and the sampling as claimed, how much noise
  there can be at most.
- *One run*: many canaries in directions of their own, each there by a fair coin; who guesses the coins better than
  epsilon allows refutes it (Steinke, Nasr, Jagielski 2023).

What is broken on purpose is broken in what runs, not in what is claimed. `fedrp.auditing.examples` plays with a real
model and an example that does not belong.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedrp.auditing.lower_bounds import FloatArray, audit_bounds, clopper_pearson
from fedrp.config.checks import require
from fedrp.crypto.secret import SecretKey
from fedrp.engines.per_example import Block, per_example
from fedrp.learning.objective import PLAIN, Examples, LocalSGD
from fedrp.learning.pixels import Inputs, floats
from fedrp.learning.trainer import LocalModel, make_local_model
from fedrp.privacy import pld
from fedrp.privacy.numerics import binomial
from fedrp.records.steps import LocalSteps
from fedrp.records.training import Gradients, RecordNoise, SiteRound
from fedrp.rng import RunSeed
from fedrp.types import KEY_BYTES

PUSH = 1e3  # length of a canary: far beyond the clip
CLIP = 1.0
SGD = LocalSGD(1.0, 0.0, 1, 1)
_ALONE, _COMPANY = 2, 3  # directions of the two games
_FINE = 1e-2  # to which noise and epsilon are found
_EPSILONS = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 3.0])  # at which rates are compared with the family's curve
_CANDIDATES = 200  # thresholds that are tried
_LEAST_NOISE, _MOST_NOISE = 0.1, 100.0
_FAR = 50.0


class RecordFault(Enum):
    """What can be broken on purpose, to see whether the audit notices."""

    NONE = "none"
    NO_NOISE = "no-noise"
    HALF_NOISE = "half-noise"
    NO_CLIP = "no-clip"
    WRONG_RATE = "wrong-rate"  # records are drawn four times as often as is claimed
    BATCH_CLIP = "batch-clip"  # the sum of a batch is clipped, not what each record adds to it


class Bounds(NamedTuple):
    """Lower bounds on epsilon from many runs of one game."""

    any: float
    family: float


class RecordAudit(NamedTuple):
    """A claim about records, and what the games proved against it."""

    claimed: float  # epsilon
    delta: float
    games: dict[str, Bounds]  # the canary alone, and in company
    one_run: float  # lower bound on epsilon
    confidence: float  # of all bounds together
    trials: int
    canaries: int
    fault: RecordFault

    @property
    def lower_bound(self) -> float:
        """The largest epsilon that is proved."""
        return max(self.one_run, *(max(bounds) for bounds in self.games.values()))

    @property
    def violated(self) -> bool:
        """Whether more was proved than was claimed."""
        return self.lower_bound > self.claimed

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "adjacency": "one record of one client added or removed",
            "lower_bound": self.lower_bound,
            **{f"lower_bound_{name}": bounds._asdict() for name, bounds in self.games.items()},
            "lower_bound_one_run": self.one_run,
            "confidence": self.confidence,
            "trials": self.trials,
            "canaries": self.canaries,
            "broken": self.fault.value,
            "violated": self.violated,
            "verdict": "VIOLATED: more is leaked than claimed" if self.violated else "consistent with the claim",
        }


def audit_records(
    steps: LocalSteps,
    noise_multiplier: float,
    delta: float,
    trials: int,
    canaries: int = 500,
    confidence: float = 0.95,
    fault: RecordFault = RecordFault.NONE,
    seed: int = 0,
    on_trial: Callable[[int], None] | None = None,
) -> RecordAudit:
    """Play both games against the steps of a site with this noise. `trials` are runs in each of the two worlds."""
    require(trials >= 4, "trials", trials, "a whole number of at least 4")
    require(1 <= canaries <= steps.records, "canaries", canaries, "at least 1, at most the number of records")
    claim = _Claim(steps, noise_multiplier, fault)
    each = 1 - (1 - confidence) / 5  # five bounds hold together
    scores: dict[str, list[tuple[float, float]]] = {"alone": [], "company": []}
    for trial in range(trials):
        rng = RunSeed(seed).generator("audit", trial)
        for name, found in scores.items():
            found.append((claim.score(name == "company", True, rng), claim.score(name == "company", False, rng)))
        if on_trial:
            on_trial(trial + 1)
    games = {name: bounds_of(steps, np.array(found).T, delta, each) for name, found in scores.items()}
    return RecordAudit(
        steps.epsilon(noise_multiplier, delta),
        delta,
        games,
        claim.one_run(canaries, delta, each, RunSeed(seed)),
        confidence,
        trials,
        canaries,
        fault,
    )


@dataclass(frozen=True)
class _Claim:
    """Steps and noise as they are claimed, and what is broken in those that run."""

    steps: LocalSteps
    noise_multiplier: float
    fault: RecordFault

    def score(self, company: bool, there: bool, rng: np.random.Generator) -> float:
        """The log-likelihood ratio of a run, of the canary's part in what every step gave."""
        size = _COMPANY if company else _ALONE
        records = torch.zeros(self.steps.records - 1 + there, size)
        if company:  # they pull one way together, the canary by itself the other way
            records[there:, 0] = -2 * CLIP / max(1.0, self.steps.rate * len(records))
        if there:
            records[0, 0] = PUSH
        return float(self._likelihood(self._sums(records, rng)[:, 0]))

    def one_run(self, canaries: int, delta: float, confidence: float, seed: RunSeed) -> float:
        """A lower bound on epsilon by guessing the coins of many canaries of one run."""
        rng = seed.generator("canaries")
        there = rng.random(canaries) < 0.5
        records = torch.zeros(self.steps.records - int((~there).sum()), canaries)
        for row, direction in enumerate(np.flatnonzero(there)):
            records[row, direction] = PUSH
        sums = self._sums(records, rng)
        return guessed_epsilon(np.array([self._likelihood(column) for column in sums.T]), there, delta, confidence)

    def _sums(self, records: torch.Tensor, rng: np.random.Generator) -> FloatArray:
        """What every step gives (steps x d), times the expected size of a batch: a noised sum."""
        model = _model(records.shape[1])
        runs, share, clip, gradients = as_it_runs(self.fault, self.steps, per_example(model))
        weights, found = torch.zeros(records.shape[1]), []
        data = Examples(records, torch.zeros(len(records)))
        for _ in range(self.steps.rounds):
            own = RecordNoise(runs, clip, share * self.noise_multiplier, 0.0, SecretKey(rng.bytes(KEY_BYTES)))
            site = SiteRound(gradients, self.steps.records + 1, data, own, SGD, PLAIN, 0)
            for step in range(self.steps.of_a_round):
                mean, _ = site.noised_mean(weights, step, clip, len(weights))
                found.append(mean * runs.expected)
        return np.stack(found)

    def _likelihood(self, parts: FloatArray) -> FloatArray:
        """Of a record that adds C with the claimed rate, against none, given the claimed noise."""
        noise = self.noise_multiplier
        capped = np.clip(parts / CLIP, -10 * PUSH, 10 * PUSH)
        exponents = (2 * capped - 1) / (2 * noise**2)
        rate = self.steps.rate
        with np.errstate(divide="ignore"):
            never = np.full_like(exponents, math.log1p(-rate) if rate < 1 else -math.inf)
        return np.asarray(np.logaddexp(never, math.log(rate) + exponents).sum())


class Running(NamedTuple):
    """What runs instead of what is claimed."""

    steps: LocalSteps
    share: float  # of the noise
    clip: float
    gradients: Gradients


def as_it_runs(fault: RecordFault, steps: LocalSteps, gradients: Gradients) -> Running:
    """Steps with a fault."""
    share, clip = 1.0, CLIP
    if fault is RecordFault.WRONG_RATE:
        steps = dataclasses.replace(steps, batch_size=4 * steps.batch_size)
    elif fault is RecordFault.NO_CLIP:
        share, clip = CLIP / (4 * PUSH), 4 * PUSH
    elif fault is RecordFault.BATCH_CLIP:
        gradients = _WholeBatch(gradients)
    share *= {RecordFault.NO_NOISE: 0.0, RecordFault.HALF_NOISE: 0.5}.get(fault, 1.0)
    return Running(steps, share, clip, gradients)


@dataclass(frozen=True)
class _WholeBatch:
    """The mistake of clipping a batch: its summed gradient in the place of single ones."""

    single: Gradients

    def gradients(self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, places: int, seed: int) -> Iterator[Block]:
        """One row: the sum."""
        found = self.single.gradients(weights, floats(x), y, places, seed)
        rows = [block.rows[: block.used].sum(dim=0) for block in found]
        if rows:
            yield Block(torch.stack(rows).sum(dim=0)[None], 1)


def bounds_of(steps: LocalSteps, scores: FloatArray, delta: float, confidence: float) -> Bounds:
    """What scores inside and outside (2 x trials) prove. Half of them choose a threshold, the others are measured."""
    bounds = audit_bounds(scores[0], scores[1], delta, confidence)
    chosen, (inside, outside) = np.array_split(scores, 2, axis=1)
    thresholds = np.quantile(chosen, np.linspace(0, 1, _CANDIDATES))
    rates = [np.array([(world > t).mean() for t in thresholds]) for world in chosen]
    threshold = thresholds[int(np.argmax(rates[0] - rates[1]))]
    risk = (1 - confidence) / 2
    hits, _ = clopper_pearson(np.array([(inside > threshold).sum()]), inside.size, risk)
    _, misses = clopper_pearson(np.array([(outside > threshold).sum()]), outside.size, risk)
    gaps = float(hits[0]) - np.exp(_EPSILONS) * float(misses[0])
    return Bounds(bounds.any.epsilon, _epsilon_of(steps, gaps, delta))


def _epsilon_of(steps: LocalSteps, gaps: FloatArray, delta: float) -> float:
    """Epsilon with the most noise for which P(S) - e^epsilon Q(S) can be as large as it was found to be."""
    low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)

    def possible(log_z: float) -> bool:
        deltas = pld.sampled_gaussian_deltas(math.exp(log_z), list(_EPSILONS), steps.of_the_run, steps.rate)
        return bool((np.array(deltas) >= gaps).all())

    if (gaps <= 0).all() or possible(high):
        return 0.0
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return steps.epsilon(math.exp(high), delta)


def guessed_epsilon(scores: FloatArray, there: np.ndarray[Any, Any], delta: float, confidence: float) -> float:
    """The epsilon that correct guesses of fair coins prove, where those of the largest and least scores are guessed.

    The number of guesses is fixed beforehand, a fifth of the coins and all of them; both bounds hold together.
    """
    order, best = np.argsort(scores, kind="stable"), 0.0
    for count in {max(2, 2 * (len(scores) // 10)), 2 * (len(scores) // 2)}:
        guesses = np.concatenate([order[len(order) - count // 2 :], order[: count // 2]])
        right = int(there[guesses[: count // 2]].sum() + (~there[guesses[count // 2 :]]).sum())
        low, high = 0.0, _FAR
        if coins_p_value(len(scores), count, right, 0.0, delta) > (1 - confidence) / 2:
            continue
        while high - low > _FINE:
            middle = (low + high) / 2
            refuted = coins_p_value(len(scores), count, right, middle, delta) <= (1 - confidence) / 2
            low, high = (middle, high) if refuted else (low, middle)
        best = max(best, low)
    return best


def coins_p_value(coins: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The probability, at most, of so many right guesses about a mechanism with (epsilon, delta) for each coin.

    Theorem 5.2 of Steinke, Nasr and Jagielski (2023): that of a binomial with rate 1 / (1 + e^-epsilon), plus what
    delta can add.
    """
    chance = binomial()(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(chance.pmf(np.arange(right - 1, -1, -1))) / np.arange(1, right + 1) if right else np.zeros(1)
    return float(min(1.0, chance.sf(right - 1) + 2 * coins * delta * below.max()))


@functools.lru_cache(maxsize=4)
def _model(size: int) -> LocalModel:
    """A model and a loss by which the gradient of a record is the record itself."""
    return make_local_model(lambda: nn.Linear(size, 1, bias=False), _output, torch.device("cpu"), RunSeed(0))


def _output(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()
