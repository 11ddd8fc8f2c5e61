"""Secure aggregation: the sum is right, everything else is noise, and no server gets two sums that differ by one."""

import dataclasses
import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from fedrp import Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression import grid
from fedrp.crypto.masks import Masker
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.crypto.sizes import ENVELOPE_BYTES, split
from fedrp.errors import ConfigError, ProtocolError, QuorumError, WireError
from fedrp.privacy.events import Adversary
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.server_state import MaskEntry, new_server
from fedrp.protocol.tally import take_correction
from fedrp.protocol.wire import Kind, Message
from fedrp.simulation.result import RoundRecord
from fedrp.storage.client_state import packed_clients, read_clients
from helpers import Federation, TinyNet, all_windows, blobs, tiny_config, windows

PARAMETERS = 83


def secure(name: str = "fedrp-subspace", /, **changes: object) -> Federation:
    return Federation(tiny_config(name, secure_aggregation=True, **changes))


def words(packet: bytes, kind: Kind = Kind.UPLOAD) -> np.ndarray:
    (message,) = wire.messages_of(wire.decode(packet), kind)
    assert message.payload.dtype == np.dtype("<u4")
    return message.payload.view(np.uint32)


def request(run: Federation, left_out: tuple[int, ...], round_: int = 1) -> bytes:
    """A recovery that a server may ask for, honest or not."""
    payload = np.array(left_out, np.uint32)
    return wire.encode([Message(Kind.RECOVER, run.bench.context, round_, wire.SERVER, payload)])


def refused(run: Federation, client: int, packet: bytes, why: str) -> None:
    before = run.clients[client]
    with pytest.raises((ProtocolError, WireError), match=why):
        run.answer(client, packet)
    assert run.clients[client] is before


# --- masks -----------------------------------------------------------------------------------------------------------


def maskers(run: Federation, clients: tuple[int, ...], **changes: object) -> dict[int, Masker]:
    call = Cohort(clients, (1,) * len(clients))
    peers = np.stack([np.frombuffer(site.mask_key.public, np.uint8) for site in run.sites.values()])
    key = SecretKey(b"round key".ljust(32))
    made = {c: Masker(run.sites[c].mask_key, peers, run.roster.digest, c, run.run, 1, call, b"", key) for c in clients}
    return {c: dataclasses.replace(masker, **changes) for c, masker in made.items()}


SIX = Federation(tiny_config("fedavg", clients=6))
ZERO = np.zeros(1000, np.uint32)


def test_masks_cancel_in_the_sum_of_all_and_in_no_other() -> None:
    uploads = {c: masker.masked(ZERO) for c, masker in maskers(SIX, (0, 1, 3, 4, 5)).items()}
    for size in range(1, 6):
        for chosen in itertools.combinations(uploads, size):
            total = np.sum([uploads[c] for c in chosen], axis=0, dtype=np.uint32)
            assert (not total.any()) == (size == 5)


@pytest.mark.parametrize(
    "change",
    [
        {"run": bytes(16)},
        {"round": 2},
        {"transcript": b"another aggregate"},
        {"round_key": None},
        {"round_key": SecretKey(bytes(32))},
        {"cohort": Cohort((0, 1, 2), (1, 1, 2))},
        {"cohort": Cohort((0, 1, 2, 3), (1, 1, 1, 1))},
        {"roster": Federation(tiny_config("fedavg", clients=6, seed=1)).roster.digest},
    ],
)
def test_whoever_was_told_anything_else_has_other_masks(change: dict[str, object]) -> None:
    honest = maskers(SIX, (0, 1, 2))
    misled = dataclasses.replace(honest[1], **change)
    total = honest[0].masked(ZERO) + misled.masked(ZERO) + honest[2].masked(ZERO)
    assert np.mean(total == 0) < 0.01


