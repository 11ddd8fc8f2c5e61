"""What a packet tells a client of past rounds: aggregates, and rounds that were given up."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedrp.algorithms.pipeline import Pipeline
from fedrp.errors import ProtocolError
from fedrp.mechanisms.base import Reach
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind, Message
from fedrp.types import Vector

_CHUNK = 1 << 20
_ROUNDING = 1e-5  # relative; sums are rounded to float32


class Past(NamedTuple):
    """A past round whose outcome goes into a client's state; round 0, the set-up, has no aggregate."""

    round: int
    aggregate: Vector | None


def past_rounds(
    pipeline: Pipeline, run: bytes, size: int, inbox: Sequence[Message], since: int, round_: int
) -> list[Past]:
    """What a client whose state is of round `since` applies before it takes part in `round_`.

    Where clients replay the history that is every round from `since` on that was not given up; elsewhere it is the
    latest one. Every round that is passed over must be named as given up: nothing is left out silently.

    Raises:
        ProtocolError: a round is missing, of the future, or larger than honest clients can make it.
    """
    aggregates = {message.round: message for message in wire.messages_of(inbox, Kind.AGGREGATE)}
    void = {message.round for message in wire.messages_of(inbox, Kind.VOID)}
    for told in sorted({*aggregates, *void}):
        if told == 0 or told >= round_ or (told in aggregates and told in void):
            raise ProtocolError(f"an outcome of round {told} before round {round_}: refused")
    if pipeline.algorithm.memory == "history":
        wanted = [past for past in range(since, round_) if past == 0 or past not in void]
    else:
        wanted = [next((past for past in range(round_ - 1, 0, -1) if past not in void), 0)]
    rounds = []
    for past in wanted:
        if past == 0:
            rounds.append(Past(0, None))
        elif past not in aggregates:
            raise ProtocolError(f"the aggregate of round {past} is missing")
        else:
            aggregate = wire.numbers(aggregates[past], pipeline.aggregate_coding(size), run)
            require_reachable(aggregate, pipeline.reach(past, size), past)
            rounds.append(Past(past, aggregate))
    return rounds


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
