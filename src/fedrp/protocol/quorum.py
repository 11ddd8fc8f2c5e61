"""Which cohorts and recoveries a client accepts under masks, and which the server chooses."""

import itertools
from collections.abc import Iterable

from fedrp.algorithms.cohort import needed
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import MIN_LEFT_OUT, MIN_SUMMED, Call
from fedrp.errors import ProtocolError, QuorumError


def require_call(config: Resolved, call: Call, client: int, weight: int) -> None:
    """Refuse a list of participants that could expose this client."""
    clients, weights = call
    if len(clients) != len(weights) or not _increasing(clients) or not clients or clients[-1] >= config.clients:
        raise ProtocolError(
            "the list of participants is not valid: expected increasing numbers of clients, and weights"
        )
    if client not in clients:
        raise ProtocolError(f"client {client} is not in the list of participants that it was sent")
    if len(clients) < MIN_SUMMED:
        raise ProtocolError(f"{len(clients)} participants: secure aggregation needs at least {MIN_SUMMED}")
    if config.sampling == "fixed":
        least, most = needed(config, config.expected_participants), config.expected_participants
        if not least <= len(clients) <= most:
            raise ProtocolError(f"{len(clients)} participants announced, the config says {least} to {most}")
    if (
        weights[clients.index(client)] != weight
        or min(weights) < 1
        or (config.weighting == "uniform" and max(weights) > 1)
    ):
        raise ProtocolError(f"the announced weights are not valid: client {client} has weight {weight}")


def require_left_out(config: Resolved, call: Call, left_out: tuple[int, ...], client: int) -> None:
    """Refuse a recovery that could expose someone."""
    if not _increasing(left_out) or not set(left_out) <= set(call.clients) or client in left_out:
        raise ProtocolError("the list of clients left out is not valid: expected other participants, in order")
    if len(left_out) < MIN_LEFT_OUT:
        raise ProtocolError("a recovery that leaves out a single client would expose it: refused")
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise ProtocolError(f"a recovery would sum {rest} of {len(call.clients)} clients, {least} needed: refused")


def choose_left_out(config: Resolved, call: Call, missing: Iterable[int]) -> tuple[int, ...]:
    """Who is left out of a sum if some are missing: they, and one more if it is only one, the next in order."""
    left_out = set(missing)
    if len(left_out) == 1:
        (only,) = left_out
        place = call.clients.index(only)
        left_out.add(call.clients[(place + 1) % len(call.clients)])
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise QuorumError(f"{rest} of {len(call.clients)} clients would be summed, {least} needed")
    return tuple(sorted(left_out))


def _increasing(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