def test_a_masked_upload_is_uniform() -> None:
    """Whatever is sent; also the answer to a recovery."""
    masker = maskers(SIX, tuple(range(6)))[2]
    for sent in (masker.masked(np.zeros(50_000, np.uint32)), masker.correction((0, 5), 50_000)):
        for part in np.split(sent.view(np.uint8).reshape(-1, 4), 4, axis=1):
            assert chisquare(np.bincount(part.ravel(), minlength=256)).pvalue > 1e-6
        assert abs(np.corrcoef(sent[:-1], sent[1:])[0, 1]) < 0.03


# --- whole rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"weighting": "samples"}, {"participation": 0.75, "clients": 6}])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_result_is_the_plain_one_up_to_rounding(name: str, change: dict[str, object], task: Task) -> None:
    if name == "fedavg-dp" and "weighting" in change:
        change = {"clip_quantile": 0.5, "clients": 6}
    if ALGORITHMS[name].server.memory == "own" and "participation" in change:
        change = {"clients": 6}
    plain = simulate(tiny_config(name, **change), task)
    masked = simulate(tiny_config(name, secure_aggregation=True, **change), task)
    # With noise, numbers are rounded to the same grid whether or not they are masked.
    np.testing.assert_allclose(masked.model, plain.model, rtol=0, atol=0 if plain.config.private else 2e-5)
    assert masked.as_json()["bytes_up"] == plain.as_json()["bytes_up"]  # one exchange, and no byte more


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_dropouts_a_run_ends_well_and_repeats(name: str, task: Task) -> None:
    config = tiny_config(name, clients=9, rounds=4, dropout=0.15, quorum=0.4, seed=5, secure_aggregation=True)
    result = simulate(config, task)
    dropped = [record.dropped for record in result.records]
    assert max(dropped) >= 2
    assert 1 not in dropped  # never a sum without a single client
    assert simulate(config, task).model.tobytes() == result.model.tobytes()


def test_stopped_after_any_round_a_masked_run_resumes_to_the_same_end(task: Task, tmp_path: Path) -> None:
    config = tiny_config("fedrp-subspace", clients=9, rounds=4, dropout=0.15, seed=5, secure_aggregation=True)
    config = dataclasses.replace(config, weighting="samples", sealing="hybrid")
    undisturbed = simulate(config, task)
    for last in (1, 3):

        def stop(record: RoundRecord, _model: object, last: int = last) -> None:
            if record.round == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            simulate(config, task, out=tmp_path / str(last), on_round=stop)
        resumed = simulate(config, task, out=tmp_path / str(last), resume=True)
        assert resumed.model.tobytes() == undisturbed.model.tobytes()
        assert [record.traffic for record in resumed.records] == [record.traffic for record in undisturbed.records]


def test_the_sum_of_those_who_came_is_exact() -> None:
    """The aggregate of a recovered round is the plain one of the same clients."""
    run, plain = secure("fedavg", clients=6), Federation(tiny_config("fedavg", clients=6))
    replies = run.deliver(run.open())
    report = run.close({c: replies[c] for c in (0, 1, 3, 4, 5)})
    assert report.participants == (0, 3, 4, 5)
    assert "left out" in report.refused[1]
    replies = plain.deliver(plain.open())
    plain.close({c: replies[c] for c in report.participants})
    np.testing.assert_allclose(run.server.aggregates[1], plain.server.aggregates[1], atol=2e-6)
    assert run.round().participants == tuple(range(6))


