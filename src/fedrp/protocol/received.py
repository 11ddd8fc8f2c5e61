"""What the server makes of the tally of a round: which uploads can be used, and what cannot be mended."""

from collections import Counter
from typing import NamedTuple

from fedrp.algorithms import cohort
from fedrp.crypto import secure_aggregation
from fedrp.protocol.server_state import Complaint, Server
from fedrp.protocol.tally import Tally

_MOST_COMPLAINTS = 3  # of one client that a round is given up for: a client that always complains must not stop a run


def outstanding(server: Server, tally: Tally) -> frozenset[int]:
    """The participants of the open round who have sent nothing that can be used, and nothing that never will be."""
    received = received_of(server, tally)
    done = (received.uploads, received.differing)
    return frozenset(client for client in server.participants if not any(client in some for some in done))


class Received(NamedTuple):
    """The replies of a round, sorted."""

    uploads: frozenset[int]  # whose upload can be used
    refused: dict[int, str]
    differing: frozenset[int]  # whose copy of the common model is not everyone's
    complaints: tuple[Complaint, ...]


def received_of(server: Server, tally: Tally) -> Received:
    """The uploads of a tally, sorted into those that can be used and those that cannot."""
    refused = {client: tally.refused[client] for client in sorted(tally.refused)}
    complaints = tuple(tally.complaints[client] for client in sorted(tally.complaints))
    apart = _apart(tally)
    replays = server.algorithm.memory == "history"
    for client in sorted(apart):
        refused[client] = "its copy of the common model differs; it will be told to rebuild it"
        if not replays:
            refused[client] = "its history of this run is not that of the others, so its masks do not cancel"
    uploads = frozenset(client for client in tally.uploads if client not in apart)
    return Received(uploads, refused, apart if replays else frozenset(), complaints)


def complaints_of(server: Server, received: Received) -> tuple[Complaint, ...]:
    """The complaints that a round is given up for.

    Where clients replay every round, all of them need its key; elsewhere a round without masks goes on without who
    complains, if the others suffice. About the set-up nothing can be done any more once there is an aggregate.
    """
    enough = len(received.uploads) >= cohort.needed(server.config, len(server.participants))
    if server.algorithm.memory != "history" and enough and not server.config.secure_aggregation:
        return ()
    made = Counter(complaint.client for complaint in server.complaints)
    rounds = {server.round + 1} if server.aggregates else {0, server.round + 1}
    return tuple(
        complaint
        for complaint in received.complaints
        if made[complaint.client] < _MOST_COMPLAINTS
        and complaint.round in rounds
        and complaint.round in server.dealt
        and server.dealt[complaint.round].dealer == complaint.dealer
    )


def is_lost(server: Server, received: Received) -> bool:
    """Whether enough clients replied, but so many of their copies differ that the round needs those who cannot help."""
    without = len(received.differing)
    if server.config.secure_aggregation and without == 1:
        without = secure_aggregation.MIN_LEFT_OUT
    needed = cohort.needed(server.config, len(server.participants))
    hopeless = bool(without) and len(server.participants) - without < needed
    return hopeless and len(received.uploads) + len(received.differing) >= needed


def _apart(tally: Tally) -> frozenset[int]:
    """Clients whose fingerprint is not the most frequent one; all of them, if two are."""
    if len(tally.sums) < 2:
        return frozenset()
    counts = Counter(tally.uploads.values()).most_common(2)
    tied = counts[0][1] == counts[1][1]  # nobody knows who is right
    return frozenset(client for client, mark in tally.uploads.items() if tied or mark != counts[0][0])
