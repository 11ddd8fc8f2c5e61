"""Input checks: coerce a setting to `float` or `int`, or say in one line which value is wrong."""

import math
from numbers import Integral, Real

from fedrp.errors import ConfigError


def number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> float:
    """`value` as a finite float inside the stated range; `ConfigError` naming it otherwise."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {name}={value!r}")
    result = float(value)
    if math.isfinite(result) and above < result < below and at_least <= result <= at_most:
        return result
    limits = [(">", above), (">=", at_least), ("<", below), ("<=", at_most)]
    wanted = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if math.isfinite(limit))
    raise ConfigError(f"{name} must be a finite number{' ' + wanted if wanted else ''}, got {name}={result!r}")


def whole(name: str, value: object, *, at_least: int) -> int:
    """`value` as an int of at least `at_least` (2.0 counts as 2); `ConfigError` naming it otherwise."""
    integral = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if not integral or isinstance(value, bool) or int(value) < at_least:  # type: ignore[call-overload]
        raise ConfigError(f"{name} must be a whole number >= {at_least}, got {name}={value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def probability(name: str, value: object) -> float:
    """`value` as a float between 1e-100 and 1, exclusive; `ConfigError` naming it otherwise."""
    return number(name, value, at_least=1e-100, below=1)
