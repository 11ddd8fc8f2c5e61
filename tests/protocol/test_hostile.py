"""Attacks that once worked, each against the code as it is: they fail, with the message that a user sees."""

import contextlib
import dataclasses
import hashlib
import struct
import tracemalloc

import numpy as np
import pytest

from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression import grid
from fedrp.compression.grid import HEADROOM
from fedrp.crypto.masks import Masker, extended
from fedrp.crypto.sealing import Identity, MaskKey, Place, SiteEntropy, mask_key_of, seal_to_all, signed_mask_key
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.crypto.sizes import ENVELOPE_BYTES, split
from fedrp.errors import FedRPError, ProtocolError, WireError
from fedrp.learning.initial import public_initial
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.client import finished
from fedrp.protocol.wire import Kind, Message
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_identity
from helpers import Federation, TinyNet, tiny_config


def secure(name: str, **changes: object) -> Federation:
    return Federation(tiny_config(name, secure_aggregation=True, **changes))


def message(run: Federation, kind: Kind, round_: int, payload: wire.Payload = wire.EMPTY, weight: int = 0) -> Message:
    """What a server of its own making would send."""
    return Message(kind, run.bench.context, round_, wire.SERVER, payload, weight)


def words(reply: bytes) -> np.ndarray:
    (upload,) = wire.messages_of(wire.decode(reply), Kind.UPLOAD)
    return upload.payload.view(np.uint32)


def decoded(run: Federation, replies: dict[int, bytes]) -> np.ndarray:
    """What the sum of masked uploads says, if their masks cancel."""
    total = np.sum([words(reply) for reply in replies.values()], axis=0, dtype=np.uint32)
    call = Cohort(tuple(replies), (1,) * len(replies))
    return total.view(np.int32) * grid.finest(64.0, call, HEADROOM).step


def cohort_of(run: Federation, round_: int) -> Message:
    everyone = tuple(run.clients)
    return message(run, Kind.ROUND, round_, Cohort(everyone, (1,) * len(everyone)).payload(), len(everyone))


def introductions(run: Federation, client: int) -> list[Message]:
    """The mask keys of all, as the honest server relays them."""
    return wire.messages_of(wire.decode(run.open()[client]), Kind.MASK_KEYS)


# --- 1. a lying server that would single out one client ---------------------------------------------------------------


def test_an_outcome_of_the_set_up_is_refused() -> None:
    """Round 0 has none: a made-up one would be applied by those who are sent it."""
    run = secure("fedadmm", clients=5, rounds=5, grad_clip=1.0)
    poison = np.full(run.server.upload_size, 1.0, np.float32)
    for kind, payload in ((Kind.AGGREGATE, poison), (Kind.VOID, wire.EMPTY)):
        packet = wire.encode([*introductions(run, 1), message(run, kind, 0, payload), cohort_of(run, 1)])
        with pytest.raises(ProtocolError, match="an outcome of round 0 before round 1: refused"):
            run.answer(1, packet)


def test_digests_of_rounds_that_a_client_sat_out_are_no_message_any_more() -> None:
    """A client vouches for what it applied and for nothing else."""
    assert "DIGESTS" not in Kind.__members__


def test_a_server_that_poisons_the_duals_of_all_but_one_does_not_find_the_update_of_the_one() -> None:
    """FedADMM. All but the victim take part in round 1; in round 2, made-up aggregates send their duals far away, so
    that in round 3 their uploads would be known. The victim takes part in round 3 only.
    """
    run = secure("fedadmm", clients=5, rounds=5, grad_clip=1.0)
    start = public_initial(TinyNet, RunSeed(0))
    poison = start.copy()
    poison[0] = 60.0  # within what honest clients could send
    for client in range(1, 5):
        run.answer(client, wire.encode([*introductions(run, client), cohort_of(run, 1)]))
        run.answer(client, wire.encode([message(run, Kind.AGGREGATE, 1, poison), cohort_of(run, 2)]))
    known = introductions(run, 0)
    told = [message(run, Kind.AGGREGATE, 2, start), cohort_of(run, 3)]
    replies = {0: run.answer(0, wire.encode([*known, *told]))}
    replies |= {client: run.answer(client, wire.encode(told)) for client in range(1, 5)}
    found = decoded(run, replies) - 4 * start.astype(np.float64)
    truth = run.clients[0].state.model.astype(np.float64)
    step, guess = (truth - start)[1:], (found - start)[1:]
    assert abs(guess @ step) / np.linalg.norm(guess) / np.linalg.norm(step) < 0.5
    assert np.abs(guess).max() > 100  # masks that do not cancel: noise over the whole range
    assert len({client_state.transcript for client_state in run.clients.values()}) == 2
    marks = {wire.decode(reply)[0].fingerprint for reply in replies.values()}
    assert len(marks) == 2  # which is how an honest server notices


