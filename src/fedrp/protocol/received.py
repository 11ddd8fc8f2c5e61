"""What the server makes of the replies of a round: which uploads can be used, and what cannot be mended."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fedrp.algorithms import cohort
from fedrp.crypto import secure_aggregation
from fedrp.errors import ProtocolError, WireError
from fedrp.protocol import wire
from fedrp.protocol.server_state import Complaint, Replies, Server, call_of, only_message
from fedrp.protocol.wire import Kind, Message

_MOST_COMPLAINTS = 3  # of one client that a round is given up for: a client that always complains must not stop a run


def outstanding(server: Server, replies: Replies) -> frozenset[int]:
    """The participants of the open round who have sent nothing that can be used, and nothing that never will be."""
    received = received_of(server, replies)
    return frozenset(server.participants) - set(received.uploads) - received.differing


class Received(NamedTuple):
    """The replies of a round, sorted."""

    uploads: dict[int, Message]  # that can be used
    refused: dict[int, str]
    differing: frozenset[int]  # whose copy of the common model is not everyone's
    complaints: tuple[Complaint, ...]
    valid: frozenset[int]  # who took part in this round as the others did, whether it is summed or not


def received_of(server: Server, replies: Replies) -> Received:
    """The uploads among the replies, sorted into those that can be used and those that cannot."""
    round_, secure = server.round + 1, server.config.secure_aggregation
    uploads: dict[int, Message] = {}
    refused: dict[int, str] = {}
    complaints = []
    for client in sorted(replies):
        try:
            for complaint in wire.messages_of(replies[client].messages, Kind.COMPLAINT):
                complaints.append(Complaint(client, complaint.weight, complaint.round))
                raise ProtocolError(f"it cannot use the key of round {complaint.round} from client {complaint.weight}")
            message = only_message(replies[client], Kind.UPLOAD, client)
            if message.round != round_ or client not in server.participants:
                raise ProtocolError(f"upload for round {message.round}, expected round {round_}")
            (wire.words if secure else wire.vector)(message, server.upload_size)
            if message.weight != call_of(server, (client,)).weights[0]:
                raise ProtocolError(f"client {client} sent another weight than it said hello with")
            uploads[client] = message
        except (WireError, ProtocolError) as error:
            refused[client] = str(error)
    apart = _apart(server, uploads)
    replays = server.algorithm.memory == "history"
    for client in apart:
        refused[client] = "its copy of the common model differs; it will be told to rebuild it"
        if not replays:
            refused[client] = "its history of this run is not that of the others, so its masks do not cancel"
        del uploads[client]
    return Received(uploads, refused, apart if replays else frozenset(), tuple(complaints), frozenset(uploads))


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


def _apart(server: Server, uploads: Mapping[int, Message]) -> frozenset[int]:
    """Clients whose fingerprint is not the most frequent one; all of them, if two are."""
    memory = server.algorithm.memory
    if memory == "aggregate" or (memory == "own" and not server.config.secure_aggregation):
        return frozenset()  # nothing that they remember needs to be the same
    counts = Counter(message.fingerprint for message in uploads.values()).most_common(2)
    tied = len(counts) == 2 and counts[0][1] == counts[1][1]  # nobody knows who is right
    return frozenset(client for client, message in uploads.items() if tied or message.fingerprint != counts[0][0])
