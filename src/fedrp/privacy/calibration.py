"""The way back: from a target (epsilon, delta) to what a run may do."""

import math
from typing import NamedTuple

from fedrp.privacy import _checks
from fedrp.privacy.bounds import Refused, tightest
from fedrp.privacy.events import Adversary, Composed, ProjectedRelease
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.privacy.numerics import root


class Calibration(NamedTuple):
    """What keeps `rounds` releases within the target, by one mechanism or the other."""

    ratio: float  # largest sensitivity / norm floor of a projected vector, no noise
    noise_multiplier: float  # smallest noise deviation / sensitivity, no secret


def calibrate(epsilon: float, delta: float, rounds: int, rows: int, sampling_rate: float = 1.0) -> Calibration:
    """Both ways to reach a target: the allowed ratio with `rows` rows, or the noise multiplier (for any dimension).

    `sampling_rate` concerns the noise alone, with visible participation: every projected round is counted.
    """
    noise = calibrate_noise_multiplier(epsilon, delta, rounds, sampling_rate)
    return Calibration(calibrate_ratio(epsilon, delta, rounds, rows), noise)


def calibrate_ratio(epsilon: float, delta: float, rounds: int, rows: int) -> float:
    """The largest sensitivity-to-norm ratio for which `rounds` projected releases cost at most `epsilon`, to 1e-4.

    Guarantees: `composed_projection_epsilon(rows, ratio, delta, rounds) <= epsilon` for the ratio returned.
    """
    epsilon = _checks.number("epsilon", epsilon, above=0)
    rounds = _checks.whole("rounds", rounds, at_least=1)

    def excess(log_ratio: float) -> float:
        spent = composed_projection_epsilon(rows, math.exp(log_ratio), delta, rounds)
        return math.log(max(spent, 1e-300) / epsilon)

    low = high = math.log(epsilon) - 0.5 * math.log(rows * rounds) - 2
    while excess(low) > 0:
        low -= 1.0
    while excess(high) <= 0:
        high += 1.0
    found = root(excess, low, high, xtol=2e-5)
    while excess(found) > 0:
        found -= 2e-5
    return math.exp(found)


def composed_projection_epsilon(rows: int, ratio: float, delta: float, rounds: int) -> float:
    """The smallest upper bound in BOUNDS on the epsilon of `rounds` projected releases."""
    answer = tightest(Composed(ProjectedRelease(rows, ratio), rounds), delta, Adversary.SERVER)
    return math.inf if isinstance(answer, Refused) else answer[1].upper
