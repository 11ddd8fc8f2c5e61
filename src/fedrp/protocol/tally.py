"""What has come in of the open round: replies are folded into running sums as they arrive, and then forgotten.

However many clients report, the server takes memory for a few vectors, and about 300 bytes for each client. Whole
uploads stay only where the outcome needs each of them: `Tally.separate` says whose.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedrp.crypto import secure_aggregation
from fedrp.crypto.epochs import Complaint, covering
from fedrp.errors import ProtocolError, WireError
from fedrp.means import add_weighted
from fedrp.mechanisms import cohort, quorum
from fedrp.mechanisms.base import Numbers
from fedrp.protocol import wire
from fedrp.protocol.limits import from_client
from fedrp.protocol.server_state import Server, cohort_of, next_dealer, only_message, read_one
from fedrp.protocol.wire import Kind, Limits, Message
from fedrp.types import NO_FINGERPRINT, Words

_MOST_COMPLAINTS = 3  # of one client that a round is given up for: a client that always complains must not stop a run


class Sum(NamedTuple):
    """Uploads that can be added up, as they carry the same fingerprint."""

    fingerprint: bytes
    total: Numbers  # of weight * vector, or of masked words; without the uploads that stay separate


@dataclass
class Tally:
    """The replies to the open round, as far as the server still needs them.

    Changed in place by `take_upload` and `take_correction` and by nothing else. It belongs to whoever runs the round,
    begins with it (`Tally.of`) and ends with it; it is never stored, as replies are not: after a crash clients send the
    same bytes again.
    """

    participants: frozenset[int]
    limits: Limits
    dealer: int | None  # of the next round's key
    separate: frozenset[int]  # clients whose uploads stay whole
    compared: bool  # whether uploads are added up only where fingerprints are equal
    corrections: Words  # the sum of them; nothing as long as there is no recovery
    uploads: dict[int, bytes] = field(default_factory=dict)  # client -> fingerprint of the upload that was taken
    sums: dict[bytes, Sum] = field(default_factory=dict)  # by fingerprint
    whole: dict[int, Numbers] = field(default_factory=dict)  # uploads of those who are separate
    refused: dict[int, str] = field(default_factory=dict)  # client -> why its last reply cannot be used
    complaints: dict[int, Complaint] = field(default_factory=dict)
    dealt: tuple[Message, ...] = ()  # the dealer's keys
    corrected: set[int] = field(default_factory=set)  # whose corrections are in it
    uncorrected: dict[int, str] = field(default_factory=dict)  # client -> why its last answer is not

    @classmethod
    def of(cls, server: Server) -> "Tally":
        """Of a round that was just opened: nothing has come."""
        config, participants = server.config, server.participants
        secure, memory = config.secure_aggregation, server.algorithm.memory
        separate: frozenset[int] = frozenset()
        if secure:
            separate = frozenset(quorum.spares(participants, server.round + 1))
        elif config.trimmed_share or server.algorithm.certificate(config):
            separate = frozenset(participants)
        return cls(
            participants=frozenset(participants),
            limits=from_client(config, server.upload_size),
            dealer=next_dealer(server, participants, server.round + 1),
            separate=separate,
            compared=memory == "history" or (memory == "own" and secure),
            corrections=np.zeros(server.upload_size if secure else 0, np.uint32),
        )


def take_upload(server: Server, tally: Tally, client: int, packet: bytes) -> None:
    """Take a client's reply to the open round: the upload into its sum, of the rest what is small or the dealer's.

    A reply that cannot be used changes nothing but the reason that is kept, and a later one may take its place. One
    upload of a client is taken in a round, never a second one. Whoever a recovery leaves out is noted, and not summed.
    """
    if client in tally.uploads:
        return
    tally.refused.pop(client, None)
    tally.complaints.pop(client, None)
    reply = read_one(server, tally.limits, client, packet)
    try:
        for complaint in wire.messages_of(reply.messages, Kind.COMPLAINT):
            tally.complaints[client] = Complaint(client, complaint.weight, complaint.round)
            raise ProtocolError(f"it cannot use the key of round {complaint.round} from client {complaint.weight}")
        message = only_message(reply, Kind.UPLOAD, client)
        if message.round != server.round + 1 or client not in tally.participants:
            raise ProtocolError(f"upload for round {message.round}, expected round {server.round + 1}")
        secure, size = server.config.secure_aggregation, server.upload_size
        numbers = wire.numbers(message, server.pipeline.upload_coding(size), server.run)
        if message.weight != cohort_of(server, (client,)).weights[0]:
            raise ProtocolError(f"client {client} sent another weight than it said hello with")
    except (WireError, ProtocolError) as error:
        tally.refused[client] = str(error)
        return
    mark = message.fingerprint if tally.compared else NO_FINGERPRINT
    if mark not in tally.sums:
        tally.sums[mark] = Sum(mark, np.zeros(size, np.uint32 if secure else np.float64))
    sum_ = tally.sums[mark]
    tally.uploads[client] = sum_.fingerprint  # the same object for all
    if client == tally.dealer:
        tally.dealt = tuple(wire.messages_of(reply.messages, Kind.DEAL))
    if client in server.left_out:
        return
    if client in tally.separate:
        tally.whole[client] = numbers
    else:
        _add(sum_.total, numbers, message.weight)


def take_correction(server: Server, tally: Tally, client: int, packet: bytes) -> None:
    """Take a client's answer to the recovery of the open round, once."""
    if client in tally.corrected or client in server.left_out or client not in tally.participants:
        return
    reply = read_one(server, tally.limits, client, packet)
    try:
        message = only_message(reply, Kind.CORRECTION, client)
        if message.round != server.round + 1:
            raise ProtocolError(f"a correction of round {message.round}")
        words = wire.numbers(message, server.pipeline.upload_coding(server.upload_size), server.run)
    except (WireError, ProtocolError) as error:
        tally.uncorrected[client] = str(error)
        return
    tally.corrections += words
    tally.corrected.add(client)