@pytest.mark.parametrize("family", ["gaussian", "sign"])
def test_with_an_insider_who_knows_the_matrices_it_does_not_find_it_either(family: str) -> None:
    """Printed FedRP, server and one client: the same, with duals in the projected space."""
    run = secure("fedrp", clients=6, rounds=5, dim=40, grad_clip=1.0, projection=family)
    size = ENVELOPE_BYTES["x25519"]

    def dealt(dealer: int, round_: int) -> dict[int, Message]:
        (deal,) = wire.decode(run.answer(dealer, wire.encode([message(run, Kind.DEAL_REQUEST, round_)])))
        envelopes = split(deal.payload.tobytes(), size, 6, "envelopes")
        sealed = [message(run, Kind.SEALED, round_, wire.raw(envelope)) for envelope in envelopes]
        return dict(enumerate(dataclasses.replace(m, sender=dealer) for m in sealed))

    keys = [dealt(dealer, round_) for round_, dealer in enumerate((1, 1, 2, 3))]
    insider = run.sites[5].identity
    place = Place(run.run, 0, 0, 5, run.bench.tag, run.roster.digest, "x25519")
    opened = [
        insider.open(keys[r][5].payload.tobytes(), place._replace(round=r, dealer=keys[r][5].sender)) for r in range(4)
    ]
    matrices = [run.bench.project(key) for key in opened]
    start = run.bench.initial(opened[0])
    poison = np.zeros(40, np.float32)
    poison[0] = 60.0
    for client in range(1, 6):
        first = [*introductions(run, client), keys[0][client], keys[1][client], cohort_of(run, 1)]
        run.answer(client, wire.encode(first))
        run.answer(client, wire.encode([keys[2][client], message(run, Kind.AGGREGATE, 1, poison), cohort_of(run, 2)]))
    aggregate = message(run, Kind.AGGREGATE, 2, matrices[2].forward(start))
    replies = {}
    for client in range(6):
        told = [keys[3][client], aggregate, cohort_of(run, 3)]
        if client == 0:
            told = [*introductions(run, 0), keys[0][0], keys[2][0], *told]
        replies[client] = run.answer(client, wire.encode(told))
    rest = decoded(run, replies) - 6 * matrices[3].forward(start).astype(np.float64)
    truth = matrices[3].forward(run.clients[0].state.model - start).astype(np.float64)
    assert abs(rest @ truth) / np.linalg.norm(rest) / np.linalg.norm(truth) < 0.5
    assert np.abs(rest).max() > 100


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].server.memory == "own"])
def test_who_missed_a_round_has_another_transcript_from_then_on(name: str) -> None:
    """Even if a server claims that every round so far was given up: then all start anew, and alike."""
    run = secure(name, clients=6, rounds=6)
    run.round()
    run.round()
    assert len({client_state.transcript for client_state in run.clients.values()}) == 1
    packets = run.open()
    run.answer(2, packets[2])
    assert len({client_state.transcript for client_state in run.clients.values()}) == 2


