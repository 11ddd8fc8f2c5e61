"""What all clients are told is encoded once."""

import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.server_state import new_server
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
