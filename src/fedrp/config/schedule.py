"""Learning-rate schedules: the share of the learning rate that a round trains with.

A pure function of the round and of the number of rounds, so that simulated and deployed clients agree on it without a
message, and a resumed run goes on as if it had never stopped.
"""

import math
from collections.abc import Callable

_WARM_UP = 0.1  # of all rounds, in which the learning rate rises
CONSTANT = "constant"


def _cosine(round_: int, rounds: int) -> float:
    """From 1 in the first round towards 0, along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * (round_ - 1) / rounds))


def _warmup_cosine(round_: int, rounds: int) -> float:
    """Rising in equal steps through the first tenth of the rounds, then as `_cosine` for those that are left."""
    warm = math.ceil(_WARM_UP * rounds)
    return round_ / (warm + 1) if round_ <= warm else _cosine(round_ - warm, rounds - warm)


LR_SCHEDULES: dict[str, Callable[[int, int], float]] = {
    CONSTANT: lambda _round, _rounds: 1.0,
    "cosine": _cosine,
    "warmup-cosine": _warmup_cosine,
}


def lr_scale(schedule: str, round_: int, rounds: int) -> float:
    """What the learning rate of a round (1, 2, ..., rounds) is multiplied by: above 0 and at most 1."""
    return LR_SCHEDULES[schedule](round_, rounds)
