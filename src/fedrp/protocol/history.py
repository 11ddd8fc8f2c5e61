"""What a packet tells a client of past rounds: aggregates, and rounds that were given up."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedrp.algorithms.pipeline import Pipeline
from fedrp.errors import ProtocolError
from fedrp.mechanisms.reachable import require_reachable
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind, Message
from fedrp.types import Vector


class Past(NamedTuple):
    """A past round whose outcome goes into a client's state; round 0, the set-up, has no aggregate."""

    round: int
    aggregate: Vector | None


def past_rounds(
    written: Callable[[int], tuple[Pipeline, int]], run: bytes, inbox: Sequence[Message], since: int, round_: int
) -> list[Past]:
    """What a client whose state is of round `since` applies before it takes part in `round_`.

    Where clients replay the history that is every round from `since` on that was not given up; elsewhere it is the
    latest one. Every round that is passed over must be named as given up: nothing is left out silently. `written` gives
    what makes the aggregate of a round, and its size.

    Raises:
        ProtocolError: a round is missing, of the future, or larger than honest clients can make it.
    """
    aggregates = {message.round: message for message in wire.messages_of(inbox, Kind.AGGREGATE)}
    void = {message.round for message in wire.messages_of(inbox, Kind.VOID)}
    for told in sorted({*aggregates, *void}):
        if told == 0 or told >= round_ or (told in aggregates and told in void):
            raise ProtocolError(f"an outcome of round {told} before round {round_}: refused")
    if written(round_)[0].algorithm.memory == "history":
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
            pipeline, size = written(past)
            aggregate = wire.numbers(aggregates[past], pipeline.aggregate_coding(size), run)
            require_reachable(aggregate, pipeline.reach(past, size), past)
            rounds.append(Past(past, aggregate))
    return rounds
