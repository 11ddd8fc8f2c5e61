"""Replies that are folded as they arrive: the same sums, in the memory of a few vectors."""

import dataclasses
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.server_state import Server, new_server
from fedrp.protocol.tally import Tally, outstanding, take_correction, take_upload
from fedrp.protocol.wire import Kind, Message
from fedrp.types import FINGERPRINT_BYTES, NO_FINGERPRINT
from helpers import Federation, tallied, tiny_config

SIZE = 1000
PER_CLIENT = 300  # bytes of the server that a client may cost: its number in sets, its entry in `last_seen`, ...
VECTORS = 12  # sums, the packet that is being read, the aggregate on its way


def open_server(name: str, count: int, **changes: object) -> Server:
    """A server in the first round of a run that all clients take part in."""
    config = resolved(tiny_config(name, clients=count, dim=SIZE, **changes), SIZE)
    server = new_server(config, bytes(wire.RUN_ID_BYTES), SIZE)
    return dataclasses.replace(server, participants=tuple(range(count)), weights=tuple(range(1, count + 1)))


def upload(server: Server, client: int, numbers: np.ndarray, mark: bytes = NO_FINGERPRINT) -> bytes:
    weight = 1 if server.config.weighting == "uniform" else server.weights[client]
    return wire.encode([Message(Kind.UPLOAD, server.context, 1, client, numbers, weight, mark)])


def streamed(server: Server, order: list[int], vectors: np.ndarray) -> np.ndarray:
    tally = Tally.of(server)
    for client in order:
        take_upload(server, tally, client, upload(server, client, vectors[client]))
    closed, report = server_side.close_round(server, tally)
    assert report.participants == tuple(sorted(order))
    return closed.aggregates[1]


# --- memory ----------------------------------------------------------------------------------------------------------


def peak(server: Server) -> int:
    """Bytes that a round takes, beyond what was there before: uploads come one by one, and nobody else keeps them."""
    dtype = np.uint32 if server.config.secure_aggregation else np.float32
    tracemalloc.start()
    tally = Tally.of(server)
    for client in server.participants:
        take_upload(server, tally, client, upload(server, client, np.zeros(SIZE, dtype)))
    closed, report = server_side.close_round(server, tally)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(report.participants) == len(server.participants)
    assert closed.round == 1
    return used


@pytest.mark.parametrize(
    ("name", "changes"),
    [("fedavg", {}), ("fedrp-subspace", {}), ("fedavg", {"secure_aggregation": True})],
    ids=["fedavg", "fedrp-subspace", "masked"],
)
def test_memory_of_a_round_is_a_few_vectors_however_many_report(name: str, changes: dict[str, object]) -> None:
    for count in (200, 20_000):
        server = open_server(name, count, **changes)
        assert peak(server) < VECTORS * 8 * SIZE + PER_CLIENT * count


def test_memory_is_that_of_all_uploads_only_where_each_is_needed() -> None:
    for name, changes in (("fedavg", {"aggregation": "median"}), ("fedrp", {"projection": "gaussian"})):
        server = open_server(name, 20, **changes)
        assert Tally.of(server).separate == set(range(20))
    for name, changes in (("fedavg", {}), ("fedrp", {"projection": "sign"})):
        assert not Tally.of(open_server(name, 20, **changes)).separate
    assert len(Tally.of(open_server("fedavg", 20, secure_aggregation=True)).separate) == 2


def test_packets_of_a_round_are_made_one_by_one_and_the_aggregate_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, size = 500, 20_000
    server = dataclasses.replace(open_server("fedavg", count), parameters=size, participants=(), round=1)
    server = dataclasses.replace(server, aggregates={1: np.ones(size, np.float32)}, last_seen=(1,) * count)
    encoded: list[Kind] = []
    real = wire.encode

    def counting(messages: Iterator[Message]) -> bytes:
        messages = list(messages)
        encoded.extend(message.kind for message in messages)
        return real(messages)

    monkeypatch.setattr(wire, "encode", counting)
    tracemalloc.start()
    _, packets = server_side.open_round(server, np.zeros(count))
    sizes = [len(packets[client]) for client in packets]
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == [2 * wire.HEADER_BYTES + 4 * size] * count
    assert encoded.count(Kind.AGGREGATE) == encoded.count(Kind.ROUND) == 1
    assert used < 6 * 4 * size + PER_CLIENT * count  # all of them would be 40 MB
    assert packets[0] is packets[1]  # to workers it goes once
    with pytest.raises(KeyError):
        packets[count]


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"weighting": "samples"}, {"aggregation": "trimmed:0.2"}], ids=str)
def test_the_order_of_arrival_is_irrelevant(changes: dict[str, object]) -> None:
    server = open_server("fedavg", 7, **changes)
    vectors = np.random.default_rng(0).normal(size=(7, SIZE)).astype(np.float32)
    expected = streamed(server, list(range(7)), vectors)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(7).tolist()
        np.testing.assert_array_equal(streamed(server, order, vectors), expected)  # float64 adds such numbers exactly
    if not server.config.trimmed_share:
        weights = np.arange(1.0, 8) if changes else np.ones(7)
        exact = (weights / weights.sum()) @ vectors.astype(np.float64)
        np.testing.assert_allclose(expected, exact, rtol=2e-7, atol=1e-12)


def test_numbers_of_very_different_size_differ_by_rounding_only() -> None:
    server = open_server("fedavg", 9)
    scale = 10.0 ** np.arange(-16, 20, 4)[:, None]
    vectors = (np.random.default_rng(0).normal(size=(9, SIZE)) * scale).astype(np.float32)
    expected = streamed(server, list(range(9)), vectors)
    np.testing.assert_allclose(streamed(server, list(range(8, -1, -1)), vectors), expected, rtol=2e-7)


