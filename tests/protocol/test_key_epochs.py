"""Round keys of one dealt secret per epoch: what they cost, who can compute them, and what happens to a bad one."""

import dataclasses

import numpy as np
import pytest

from fedrp import RunConfig, simulate
from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.epochs import covering
from fedrp.crypto.schedule import round_key
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import ENVELOPE_BYTES
from fedrp.errors import ProtocolError
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.server_state import deals_due
from fedrp.protocol.wire import Kind, Message
from helpers import Federation, tiny_config, tiny_task

SECRET = [name for name in ALGORITHMS if ALGORITHMS[name].server.round_keys]
DEFAULT = RunConfig().key_epoch


# --- what they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "rounds", "participation"),
    [(100, 30, 1.0), (1000, 30, 0.1), (20, 24, 1.0), (20, DEFAULT + 1, 1.0)],
    ids=str,
)
def test_keys_cost_at_most_16_bytes_per_client_and_round(clients: int, rounds: int, participation: float) -> None:
    """Both ways together, hellos included, on encoded messages; also where a second epoch has but one round."""
    config = tiny_config("fedrp-subspace", clients=clients, rounds=rounds, participation=participation)
    config = dataclasses.replace(config, key_epoch=DEFAULT, batch_size=1)
    result = simulate(config, tiny_task(clients)).as_json()
    assert result["bytes_keys_per_client"] <= 16
    envelope = ENVELOPE_BYTES["x25519"]
    dealt = -(-rounds // DEFAULT) * (envelope + 28 + (envelope * clients + 2 * 28) / clients)
    assert result["bytes_keys_per_client"] == pytest.approx((60 + dealt) / rounds, rel=0.02)
    both = result["bytes_keys_up"] + result["bytes_keys_down"]  # per participant, rounded
    assert both == pytest.approx(result["bytes_keys_per_client"] / participation, abs=1)


@pytest.mark.parametrize("name", SECRET)
def test_a_new_secret_every_round_costs_20_times_as_much(name: str) -> None:
    costs = []
    for epoch in (1, DEFAULT):
        config = tiny_config(name, clients=4, rounds=40, key_epoch=epoch)
        costs.append(simulate(config, tiny_task(8)).as_json()["bytes_keys_per_client"])
    assert costs[0] > 20 * costs[1]


def test_payload_framing_and_keys_are_stated_apart() -> None:
    config = tiny_config("fedrp-subspace", clients=5, rounds=4, secure_aggregation=True)
    result = simulate(config, tiny_task(15)).as_json()
    assert (result["bytes_payload_up"], result["bytes_framing_up"]) == (4 * 12, 28)
    assert result["bytes_payload_down"] == 4 * 12  # an aggregate for every round but the first, and at the end
    assert result["bytes_framing_down"] == 28 + 28 + 8 * 5 + 28 // 4  # aggregate, call, cohort; the end, once
    for way in ("up", "down"):
        assert result[f"bytes_{way}"] == result[f"bytes_payload_{way}"] + result[f"bytes_framing_{way}"]
    assert result["bytes_keys_up"] + result["bytes_keys_down"] == pytest.approx(result["bytes_keys_per_client"], abs=1)
    assert result["bytes_keys_down"] > 100 * 5 / 4  # mask keys are keys too


# --- who can compute them --------------------------------------------------------------------------------------------


def test_no_two_rounds_have_the_same_key_even_if_one_secret_is_dealt_again_and_again() -> None:
    secret = SecretKey(bytes(32))
    keys = [round_key(secret, first, secret, round_) for first in (0, 5, 9) for round_ in range(first, first + 4)]
    assert len(set(keys)) == len(keys)


def test_a_key_depends_on_the_secret_of_its_epoch_and_on_that_of_the_set_up() -> None:
    known, other = SecretKey(bytes(32)), SecretKey(b"x" * 32)
    keys = {round_key(set_up, 5, dealt, 6) for set_up in (known, other) for dealt in (known, other)}
    assert len(keys) == 4
    assert round_key(known, 0, known, 4) != round_key(other, 0, other, 4)


@pytest.mark.parametrize("epoch", [1, 2, 3, DEFAULT])
@pytest.mark.parametrize("name", SECRET)
def test_clients_that_come_late_or_were_away_have_the_keys_of_all_others(name: str, epoch: int) -> None:
    run = Federation(tiny_config(name, rounds=8, quorum=0.5, key_epoch=epoch))
    for round_ in range(1, 9):
        away = {3} if round_ < 6 else {1} if round_ == 7 else {2} if round_ < 8 else set()
        packets = {client: packet for client, packet in run.open().items() if client not in away}
        report = run.close(run.deliver(packets))
        assert set(report.participants) == set(packets)
        for stand_in, request in server_side.request_key(run.server, 0).items():
            run.take_keys({stand_in: run.answer(stand_in, request)})
    models = run.final_models()
    if run.bench.algorithm.delivers == "consensus":
        for model in models.values():
            np.testing.assert_allclose(model, models[0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "at_a_client", "at_the_server"),
    [("fedrp", {0, 5, 7}, {7}), ("fedrp-subspace", {0, 7}, {0, 3, 5, 7})],
)
def test_envelopes_are_kept_as_long_as_they_can_be_needed(
    name: str, at_a_client: set[int], at_the_server: set[int]
) -> None:
    """If round 7 were given up, the next one would need the key of round 6 in printed FedRP, and none elsewhere."""
    run = Federation(tiny_config(name, rounds=9, key_epoch=2))
    for _ in range(7):
        run.round()
    assert all(set(client.envelopes) == at_a_client for client in run.clients.values())
    assert set(run.server.dealt) == at_the_server


# --- what a client refuses -------------------------------------------------------------------------------------------


def sealed_again(run: Federation, client: int, dealer: int, round_: int) -> Message:
    """A secret that a client was made to deal for a round, as the server would pass it on."""
    request = Message(Kind.DEAL_REQUEST, run.bench.context, round_, wire.SERVER, wire.EMPTY)
    (deal,) = wire.decode(run.answer(dealer, wire.encode([request])))
    size = ENVELOPE_BYTES["x25519"]
    return dataclasses.replace(deal, kind=Kind.SEALED, payload=deal.payload[size * client : size * (client + 1)])


@pytest.mark.parametrize("name", SECRET)
def test_a_round_that_a_client_has_done_gets_no_other_key_from_a_secret_that_comes_later(name: str) -> None:
    run = Federation(tiny_config(name, rounds=6, key_epoch=4))
    run.round()
    run.round()
    packet, before = run.open()[1], run.clients[1]
    late = sealed_again(run, 1, 2, 2)  # round 2 had its key from the secret of the set-up
    with pytest.raises(ProtocolError, match="client 1 was sent another key for round 2 than it has: refused"):
        run.answer(1, packet + wire.encode([late]))
    assert run.clients[1] == before
    run.answer(1, packet + wire.encode([dataclasses.replace(late, round=1)]))  # further back nothing is looked at
    assert set(run.clients[1].envelopes) == {0}


@pytest.mark.parametrize("name", SECRET)
def test_a_client_uses_a_secret_for_no_more_rounds_than_were_agreed(name: str) -> None:
    """Whatever the server does, which may have other settings."""
    run = Federation(tiny_config(name, rounds=6, key_epoch=2))
    run.server = dataclasses.replace(run.server, settings=dataclasses.replace(run.config, key_epoch=6))
    run.round()
    run.round()
    assert not deals_due(run.server, 3)
    with pytest.raises(ProtocolError, match="has no sealed key for round 3"):
        run.round()


# --- a bad secret ----------------------------------------------------------------------------------------------------


def spoil(run: Federation, first: int, client: int) -> None:
    """A dealer has sealed garbage to one client."""
    dealt = run.server.dealt[first]
    bad = bytes(len(dealt.envelopes[client]))
    envelopes = (*dealt.envelopes[:client], bad, *dealt.envelopes[client + 1 :])
    run.server = dataclasses.replace(run.server, dealt={**run.server.dealt, first: dealt._replace(envelopes=envelopes)})


def without(run: Federation, *away: int) -> server_side.RoundReport:
    """A round that some clients do not hear of; another client deals if one of them should have."""
    packets = {client: packet for client, packet in run.open().items() if client not in away}
    report = run.close(run.deliver(packets))
    for attempt in range(len(run.clients)):
        for dealer, request in server_side.request_key(run.server, attempt).items():
            run.take_keys({dealer: run.answer(dealer, request)})
    return report


def test_a_wrong_envelope_that_comes_to_light_within_an_epoch_ends_the_epoch() -> None:
    """Printed FedRP: the round goes on, and with an aggregate under the new secret the client is back."""
    run = Federation(tiny_config("fedrp", clients=5, rounds=12, quorum=0.5, key_epoch=4))
    for _ in range(4):
        without(run)
    spoil(run, 5, 2)
    dealer = run.server.dealt[5].dealer
    for _ in range(2):
        without(run, 2)
    assert set(without(run).participants) == {0, 1, 3, 4}  # client 2 complains in round 7
    assert max(run.server.dealt) == 8
    assert run.server.dealt[8].dealer != dealer
    assert set(without(run).participants) == {0, 1, 3, 4}  # it needs the key of round 7
    assert set(without(run).participants) == {0, 1, 2, 3, 4}
    assert max(run.server.dealt) == 8  # one new secret for one complaint


def test_a_secret_that_an_aggregate_rests_on_is_kept_where_the_round_cannot_do_without_who_complains() -> None:
    run = Federation(tiny_config("fedrp", clients=5, rounds=12, quorum=0.5, key_epoch=4))
    for _ in range(4):
        without(run)
    spoil(run, 5, 2)
    without(run, 2)
    strict = dataclasses.replace(run.config, quorum=1.0)
    run.server = dataclasses.replace(run.server, settings=strict)
    assert "client 2 cannot use the key" in without(run).void  # in round 6
    assert set(run.server.dealt) == {5, 7}  # the others need the key of round 5 again
    run.server = dataclasses.replace(run.server, settings=run.config)
    assert set(without(run).participants) == {0, 1, 3, 4}
    assert set(without(run).participants) == {0, 1, 2, 3, 4}


def test_where_clients_replay_all_rounds_it_stays_out_and_costs_nothing() -> None:
    run = Federation(tiny_config("fedrp-subspace", clients=5, rounds=10, quorum=0.5, key_epoch=4))
    for _ in range(4):
        without(run)
    spoil(run, 5, 2)
    without(run, 2)
    for _ in range(3):
        assert set(without(run).participants) == {0, 1, 3, 4}
    assert not run.server.complaints
    assert [covering(run.server.dealt, round_) for round_ in (4, 5, 8, 9)] == [0, 5, 5, 9]


@pytest.mark.parametrize("name", SECRET)
@pytest.mark.parametrize("masked", [False, True])
def test_a_secret_that_is_given_up_leaves_no_trace_in_the_keys_of_later_rounds(name: str, masked: bool) -> None:
    """Whoever kept its envelope and whoever never had it go on with the same keys."""
    masks = {"secure_aggregation": True} if masked else {}
    quorum = 1.0 if masked or name == "fedrp-subspace" else 0.9
    run = Federation(tiny_config(name, clients=5, rounds=9, quorum=quorum, key_epoch=3, **masks))
    for _ in range(3):
        without(run)
    spoil(run, 4, 2)
    assert "client 2 cannot use the key" in without(run).void
    assert set(run.server.dealt) - {0} == {5}
    if masked and name == "fedrp":  # who could not take part has another history from now on
        run.server = dataclasses.replace(run.server, settings=dataclasses.replace(run.config, quorum=0.6))
        run.bench = dataclasses.replace(run.bench, config=run.server.config)
    rest = {0, 1, 3, 4} if masked and name == "fedrp" else {0, 1, 2, 3, 4}
    for _ in range(5):
        report = without(run)
        assert (set(report.participants), report.void) == (rest, "")
    assert max(run.server.dealt) == 8  # three rounds later, as agreed
