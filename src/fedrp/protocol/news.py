"""What the server tells a client that it does not know yet."""

import dataclasses
import struct
from collections.abc import Sequence

from fedrp.protocol import wire
from fedrp.protocol.server_state import Server, message_of
from fedrp.protocol.wire import Kind, Message


def news(server: Server, client: int, round_: int) -> list[Message]:
    """What a client lacks for `round_`: outcomes of past rounds, sealed keys, mask keys."""
    last, replays = server.last_seen[client], server.algorithm.memory == "history"
    rebuild = client in server.differing or (last > 0 and not server.aggregates)  # also after a set-up that was redone
    if rebuild:
        last = 0
    first = last if replays else server.latest  # the first round whose outcome it is told
    told = [message_of(server, Kind.REBUILD, round_)] if rebuild else []
    told += [
        message_of(server, Kind.AGGREGATE, past, server.aggregates[past])
        if past in server.aggregates
        else message_of(server, Kind.VOID, past)
        for past in range(max(first, 1), round_)
    ]
    wanted = {*range(first, round_ + 1), *([0] if last == 0 else [])}
    given = last if last else -1  # it has kept the keys of the last round that it took part in
    told += [
        dataclasses.replace(
            message_of(server, Kind.SEALED, past, wire.raw(server.dealt[past].envelopes[client])),
            sender=server.dealt[past].dealer,
        )
        for past in sorted(wanted)
        if past in server.dealt and past > given and (past in server.aggregates or past in (0, round_))
    ]
    seen = server.last_seen[client]
    if keys := [(c, e.signed) for c, e in sorted(server.mask_keys.items()) if seen < e.known <= round_]:
        entries = b"".join(struct.pack("<I", owner) + signed for owner, signed in keys)
        told.append(message_of(server, Kind.MASK_KEYS, round_, wire.raw(entries)))
    return told


_COMMON = frozenset({Kind.AGGREGATE, Kind.VOID, Kind.REBUILD, Kind.ROUND, Kind.FINISH})  # nothing of one client in them


class Encoder:
    """Encodes what all clients are told once, and not once per client; those told the same get the same bytes."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Kind, int, int], tuple[Message, bytes]] = {}  # a message kept is a payload's id kept
        self._packets: dict[tuple[int, ...], bytes] = {}

    def packet(self, messages: Sequence[Message]) -> bytes:
        """The messages as one packet, see `wire.encode`."""
        parts = [self._part(message) for message in messages]
        if not all(message.kind in _COMMON for message in messages):
            return b"".join(parts)
        told = tuple(id(part) for part in parts)
        if told not in self._packets:
            self._packets[told] = b"".join(parts)
        return self._packets[told]

    def _part(self, message: Message) -> bytes:
        if message.kind not in _COMMON:
            return wire.encode([message])
        key = (message.kind, message.round, id(message.payload))
        if key not in self._parts:
            self._parts[key] = (message, wire.encode([message]))
        return self._parts[key][1]
