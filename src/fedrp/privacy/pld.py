"""Privacy-loss distributions by `dp_accounting`. Only this file imports it, on first use: that takes a second."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedrp.privacy.projection_loss import LossGrid

SMALLEST_DELTA = 1e-12  # the FFT of a composition is exact to about 1e-16 per bucket; below this its noise would show
_TRUNCATION = 1e-15
_LARGEST_LOSS = 1e6


class Sampled(NamedTuple):
    """A Gaussian release in which a client takes part with probability `rate`."""

    noise_multiplier: float
    rate: float
    hidden: bool  # whether it took part


def sampled_gaussian_epsilon(noise_multiplier: float, delta: float, rounds: int, sampling_rate: float) -> float:
    """Epsilon of `rounds` Poisson-sampled Gaussian releases, adding or removing one participant who is not seen.

    The dominating pairs are N(0, z^2) against (1-q) N(0, z^2) + q N(1, z^2), in both orders.

    Guarantees: an upper bound (connect-the-dots discretisation), less than 1 % above the exact value.
    """
    return sampled_gaussians_epsilon({Sampled(noise_multiplier, sampling_rate, hidden=True): rounds}, delta)


def sampled_gaussians_epsilon(releases: Mapping[Sampled, int], delta: float) -> float:
    """Epsilon of releases of several kinds together, each kind as often as stated.

    Where it is seen who takes part, losses are those of N(0, z^2) against N(1, z^2) with probability q, and else 0.

    Guarantees: an upper bound. The grid is as fine as the finest kind needs, unless the coarsest would not fit it.
    """
    return float(_composed(releases).get_epsilon_for_delta(delta))


def sampled_gaussian_deltas(
    noise_multiplier: float, epsilons: Sequence[float], rounds: int, sampling_rate: float
) -> list[float]:
    """The deltas of `sampled_gaussian_epsilon` for given epsilons: upper bounds, too."""
    composed = _composed({Sampled(noise_multiplier, sampling_rate, hidden=True): rounds})
    return [float(composed.get_delta_for_epsilon(epsilon)) for epsilon in epsilons]


def _composed(releases: Mapping[Sampled, int]) -> Any:
    """The privacy-loss distribution of releases of several kinds together."""
    from dp_accounting.pld import privacy_loss_distribution

    interval = max(min(map(_deviation, releases)) / 100, max(map(_reach, releases)) / 20_000, 1e-8)
    nothing = privacy_loss_distribution.identity(interval)
    everything = nothing
    for kind, count in releases.items():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=kind.noise_multiplier,
            sampling_prob=kind.rate if kind.hidden else 1.0,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        one = one if kind.hidden else one.compute_mixture(nothing, kind.rate)
        everything = everything.compose(one.self_compose(count))
    return everything


def fits(releases: Mapping[Sampled, int]) -> bool:
    """Whether losses are small enough that a grid of them means something, and does not overflow."""
    return all(count * _reach(kind) < _LARGEST_LOSS for kind, count in releases.items())


def _deviation(kind: Sampled) -> float:
    """About that of the privacy loss, up to 0.1."""
    return min(kind.rate * math.sqrt(math.expm1(min(kind.noise_multiplier**-2, 50.0))), 0.1)


def _reach(kind: Sampled) -> float:
    """The privacy loss at ten deviations of the noise."""
    exponent = (1 + 20 * kind.noise_multiplier) / (2 * kind.noise_multiplier**2)
    return exponent if exponent > 500 or not kind.hidden else math.log1p(kind.rate * math.expm1(exponent))


def composed_epsilon(losses: LossGrid, count: int, delta: float) -> float:
    """Epsilon of `count` releases with the given losses.

    Guarantees: an upper bound for pessimistic losses, a lower bound for optimistic ones.
    """
    from dp_accounting.pld import pld_pmf

    one = pld_pmf.DensePLDPmf(losses.interval, losses.lowest, losses.probabilities, losses.infinite, losses.pessimistic)
    composed = one.self_compose(count, _TRUNCATION)  # counts the mass it cuts off as infinite loss
    return float(composed.get_epsilon_for_delta(delta if losses.pessimistic else delta + 2 * _TRUNCATION))
