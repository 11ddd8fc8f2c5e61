"""The projection mechanism: z = A w with a secret m x n Gaussian matrix A, entries independent N(0, 1/m).

z is N(0, (r^2/m) I_m) with r = ||w||: only the norm matters. If ||w - w'|| <= Delta and ||w||, ||w'|| >= sigma_min for
all adjacent data sets, the larger norm is at most q = 1 + alpha times the smaller, alpha = Delta / sigma_min, whichever
of the two is the larger; and the divergence grows with the ratio, so the pair of norms (r, q r) is the worst. In code
`rows` is m and `ratio` is alpha. Derivations: docs/privacy-proofs.md, "Projection mechanism".
"""

import math

import numpy as np

from fedrp.privacy import _checks
from fedrp.privacy.chi import log_tail_excess
from fedrp.privacy.numerics import root

LARGEST_RATIO = 1e5  # beyond it epsilon is above 1e9 for one row: a number without meaning, and soon without digits


def paper_epsilon(rows: int, ratio: float, delta: float) -> float:
    """Theorem 2 of the paper: alpha (1 + alpha/2) (m + 2 lambda + 2 sqrt(lambda (m + lambda))), lambda = ln(1/delta).

    Guarantees: never below `exact_epsilon`.
    """
    rows, ratio, delta = _checked(rows, ratio, delta)
    slack = math.log(1 / delta)
    return _growth_rate(ratio) * (rows + 2 * slack + 2 * math.sqrt(slack * (rows + slack)))


def growing_log_delta(epsilon: float, rows: int, ratio: float) -> float:
    """Logarithm of the hockey-stick divergence of norm q r from norm r: sf(tau) - e^eps sf(q^2 tau).

    tau = (eps + m ln q) / c, c = (q^2 - 1)/2, sf the upper tail of chi-square with m degrees of freedom; epsilon >= 0.
    """
    epsilon, rows, ratio = _checked_curve(epsilon, rows, ratio)
    if ratio == 0:
        return -math.inf
    rate = _growth_rate(ratio)
    edge = math.sqrt((epsilon + rows * math.log1p(ratio)) / rate)
    return float(log_tail_excess(np.array(edge), rate, rows))


def exact_delta(epsilon: float, rows: int, ratio: float) -> float:
    """The smallest delta for which one projected release is (epsilon, delta)-private.

    Guarantees: equals the growing direction, never below the shrinking one (docs/privacy-proofs.md, Lemma 2); falls
    with epsilon, rises with ratio and rows.
    """
    return math.exp(min(0.0, growing_log_delta(epsilon, rows, ratio)))


def exact_epsilon(rows: int, ratio: float, delta: float) -> float:
    """The smallest epsilon for which one projected release is (epsilon, delta)-private: the inverse of `exact_delta`.

    Guarantees: relative error below 1e-9 for rows up to 1e6 and delta down to 1e-30. Edge case: 0 where the total
    variation distance is already at most delta.
    """
    rows, ratio, delta = _checked(rows, ratio, delta)

    def excess(epsilon: float) -> float:
        return growing_log_delta(epsilon, rows, ratio) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    return root(excess, 0.0, paper_epsilon(rows, ratio, delta), xtol=1e-300, rtol=1e-13)


def renyi_divergence(order: float, rows: int, ratio: float) -> float:
    """Renyi divergence of order a > 1, the larger over both directions: -m ln q - m/(2(a-1)) ln(a - (a-1) q^2).

    Guarantees: the growing direction, which is the larger for every order. Edge case: infinite from `highest_order` on.
    """
    order = _checks.number("order", order, above=1)
    _, rows, ratio = _checked_curve(0.0, rows, ratio)
    room = -2 * (order - 1) * _growth_rate(ratio)  # a - (a-1) q^2 - 1
    if room <= -1:
        return math.inf
    return rows * (-math.log1p(ratio) - math.log1p(room) / (2 * (order - 1)))


def highest_order(ratio: float) -> float:
    """The order q^2 / (q^2 - 1) at which the Renyi divergence becomes infinite, for ratios up to `LARGEST_RATIO`."""
    ratio = _checks.number("ratio", ratio, at_least=0, at_most=LARGEST_RATIO)
    return math.inf if ratio == 0 else 1 + 1 / (2 * _growth_rate(ratio))


def _growth_rate(ratio: float) -> float:
    """The loss per unit of chi-square, c = (q^2 - 1) / 2 = alpha (1 + alpha/2)."""
    return ratio * (1 + ratio / 2)


def _checked(rows: int, ratio: float, delta: float) -> tuple[int, float, float]:
    _, rows, ratio = _checked_curve(0.0, rows, ratio)
    return rows, ratio, _checks.probability("delta", delta)


def _checked_curve(epsilon: float, rows: int, ratio: float) -> tuple[float, int, float]:
    return (
        _checks.number("epsilon", epsilon, at_least=0),
        _checks.whole("rows", rows, at_least=1),
        _checks.number("ratio", ratio, at_least=0),
    )
