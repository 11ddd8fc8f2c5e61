"""The local steps of a site with record-level noise: how many, at which sampling rate, and the noise that they need.

A site with N records takes ceil(N / B) steps in an epoch. Each record is in the batch of a step with probability
q = min(1, B / N), by a coin of its own; the noised sum is divided by the expected number q N, which is no secret.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedrp.privacy import _checks, pld
from fedrp.privacy.events import Composed, GaussianRelease, SampledRecords
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier, gaussian_epsilon
from fedrp.privacy.numerics import root

SMALLEST_CLIP = 1e-12  # far above where scaling to a grid of float32 would overflow
_TOLERANCE = 1e-3  # of a noise multiplier: a privacy-loss distribution takes a fraction of a second


@dataclass(frozen=True)
class LocalSteps:
    """What a site does in a run, as far as privacy depends on it."""

    records: int
    batch_size: int
    epochs: int  # of a round
    rounds: int  # that the site takes part in, at most

    def __post_init__(self) -> None:
        for name in ("records", "batch_size", "epochs", "rounds"):
            _checks.whole(name, getattr(self, name), at_least=1)

    @property
    def rate(self) -> float:
        """The probability with which a record is in the batch of a step."""
        return min(1.0, self.batch_size / self.records)

    @property
    def expected(self) -> float:
        """The number of records in a batch, on average: what its sum is divided by."""
        return float(min(self.batch_size, self.records))

    @property
    def of_a_round(self) -> int:
        """Steps of a round."""
        return self.epochs * math.ceil(self.records / self.batch_size)

    @property
    def of_the_run(self) -> int:
        """Steps of all rounds."""
        return self.rounds * self.of_a_round

    def event(self, noise_multiplier: float) -> Composed:
        """What all steps together release about the records of the site, whoever looks."""
        return Composed(SampledRecords(GaussianRelease(noise_multiplier), self.rate), self.of_the_run)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """What a record is promised, by the bound that statements use; infinity where there is (almost) no noise."""
        kind = pld.Sampled(noise_multiplier, self.rate, hidden=True)
        if noise_multiplier == 0 or (self.rate < 1 and not pld.fits({kind: self.of_the_run})):
            return math.inf
        if self.rate == 1:
            return gaussian_epsilon(noise_multiplier, delta, self.of_the_run)
        return pld.sampled_gaussian_epsilon(noise_multiplier, delta, self.of_the_run, self.rate)

    def noise_for(self, epsilon: float, delta: float) -> float:
        """The smallest noise multiplier, to 0.1 %, with which a record is promised `epsilon` at `delta`.

        Guarantees: `self.epsilon(z, delta) <= epsilon` for the z returned; a pure function of the numbers.
        """
        if self.rate == 1:
            return calibrate_noise_multiplier(epsilon, delta, self.of_the_run)
        _checks.number("delta", delta, at_least=pld.SMALLEST_DELTA, below=1)
        return _noise(_checks.number("epsilon", epsilon, above=0), delta, self)


@functools.lru_cache(maxsize=1024)
def _noise(epsilon: float, delta: float, steps: LocalSteps) -> float:
    def excess(log_z: float) -> float:
        return math.log(max(min(steps.epsilon(math.exp(log_z), delta), 1e300), 1e-300) / epsilon)

    low, high = _bracket(excess)
    found = root(excess, low, high, xtol=_TOLERANCE / 2)
    while excess(found) > 0:
        found += _TOLERANCE / 2
    return math.exp(found)


def _bracket(excess: Callable[[float], float]) -> tuple[float, float]:
    """Where the sign changes, from a noise multiplier of 1 on."""
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 0.5
    while excess(low) <= 0:
        low, high = low - 0.5, low
    return low, high


def plan(steps: LocalSteps, delta: float, epsilon: float | None, noise_multiplier: float | None) -> dict[str, Any]:
    """What a site of so many records is promised, and by which noise: one of both is given, the other follows."""
    noise = steps.noise_for(epsilon, delta) if epsilon else float(noise_multiplier or 0.0)
    reached = steps.epsilon(noise, delta)
    return {
        "records": steps.records,
        "sampling_rate": steps.rate,
        "steps": steps.of_the_run,
        "noise_multiplier": noise,
        "epsilon": reached if math.isfinite(reached) else None,
        "delta": delta,
    }