def test_a_client_whose_model_differs_is_left_out_with_another() -> None:
    run = secure(clients=6, rounds=4)
    run.round()
    state = run.clients[2].state
    run.clients[2] = dataclasses.replace(run.clients[2], state=state._replace(model=state.model + 1))
    assert run.round().participants == (0, 1, 4, 5)
    assert run.round().participants == tuple(range(6))
    models = run.final_models()
    for model in models.values():
        np.testing.assert_allclose(model, models[0], atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_plain_vector_reaches_the_server(name: str) -> None:
    masked, plain = secure(name), Federation(tiny_config(name))
    vectors = [wire.decode(reply)[0].payload.tobytes() for reply in plain.deliver(plain.open()).values()]
    assert all(vector in b"".join(plain.received) for vector in vectors)  # the search finds what is there
    masked.deliver(masked.open())
    seen = all_windows(masked.received)
    assert not any(windows(vector) & seen for vector in vectors)
    scale = grid.finest(64.0, Cohort((0, 1, 2, 3), (1, 1, 1, 1)))
    for vector in vectors:
        encoded, _ = grid.encode(np.frombuffer(vector, np.float32), scale, 1)
        assert not {part for part in windows(encoded.tobytes()) if any(part)} & seen


def test_a_thousand_numbers_fit_into_the_promised_bytes(task: Task) -> None:
    config = tiny_config("fedrp-subspace", dim=83, secure_aggregation=True)
    assert simulate(config, task).as_json()["bytes_up"] == 28 + 4 * 83  # so 4,028 bytes at m = 1,000


def test_numbers_beyond_the_range_are_cut_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    run = secure("fedavg", secure_range=0.1)
    with caplog.at_level(logging.WARNING):
        run.round()
    assert "numbers beyond +-0.1 were cut off before masking" in caplog.text
    assert np.abs(run.server.aggregates[1]).max() <= 0.1 + 1e-6
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        secure("fedavg").round()
    assert not caplog.text


# --- what a client refuses -------------------------------------------------------------------------------------------


def recalled(run: Federation, packet: bytes, clients: tuple[int, ...], weights: tuple[int, ...] | None = None) -> bytes:
    """A packet that announces other participants."""
    payload = Cohort(clients, weights or (1,) * len(clients)).payload()
    return wire.encode(
        dataclasses.replace(m, payload=payload, weight=len(clients)) if m.kind is Kind.ROUND else m
        for m in wire.decode(packet)
    )


@pytest.mark.parametrize(
    ("clients", "weights", "why"),
    [
        ((1,), None, "1 participants: secure aggregation needs at least 3"),
        ((1, 2), None, "2 participants"),
        ((1, 2, 3), None, "3 participants announced, the config says 4 to 6"),
        ((0, 2, 3, 4, 5), None, "client 1 is not in the list"),
        ((0, 1, 2, 3, 4, 6), None, "not valid"),
        ((0, 1, 1, 2, 3, 4), None, "not valid"),
        ((1, 0, 2, 3, 4, 5), None, "not valid"),
        ((0, 1, 2, 3, 4, 5), (1, 2, 1, 1, 1, 1), "weights are not valid"),
        ((0, 1, 2, 3, 4, 5), (2, 1, 1, 1, 1, 1), "weights are not valid"),
        ((0, 1, 2, 3, 4, 5), (0, 1, 1, 1, 1, 1), "weights are not valid"),
        ((0, 1, 2, 3, 4, 5), (1, 1, 1, 1, 1), "not valid"),
        ((), (), "not valid"),
    ],
)
def test_a_list_of_participants_that_could_expose_a_client_is_refused(
    clients: tuple[int, ...], weights: tuple[int, ...] | None, why: str
) -> None:
    run = secure("fedavg", clients=6)
    refused(run, 1, recalled(run, run.open()[1], clients, weights), why)


def test_a_count_that_is_not_that_of_the_list_is_refused() -> None:
    """Clients would add too little noise."""
    run = secure("fedavg-dp", clients=6)
    packet = run.open()[1]
    lied = [dataclasses.replace(m, weight=600) if m.kind is Kind.ROUND else m for m in wire.decode(packet)]
    refused(run, 1, wire.encode(lied), "600 participants announced, 6 listed")


def test_a_round_has_one_list_and_asked_again_the_same_bytes_are_sent() -> None:
    run = secure("fedavg", clients=6, sampling="poisson")
    packet = run.open()[1]
    reply = run.answer(1, packet)
    assert run.answer(1, packet) == reply
    refused(run, 1, recalled(run, packet, (0, 1, 2, 3, 4)), "another list of participants for round 1")


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        ((0,), "leaves out a single client"),
        ((), "leaves out a single client"),
        ((0, 1), "not valid"),
        ((0, 0), "not valid"),
        ((5, 0), "not valid"),
        ((0, 9), "not valid"),
        ((0, 3, 4), "would sum 3 of 6 clients, 4 needed"),
        ((0, 2, 3, 4, 5), "would sum 1 of 6 clients"),
    ],
)
def test_a_recovery_that_could_expose_someone_is_refused(left_out: tuple[int, ...], why: str) -> None:
    run = secure("fedavg", clients=6)
    run.deliver(run.open())
    refused(run, 1, request(run, left_out), why)


