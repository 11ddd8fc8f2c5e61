"""The two halves of the protocol, message by message: what they refuse, what they forgive, what the server learns."""

import dataclasses
import pickle
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.roster import Entry, Roster
from fedrp.crypto.schedule import round_key
from fedrp.crypto.sealing import Identity, Place, seal_to_all, verify
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import ENVELOPE_BYTES, split
from fedrp.errors import DivergenceError, ProtocolError, QuorumError, WireError
from fedrp.learning.initial import secret_initial
from fedrp.projection.families import make_projection
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.client import hello
from fedrp.protocol.server import RoundReport
from fedrp.protocol.server_state import new_server
from fedrp.protocol.tally import outstanding
from fedrp.protocol.wire import Kind, Message
from helpers import Federation, TinyNet, all_windows, round_keys, tiny_config, windows

SECRET = [name for name, algorithm in ALGORITHMS.items() if algorithm.server.round_keys]


def altered(packet: bytes, kind: Kind, **changes: object) -> bytes:
    """A packet with some fields of its messages of one kind changed."""
    messages = [dataclasses.replace(m, **changes) if m.kind is kind else m for m in wire.decode(packet)]
    return wire.encode(messages)


def without(packet: bytes, kind: Kind) -> bytes:
    return wire.encode(message for message in wire.decode(packet) if message.kind is not kind)


def only(packet: bytes, kind: Kind) -> Message:
    (message,) = wire.messages_of(wire.decode(packet), kind)
    return message


def not_finite(packet: bytes) -> bytes:
    """A packet whose first message ends in a NaN, with a checksum that fits: a liar, not a bad line."""
    first, *rest = wire.decode(packet)
    raw = bytearray(wire.encode([first]))
    raw[-4:] = struct.pack("<f", float("nan"))
    crc = zlib.crc32(raw[wire.HEADER_BYTES :], zlib.crc32(raw[: wire.HEADER_BYTES - 4]))
    raw[wire.HEADER_BYTES - 4 : wire.HEADER_BYTES] = struct.pack("<I", crc)
    return bytes(raw) + wire.encode(rest)


def complained(
    run: Federation, client: int, packet: bytes, round_: int, log: pytest.LogCaptureFixture, why: str
) -> None:
    """The client takes no part and says which key it cannot use; why stays with it."""
    before = run.clients[client]
    log.clear()
    (complaint,) = wire.decode(run.answer(client, packet))
    assert (complaint.kind, complaint.round, complaint.payload.size) == (Kind.COMPLAINT, round_, 0)
    assert run.clients[client] == before
    assert why in log.text


# --- what a client refuses -------------------------------------------------------------------------------------------


def refused(run: Federation, client: int, packet: bytes, error: type[Exception], why: str) -> None:
    before = run.clients[client]
    with pytest.raises(error, match=why):
        run.answer(client, packet)
    assert run.clients[client] is before


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_old_round_is_refused(name: str) -> None:
    run = Federation(tiny_config(name))
    first = run.open()
    run.close(run.deliver(first))
    run.round()
    refused(run, 1, first[1], ProtocolError, "replayed")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_that_is_asked_for_twice_is_answered_with_the_same_bytes(name: str) -> None:
    """Noise and training must not happen twice; the server may have lost the reply."""
    run = Federation(tiny_config(name))
    packets = run.open()
    reply = run.answer(2, packets[2])
    after = run.clients[2]
    assert run.answer(2, packets[2]) == reply
    assert run.clients[2].round == after.round == 1
    assert np.array_equal(run.clients[2].state.model, after.state.model)


@pytest.mark.parametrize("kind", [Kind.ROUND, Kind.SEALED])
def test_messages_of_another_run_are_refused(kind: Kind) -> None:
    run = Federation(tiny_config("fedrp"))
    packet = altered(run.open()[0], kind, context=wire.context_of(b"some other run..", run.bench.tag))
    refused(run, 0, packet, ProtocolError, "another run, or was made for another projection: use the same")


@pytest.mark.parametrize("projection", [0, 0x0102, 0x0201])
def test_messages_for_another_projection_are_refused(projection: int) -> None:
    run = Federation(tiny_config("fedrp", projection="gaussian"))
    packet = altered(run.open()[0], Kind.ROUND, context=wire.context_of(run.run, projection))
    refused(run, 0, packet, ProtocolError, "another run, or was made for another projection: use the same")