STILL = {"lr": 1e-30, "local_epochs": 2, "secure_range": 1e9}  # settings by which an upload is known, or nearly


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedavg-dp"])
@pytest.mark.parametrize("setting", STILL)
def test_clients_with_other_settings_are_not_summed_with_the_one_who_has_the_true_ones(name: str, setting: str) -> None:
    """Settings reach a site through the server: with a learning rate of zero all uploads but one would be known."""
    run = secure(name, clients=5, rounds=3)
    other = dataclasses.replace(run.bench, config=dataclasses.replace(run.config, **{setting: STILL[setting]}))
    honest, packets = run.bench, run.open()
    replies = {}
    for client, packet in packets.items():
        run.bench = honest if client == 0 else other
        replies[client] = run.answer(client, packet)
    assert np.abs(decoded(run, replies)).max() > 100  # masks that do not cancel
    assert len({client_state.transcript for client_state in run.clients.values()}) == 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_news_beside_a_recovery_get_no_second_answer_to_it(name: str) -> None:
    """Told to start anew, a client no longer has the transcript that its masks came from."""
    run = secure(name, clients=5, rounds=6, quorum=0.6)
    run.round()
    run.deliver(run.open())
    request = message(run, Kind.RECOVER, 2, np.array([3, 4], np.uint32))
    answer = run.answer(0, wire.encode([request]))
    sealed = wire.messages_of(wire.decode(run.open()[0]), Kind.SEALED)
    for news in ([message(run, Kind.REBUILD, 3), *sealed], [message(run, Kind.VOID, past) for past in (1, 2)]):
        packet = wire.encode([*news, request])
        if news[0].kind is Kind.REBUILD and ALGORITHMS[name].server.memory == "history":
            with pytest.raises(ProtocolError, match="client 0 has no masked upload in round 2 to be recovered"):
                run.answer(0, packet)
        else:
            assert run.answer(0, packet) == answer


# --- 3. state that was restored ---------------------------------------------------------------------------------------


def test_the_same_packet_gets_the_same_noise_whatever_state_was_restored() -> None:
    run = secure("fedavg-dp", clients=4, rounds=3, noise_multiplier=1.0)
    sites = {c: dataclasses.replace(s, entropy=SiteEntropy(s.identity)) for c, s in run.sites.items()}
    run.sites = sites
    packet, before = run.open()[0], run.clients[0]
    first = run.answer(0, packet)
    for _ in range(3):
        run.clients[0] = before
        assert run.answer(0, packet) == first


def test_another_packet_gets_unrelated_noise() -> None:
    """Else the difference of two uploads would be free of it."""
    identity = simulated_identity(RunSeed(0), 0)
    places = [
        (bytes(16), 1, bytes(32)),
        (bytes(16), 1, b"x" * 32),
        (bytes(16), 2, bytes(32)),
        (b"y" * 16, 1, bytes(32)),
    ]
    keys = {identity.noise_key(*place).reveal() for place in places}
    assert len(keys) == 4
    assert identity.noise_key(*places[0]) == identity.noise_key(*places[0])
    assert identity.noise_key(*places[0]) != simulated_identity(RunSeed(0), 1).noise_key(*places[0])


def test_a_client_refuses_more_rounds_than_honest_coins_would_choose_it_for() -> None:
    """A lying server asks one client every time; privacy was accounted for samples."""
    config = tiny_config("fedavg-dp", clients=10, rounds=100, participation=0.1, dp_noise="local", noise_multiplier=1.0)
    run = Federation(config)
    aggregate = np.zeros(run.server.upload_size, np.float32)

    def asked(round_: int) -> bytes:
        news = [message(run, Kind.AGGREGATE, round_ - 1, aggregate)] if round_ > 1 else []
        return wire.encode([*news, message(run, Kind.ROUND, round_, weight=1)])

    for round_ in range(1, 28):  # binom.sf(27, 100, 0.1) is 5e-7, binom.sf(26, 100, 0.1) is 1.7e-6
        run.answer(3, asked(round_))
    with pytest.raises(ProtocolError, match="taken part in 27 of 100 rounds, more than honest coins would choose"):
        run.answer(3, asked(28))


# --- 5. a key that is stolen later ------------------------------------------------------------------------------------


def test_a_stolen_identity_takes_no_mask_off() -> None:
    """All that was recorded, and the client's identity: the mask key is not derived from it."""
    run = secure("fedavg-dp", clients=5, rounds=4, noise_multiplier=1.0)
    run.round()
    replies = run.deliver(run.open())
    client_state = run.clients[3]
    stolen = SecretKey(hashlib.sha256(b"all that the thief has is the identity").digest())
    call = Cohort(tuple(range(5)), (1,) * 5)
    transcript = extended(run.bench.settings, 0, 1, run.server.aggregates[1], None)
    assert transcript == client_state.transcript  # public
    sent = words(replies[3])
    place = (run.roster.digest, 3, run.run, 2, call, transcript, None)
    for key, right in ((run.sites[3].mask_key, True), (MaskKey(stolen), False)):
        mask = Masker(key, client_state.mask_keys, *place).masked(np.zeros(sent.size, np.uint32))
        bare = (sent - mask).view(np.int32)
        assert (np.abs(bare).max() < 2**20) == right


