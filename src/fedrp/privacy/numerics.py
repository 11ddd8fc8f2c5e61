"""Roots, minima, distances and the binomial distribution by scipy. Only this file imports those, on first use.

That takes most of a second, and a run that adds no noise needs none of them.
"""

from collections.abc import Callable
from typing import Any

from fedrp.types import Precise

_RTOL = 4 * 2.0**-52


def root(
    function: Callable[[float], float], low: float, high: float, xtol: float = 2e-12, rtol: float = _RTOL
) -> float:
    """Where a function that changes its sign between `low` and `high` is zero; defaults are scipy's."""
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=xtol, rtol=rtol))


def least(function: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """The smallest value of a function between `low` and `high`."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": tolerance})
    return float(found.fun)


def largest_distance(rows: Precise) -> float:
    """Between any two rows of a matrix."""
    from scipy.spatial.distance import pdist

    return float(pdist(rows).max())


def binomial() -> Any:
    """`scipy.stats.binom`."""
    from scipy.stats import binom

    return binom
