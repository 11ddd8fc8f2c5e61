"""What the server tells clients that they do not know yet: packets that are made when they are sent."""

import dataclasses
import functools
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from fedrp.protocol import wire
from fedrp.protocol.server_state import Server, message_of
from fedrp.protocol.wire import Kind, Message


class LazyPackets(Mapping[int, bytes]):
    """A packet for each of some clients, made whenever it is asked for, and not kept: a round may have a million."""

    def __init__(self, clients: Iterable[int], make: Callable[[int], bytes]) -> None:
        self._clients, self._make = dict.fromkeys(clients), make

    def __getitem__(self, client: int) -> bytes:
        if client not in self._clients:
            raise KeyError(client)
        return self._make(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def only(packets: Mapping[int, bytes], clients: Container[int]) -> LazyPackets:
    """The packets for some of the clients."""
    return LazyPackets((client for client in packets if client in clients), packets.__getitem__)


def packets_with_news(
    server: Server, clients: Iterable[int], round_: int, request: Message, also: Mapping[int, Message]
) -> LazyPackets:
    """For each client what it lacks for `round_`, a request that is the same for all, and what is for it `also`.

    Outcomes and the request are encoded once, however many clients get them.
    """
    asked = wire.encode([request])
    outcome = functools.cache(lambda past: wire.encode([_outcome(server, past)]))

    def packet(client: int) -> bytes:
        own = wire.encode([also[client]]) if client in also else b""
        return b"".join([*_news(server, client, round_, outcome), asked, own])

    return LazyPackets(clients, packet)


def _outcome(server: Server, past: int) -> Message:
    """What became of a round."""
    if past in server.aggregates:
        return message_of(server, Kind.AGGREGATE, past, server.aggregates[past])
    return message_of(server, Kind.VOID, past)


def _news(server: Server, client: int, round_: int, outcome: Callable[[int], bytes]) -> list[bytes]:
    """What a client lacks for `round_`, encoded: outcomes of past rounds, sealed keys, mask keys."""
    last, replays = server.last_seen[client], server.algorithm.memory == "history"
    rebuild = client in server.differing or (last > 0 and not server.aggregates)  # also after a set-up that was redone
    if rebuild:
        last = 0
    first = last if replays else server.latest  # the first round whose outcome it is told
    told = [wire.encode([message_of(server, Kind.REBUILD, round_)])] if rebuild else []
    told += [outcome(past) for past in range(max(first, 1), round_)]
    wanted = {*range(first, round_ + 1), *([0] if last == 0 else [])}
    given = last if last else -1  # it has kept the keys of the last round that it took part in
    own = [
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
        own.append(message_of(server, Kind.MASK_KEYS, round_, wire.raw(entries)))
    return [*told, wire.encode(own)]
