"""Shared types, and the wire constants that algorithms need."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]  # (n,) or (m,)
Precise = npt.NDArray[np.float64]  # the same, before it is rounded
Words = npt.NDArray[np.uint32]  # an upload as whole numbers modulo 2^32
Codes = npt.NDArray[np.uint32]  # one of few bits for each number of a vector
Packets = dict[int, bytes]  # client -> packet

# Of the mark in a message's header, by which the server finds honest clients whose copies differ. Two that differ have
# the same by accident once in 2^32; more bytes would not stop a liar, who can copy the mark of another client.
FINGERPRINT_BYTES = 4
NO_FINGERPRINT = bytes(FINGERPRINT_BYTES)
MAX_CLIENTS = 2**24 - 2  # a sender has three bytes in a message's header, and the highest number is the server's
MAX_ROUNDS = 2**16 - 1
KEY_BYTES = 32  # of a secret
MAX_COUNT = 2**31  # numbers in a message, at most


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