def test_a_recovery_below_the_quorum_is_refused() -> None:
    run = secure("fedavg", clients=6, quorum=0.8)
    run.deliver(run.open())
    refused(run, 1, request(run, (0, 2)), "would sum 4 of 6 clients, 5 needed")


def test_a_client_helps_in_one_recovery_of_a_round_and_says_the_same_again() -> None:
    run = secure("fedavg", clients=6)
    run.deliver(run.open())
    answer = run.answer(1, request(run, (0, 2)))
    assert run.answer(1, request(run, (0, 2))) == answer
    for other in [(0, 3), (3, 4)]:
        refused(run, 1, request(run, other), "helped in another recovery of round 1")


def test_a_recovery_of_any_other_round_is_refused() -> None:
    run = secure("fedavg", clients=6)
    refused(run, 1, request(run, (0, 2)), "has no masked upload in round 1")
    run.round()
    run.round()
    for round_ in (0, 1, 3):
        refused(run, 1, request(run, (0, 2), round_), f"has no masked upload in round {round_}")
    plain = Federation(tiny_config("fedavg", clients=6))
    plain.round()
    refused(plain, 1, request(plain, (0, 2)), "has no masked upload")


def test_the_rules_outlive_the_process(tmp_path: Path) -> None:
    """All that a client must remember is in its file."""
    run = secure("fedrp-subspace", clients=6)
    packet = run.open()[1]
    run.answer(1, packet)
    run.answer(1, request(run, (0, 2)))
    client_state = run.clients[1]
    (tmp_path / "state").write_bytes(packed_clients(run.run, [client_state]))
    (restored,) = read_clients(tmp_path / "state", run.run)
    assert dataclasses.replace(restored, state=client_state.state) == client_state
    run.clients[1] = restored
    refused(run, 1, request(run, (0, 3)), "helped in another recovery")
    assert run.answer(1, packet) == client_state.reply
    run.clients[1] = dataclasses.replace(restored, reply=b"")  # even if the reply was lost
    refused(run, 1, packet, "past round 1")


def test_a_client_that_is_told_to_rebuild_remembers_the_rules() -> None:
    run = secure("fedrp-subspace", clients=6, sampling="poisson")
    packet = run.open()[1]
    run.answer(1, packet)
    run.answer(1, request(run, (0, 2)))
    rebuild = wire.encode([Message(Kind.REBUILD, run.bench.context, 1, wire.SERVER, wire.EMPTY)])
    refused(run, 1, rebuild + recalled(run, packet, (0, 1, 2, 3, 4)), "another list of participants")
    refused(run, 1, rebuild + request(run, (0, 3)), "has no masked upload in round 1 to be recovered")


# --- what a lying server gets ----------------------------------------------------------------------------------------


def vectors_of(run: Federation, plain: Federation) -> dict[int, np.ndarray]:
    """What the clients would send unmasked, in grid steps."""
    scale = grid.finest(64.0, Cohort(tuple(run.clients), (1,) * len(run.clients)), grid.HEADROOM)
    replies = plain.deliver(plain.open())
    return {c: grid.encode(wire.decode(r)[0].payload, scale, 1)[0] for c, r in replies.items()}


