"""What the server tells clients that they do not know yet: packets that are made when they are sent."""

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterable, Mapping

from fedrp.crypto.epochs import covering
from fedrp.protocol import wire
from fedrp.protocol.server_state import Server, message_of
from fedrp.protocol.wire import Kind, Message
from fedrp.types import LazyPackets


def packets_with_news(
    server: Server, clients: Iterable[int], round_: int, request: Message, also: Mapping[int, Message]
) -> LazyPackets:
    """For each client what it lacks for `round_`, a request that is the same for all, and what is for it `also`.

    Outcomes and the request are encoded once, however many clients get them; who is told the same gets the same bytes.
    """
    asked = wire.encode([request])
    outcome = functools.cache(lambda past: wire.encode([_outcome(server, past)]))
    common = functools.cache(lambda told: b"".join([*told, asked]))

    def packet(client: int) -> bytes:
        told, own = _news(server, client, round_, request.round, outcome)
        if client in also:
            return b"".join([*told, own, asked, wire.encode([also[client]])])
        return b"".join([*told, own, asked]) if own else common(told)

    return LazyPackets(clients, packet)


def _outcome(server: Server, past: int) -> Message:
    """What became of a round."""
    if past in server.aggregates:
        sent = message_of(server, Kind.AGGREGATE, past, server.aggregates[past])
        return dataclasses.replace(sent, width=server.aggregate_coding(past).width)
    return message_of(server, Kind.VOID, past)


def _news(
    server: Server, client: int, round_: int, asked: int, outcome: Callable[[int], bytes]
) -> tuple[tuple[bytes, ...], bytes]:
    """What a client lacks for `round_`, encoded: outcomes of past rounds, and its own sealed keys and mask keys.

    `asked` is what the packet's request names: after the last round there is no other for `round_` to be.
    """
    last, replays = server.last_seen[client], server.algorithm.memory == "history"
    rebuild = client in server.differing or (last > 0 and not server.aggregates)  # also after a set-up that was redone
    if rebuild:
        last = 0
    first = last if replays else server.latest  # the first round whose outcome it is told
    told = [wire.encode([message_of(server, Kind.REBUILD, asked)])] if rebuild else []
    told += [outcome(past) for past in range(max(first, 1), round_)]
    rounds = [past for past in range(first, asked + 1) if past in server.aggregates or past == asked]
    wanted = {covering(server.dealt, past) for past in ([0] if last == 0 else []) + rounds}
    given = last if last else -1  # it has kept the secrets of the last round that it took part in
    own = [
        dataclasses.replace(
            message_of(server, Kind.SEALED, past, wire.raw(server.dealt[past].envelopes[client])),
            sender=server.dealt[past].dealer,
        )
        for past in sorted(server.dealt)
        if past in wanted and past > given
    ]
    seen = server.last_seen[client]
    if keys := [(c, e.signed) for c, e in sorted(server.mask_keys.items()) if seen < e.known <= round_]:
        entries = b"".join(struct.pack("<I", owner) + signed for owner, signed in keys)
        own.append(message_of(server, Kind.MASK_KEYS, asked, wire.raw(entries)))
    return tuple(told), wire.encode(own)
