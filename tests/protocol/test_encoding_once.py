"""What all clients are told is encoded once."""

import numpy as np
import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.news import Encoder
from fedrp.protocol.server_state import message_of, new_server
from fedrp.protocol.wire import Kind
from fedrp.simulation.identities import simulated_coins
from helpers import tiny_config


def test_clients_that_are_told_the_same_get_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = new_server(resolved(tiny_config("fedavg"), 83), bytes(16), 83)
    encoded: list[Kind] = []
    encode = wire.encode
    monkeypatch.setattr(wire, "encode", lambda m: encoded.extend(x.kind for x in m) or encode(m))
    _, packets = server_side.open_round(server, simulated_coins(server.config, 1))
    assert len(packets) > 1
    assert len({id(packet) for packet in packets.values()}) == 1
    assert encoded == [Kind.ROUND]


def test_a_packet_is_what_its_messages_are_one_by_one() -> None:
    server = new_server(resolved(tiny_config("fedavg"), 83), bytes(16), 3)
    encoder = Encoder()
    for value in (1.0, 2.0, 1.0):  # payloads of one kind and round that differ
        aggregate = message_of(server, Kind.AGGREGATE, 1, np.full(3, value, np.float32))
        own = message_of(server, Kind.SEALED, 2, wire.raw(bytes([int(value)])))
        for messages in ([aggregate], [aggregate, own], [own]):
            assert encoder.packet(messages) == wire.encode(messages)