def near(found: np.ndarray, true: np.ndarray) -> bool:
    return bool((np.abs((found - true).view(np.int32)) <= 8).all())


def test_with_late_uploads_it_gets_the_sum_of_those_left_out_and_not_less() -> None:
    run = secure("fedavg", clients=6)
    true = vectors_of(run, Federation(tiny_config("fedavg", clients=6)))
    uploads = {c: words(reply) for c, reply in run.deliver(run.open()).items()}  # all of them come, some late
    answers = {c: words(run.answer(c, request(run, (2, 3))), Kind.CORRECTION) for c in (0, 1, 4, 5)}
    correction = np.sum(list(answers.values()), axis=0, dtype=np.uint32)
    assert near(sum(uploads[c] for c in (0, 1, 4, 5)) - correction, sum(true[c] for c in (0, 1, 4, 5)))
    assert near(uploads[2] + uploads[3] + correction, true[2] + true[3])  # the price, as stated
    for single in (2, 3):
        assert not near(uploads[single] + correction, true[single])
        assert not any(near(uploads[single] + answer, true[single]) for answer in answers.values())


def test_different_lists_to_different_survivors_give_it_nothing() -> None:
    """In pairs, "your partner and client 6 are missing": the bare masks would add up to those of client 6."""
    run = secure("fedavg", clients=7)
    true = vectors_of(run, Federation(tiny_config("fedavg", clients=7)))
    uploads = {c: words(reply) for c, reply in run.deliver(run.open()).items()}
    pairs = {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4}
    answers = [words(run.answer(c, request(run, (p, 6))), Kind.CORRECTION) for c, p in pairs.items()]
    exposed = uploads[6] + np.sum(answers, axis=0, dtype=np.uint32)
    assert not near(exposed, true[6])
    assert np.mean(np.abs((exposed - true[6]).view(np.int32)) < 2**24) < 0.1  # uniform

    made = maskers(
        run, tuple(range(7)), round_key=None, transcript=run.clients[0].transcript
    )  # the attack is real: without the inner masks it would work
    bare = [
        m._added(np.zeros(len(true[6]), np.uint32), (p, 6), b"upload") for (c, p) in pairs.items() for m in [made[c]]
    ]
    assert near(uploads[6] + np.sum(bare, axis=0, dtype=np.uint32), true[6])


def with_mark(upload: bytes, other: bytes) -> bytes:
    """An upload with the transcript of another one."""
    mark = wire.decode(other)[0].fingerprint
    first, *rest = wire.decode(upload)
    return wire.encode([dataclasses.replace(first, fingerprint=mark), *rest])


def with_aggregates(packet: bytes, change: float) -> bytes:
    """The packet of a server that lies about aggregates."""
    return wire.encode(
        dataclasses.replace(m, payload=m.payload + np.float32(change)) if m.kind is Kind.AGGREGATE else m
        for m in wire.decode(packet)
    )


def cancel(uploads: dict[int, bytes]) -> bool:
    """Whether the masks cancel in the sum: then it is near zero, else uniform."""
    total = np.sum([words(wire.encode(wire.decode(u)[:1])) for u in uploads.values()], axis=0, dtype=np.uint32)
    return bool(np.mean(np.abs(total.view(np.int32)) < 2**28) > 0.6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_that_were_sent_different_aggregates_are_not_summed(name: str) -> None:
    """Else it could send all but one a model whose update it knows, and would find the update of the one in the sum."""
    run = secure(name, clients=6, rounds=3)
    run.round()
    packets = run.open()
    uploads = run.deliver({**packets, 2: with_aggregates(packets[2], 1e-3)})
    assert run.deliver(packets)[3] == uploads[3]
    assert not cancel(uploads)


@pytest.mark.parametrize("lie", [0.0, 1e-3])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].server.memory != "history"])
def test_one_false_aggregate_in_an_earlier_round_is_remembered_where_it_still_counts(name: str, lie: float) -> None:
    """The dual of FedADMM and FedRP rests on every aggregate; FedAvg trains from the latest alone."""
    run = secure(name, clients=6, rounds=4)
    run.round()
    packets = run.open()
    uploads = run.deliver({**packets, 2: with_aggregates(packets[2], lie)})
    if lie and ALGORITHMS[name].server.memory == "own":
        uploads = uploads | {2: with_mark(uploads[2], uploads[3])}  # the server does not mind
    if lie:  # and adds up what it likes
        honest = secure(name, clients=6, rounds=4)
        honest.round()
        uploads = honest.deliver(honest.open())
    run.close(uploads)
    assert cancel(run.deliver(run.open())) == (lie == 0.0 or ALGORITHMS[name].server.memory == "aggregate")