def test_an_envelope_of_another_round_does_not_open(caplog: pytest.LogCaptureFixture) -> None:
    run = Federation(tiny_config("fedrp"))
    old = run.open()
    run.close(run.deliver(old))
    stale = wire.messages_of(wire.decode(old[1]), Kind.SEALED)[-1]
    assert stale.round == 0
    packet = altered(run.open()[1], Kind.SEALED, payload=stale.payload)
    complained(run, 1, packet, 2, caplog, "not signed by client 1 for this place")


def test_an_envelope_of_another_client_does_not_open(caplog: pytest.LogCaptureFixture) -> None:
    run = Federation(tiny_config("fedrp"))
    packets = run.open()
    stolen = {m.round: m for m in wire.messages_of(wire.decode(packets[2]), Kind.SEALED)}
    messages = [stolen[m.round] if m.kind is Kind.SEALED else m for m in wire.decode(packets[1])]
    complained(run, 1, wire.encode(messages), 0, caplog, "not signed by client 0 for this place")


def test_an_envelope_under_another_dealers_name_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    run = Federation(tiny_config("fedrp"))
    packet = run.open()[1]
    complained(run, 1, altered(packet, Kind.SEALED, sender=3), 0, caplog, "not signed by client 3")
    stranger = altered(packet, Kind.SEALED, sender=4)
    refused(run, 1, stranger, ProtocolError, "client 4, who is not in the roster")


@pytest.mark.parametrize("name", SECRET)
def test_a_key_that_the_server_dealt_itself_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It knows everyone's public keys, so it can seal; it cannot sign for a client_state of the roster."""
    run = Federation(tiny_config(name))
    packet = run.open()[1]
    mallory = Identity(SecretKey(b"the server's own secret".ljust(32)), "client-0")
    for dealer in range(4):
        place = Place(run.run, 0, dealer, 1, run.bench.tag, run.roster.digest, "x25519")
        envelopes = seal_to_all(SecretKey(bytes(32)), mallory, run.roster.keys, place)
        own = wire.raw(split(envelopes, ENVELOPE_BYTES["x25519"], 4, "envelopes")[1])
        forged = [
            dataclasses.replace(m, payload=own, sender=dealer) if m.kind is Kind.SEALED else m
            for m in wire.decode(packet)
        ]
        complained(run, 1, wire.encode(forged), 0, caplog, f"not signed by client {dealer}")