def test_the_most_frequent_fingerprint_is_summed_however_arrivals_interleave() -> None:
    server = open_server("fedrp-subspace", 7, quorum=0.5, projection="sign")
    vectors = np.random.default_rng(0).normal(size=(7, SIZE)).astype(np.float32)
    marks = {client: bytes([client in (1, 2, 5)]) * FINGERPRINT_BYTES for client in range(7)}
    for seed in range(5):
        tally = Tally.of(server)
        for place, client in enumerate(np.random.default_rng(seed).permutation(7).tolist()):
            take_upload(server, tally, client, upload(server, client, vectors[client], marks[client]))
            outstanding(server, tally)  # at any time, whoever leads
            assert len(tally.uploads) == place + 1
        closed, report = server_side.close_round(server, tally)
        assert report.participants == (0, 3, 4, 6)
        assert closed.differing == {1, 2, 5}
        expected = vectors[[0, 3, 4, 6]].astype(np.float64).mean(axis=0)
        np.testing.assert_array_equal(closed.aggregates[1], expected.astype(np.float32))


# --- replies ---------------------------------------------------------------------------------------------------------


def test_a_second_upload_of_a_round_is_not_used_and_one_after_a_bad_reply_is() -> None:
    server = open_server("fedavg", 3)
    ones = np.ones(SIZE, np.float32)
    tally = tallied(server, {0: upload(server, 0, ones), 1: b"?", 2: upload(server, 2, ones)})
    assert outstanding(server, tally) == {1}
    take_upload(server, tally, 0, upload(server, 0, 5 * ones))
    take_upload(server, tally, 2, b"?")  # what was taken stays
    take_upload(server, tally, 1, upload(server, 1, 4 * ones))
    assert not tally.refused
    closed, report = server_side.close_round(server, tally)
    assert report.participants == (0, 1, 2)
    np.testing.assert_array_equal(closed.aggregates[1], 2 * ones)


def test_to_close_a_round_changes_nothing_of_the_tally() -> None:
    for changes in ({}, {"aggregation": "median"}):
        server = open_server("fedavg", 5, **changes)
        packets = {c: upload(server, c, np.full(SIZE, c, np.float32)) for c in range(5)}
        tally = tallied(server, packets)
        first, again = (server_side.close_round(server, tally)[0].aggregates[1] for _ in range(2))
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(first, np.full(SIZE, 2, np.float32))


# --- masks -----------------------------------------------------------------------------------------------------------


def summed_by_hand(changes: dict[str, object], clients: tuple[int, ...]) -> np.ndarray:
    plain = Federation(tiny_config("fedavg", **changes))
    replies = plain.deliver(plain.open())
    plain.close({client: replies[client] for client in clients})
    return plain.server.aggregates[1]


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2,), (5,), (1, 2), (3, 5)], ids=str)
def test_masked_sums_with_missing_clients_in_any_order_of_arrival(missing: tuple[int, ...]) -> None:
    """Round 1: the spares are clients 1 and 2."""
    changes = {"clients": 6, "quorum": 0.5}
    run = Federation(tiny_config("fedavg", secure_aggregation=True, **changes))
    replies = run.deliver(run.open())
    order = [client for client in (4, 1, 5, 0, 2, 3) if client not in missing]
    tally = run.tallied({client: replies[client] for client in order})
    assert set(tally.whole) == {1, 2} - set(missing)
    run.server, requests = server_side.recover(run.server, tally)
    spare = 2 if missing == (1,) else 1
    left_out = (*missing, spare) if len(missing) == 1 else missing
    assert run.server.left_out == tuple(sorted(left_out))
    for client, packet in run.deliver(requests).items():
        take_correction(run.server, tally, client, packet)
    for client in missing:  # too late: it is not summed any more, and counts as having taken part
        take_upload(run.server, tally, client, replies[client])
    closed, report = server_side.close_round(run.server, tally)
    assert report.participants == tuple(sorted(set(range(6)) - set(left_out)))
    assert all("left out" in report.refused[client] for client in left_out)
    assert closed.last_seen == (1,) * 6
    np.testing.assert_allclose(closed.aggregates[1], summed_by_hand(changes, report.participants), atol=2e-6)


def test_everyone_is_a_spare_in_turn() -> None:
    run = Federation(tiny_config("fedavg", clients=5, rounds=5, secure_aggregation=True, quorum=0.6))
    unlucky = []
    for _ in range(5):
        replies = run.deliver(run.open())
        report = run.close({client: reply for client, reply in replies.items() if client != 4})
        unlucky.append(sorted(report.refused))
    assert unlucky == [[1], [2], [3], [0], [0]]


def test_a_correction_counts_once_and_only_of_those_who_were_asked() -> None:
    run = Federation(tiny_config("fedavg", clients=6, secure_aggregation=True, quorum=0.5))
    replies = run.deliver(run.open())
    tally = run.tallied({client: replies[client] for client in range(5)})
    run.server, requests = server_side.recover(run.server, tally)
    answers = run.deliver(requests)
    for client in (*answers, *answers, 1, 5):
        take_correction(run.server, tally, client, answers.get(client, answers[0]))
    assert tally.corrected == {0, 2, 3, 4}
    assert not tally.uncorrected
    closed, report = server_side.close_round(run.server, tally)
    expected = summed_by_hand({"clients": 6, "quorum": 0.5}, report.participants)
    np.testing.assert_allclose(closed.aggregates[1], expected, atol=2e-6)