def test_the_end_cannot_be_announced_in_the_middle_to_slip_in_an_aggregate() -> None:
    run = secure("fedrp-subspace", clients=6, rounds=4)
    run.round()
    end = server_side.finish(run.server, (2,))[2]
    before = run.clients[2]
    assert run.answer(2, end) == b""
    assert (run.clients[2].since, run.clients[2].state) == (before.since, before.state)


@pytest.mark.parametrize("lie", [False, True])
def test_clients_that_were_ever_given_different_keys_are_not_summed(lie: bool) -> None:
    """Else a dealer who works for the server could turn all models but one into nonsense."""
    run = secure("fedrp-subspace", clients=6, rounds=4)
    run.round()
    packets = run.open()
    if lie:
        ask = Message(Kind.DEAL_REQUEST, run.bench.context, 2, wire.SERVER, wire.EMPTY)
        (dealt,) = wire.decode(run.answer(5, wire.encode([ask])))
        own = wire.raw(split(dealt.payload.tobytes(), ENVELOPE_BYTES["x25519"], 6, "envelopes")[2])
        packets[2] = wire.encode(
            dataclasses.replace(m, sender=5, payload=own) if m.kind is Kind.SEALED else m
            for m in wire.decode(packets[2])
        )
    run.close(run.deliver(packets))
    run.server = dataclasses.replace(run.server, differing=frozenset(), last_seen=(2,) * 6)  # else: rebuild
    assert cancel(run.deliver(run.open())) != lie


def test_only_a_client_with_a_common_model_rebuilds_its_state() -> None:
    """Elsewhere its own past would be lost, and a server could choose whose."""
    run = secure("fedadmm", clients=6, rounds=4)
    run.round()
    before = run.clients[2].state
    run.answer(2, wire.encode([Message(Kind.REBUILD, run.bench.context, 2, wire.SERVER, wire.EMPTY)]))
    assert run.clients[2].state is before


def comes_and_goes(run: Federation, absences: tuple[set[int], ...]) -> None:
    """Rounds in which some are away; if the dealer is, another one deals."""
    for away in absences:
        packets = run.open()
        run.close(run.deliver({c: packet for c, packet in packets.items() if c not in away}))
        for attempt in range(len(run.clients)):
            for stand_in, wanted in server_side.request_key(run.server, attempt).items():
                run.take_keys({stand_in: run.answer(stand_in, wanted)})


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].server.memory != "own"])
def test_the_transcript_is_the_same_for_all_who_were_told_the_same(name: str) -> None:
    """Also for one that came late and one that was away."""
    run = secure(name, clients=7, rounds=6, quorum=0.5)  # with shared noise nobody may be away, unless it is said
    comes_and_goes(run, ({6, 1}, {6, 1}, {6, 2}, set()))
    assert len({client_state.transcript for client_state in run.clients.values()}) == 1
    assert run.round().participants == tuple(range(7))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].server.memory == "own"])