def total_of(server: Server, tally: Tally, clients: frozenset[int]) -> Numbers:
    """The sum of the uploads of clients: all those of one fingerprint, but for separate ones. Not to be changed."""
    total = tally.sums[tally.uploads[min(clients)]].total
    separate = [client for client in sorted(tally.whole) if client in clients]
    if separate:
        total = total.copy()
    for client in separate:
        _add(total, tally.whole[client], cohort_of(server, (client,)).weights[0])
    return total


def _add(total: Numbers, numbers: Numbers, weight: int) -> None:
    if numbers.dtype == np.uint32:
        np.add(total, numbers, out=total)  # modulo 2^32; weights are in the words
    else:
        add_weighted(total, numbers, weight)


# --- what the server makes of it --------------------------------------------------------------------------------------


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
    """The complaints that count: another client deals a secret for the next round, and their dealer does not again.

    They are about the secret of this round, or that of the set-up. Where an aggregate rests on it, a new one is of no
    use to who complains, if that is the set-up or if clients replay every round.
    """
    made = Counter(complaint.client for complaint in server.complaints)
    replays = server.algorithm.memory == "history"
    return tuple(
        complaint
        for complaint in received.complaints
        if made[complaint.client] < _MOST_COMPLAINTS
        and complaint.round in (0, covering(server.dealt, server.round + 1))
        and complaint.round in server.dealt
        and server.dealt[complaint.round].dealer == complaint.dealer
        and (not rests_on(server, complaint.round) or not (replays or complaint.round == 0))
    )


def rests_on(server: Server, first: int) -> bool:
    """Whether there is an aggregate under the secret that was dealt for round `first`, so that it must be kept."""
    return server.latest >= max(first, 1)


def is_spoilt(server: Server, received: Received) -> bool:
    """Whether the round is given up for the complaints that count.

    All clients need the secret of the set-up; where they replay every round, or uploads are masked, also that of this
    round. Elsewhere, and where it cannot be exchanged any more, the round goes on if the others suffice.
    """
    counted = complaints_of(server, received)
    enough = len(received.uploads) >= cohort.needed(server.config, len(server.participants))
    all_needed = server.algorithm.memory == "history" or server.config.secure_aggregation
    needed = [c for c in counted if (all_needed or c.round == 0) and not rests_on(server, c.round)]
    return bool(needed) or (bool(counted) and not enough)


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