def test_a_deal_for_a_roster_with_a_swapped_or_an_added_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Were a dealer made to seal to another roster, nobody with the pinned one would take its keys."""
    run = Federation(tiny_config("fedrp"))
    packet = run.open()[1]
    mallory = Identity(SecretKey(b"the server's own secret".ljust(32)), "client-3")
    stranger = Entry("client-3", mallory.public)
    for members in ((*run.roster.entries[:3], stranger), (*run.roster.entries, stranger._replace(name="more"))):
        other = Roster(members)
        place = Place(run.run, 0, 0, 1, run.bench.tag, other.digest, "x25519")
        envelopes = seal_to_all(SecretKey(bytes(32)), run.sites[0].identity, other.keys, place)
        payload = wire.raw(envelopes[ENVELOPE_BYTES["x25519"] :][: ENVELOPE_BYTES["x25519"]])
        forged = [dataclasses.replace(m, payload=payload) if m.kind is Kind.SEALED else m for m in wire.decode(packet)]
        complained(run, 1, wire.encode(forged), 0, caplog, "another recipient, round, run, roster")


def test_a_client_with_another_roster_is_not_welcome() -> None:
    run = Federation(tiny_config("fedrp"))
    hello = Message(Kind.HELLO, run.bench.context, 0, 2, wire.raw(bytes(32)), 1)
    with pytest.raises(ProtocolError, match="client 2 has another roster than the others: compare"):
        server_side.welcome(run.server, run.read({2: wire.encode([hello])}))


@pytest.mark.parametrize("name", SECRET)
def test_a_second_key_for_a_round_is_refused_before_and_after_it_was_used(name: str) -> None:
    """Even one that its dealer signed: say, because the server asked two clients to deal."""
    run = Federation(tiny_config(name))
    run.round()
    packet = run.open()[1]
    request = Message(Kind.DEAL_REQUEST, run.bench.context, 2, wire.SERVER, wire.EMPTY)
    deal = only(run.answer(2, wire.encode([request])), Kind.DEAL).payload.tobytes()
    size = ENVELOPE_BYTES["x25519"]
    own = wire.raw(deal[size : 2 * size])
    again = [dataclasses.replace(m, payload=own, sender=2) if m.kind is Kind.SEALED else m for m in wire.decode(packet)]
    run.answer(1, packet)
    refused(run, 1, wire.encode(again), ProtocolError, "another key for round 2")
    rebuild = Message(Kind.REBUILD, run.bench.context, 2, wire.SERVER, wire.EMPTY)
    refused(run, 1, wire.encode([rebuild, *again]), ProtocolError, "another key for round 2")


def test_a_client_that_is_told_to_rebuild_does_not_forget_which_rounds_it_did() -> None:
    run = Federation(tiny_config("fedrp-subspace", rounds=5))
    first = run.open()[1]
    run.round()
    run.round()
    rebuild = Message(Kind.REBUILD, run.bench.context, 1, wire.SERVER, wire.EMPTY)
    refused(run, 1, wire.encode([rebuild, *wire.decode(first)]), ProtocolError, "past round 1: replayed")


def test_a_missing_key_is_noticed() -> None:
    run = Federation(tiny_config("fedrp"))
    refused(run, 1, without(run.open()[1], Kind.SEALED), ProtocolError, "client 1 has no sealed key for round")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_missing_aggregate_is_noticed(name: str) -> None:
    run = Federation(tiny_config(name))
    run.round()
    refused(run, 1, without(run.open()[1], Kind.AGGREGATE), ProtocolError, "aggregate of round 1 is missing")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_aggregate_of_the_wrong_length_is_refused(name: str) -> None:
    run = Federation(tiny_config(name))
    run.round()
    packet = altered(run.open()[1], Kind.AGGREGATE, payload=np.ones(5, np.float32))
    refused(run, 1, packet, WireError, "5 numbers of type float32, expected")


def test_noise_on_the_line_is_refused() -> None:
    run = Federation(tiny_config("fedrp"))
    packet = run.open()[1]
    refused(run, 1, packet[:-1], WireError, "truncated")
    refused(run, 1, b"hello", WireError, "truncated")


# --- what the server refuses, while the round goes on ----------------------------------------------------------------


BAD_UPLOADS: dict[str, Callable[[bytes], bytes]] = {
    "too short": lambda packet: altered(packet, Kind.UPLOAD, payload=np.ones(3, np.float32)),
    "too long": lambda packet: altered(packet, Kind.UPLOAD, payload=np.ones(500, np.float32)),
    "of bytes": lambda packet: altered(packet, Kind.UPLOAD, payload=wire.raw(b"x" * 12)),
    "of another sender": lambda packet: altered(packet, Kind.UPLOAD, sender=0),
    "of no client": lambda packet: altered(packet, Kind.UPLOAD, sender=77),
    "of a past round": lambda packet: altered(packet, Kind.UPLOAD, round=0),
    "of a later round": lambda packet: altered(packet, Kind.UPLOAD, round=2),
    "of another run": lambda packet: altered(packet, Kind.UPLOAD, context=wire.context_of(b"some other run..", 0x0101)),
    "of another projection": lambda packet: altered(packet, Kind.UPLOAD, context=wire.context_of(Federation.run, 9)),
    "without weight": lambda packet: altered(packet, Kind.UPLOAD, weight=0),
    "with all the weight": lambda packet: altered(packet, Kind.UPLOAD, weight=2**32 - 1),
    "not finite": not_finite,
    "altered on the way": lambda packet: packet[:-1] + bytes([packet[-1] ^ 1]),
    "truncated": lambda packet: packet[:-1],
    "missing": lambda packet: without(packet, Kind.UPLOAD),
    "twice": lambda packet: packet + wire.encode([only(packet, Kind.UPLOAD)]),
    "noise": lambda packet: b"not a message",
    "nothing": lambda packet: b"",
}


@pytest.mark.parametrize("name", ["fedrp", "fedavg"])
@pytest.mark.parametrize("bad", BAD_UPLOADS)
def test_a_bad_upload_is_refused_and_the_round_goes_on_with_the_others(bad: str, name: str) -> None:
    run, clean = Federation(tiny_config(name)), Federation(tiny_config(name))
    replies = run.deliver(run.open())
    report = run.close({**replies, 3: BAD_UPLOADS[bad](replies[3])})
    assert report.participants == (0, 1, 2)
    assert list(report.refused) == [3]
    good = clean.deliver(clean.open())
    clean.close({client: good[client] for client in (0, 1, 2)})
    assert np.array_equal(run.server.aggregates[1], clean.server.aggregates[1])
    assert run.round().participants == (0, 1, 2, 3)  # and next time it is welcome again


def test_a_client_that_comes_back_with_more_data_is_not_welcome() -> None:
    """Its upload of the open round, or masks towards it, were made with the weight that it had."""
    run = Federation(tiny_config("fedavg", weighting="samples"))
    (message,) = wire.decode(hello(run.bench, 2, run.sites[2]))
    more = wire.encode([dataclasses.replace(message, weight=message.weight + 2)])
    with pytest.raises(ProtocolError, match=r"client 2 came back with weight \d+, it had \d+"):
        server_side.welcome(run.server, run.read({2: more}))
    assert server_side.welcome(run.server, run.read({2: wire.encode([message])})) == run.server


def test_an_average_that_overflows_is_said_and_not_kept() -> None:
    run = Federation(tiny_config("fedavg", server_momentum=0.9, rounds=4))
    run.round()
    huge = np.full(run.server.upload_size, 3e38, np.float32)

    def uploads(round_: int) -> dict[int, bytes]:
        return {
            c: wire.encode([Message(Kind.UPLOAD, run.bench.context, round_, c, huge, weight=1)]) for c in run.clients
        }

    run.open()
    run.server, _ = server_side.close_round(run.server, run.tallied(uploads(2)))
    run.open()
    with np.errstate(over="ignore"), pytest.raises(DivergenceError, match=r"round 3: .* too large to be averaged"):
        server_side.close_round(run.server, run.tallied(uploads(3)))


def test_an_upload_of_a_client_that_was_not_asked_is_refused() -> None:
    run = Federation(tiny_config("fedavg", participation=0.5))
    packets = run.open()
    replies = run.deliver(packets)
    stranger = next(client for client in range(4) if client not in packets)
    copied = altered(next(iter(replies.values())), Kind.UPLOAD, sender=stranger)
    report = run.close({**replies, stranger: copied})
    assert report.participants == tuple(packets)
    assert list(report.refused) == [stranger]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_below_the_quorum_the_round_fails_and_can_be_repeated(name: str) -> None:
    run, undisturbed = Federation(tiny_config(name)), Federation(tiny_config(name))
    replies = run.deliver(run.open())
    before = run.server
    with pytest.raises(QuorumError, match=r"round 1: 1 valid uploads, \d needed; client 0: .*truncated"):
        run.close({0: b"?", 1: replies[1]})
    assert run.server is before
    run.round()
    undisturbed.round()
    assert np.array_equal(run.server.aggregates[1], undisturbed.server.aggregates[1])


def test_private_rounds_need_all_whose_noise_was_counted_on() -> None:
    run = Federation(tiny_config("fedavg-dp"))
    replies = run.deliver(run.open())
    with pytest.raises(QuorumError, match="3 valid uploads, 4 needed"):
        run.close({client: replies[client] for client in (0, 1, 2)})


def test_a_round_nobody_answered_fails() -> None:
    run = Federation(tiny_config("fedavg"))
    run.open()
    with pytest.raises(QuorumError, match="0 valid uploads"):
        run.close({})


@pytest.mark.parametrize("length", [0, 79, 80, 1000])
def test_a_dealer_with_the_wrong_number_of_envelopes_does_not_stop_the_others(length: int) -> None:
    run = Federation(tiny_config("fedrp"))
    replies = run.deliver(run.open())
    dealer = next(c for c, reply in replies.items() if wire.messages_of(wire.decode(reply), Kind.DEAL))
    replies[dealer] = altered(replies[dealer], Kind.DEAL, payload=wire.raw(b"x" * length))
    report = run.close(replies)
    assert set(report.participants) >= set(range(4)) - {dealer}
    assert 2 not in run.server.dealt


def test_only_the_chosen_dealer_deals_and_only_the_next_key() -> None:
    run = Federation(tiny_config("fedrp"))
    replies = run.deliver(run.open())
    dealer = next(c for c, reply in replies.items() if wire.messages_of(wire.decode(reply), Kind.DEAL))
    rogue = next(c for c in replies if c != dealer)
    forged = [dataclasses.replace(only(replies[dealer], Kind.DEAL), sender=rogue, round=r) for r in (0, 2, 3)]
    before = run.server.dealt[0]
    run.close({**replies, rogue: replies[rogue] + wire.encode(forged)})
    assert run.server.dealt[0] == before
    assert run.server.dealt[2].dealer == dealer
    assert 3 not in run.server.dealt


def test_if_dealers_do_not_answer_the_next_in_the_roster_is_asked() -> None:
    run = Federation(tiny_config("fedrp", rounds=4))
    new = new_server(run.config, run.run, run.config.dim)
    assert [list(server_side.request_key(new, attempt)) for attempt in range(5)] == [[0], [1], [2], [3], [0]]
    new = server_side.take_keys(new, run.read({2: run.answer(2, server_side.request_key(new, 2)[2])}))
    assert {round_: dealt.dealer for round_, dealt in new.dealt.items()} == {0: 2}
    assert server_side.request_key(new, 3) == {}


# --- clients that come and go ----------------------------------------------------------------------------------------


def play(run: Federation, rounds: int, absent: Callable[[int], set[int]]) -> list[RoundReport]:
    """Rounds in which some clients never hear of the call."""
    reports = []
    for round_ in range(1, rounds + 1):
        packets = {client: packet for client, packet in run.open().items() if client not in absent(round_)}
        reports.append(run.close(run.deliver(packets)))
        for stand_in, request in server_side.request_key(run.server, 0).items():
            run.take_keys({stand_in: run.answer(stand_in, request)})
    return reports


@pytest.mark.parametrize(
    ("name", "momentum"),
    [
        *((name, None) for name in ALGORITHMS),
        *((name, 0.6) for name in ALGORITHMS if "server_momentum" in ALGORITHMS[name].settings),
    ],
)
def test_a_late_joiner_and_one_who_was_away_get_what_they_need(name: str, momentum: float | None) -> None:
    run = Federation(tiny_config(name, rounds=6, quorum=0.5, server_momentum=momentum))
    reports = play(run, 6, lambda round_: ({3} if round_ < 5 else set()) | ({1} if 2 <= round_ <= 4 else set()))
    assert [len(report.participants) for report in reports] == [3, 2, 2, 2, 4, 4]
    models = run.final_models()
    if run.bench.algorithm.delivers == "consensus":
        for model in models.values():
            np.testing.assert_allclose(model, models[0], atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_someone_who_never_came_still_ends_with_a_model(name: str) -> None:
    run = Federation(tiny_config(name, rounds=4, quorum=0.5))
    play(run, 4, lambda _: {2})
    assert run.server.last_seen[2] == 0
    models = run.final_models()
    if run.bench.algorithm.delivers == "consensus":
        np.testing.assert_allclose(models[2], models[0], atol=1e-6)
    else:
        assert np.array_equal(models[2], secret_initial(TinyNet, round_keys(run.config)[0]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_partial_participation_only_the_chosen_are_called(name: str) -> None:
    run = Federation(tiny_config(name, rounds=8, participation=0.5, clients=6))
    called = [report.participants for report in play(run, 8, lambda _: set())]
    assert {len(chosen) for chosen in called} == {3}
    assert len(set(called)) > 1
    assert set().union(*called) == set(range(6))


def test_without_participation_of_the_dealer_another_client_deals() -> None:
    run = Federation(tiny_config("fedrp", rounds=4))
    play(run, 4, lambda round_: {round_ % 4})  # whoever is to deal the next key
    assert set(run.server.dealt) == {4}


def test_a_client_whose_copy_of_the_common_model_differs_is_left_out_and_told_to_rebuild_it() -> None:
    run = Federation(tiny_config("fedrp-subspace", rounds=5))
    run.round()
    spoil(run, 2)
    report = run.round()
    assert report.participants == (0, 1, 3)
    assert "differs" in report.refused[2]
    assert run.round().participants == (0, 1, 2, 3)
    models = run.final_models()
    np.testing.assert_allclose(models[2], models[0], atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"quorum": 1.0},
        {"secure_aggregation": True},
        {"noise_multiplier": 0.5},
        {"noise_multiplier": 0.5, "clip_quantile": 0.5, "clients": 12},
    ],
)
def test_where_everyone_is_needed_a_round_is_given_up_for_a_copy_that_differs(change: dict[str, object]) -> None:
    """The client must not upload twice in one round: it rebuilds its copy, and takes part in the next."""
    run = Federation(tiny_config("fedrp-subspace", rounds=5, projection="sign", server_momentum=0.5, **change))
    everyone = tuple(run.clients)
    run.round()
    spoil(run, 2)
    report = run.round()
    assert report.participants == ()
    assert "differs" in report.refused[2]
    assert report.void == "too few copies of the common model agree"
    assert run.server.latest == 1
    packets = run.open()
    run.answer(2, packets[2])  # its reply is lost, and it is asked again
    assert run.close(run.deliver(packets)).participants == everyone
    run.round()
    models = run.final_models()
    assert all(np.array_equal(model, models[0]) for model in models.values())


def test_a_copy_that_differs_although_it_was_rebuilt_ends_the_run_with_advice() -> None:
    run = Federation(tiny_config("fedrp-subspace", rounds=5, quorum=1.0))
    run.round()
    spoil(run, 2)
    run.round()
    replies = run.deliver(run.open())
    spoiled = altered(replies[2], Kind.UPLOAD, fingerprint=bytes(len(only(replies[2], Kind.UPLOAD).fingerprint)))
    with pytest.raises(ProtocolError, match=r"round 3: the copy of client 2 differs although it was rebuilt: .*sign"):
        run.close({**replies, 2: spoiled})


@pytest.mark.parametrize("spoiled", [0, 1])
def test_where_two_copies_differ_and_nobody_knows_which_is_right_both_are_rebuilt(spoiled: int) -> None:
    run, undisturbed = (Federation(tiny_config("fedrp-subspace", clients=2, rounds=3, quorum=0.5)) for _ in range(2))
    run.round()
    spoil(run, spoiled)
    assert run.round().participants == ()
    assert run.round().participants == (0, 1)
    undisturbed.round()
    models = run.final_models()
    assert np.array_equal(models[0], models[1])
    rebuilt, before = models[0], undisturbed.final_models()[0]
    assert np.linalg.norm(rebuilt - before) < 0.5 * np.linalg.norm(before)  # not the copy that is off by 1 everywhere


def test_a_client_takes_part_in_no_more_rounds_than_privacy_is_accounted_for() -> None:
    run = Federation(tiny_config("fedavg-dp", rounds=2))
    run.round()
    run.round()
    one_more = run.open()
    with pytest.raises(ProtocolError, match="round 3 was asked for, but the run has 2: refused"):
        run.answer(1, one_more[1])


@pytest.mark.parametrize("secure", [False, True])
def test_a_copy_that_differs_is_done_without_where_others_may_still_come(secure: bool) -> None:
    run = Federation(tiny_config("fedrp-subspace", clients=6, rounds=5, quorum=0.5, secure_aggregation=secure))
    run.round()
    spoil(run, 0)
    replies = run.deliver(run.open())
    first = {client: replies[client] for client in range(4 if secure else 3)}
    with pytest.raises(QuorumError):
        run.close(first)
    assert 0 not in run.close(replies).participants


@pytest.mark.parametrize("name", ["fedavg", "fedavg-dp", "fedadmm", "fedrp"])
def test_marks_mean_nothing_where_clients_do_not_make_the_common_model(name: str) -> None:
    run, plain = (Federation(tiny_config(name, quorum=1.0)) for _ in range(2))
    replies = run.deliver(run.open())
    marked = altered(replies[2], Kind.UPLOAD, fingerprint=b"x" * len(only(replies[2], Kind.UPLOAD).fingerprint))
    assert run.close({**replies, 2: marked}).participants == (0, 1, 2, 3)
    plain.round()
    assert np.array_equal(run.server.aggregates[1], plain.server.aggregates[1])


def spoil(run: Federation, client: int) -> None:
    state = run.clients[client].state
    run.clients[client] = dataclasses.replace(run.clients[client], state=state._replace(model=state.model + 1))


def test_a_round_that_is_opened_again_has_the_same_participants_and_asks_the_missing() -> None:
    run = Federation(tiny_config("fedavg", clients=8, participation=0.5, quorum=1.0))
    packets = run.open()
    replies = run.deliver(packets)
    late = min(replies)
    arrived = {client: reply for client, reply in replies.items() if client != late}
    with pytest.raises(QuorumError):
        run.close(arrived)
    for coins in (np.linspace(0, 0.9, 8), np.linspace(0.9, 0, 8)):
        server, again = server_side.open_round(run.server, coins)
        assert server.participants == tuple(packets)
        assert again == packets
    assert outstanding(run.server, run.tallied(arrived)) == {late}
    assert outstanding(run.server, run.tallied({**arrived, late: b"?"})) == {late}
    assert outstanding(run.server, run.tallied(replies)) == set()


# --- what the server learns ------------------------------------------------------------------------------------------


def learned_by(run: Federation, rounds: int = 3) -> tuple[set[bytes], list[bytes]]:
    """Every run of 16 bytes that reached the server or is kept by it, and all models clients ever had, as bytes."""
    models = []
    for _ in range(rounds):
        run.round()
        models += [client_state.state.model.tobytes() for client_state in run.clients.values()]
    kept = [pickle.dumps(getattr(run.server, field.name)) for field in dataclasses.fields(run.server)]
    return all_windows([*run.received, *kept]), models


@pytest.mark.parametrize("projection", ["gaussian", "sign", "hadamard"])
@pytest.mark.parametrize("name", SECRET)
def test_no_key_no_model_and_no_matrix_reaches_the_server(name: str, projection: str) -> None:
    config = tiny_config(name, projection=projection)
    run = Federation(config)
    seen, models = learned_by(run)
    keys = round_keys(config)
    identities = [site.entropy.secret("identity") for site in run.sites.values()]
    for key in (*keys, *identities, *(key.derive("projection") for key in keys)):
        assert not windows(key.reveal()) & seen
    assert not windows(secret_initial(TinyNet, keys[0]).tobytes()) & seen
    for model in models:
        assert not windows(model) & seen
    units = np.eye(config.dim, dtype=np.float32)
    for key in keys:
        matrix = make_projection(projection, key, len(models[0]) // 4, config.dim).adjoint(units)
        for row in matrix:
            # Zeros are everywhere, and next to them every other byte now and then: random ones of checksums.
            telling = {part for part in windows(row.tobytes()) if sum(map(bool, part)) >= 4}
            assert not telling & seen


def test_the_search_finds_what_is_there() -> None:
    """FedAvg sends models in the clear, so the same search must find those that it delivers."""
    run = Federation(tiny_config("fedavg"))
    seen, _ = learned_by(run)
    assert all(windows(model.tobytes()) <= seen for model in run.final_models().values())


@pytest.mark.parametrize("name", SECRET)
def test_the_relayed_envelopes_do_hold_the_keys(name: str) -> None:
    """Opened by their recipient, so what the server relays is the real thing."""
    run = Federation(tiny_config(name))
    run.open()
    for client, site in run.sites.items():
        dealer, envelopes = run.server.dealt[0]
        place = Place(run.run, 0, dealer, client, run.bench.tag, run.roster.digest, "x25519")
        verify(envelopes[client], run.roster.keys[dealer], place)
        secret = site.identity.open(envelopes[client], place)
        assert [round_key(secret, 0, secret, round_) for round_ in (0, 1)] == round_keys(run.config)[:2]


@pytest.mark.parametrize("name", SECRET)
def test_what_a_client_keeps_between_messages_holds_no_opened_key(name: str) -> None:
    run = Federation(tiny_config(name))
    for _ in range(2):
        run.round()
    for client_state in run.clients.values():
        kept = pickle.dumps(client_state)
        assert not any(key.reveal() in kept for key in round_keys(run.config))
        assert Identity.__name__.encode() not in kept