def test_who_keeps_state_of_its_own_and_missed_a_round_is_not_summed_with_the_others_again(name: str) -> None:
    run = secure(name, clients=7, rounds=6, quorum=0.5)
    comes_and_goes(run, (set(), {6, 1}))
    assert set(run.open()) == {0, 2, 3, 4, 5}
    assert run.round().participants == (0, 2, 3, 4, 5)
    # A server that asks it all the same gets nothing: its masks are others.
    run.server = dataclasses.replace(run.server, participants=tuple(range(7)))
    uploads = {c: run.answer(c, packet) for c, packet in run.open().items()}
    assert not cancel(uploads)
    report = run.close(uploads)
    assert report.participants == (0, 2, 3, 4, 5)
    assert all("not that of the others" in report.refused[c] for c in (1, 6))


def test_the_transcript_survives_that_a_client_rebuilds_its_model() -> None:
    run = secure("fedrp-subspace", clients=7, rounds=6)
    comes_and_goes(run, ({6, 1}, set()))
    run.clients[3] = dataclasses.replace(
        run.clients[3], state=run.clients[3].state._replace(model=run.clients[3].state.model + 1)
    )
    assert 3 not in run.round().participants
    assert 3 in run.round().participants
    assert len({client_state.transcript for client_state in run.clients.values()}) == 1


def test_a_recovery_that_not_all_survivors_answer_gives_nothing() -> None:
    run = secure("fedavg", clients=6)
    true = vectors_of(run, Federation(tiny_config("fedavg", clients=6)))
    uploads = {c: words(reply) for c, reply in run.deliver(run.open()).items()}
    answers = {c: words(run.answer(c, request(run, (2, 3))), Kind.CORRECTION) for c in (0, 1, 4)}
    total = sum(uploads[c] for c in (0, 1, 4)) - np.sum(list(answers.values()), axis=0, dtype=np.uint32)
    assert not near(total, sum(true[c] for c in (0, 1, 4)))


# --- the honest server -----------------------------------------------------------------------------------------------


def test_too_few_for_a_recovery_and_the_round_is_repeated_with_the_same_bytes() -> None:
    run = secure("fedavg")
    packets = run.open()
    replies = run.deliver(packets)
    with pytest.raises(QuorumError, match="round 1: 2 of 4 clients would be summed, 3 needed"):
        run.close({c: replies[c] for c in (0, 1, 2)})
    again = run.open()
    assert again == packets
    assert run.deliver(again) == replies
    assert run.close(replies).participants == (0, 1, 2, 3)


def test_a_recovery_once_begun_stays_the_same_whoever_comes_late() -> None:
    run = secure("fedavg", clients=6)
    replies = run.deliver(run.open())
    run.server, requests = server_side.recover(run.server, run.tallied({c: replies[c] for c in range(5)}))
    assert set(requests) == {0, 2, 3, 4}
    run.server, again = server_side.recover(run.server, run.tallied(replies))
    assert again == requests
    answers = run.deliver(requests)
    tally = run.tallied(replies, {**answers, 3: b""})
    with pytest.raises(QuorumError, match="client 3 did not help to recover it"):
        server_side.close_round(run.server, tally)
    run.server, rest = server_side.recover(run.server, tally)
    assert set(rest) == {3}  # what the others answered is kept
    take_correction(run.server, tally, 3, answers[3])
    run.server, report = server_side.close_round(run.server, tally)
    assert report.participants == (0, 2, 3, 4)