def test_a_mask_key_is_bound_to_its_owner_run_and_roster() -> None:
    run = secure("fedavg", clients=4)
    owner, key = run.sites[1].identity, MaskKey(SecretKey(bytes(32)))
    signed = signed_mask_key(key, owner, run.run, run.roster.digest, 1)
    place = (owner.public.ed25519, run.run, run.roster.digest, 1)
    assert mask_key_of(signed, *place) == key.public
    stranger = Identity(SecretKey(b"z" * 32)).public.ed25519
    others = [(stranger, *place[1:]), (place[0], bytes(16), *place[2:]), (*place[:2], bytes(32), 1), (*place[:3], 2)]
    for other in others:
        with pytest.raises(ProtocolError, match="is not signed by it for this run"):
            mask_key_of(signed, *other)
    zero = bytes(32) + owner.sign(b"fedrp mask key v1|" + struct.pack("<16s32sI", *place[1:]) + bytes(32))
    with pytest.raises(ProtocolError, match="is not signed by it for this run"):
        mask_key_of(zero, *place)  # a point that makes every shared secret the same


def test_a_second_mask_key_of_a_client_is_refused() -> None:
    run = secure("fedavg", clients=4)
    run.round()
    signed = signed_mask_key(MaskKey(SecretKey(bytes(32))), run.sites[2].identity, run.run, run.roster.digest, 2)
    extra = message(run, Kind.MASK_KEYS, 2, wire.raw(struct.pack("<I", 2) + signed))
    packet = run.open()[1]
    with pytest.raises(ProtocolError, match="another mask key of a client than it has: refused"):
        run.answer(1, packet + wire.encode([extra]))
    hello = Message(Kind.HELLO, run.bench.context, 0, 2, wire.raw(run.roster.digest + signed), 1)
    with pytest.raises(ProtocolError, match="client 2 came with no mask key or another one: it must sit this run out"):
        server_side.welcome(run.server, run.read({2: wire.encode([hello])}))


def test_mask_keys_cost_nothing_after_the_first_round() -> None:
    run, plain = secure("fedavg", clients=5), Federation(tiny_config("fedavg", clients=5))
    for round_ in range(1, 4):
        packets, bare = run.open(), plain.open()
        grown = max(len(packets[c]) - len(bare[c]) for c in packets)
        assert grown == (8 * 5 + (28 + 5 * 100 if round_ == 1 else 0))  # the list of participants, and the keys once
        replies, others = run.deliver(packets), plain.deliver(bare)
        assert [len(reply) for reply in replies.values()] == [len(reply) for reply in others.values()]
        run.close(replies)
        plain.close(others)


# --- 6. one bad client ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_random_words_under_masks_spoil_no_model(name: str) -> None:
    """Nobody can tell whose they are, but everyone can tell that the sum is none of honest clients."""
    run, honest = (secure(name, clients=5, rounds=4) for _ in range(2))
    replies = run.deliver(run.open())
    first, *rest = wire.decode(replies[2])
    noise = np.random.default_rng(0).integers(0, 2**32, first.payload.size, dtype=np.uint32)
    replies[2] = wire.encode([dataclasses.replace(first, payload=noise), *rest])
    report = run.close(replies)
    assert report.participants == ()
    assert "honest clients reach" in report.void
    assert not run.server.aggregates
    honest.round()
    assert run.round().participants == tuple(range(5))  # the next round goes on from where this one began
    again, before = run.server.aggregates[2], honest.server.aggregates[1]
    assert np.linalg.norm(again) < 3 * np.linalg.norm(before) + 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_refuses_an_aggregate_that_no_honest_cohort_can_have_made(name: str) -> None:
    run = secure(name, clients=5, rounds=4)
    run.round()
    honest = run.server.aggregates[1]
    run.server = dataclasses.replace(run.server, aggregates={1: honest + np.float32(1e4)})
    with pytest.raises(ProtocolError, match=r"aggregate of round 1 has a n.* honest clients reach .* at most"):
        run.answer(1, run.open()[1])


