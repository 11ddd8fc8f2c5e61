"""How large an aggregate can be that honest clients made: one beyond that is refused, by clients and by the server."""

import math

import numpy as np

from fedrp.errors import ProtocolError
from fedrp.mechanisms.base import Reach
from fedrp.types import Vector

_CHUNK = 1 << 20
_ROUNDING = 1e-5  # relative; sums are rounded to float32


def require_reachable(aggregate: Vector, reach: Reach, round_: int) -> None:
    """Refuse an aggregate that no cohort of honest clients can have made.

    Raises:
        ProtocolError: it is too large.
    """
    for measure, limit, what in ((_largest, reach.number, "a number"), (_norm, reach.norm, "a norm")):
        found = 0.0 if math.isinf(limit) else measure(aggregate)
        if found > limit * (1 + _ROUNDING):
            raise ProtocolError(
                f"the aggregate of round {round_} has {what} of {found:.3g}, honest clients reach {limit:.3g} at most: "
                "a client sent garbage, or the server lies"
            )


def _largest(aggregate: Vector) -> float:
    return float(np.abs(aggregate).max(initial=0.0))


def _norm(aggregate: Vector) -> float:
    parts = (aggregate[start : start + _CHUNK] for start in range(0, aggregate.size, _CHUNK))
    return math.sqrt(sum(float(np.square(part, dtype=np.float64).sum()) for part in parts))