BAD = {
    "float": lambda m: dataclasses.replace(m, payload=np.ones(m.payload.size, np.float32)),
    "short": lambda m: dataclasses.replace(m, payload=m.payload[:-1]),
    "weight": lambda m: dataclasses.replace(m, weight=9),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_masked_upload_is_left_out(bad: str) -> None:
    run = secure("fedavg", clients=6)
    replies = run.deliver(run.open())
    replies[2] = wire.encode([BAD[bad](wire.decode(replies[2])[0])])
    report = run.close(replies)
    assert report.participants == (0, 3, 4, 5)
    assert set(report.refused) == {1, 2}


def test_the_weights_must_be_known_before_masks_are_made() -> None:
    run = secure("fedavg", weighting="samples")
    run.server = dataclasses.replace(run.server, weights=(20, 20, 0, 20))
    with pytest.raises(ProtocolError, match="client 2 has not said hello"):
        run.open()


def test_a_dealer_that_is_left_out_still_deals() -> None:
    run = secure("fedrp-subspace", clients=6)
    replies = run.deliver(run.open())
    assert run.close({c: replies[c] for c in (1, 2, 3, 4, 5)}).participants == (2, 3, 4, 5)
    assert run.server.dealt[2].dealer == 1


# --- what is claimed -------------------------------------------------------------------------------------------------


def test_shared_noise_holds_against_the_server_if_it_sees_sums_only(task: Task) -> None:
    plain = simulate(tiny_config("fedavg-dp"), task).privacy
    masked = simulate(tiny_config("fedavg-dp", secure_aggregation=True), task).privacy
    of = {(secure, item.adversary): item for secure, items in ((0, plain), (1, masked)) for item in items}
    for adversary in (Adversary.SERVER, Adversary.SERVER_AND_CLIENT):
        assert of[0, adversary].epsilon is None
        assert of[1, adversary].epsilon == of[0, Adversary.CLIENTS].epsilon
        assert any("masks hide single uploads" in text for text in of[1, adversary].assumptions)
        assert any("rounding before masking" in text for text in of[1, adversary].assumptions)
        assert not any("discards unread" in text for text in of[1, adversary].assumptions)
    partial = simulate(tiny_config("fedavg-dp", secure_aggregation=True, quorum=0.9, clients=6), task).privacy
    assert any("discards unread" in text for text in partial[0].assumptions)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedavg-dp"])
def test_without_noise_nothing_is_claimed(name: str) -> None:
    config = resolved(tiny_config(name, secure_aggregation=True), PARAMETERS)
    for release in ALGORITHMS[name].releases(config):
        assert "NonPrivate" not in repr(release.event)  # nothing is in the clear
        assert "noise_multiplier" not in repr(release.event)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("fwc", {}, "secure_aggregation=True does nothing with algorithm 'fwc'"),
        ("fedavg", {"clients": 2}, "2 participants a round are too few"),
        ("fedavg", {"clients": 10, "participation": 0.2}, "2 participants a round are too few"),
        ("fedavg-dp", {"noise_multiplier": 1e-9}, "noise_multiplier=1e-09 is too small"),
        ("fedavg", {"secure_range": 0.0}, "secure_range=0.0 is not valid"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, change: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolved(tiny_config(name, secure_aggregation=True, **change), PARAMETERS)


def test_coins_never_choose_fewer_than_can_be_summed() -> None:
    config = resolved(tiny_config("fedavg", clients=8, participation=0.1, sampling="poisson", rounds=30), PARAMETERS)
    masked = dataclasses.replace(config, secure_aggregation=True)
    for round_ in range(30):
        coins = np.random.default_rng(round_).random(8)
        greeted = {client: MaskEntry(1, b"") for client in range(8)}
        servers = [new_server(c, bytes(16), 1) for c in (config, masked)]
        few, enough = (
            server_side.open_round(dataclasses.replace(server, mask_keys=greeted), coins)[0].participants
            for server in servers
        )
        assert len(few) >= 1
        assert len(enough) >= 3
        assert set(few) <= set(enough)


def test_a_weighted_mean_of_unequal_clients_is_that_of_all_examples() -> None:
    x, y = blobs(60)
    parts = [(x[:30], y[:30]), (x[30:50], y[30:50]), (x[50:], y[50:])]
    config = tiny_config("fedavg", clients=3, batch_size=100, momentum=0.0, weighting="samples")
    masked = simulate(dataclasses.replace(config, secure_aggregation=True), Task(TinyNet, parts, (x, y)))
    union = simulate(dataclasses.replace(config, clients=1), Task(TinyNet, [(x, y)], (x, y)))
    np.testing.assert_allclose(masked.model, union.model, atol=2e-6)
