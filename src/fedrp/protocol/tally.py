"""What has come in of the open round: replies are folded into running sums as they arrive, and then forgotten.

However many clients report, the server takes memory for a few vectors, and about 300 bytes for each client. Whole
uploads stay only where the outcome needs each of them: `Tally.separate` says whose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedrp.algorithms.mechanisms.base import Numbers
from fedrp.errors import ProtocolError, WireError
from fedrp.protocol import quorum, wire
from fedrp.protocol.aggregate import add_weighted
from fedrp.protocol.limits import from_client
from fedrp.protocol.server_state import Complaint, Server, call_of, next_dealer, only_message, read_one
from fedrp.protocol.wire import Kind, Limits, Message
from fedrp.types import NO_FINGERPRINT, Words


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


def tallied(server: Server, packets: Mapping[int, bytes]) -> Tally:
    """The tally of an open round with these replies, in their order."""
    tally = Tally.of(server)
    for client, packet in packets.items():
        take_upload(server, tally, client, packet)
    return tally


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
        numbers: Numbers = wire.words(message, size) if secure else wire.vector(message, size)
        if message.weight != call_of(server, (client,)).weights[0]:
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
        words = wire.words(message, server.upload_size)
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
        _add(total, tally.whole[client], call_of(server, (client,)).weights[0])
    return total


def _add(total: Numbers, numbers: Numbers, weight: int) -> None:
    if numbers.dtype == np.uint32:
        np.add(total, numbers, out=total)  # modulo 2^32; weights are in the words
    else:
        add_weighted(total, numbers, weight)