def test_a_run_in_which_garbage_keeps_coming_ends_with_a_word() -> None:
    run = secure("fedavg", clients=5, rounds=9)

    def spoiled() -> dict[int, bytes]:
        replies = run.deliver(run.open())
        (first,) = wire.decode(replies[2])
        return {**replies, 2: wire.encode([dataclasses.replace(first, payload=first.payload ^ np.uint32(1 << 30))])}

    assert run.close(spoiled()).void
    assert run.close(spoiled()).void
    third = spoiled()
    with pytest.raises(ProtocolError, match=r"3 rounds in a row were given up, the last because .* sent garbage"):
        run.close(third)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
def test_one_wrong_envelope_costs_a_round_and_another_client_deals(name: str, masked: bool) -> None:
    run = Federation(tiny_config(name, clients=5, rounds=6, secure_aggregation=masked, quorum=1.0))
    run.round()
    replies = run.deliver(run.open())
    (dealer,) = (c for c, r in replies.items() if wire.messages_of(wire.decode(r), Kind.DEAL))
    replies[dealer] = wire.encode(
        dataclasses.replace(m, payload=flipped(m.payload)) if m.kind is Kind.DEAL else m
        for m in wire.decode(replies[dealer])
    )
    run.close(replies)
    report = run.round()
    assert report.void == f"client 0 cannot use the key that client {dealer} dealt"
    deal(run)
    rest = tuple(range(5))
    if masked and name == "fedrp":  # who could not take part has another history from now on
        run.server = dataclasses.replace(run.server, settings=dataclasses.replace(run.config, quorum=0.6))
        run.bench = dataclasses.replace(run.bench, config=run.server.config)
        rest = (1, 2, 3, 4)
    for _ in range(3):
        assert run.round().participants == rest
        assert run.server.dealt[max(run.server.dealt)].dealer != dealer
    if name == "fedrp-subspace":
        models = run.final_models()
        assert all(np.array_equal(model, models[0]) for model in models.values())


def deal(run: Federation) -> None:
    """Have the key of the next round dealt, if it is not; who has dealt it before refuses."""
    for attempt in range(len(run.clients)):
        with contextlib.suppress(ProtocolError):
            run.take_keys(run.deliver(server_side.request_key(run.server, attempt)))


def flipped(payload: np.ndarray) -> np.ndarray:
    """The payload with a wrong bit in its first byte: client 0's envelope."""
    changed = payload.copy()
    changed[0] ^= 1
    return changed


@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_wrong_envelope_of_the_set_up_starts_the_run_anew(name: str, masked: bool) -> None:
    run = Federation(tiny_config(name, clients=4, rounds=4, secure_aggregation=masked, quorum=1.0))
    old = run.server.dealt[0]
    bad = bytes([old.envelopes[2][0] ^ 1]) + old.envelopes[2][1:]
    spoiled = old._replace(envelopes=(*old.envelopes[:2], bad, *old.envelopes[3:]))
    run.server = dataclasses.replace(run.server, dealt={**run.server.dealt, 0: spoiled})
    assert "client 2 cannot use the key" in run.round().void
    deal(run)
    assert run.server.dealt[0] != spoiled
    for _ in range(3):
        assert run.round().participants == (0, 1, 2, 3)
    if name == "fedrp-subspace":
        models = run.final_models()
        assert all(np.array_equal(model, models[0]) for model in models.values())


def test_a_client_that_always_complains_does_not_stop_the_run() -> None:
    run = Federation(tiny_config("fedrp-subspace", clients=5, rounds=12, quorum=0.5))
    run.round()
    voids = 0
    for _ in range(9):
        deal(run)
        replies = run.deliver(run.open())
        sealed = run.server.dealt[run.server.round + 1].dealer
        fields = (run.bench.context, run.server.round + 1, 4, wire.EMPTY, sealed)
        replies[4] = wire.encode([Message(Kind.COMPLAINT, *fields)])
        voids += bool(run.close(replies).void)
    assert voids <= 3
    assert run.server.latest == run.server.round


# --- 7. packets that cost more than they should -----------------------------------------------------------------------


def test_a_packet_larger_than_the_configuration_allows_is_refused_unread() -> None:
    run = secure("fedrp-subspace", clients=4, rounds=1000)
    with pytest.raises(WireError, match=r"a packet of \d+ bytes, at most \d+ are taken here"):
        run.answer(1, bytes(wire.largest(run.bench.limits) + 1))
    (reply,) = run.read({1: bytes(2**20)}).values()
    assert "are taken here" in reply.refused


