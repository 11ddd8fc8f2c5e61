"""Privacy-loss distributions by `dp_accounting`. Only this file imports it, on first use: that takes a second."""

import math

from fedrp.privacy.projection_loss import LossGrid

SMALLEST_DELTA = 1e-12  # the FFT of a composition is exact to about 1e-16 per bucket; below this its noise would show
_TRUNCATION = 1e-15


def sampled_gaussian_epsilon(noise_multiplier: float, delta: float, rounds: int, sampling_rate: float) -> float:
    """Epsilon of `rounds` Poisson-sampled Gaussian releases, adding or removing one participant.

    The dominating pairs are N(0, z^2) against (1-q) N(0, z^2) + q N(1, z^2), in both orders.

    Guarantees: an upper bound (connect-the-dots discretisation), less than 1 % above the exact value.
    """
    from dp_accounting.pld import privacy_loss_distribution

    spread = sampling_rate * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))  # about the loss's deviation
    exponent = (1 + 20 * noise_multiplier) / (2 * noise_multiplier**2)
    reach = exponent if exponent > 500 else math.log1p(sampling_rate * math.expm1(exponent))  # loss at 10 deviations
    one_round = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=sampling_rate,
        value_discretization_interval=max(min(spread, 0.1) / 100, reach / 20_000, 1e-8),
        use_connect_dots=True,
    )
    return float(one_round.self_compose(rounds).get_epsilon_for_delta(delta))


def composed_epsilon(losses: LossGrid, count: int, delta: float) -> float:
    """Epsilon of `count` releases with the given losses.

    Guarantees: an upper bound for pessimistic losses, a lower bound for optimistic ones.
    """
    from dp_accounting.pld import pld_pmf

    one = pld_pmf.DensePLDPmf(losses.interval, losses.lowest, losses.probabilities, losses.infinite, losses.pessimistic)
    composed = one.self_compose(count, _TRUNCATION)  # counts the mass it cuts off as infinite loss
    return float(composed.get_epsilon_for_delta(delta if losses.pessimistic else delta + 2 * _TRUNCATION))
