"""From one release to many: basic, advanced and Renyi composition, each an upper bound for adaptive releases."""

import math
from collections.abc import Callable

from fedrp.privacy import _checks
from fedrp.privacy.numerics import least

EpsilonAt = Callable[[float], float]  # delta -> epsilon of one release
DivergenceAt = Callable[[float], float]  # order -> Renyi divergence


def basic_epsilon(epsilon_at: EpsilonAt, count: int, delta: float) -> float:
    """T epsilon_1(delta / T): epsilons and deltas add up."""
    count, delta = _checks.whole("count", count, at_least=1), _checks.probability("delta", delta)
    return count * epsilon_at(delta / count)


def advanced_epsilon(epsilon_at: EpsilonAt, count: int, delta: float) -> float:
    """sqrt(2 T ln(2/delta)) e + T e (e^e - 1) with e = epsilon_1(delta / 2T) (Dwork, Rothblum, Vadhan 2010, Thm III.3).

    Half of delta pays for the rounds, half for the deviation of the sum. Better than basic only where e is small.
    """
    count, delta = _checks.whole("count", count, at_least=1), _checks.probability("delta", delta)
    one = epsilon_at(delta / (2 * count))
    drift = math.inf if one > 700 else count * one * math.expm1(one)
    return math.sqrt(2 * count * math.log(2 / delta)) * one + drift


def renyi_epsilon(divergence_at: DivergenceAt, delta: float, highest_order: float = math.inf) -> float:
    """The smallest D(a) + ln(1 - 1/a) - ln(delta a)/(a - 1) over orders 1 < a < highest_order.

    The conversion of Canonne, Kamath and Steinke (2020, Prop. 12). Divergences of adaptive releases add up, order by
    order, so a composition is the sum of curves. Any order gives a valid bound; the minimum is searched to 1e-8.
    """
    delta = _checks.probability("delta", delta)
    top = math.log(min(highest_order - 1, 1e12))

    def epsilon(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        excess = order - 1
        penalty = math.log(excess / order) - (math.log(delta) + math.log(order)) / excess
        return min(divergence_at(order) + penalty, 1e300)

    steps = 4 * math.ceil(max(top + 18, 7))  # down to an order of 1 + 1e-8, or a thousandth of the highest
    grid = [top - 0.25 * step for step in range(1, steps)]
    best = min(range(len(grid)), key=lambda index: epsilon(grid[index]))
    low, high = grid[min(best + 1, len(grid) - 1)], grid[best - 1] if best else top - 1e-6
    return max(0.0, min(least(epsilon, low, high, 1e-8), epsilon(grid[best])))