HOSTILE = {
    "the same outcome many times": lambda run, n: wire.encode([message(run, Kind.AGGREGATE, 5, NUMBERS)]) * n,
    "many empty outcomes": lambda run, n: wire.encode(message(run, Kind.VOID, r) for r in range(1, n)),
    "many requests for a key": lambda run, n: wire.encode([message(run, Kind.DEAL_REQUEST, 7)]) * n,
    "an endless list of clients": lambda run, n: wire.encode(
        [message(run, Kind.ROUND, 1, np.arange(16 * n, dtype=np.uint32), 8 * n)]
    ),
    "many keys": lambda run, n: wire.encode(message(run, Kind.SEALED, r, wire.raw(bytes(144))) for r in range(n)),
    "many mask keys": lambda run, n: wire.encode([message(run, Kind.MASK_KEYS, 1, wire.raw(bytes(100 * n)))]),
    "a long recovery": lambda run, n: wire.encode([message(run, Kind.RECOVER, 1, np.arange(10 * n, dtype=np.uint32))]),
}
NUMBERS = np.zeros(12, np.float32)


def peak_memory(run: Federation, packet: bytes) -> int:
    """The most memory that a client takes for its answer or refusal."""
    tracemalloc.start()
    try:
        with contextlib.suppress(FedRPError):
            run.answer(1, packet)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", HOSTILE)
def test_no_packet_up_to_the_cap_takes_more_memory_than_an_honest_one(what: str) -> None:
    """Time is measured by `benchmarks/hostile.py`."""
    honest, hostile = (secure("fedrp-subspace", clients=4, rounds=400) for _ in range(2))
    whole = catch_up(honest, 400)
    packet = HOSTILE[what](hostile, len(whole) // 200)
    peak_memory(secure("fedrp-subspace", clients=4, rounds=400), packet)  # what is imported at first is not its cost
    assert peak_memory(hostile, packet) <= 2 * peak_memory(honest, whole)


def catch_up(run: Federation, rounds: int) -> bytes:
    """The packet of a client that has missed everything: all keys and aggregates."""
    identity = run.sites[0].identity
    sealed = []
    for round_ in range(rounds + 1):
        place = Place(run.run, round_, 0, 0, run.bench.tag, run.roster.digest, "x25519")
        envelopes = seal_to_all(SecretKey(bytes(32)), identity, run.roster.keys[:2], place)
        own = wire.raw(envelopes[ENVELOPE_BYTES["x25519"] :])
        sealed.append(dataclasses.replace(message(run, Kind.SEALED, round_, own), sender=0))
    zeros = np.zeros(run.server.upload_size, np.float32)
    told = [message(run, Kind.AGGREGATE, past, zeros) for past in range(1, rounds)]
    return wire.encode([*introductions(run, 1), *sealed, *told, cohort_of(run, rounds)])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_end_of_a_round_that_the_run_does_not_have_is_refused(name: str) -> None:
    """Before all rounds up to it are looked for, which would take a client's time and memory."""
    run = Federation(tiny_config(name))
    run.round()
    packet = wire.encode([message(run, Kind.FINISH, 2**16 - 1)])
    with pytest.raises(ProtocolError, match="the end of round 65535 was announced, but the run has 3: refused"):
        finished(run.bench, run.clients[1], run.sites[1], packet)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_last_packet_that_announces_no_end_is_refused(name: str) -> None:
    run = Federation(tiny_config(name))
    run.round()
    for packet in (b"", run.open()[1]):
        with pytest.raises(ProtocolError, match="client 1 was sent a last packet that announces no end: refused"):
            finished(run.bench, run.clients[1], run.sites[1], packet)


def test_a_client_deals_one_key_per_round() -> None:
    run = Federation(tiny_config("fedrp-subspace", rounds=9))
    request = wire.encode([message(run, Kind.DEAL_REQUEST, 7)])
    run.answer(1, request)
    for again in (7, 6):
        with pytest.raises(ProtocolError, match=f"client 1 deals no key for round {again}: it has dealt up to 7"):
            run.answer(1, wire.encode([message(run, Kind.DEAL_REQUEST, again)]))
    with pytest.raises(ProtocolError, match="deals no key for round 10"):
        run.answer(2, wire.encode([message(run, Kind.DEAL_REQUEST, 10)]))
