"""Which cohorts and recoveries a client accepts under masks, and which the server chooses."""

import itertools
from collections.abc import Iterable, Sequence

from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import MIN_LEFT_OUT, MIN_SUMMED, Cohort
from fedrp.errors import ProtocolError, QuorumError
from fedrp.mechanisms.cohort import needed


def require_cohort(config: Resolved, call: Cohort, client: int, weight: int) -> None:
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


def require_left_out(config: Resolved, call: Cohort, left_out: tuple[int, ...], client: int) -> None:
    """Refuse a recovery that could expose someone."""
    if not _increasing(left_out) or not set(left_out) <= set(call.clients) or client in left_out:
        raise ProtocolError("the list of clients left out is not valid: expected other participants, in order")
    if len(left_out) < MIN_LEFT_OUT:
        raise ProtocolError("a recovery that leaves out a single client would expose it: refused")
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise ProtocolError(f"a recovery would sum {rest} of {len(call.clients)} clients, {least} needed: refused")


def spares(participants: Sequence[int], round_: int) -> tuple[int, int]:
    """The two participants of whom one is left out where a single other one is missing. Everyone takes turns.

    They are known before anything is sent, so that the server has to keep no other upload apart from the sum; and they
    depend on nothing that anyone sent. Clients do not rely on it: they take any set that exposes nobody.
    """
    place, count = round_ % len(participants), len(participants)
    return participants[place], participants[(place + 1) % count]


def choose_left_out(config: Resolved, call: Cohort, missing: Iterable[int], round_: int) -> tuple[int, ...]:
    """Who is left out of a sum if some are missing: they and, if it is only one, the first of the `spares` beside."""
    left_out = set(missing)
    if len(left_out) == 1:
        left_out.add(next(client for client in spares(call.clients, round_) if client not in left_out))
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise QuorumError(f"{rest} of {len(call.clients)} clients would be summed, {least} needed")
    return tuple(sorted(left_out))


def _increasing(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
