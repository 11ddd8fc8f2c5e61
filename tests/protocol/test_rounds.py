"""The round loop: its order, what is kept before what leaves, and what happens when clients do not answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedrp.auditing.carrier import BenchCarrier
from fedrp.errors import ProtocolError, QuorumError
from fedrp.mechanisms.exchanges import Answers, Exchange, Step, Take
from fedrp.protocol.client_state import Client
from fedrp.protocol.rounds import begin, rounds
from fedrp.protocol.server_state import Server, new_server
from helpers import Federation, tiny_config


@dataclass
class Diary:
    """A store that remembers all, among what was carried in between."""

    entries: list[object] = field(default_factory=list)

    def save(self, server: Server) -> None:
        self.entries.append(server)

    def log(self, event: str, details: Mapping[str, object]) -> None:
        self.entries.append((event, details))

    @property
    def steps(self) -> list[str]:
        return ["saved" if isinstance(e, Server) else e.value if isinstance(e, Step) else "" for e in self.entries]


@dataclass
class LossyCarrier(BenchCarrier):
    """Real clients, of whom some do not answer."""

    diary: Diary
    deaf: dict[Step, set[int]]  # who is never reached
    deaf_once: dict[Step, set[int]]  # who is not reached at the first attempt

    def exchange(self, packets: Mapping[int, bytes], exchange: Exchange, take: Take) -> Answers:
        self.diary.entries.append(exchange.step)
        lost = set(self.deaf.get(exchange.step, ()))
        lost |= self.deaf_once.get(exchange.step, set()) if exchange.attempt == 1 else set()
        reached = {client: packet for client, packet in packets.items() if client not in lost}
        return super().exchange(reached, exchange, take)


def new_run(
    name: str, deaf: dict[Step, set[int]] | None = None, once: dict[Step, set[int]] | None = None, **changes: object
) -> tuple[Server, LossyCarrier, Diary]:
    """Parties before anything has been said."""
    run, diary = Federation(tiny_config(name, rounds=2, **changes)), Diary()
    fresh = new_server(run.config, run.run, run.server.parameters)
    client_states = [Client(client) for client in run.clients]
    carrier = LossyCarrier(
        run.config.clients, 2, run.bench, list(run.sites.values()), client_states, True, diary, deaf or {}, once or {}
    )
    return fresh, carrier, diary


def finished(server: Server, carrier: LossyCarrier, diary: Diary) -> Server:
    server = begin(server, carrier, diary, server.config.clients)
    coins = np.linspace(0, 0.9, server.config.clients)
    for closed in rounds(server, carrier, diary, lambda _server: coins):
        server = closed.server
    return server


def test_a_round_is_asked_closed_and_kept_and_its_key_is_there_before() -> None:
    server, carrier, diary = new_run("fedrp-subspace")
    assert finished(server, carrier, diary).round == 2
    assert diary.steps == ["deal", "saved", "train", "saved", "train", "saved"]
    first = diary.entries[1]
    assert isinstance(first, Server)
    assert set(first.dealt) == {0}


def test_a_cohort_that_coins_chose_is_kept_before_it_is_asked() -> None:
    server, carrier, diary = new_run("fedavg", participation=0.5)
    finished(server, carrier, diary)
    assert diary.steps[:3] == ["saved", "train", "saved"]
    chosen = diary.entries[0]
    assert isinstance(chosen, Server)
    assert chosen.participants == (0, 1)


def test_who_is_left_out_of_a_masked_sum_is_kept_before_anyone_helps() -> None:
    server, carrier, diary = new_run("fedavg", {Step.TRAIN: {1}}, secure_aggregation=True, clients=6, quorum=0.5)
    finished(server, carrier, diary)
    assert diary.steps[:5] == ["saved", "train", "saved", "recover", "saved"]
    recovering = diary.entries[2]
    assert isinstance(recovering, Server)
    assert 1 in recovering.left_out


def test_a_key_whose_dealer_is_away_is_dealt_by_another_and_kept() -> None:
    server, carrier, diary = new_run("fedrp-subspace", {Step.TRAIN: {1}}, quorum=0.5)  # client 1 deals for round 2
    finished(server, carrier, diary)
    assert diary.steps == ["deal", "saved", "train", "saved", "deal", "saved", "train", "saved"]


def test_only_those_who_have_not_answered_are_asked_again() -> None:
    server, carrier, diary = new_run("fedavg", once={Step.TRAIN: {2}}, quorum=1.0)
    assert finished(server, carrier, diary).round == 2
    failed = [entry for entry in diary.entries if isinstance(entry, tuple)]
    assert [(event, details["round"], details["attempt"]) for event, details in failed] == [
        ("round failed", 1, 1),
        ("round failed", 2, 1),
    ]


def test_a_round_that_always_lacks_uploads_ends_the_run_with_what_was_kept() -> None:
    server, carrier, diary = new_run("fedavg", {Step.TRAIN: {0, 1, 2}})
    with pytest.raises(QuorumError, match=r"round 1: 1 valid uploads, \d needed"):
        finished(server, carrier, diary)
    assert diary.steps.count("train") == 2
    assert "saved" not in diary.steps


def test_a_run_whose_keys_nobody_deals_ends_with_one_line() -> None:
    server, carrier, diary = new_run("fedrp-subspace", {Step.DEAL: {0, 1, 2, 3}})
    with pytest.raises(QuorumError, match="nobody dealt the key of round 1: run again with the same store"):
        finished(server, carrier, diary)


def test_a_client_with_another_roster_ends_a_run_in_which_everyone_is_needed() -> None:
    server, carrier, diary = new_run("fedavg", secure_aggregation=True)
    stranger = Federation(tiny_config("fedavg", secure_aggregation=True, seed=99))
    hellos = {**carrier.hellos(), 2: stranger.received[2]}
    carrier.hellos = lambda: hellos  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="client 2 has another roster than the others"):
        finished(server, carrier, diary)
