"""The Gaussian mechanism over rounds: noise multiplier to epsilon and back.

A round releases sum_i x_i + N(0, (z C)^2 I), every ||x_i|| <= C; z is the *noise multiplier*. Adjacency: one client is
added, removed, or its x_i set to zero (sensitivity C); replacing a client by another doubles the sensitivity, so use
z / 2 there. Derivations: docs/privacy-proofs.md, "Gaussian mechanism".
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, gammaln, ndtr, xlog1py, xlogy

from fedrp.errors import ConfigError
from fedrp.privacy import _checks, pld
from fedrp.privacy.numerics import root

FloatArray = npt.NDArray[np.float64]


def gaussian_delta(epsilon: float, separation: float | FloatArray) -> FloatArray:
    """Hockey-stick divergence of N(separation, 1) from N(0, 1) at e^epsilon, for epsilon >= 0 (Balle, Wang 2018).

    With mu = separation and x = epsilon/mu - mu/2: Phi(-x) - e^epsilon Phi(-x - mu). Written with the Mills ratio M,
    as e^epsilon phi(x + mu) = phi(x), so that nothing overflows and small separations do not cancel.
    """
    mu = np.asarray(separation, np.float64)
    safe = np.where(mu > 0, mu, 1.0)
    x = epsilon / safe - safe / 2
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    far = density * (_mills(np.maximum(x, 0)) - _mills(x + safe))
    near = ndtr(-x) - density * _mills(x + safe)
    return np.where(mu > 0, np.where(x > 0, far, near), 0.0)


def gaussian_epsilon(
    noise_multiplier: float,
    delta: float,
    rounds: int,
    sampling_rate: float = 1.0,
    *,
    participation_hidden: bool = False,
) -> float:
    """Epsilon at `delta` after `rounds` releases in which each client takes part with probability `sampling_rate`.

    - `participation_hidden=False`: the adversary may see who took part. delta(eps) = sum_b Binomial(T, q)(b)
      delta_Gauss(eps; sqrt(b) / z), exact.
    - `participation_hidden=True`: amplification by Poisson sampling (PLD). Only for an adversary who learns neither the
      participants nor their number, from a noise level and a denominator that do not depend on them.

    Guarantees: an upper bound; equal for both settings at `sampling_rate=1`; hidden is never above visible; falls with
    the noise, rises with rounds and rate. Edge cases: no noise gives infinity, no round or no participant gives 0.
    """
    z = _checks.number("noise_multiplier", noise_multiplier, at_least=0)
    delta = _checks.probability("delta", delta)
    rounds = _checks.whole("rounds", rounds, at_least=0)
    rate = _checks.number("sampling_rate", sampling_rate, at_least=0, at_most=1)
    if rounds == 0 or rate == 0:
        return 0.0
    if z == 0:
        return math.inf
    if participation_hidden and rate < 1:
        if delta < pld.SMALLEST_DELTA:
            raise ConfigError(f"amplification is computed for delta >= {pld.SMALLEST_DELTA:g}, got delta={delta!r}")
        return min(pld.sampled_gaussian_epsilon(z, delta, rounds, rate), _visible_epsilon(z, delta, rounds, rate))
    return _visible_epsilon(z, delta, rounds, rate)


def calibrate_noise_multiplier(
    epsilon: float, delta: float, rounds: int, sampling_rate: float = 1.0, *, participation_hidden: bool = False
) -> float:
    """The smallest noise multiplier z with `gaussian_epsilon(z, delta, ...) <= epsilon`, to 0.1 % at worst.

    Guarantees: the inequality holds for the returned z; it falls with epsilon and delta, rises with rounds and rate.
    Edge case: where nothing is ever released (no rounds, rate 0) it is 0.
    """
    epsilon = _checks.number("epsilon", epsilon, above=0)
    if gaussian_epsilon(0.0, delta, rounds, sampling_rate) == 0:
        return 0.0
    return _calibrated(epsilon, float(delta), int(rounds), float(sampling_rate), participation_hidden)


@lru_cache(maxsize=256)
def _calibrated(epsilon: float, delta: float, rounds: int, rate: float, hidden: bool) -> float:
    def excess(log_z: float) -> float:
        spent = gaussian_epsilon(math.exp(log_z), delta, rounds, rate, participation_hidden=hidden)
        return math.log(max(spent, 1e-300) / epsilon)

    low = high = 0.0
    while excess(high) > 0:
        high += 1.0
    while excess(low) <= 0:
        low -= 1.0
    tolerance = 5e-4 if hidden and rate < 1 else 1e-10  # a PLD costs 0.1 s, a formula nothing
    found = root(excess, low, high, xtol=tolerance)
    while excess(found) > 0:
        found += tolerance / 2
    return math.exp(found)


def _visible_epsilon(z: float, delta: float, rounds: int, rate: float) -> float:
    """Epsilon when the participation is seen: solve sum_b Binomial(b) delta_Gauss(eps; sqrt(b)/z) = delta for eps."""
    taken = np.arange(rounds + 1)
    ways = gammaln(rounds + 1) - gammaln(taken + 1) - gammaln(rounds - taken + 1)
    weights = np.exp(ways + xlogy(taken, rate) + xlog1py(rounds - taken, -rate))
    taken, weights = taken[weights > 0], weights[weights > 0]
    separation = np.sqrt(taken) / z

    def excess(eps: float) -> float:
        return math.log(max(float(weights @ gaussian_delta(eps, separation)), 1e-300)) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return root(excess, 0.0, high, xtol=1e-14, rtol=1e-12)


def _mills(x: FloatArray) -> FloatArray:
    """(1 - Phi(x)) / phi(x)."""
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2)))
