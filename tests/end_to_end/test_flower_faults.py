"""Faults of machines, disks, links and people, injected for real; after each, nothing is lost and everyone agrees.

Clients answer in processes of their own, forked for each message, as in a deployment. Secrets are the simulator's, so
that "nothing is lost" can be said exactly: the model is the one of a run in which nothing happened.
"""

import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from safetensors import safe_open

from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.roster import entry_of, merged, new_identity, write_roster
from fedrp.errors import QuorumError, SiteError
from fedrp.flower.messages import FINISH, ROUND, answer, packet_of
from fedrp.flower.server_app import server_app
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.simulation.measures import delivering_client
from fedrp.testing.local import LocalGrid, run_locally
from flower_helpers import FlowerFederation, answer_in_child, in_child, lost
from helpers import TinyNet, mounted, tiny_config

EXACT = {"projection": "sign"}  # results are equal to the last bit, on every machine
Answer = Callable[[int, Message], Message | None]


def round_of(message: Message) -> int:
    """The round that a message calls for; 0 if it is about something else."""
    if message.metadata.message_type != ROUND:
        return 0
    calls = wire.messages_of(wire.decode(packet_of(message)), Kind.ROUND)
    return calls[-1].round if calls else 0


def same_model(run: FlowerFederation, clients: range | list[int] = range(4)) -> np.ndarray:
    models = [run.model(client) for client in clients]
    assert all(np.array_equal(model, models[0]) for model in models)
    return models[0]


def undisturbed(run: FlowerFederation) -> np.ndarray:
    return run.simulated().model


def first_time(run: FlowerFederation, fault: Answer, when: Callable[[int, Message], bool]) -> Answer:
    """Clients that answer in processes of their own, but for one fault, the first time that `when` holds."""
    happened = []

    def reply(client: int, message: Message) -> Message | None:
        if not happened and when(client, message):
            happened.append(fault(client, message))
            return happened[0]
        return answer_in_child(run, client, message)

    reply.happened = happened  # type: ignore[attr-defined]
    return reply


def dies_at(folder: Path, operation: int) -> Callable[[], None]:
    """Makes this process kill itself at its n-th change to a folder."""

    def prepare() -> None:
        left = operation

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (writes or event in {"os.rename", "os.mkdir"}) and str(folder) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)

    return prepare


# --- a client is killed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["fedrp-subspace", "fedrp"])
def test_a_client_that_is_killed_in_the_middle_of_a_round_does_it_once(
    name: str, operation: int, tmp_path: Path
) -> None:
    """Before it trains, while it writes its state, after that and before the reply leaves: the round is done once."""
    run = FlowerFederation(tmp_path, tiny_config(name, **EXACT))
    dies = dies_at(tmp_path / "sites" / "site-1", operation)
    reply = first_time(run, lambda c, m: answer_in_child(run, c, m, dies), lambda c, m: c == 1 and round_of(m) == 2)
    run.run(reply)
    assert reply.happened[0].has_error()  # it did die
    assert run.status(1)["round"] == 3
    assert np.array_equal(run.model(delivering_client(run.config)), undisturbed(run))


def test_a_reply_that_was_lost_is_sent_again_and_not_made_again(tmp_path: Path) -> None:
    """Its noise is drawn once: two different uploads of one round would tell more than one."""
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp"))
    replies: list[bytes] = []

    def loses(client: int, message: Message) -> Message:
        replies.append(packet_of(answer_in_child(run, client, message)))
        return lost(message)

    def watch(client: int, message: Message) -> Message | None:
        given = reply(client, message)
        if client == 2 and round_of(message) == 2 and given is not None and given.has_content():
            replies.append(packet_of(given))
        return given

    reply = first_time(run, loses, lambda c, m: c == 2 and round_of(m) == 2)
    run.run(watch)
    assert len(replies) == 2
    assert replies[0] == replies[1]
    assert np.array_equal(same_model(run), undisturbed(run))


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedrp", "fedavg", "fedadmm"])
def test_a_site_that_is_down_for_rounds_comes_back_and_catches_up(name: str, tmp_path: Path) -> None:
    exact = EXACT if ALGORITHMS[name].server.round_keys else {}
    run = FlowerFederation(tmp_path, tiny_config(name, rounds=6, **exact))

    def online() -> list[int]:
        return [0, 1, 2] if 2 <= run.store().get("round", 0) < 5 else [0, 1, 2, 3]

    run.run(lambda c, m: answer_in_child(run, c, m), online)
    assert run.status(3)["round"] == 6
    if ALGORITHMS[name].delivers == "consensus":
        same_model(run)


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedrp"])
def test_when_the_dealer_is_gone_another_client_deals(name: str, tmp_path: Path) -> None:
    """Client 2 is to deal the key of round 3 with its upload of round 2, and is never seen again."""
    run = FlowerFederation(tmp_path, tiny_config(name, rounds=4, **EXACT))
    gone = []

    def reply(client: int, message: Message) -> Message:
        if client == 2 and round_of(message) == 2:
            assert wire.messages_of(wire.decode(packet_of(message)), Kind.DEAL_REQUEST)
            gone.append(client)
        return lost(message) if client in gone else answer_in_child(run, client, message)

    run.run(reply, lambda: [c for c in range(4) if c not in gone])
    assert gone
    assert run.store()["round"] == 4
    assert run.store()["missing"] == [2]
    gone.clear()
    run.run()  # back again, after the end
    assert run.store()["missing"] == []
    if name == "fedrp-subspace":
        same_model(run)


def test_a_late_joiner_is_noticed_and_ends_with_the_same_model(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", rounds=5, **EXACT), min_clients=3)
    run.run(online=lambda: range(4) if run.store().get("round", 0) >= 2 else range(3))
    assert run.status(3)["round"] == 5
    same_model(run)


# --- stragglers ------------------------------------------------------------------------------------------------------


def test_a_straggler_past_the_deadline_is_left_out_and_welcome_again(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", rounds=4, **EXACT), round_timeout=8.0)

    def too_late(client: int, message: Message) -> None:
        answer_in_child(run, client, message)  # it does its work, and then nobody waits for it any more

    reply = first_time(run, too_late, lambda c, m: c == 1 and round_of(m) == 2)
    began = time.monotonic()
    run.run(reply)
    assert time.monotonic() - began >= 8
    assert run.store()["participants"] == [0, 1, 2, 3]
    assert run.status(1)["round"] == 4
    same_model(run)


def test_below_the_quorum_the_round_is_repeated_until_the_others_are_back(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT, quorum=1.0), round_timeout=3.0)
    missed = []

    def reply(client: int, message: Message) -> Message | None:
        if client in (1, 2) and round_of(message) == 2 and missed.count(client) < 2:
            missed.append(client)
            return None
        return answer_in_child(run, client, message)

    run.run(reply)
    assert sorted(missed) == [1, 1, 2, 2]
    assert np.array_equal(same_model(run), undisturbed(run))


def test_a_run_that_is_given_up_can_be_taken_up_again(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT, quorum=1.0), round_timeout=3.0, attempts=2)
    with pytest.raises(QuorumError, match=r"round 2: 3 valid uploads, 4 needed"):
        run.run(lambda c, m: None if c == 1 and round_of(m) == 2 else run.answer(c, m))
    assert run.store()["round"] == 1
    run.run_config["round-timeout"] = 60.0
    run.run()
    assert np.array_equal(same_model(run), undisturbed(run))


# --- the server is killed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("operation", [2, 4, 6, 9, 12, 15])
def test_a_server_that_is_killed_goes_on_where_it_was(operation: int, secure: bool, tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT, clients=3, secure_aggregation=secure))
    dies = dies_at(tmp_path / "store", operation)

    def work() -> None:
        dies()
        run.run()

    status, _ = in_child(work)
    assert os.WTERMSIG(status) == signal.SIGKILL
    run.run()
    assert run.store()["finished"]
    assert np.array_equal(same_model(run, range(3)), undisturbed(run))


def test_who_was_chosen_stays_chosen_when_the_server_is_killed(tmp_path: Path) -> None:
    """Drawn again, the coins would show more of who takes part than was counted; and masks would not come off."""
    config = tiny_config("fedrp-subspace", **EXACT, clients=8, participation=0.5, rounds=2, secure_aggregation=True)
    run = FlowerFederation(tmp_path, config)

    def work() -> None:
        def reply(client: int, message: Message) -> Message:
            if round_of(message) == 2:
                (tmp_path / "asked").write_text(str(client))
                os.kill(os.getpid(), signal.SIGKILL)
            return run.answer(client, message)

        run.run(reply)

    status, _ = in_child(work)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with safe_open(tmp_path / "store" / "head.safetensors", framework="numpy") as file:
        chosen = json.loads(file.metadata()["about"])["state"]["cohort"]
    assert int((tmp_path / "asked").read_text()) in chosen
    run.run()
    assert run.store()["participants"] == chosen


def test_who_joins_while_the_server_is_down_is_not_in_a_masked_round_that_was_open(tmp_path: Path) -> None:
    """Clients that have uploaded for one list of participants take no other: the round would never end."""
    config = tiny_config("fedrp-subspace", **EXACT, clients=5, rounds=2, secure_aggregation=True)
    run = FlowerFederation(tmp_path, config, min_clients=4)

    def work() -> None:
        def reply(client: int, message: Message) -> Message:
            if round_of(message) == 1 and client == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer_in_child(run, client, message)

        run.run(reply, lambda: range(4))

    status, _ = in_child(work)
    assert os.WTERMSIG(status) == signal.SIGKILL
    run.run()
    assert run.store()["finished"]
    same_model(run, range(5))


def test_a_site_whose_model_differs_costs_a_round_where_everyone_is_needed(tmp_path: Path) -> None:
    """In round 2 its mark is wrong; in round 3 it rebuilds its model, and its first reply is lost."""
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT, rounds=4, quorum=1.0))
    lost_replies = []

    def reply(client: int, message: Message) -> Message:
        given = run.answer(client, message)
        if client == 2 and round_of(message) == 2:
            first, *others = wire.decode(packet_of(given))
            return answer(wire.encode([dataclasses.replace(first, fingerprint=bytes(4)), *others]), message)
        if client == 2 and round_of(message) == 3 and not lost_replies:
            lost_replies.append(client)
            return lost(message)
        return given

    run.run(reply)
    lines = map(json.loads, (tmp_path / "store" / "log.jsonl").read_text().splitlines())
    rounds = [line for line in lines if line["event"] == "round"]
    assert [line["participants"] for line in rounds] == [[0, 1, 2, 3], [], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert "differs" in rounds[1]["refused"]["2"]
    assert lost_replies
    same_model(run)


def test_a_second_server_on_the_same_store_is_refused(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg"))
    other = []

    def reply(client: int, message: Message) -> Message:
        if not other:
            status, _ = in_child(lambda: refused_second())
            other.append(status)
        return run.answer(client, message)

    def refused_second() -> None:
        with pytest.raises(SiteError, match="another process is working"):
            FlowerFederation.run(run)

    run.run(reply)
    assert other == [0]


# --- bytes that are not what they were -------------------------------------------------------------------------------


def flipped(packet: bytes, place: float) -> bytes:
    position = int(place * (len(packet) - 1))
    return packet[:position] + bytes([packet[position] ^ 4]) + packet[position + 1 :]


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_bit_that_flips_on_the_way_costs_one_upload_and_nothing_else(
    direction: str, place: float, tmp_path: Path
) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))

    def spoils(client: int, message: Message) -> Message:
        record = next(iter(message.content.config_records.values()))
        if direction == "down":
            record["packet"] = flipped(record["packet"], place)
            return run.answer(client, message)
        return answer(flipped(packet_of(run.answer(client, message)), place), message)

    seen: list[dict[str, object]] = []

    def watch(client: int, message: Message) -> Message | None:
        if round_of(message) == 3 and not seen:
            seen.append(run.store())
        return reply(client, message)

    reply = first_time(run, spoils, lambda c, m: c == 3 and round_of(m) == 2)
    run.run(watch)
    assert seen[0]["participants"] == [0, 1, 2]
    assert list(seen[0]["refused"]) == ["3"]
    assert run.store()["participants"] == [0, 1, 2, 3]
    same_model(run)


def test_messages_that_come_twice_and_messages_of_the_past_change_nothing(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    past: list[tuple[int, Message]] = []

    def reply(client: int, message: Message) -> Message:
        first = run.answer(client, message)
        if message.metadata.message_type == ROUND and round_of(message):
            assert packet_of(run.answer(client, message)) == packet_of(first)
            for whose, old in past:
                if whose == client and round_of(old) < round_of(message):
                    again = run.answer(client, old)
                    assert "refused" in next(iter(again.content.config_records.values()))
            past.append((client, message))
        return first

    run.run(reply)
    assert len(past) == 12
    assert np.array_equal(same_model(run), undisturbed(run))


def test_a_message_for_another_client_is_refused(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    crossed = first_time(run, lambda c, m: run.answer(0, m), lambda c, m: c == 3 and round_of(m) == 1)
    run.run(crossed)
    assert crossed.happened
    same_model(run)


# --- people ----------------------------------------------------------------------------------------------------------


def test_a_site_with_another_roster_is_left_out_and_the_reason_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT), min_clients=3)
    (tmp_path / "else").mkdir()
    strangers = [entry_of(new_identity(tmp_path / "else" / f"{n}.key", n)) for n in run.names[:3]]
    own = [entry_of(new_identity(tmp_path / "else" / "site-3.key", "site-3"))]
    write_roster(tmp_path / "else" / "roster.toml", merged([*strangers, *own]))
    run.node_configs[103] |= {"key": str(tmp_path / "else/site-3.key"), "roster": str(tmp_path / "else/roster.toml")}
    run.run()
    assert "site 'site-3' (node 103) cannot take part: client 3 has another roster than the others" in caplog.text
    assert run.store()["missing"] == [3]
    same_model(run, [0, 1, 2])


def test_two_nodes_with_one_name_do_not_disturb_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    run.node_configs[104] = run.node_configs[100]
    run.run(online=lambda: range(5))
    assert "says that it is client 0, who is online as site 'site-0' (node 10" in caplog.text
    assert np.array_equal(same_model(run), undisturbed(run))


# --- disks and clocks ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk_of_site_1(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "sites" / "site-1", "128k") as disk:
        yield disk


def test_a_full_disk_costs_a_round_and_no_state(disk_of_site_1: Path, tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", rounds=5, **EXACT))
    refused: list[str] = []

    def reply(client: int, message: Message) -> Message:
        ballast = disk_of_site_1 / "ballast"
        if client == 1 and round_of(message) == 2:
            with pytest.raises(OSError, match="No space left"):
                ballast.write_bytes(bytes(1 << 20))
        given = answer_in_child(run, client, message)
        if client == 1 and round_of(message) == 2:
            refused.append(str(next(iter(given.content.config_records.values())).get("refused")))
            ballast.unlink()
        return given

    run.run(reply)
    assert refused == ["SiteError"]
    assert run.status(1)["round"] == 5
    same_model(run)


def test_a_quota_costs_a_round_and_no_state(tmp_path: Path) -> None:
    """The same without being root: files may not grow beyond 100 bytes."""
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))

    def quota() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    reply = first_time(run, lambda c, m: answer_in_child(run, c, m, quota), lambda c, m: c == 1 and round_of(m) == 2)
    run.run(reply)
    assert reply.happened
    same_model(run)


@pytest.mark.parametrize("skew", [-400.0, 400.0, 10 * 3600.0])
def test_clocks_that_are_wrong_change_nothing(skew: float, tmp_path: Path) -> None:
    """One client's clock is off, by up to ten hours; another amount in every process."""
    import flwr.app.message.message as flower_message

    import fedrp.storage.status

    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    now, own, count = flower_message.now, fedrp.storage.status._now, iter(range(100))

    def reply(client: int, message: Message) -> Message:
        import datetime

        offset = datetime.timedelta(seconds=skew * (1 - 0.5 * (next(count) % 2)))

        def wrong_clock() -> None:
            if client == 1:
                flower_message.now = lambda: now() + offset
                fedrp.storage.status._now = lambda: (datetime.datetime.fromisoformat(own()) + offset).isoformat()
                seconds = time.time
                time.time = lambda: seconds() + offset.total_seconds()

        return answer_in_child(run, client, message, wrong_clock)

    run.run(reply)
    assert np.array_equal(same_model(run), undisturbed(run))


# --- masked uploads --------------------------------------------------------------------------------------------------


def masked(tmp_path: Path, **pacing: object) -> FlowerFederation:
    config = tiny_config("fedrp-subspace", **EXACT, clients=5, rounds=4, secure_aggregation=True)
    return FlowerFederation(tmp_path, config, **pacing)


def asks_for_recovery(message: Message) -> bool:
    return message.metadata.message_type == ROUND and bool(
        wire.messages_of(wire.decode(packet_of(message)), Kind.RECOVER)
    )


def test_masks_of_a_client_that_drops_out_are_taken_off(tmp_path: Path) -> None:
    run = masked(tmp_path)
    gone: list[int] = []

    def reply(client: int, message: Message) -> Message:
        if client == 3 and round_of(message) == 2:
            gone.append(client)
        if round_of(message) == 3:
            gone.clear()
        return lost(message) if client in gone else answer_in_child(run, client, message)

    run.run(reply, lambda: [c for c in range(5) if c not in gone])
    assert any(asks_for_recovery(message) for message in run.sent)
    assert run.store()["participants"] == [0, 1, 2, 3, 4]
    same_model(run, range(5))


def test_a_server_that_is_killed_in_a_recovery_asks_for_the_same_again(tmp_path: Path) -> None:
    """Clients help to leave out one set of clients a round, so the server must remember which."""
    run = masked(tmp_path, round_timeout=30.0)

    def work() -> None:
        def reply(client: int, message: Message) -> Message:
            if asks_for_recovery(message) and client == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return lost(message) if client == 3 and round_of(message) == 2 else run.answer(client, message)

        run.run(reply)

    status, _ = in_child(work)
    assert os.WTERMSIG(status) == signal.SIGKILL
    run.run()  # client 3 is back, but its masks of round 2 have been given away
    assert run.store()["finished"]
    same_model(run, range(5))


def test_a_helper_whose_correction_is_lost_is_asked_again(tmp_path: Path) -> None:
    run = masked(tmp_path)
    lost_ones: list[int] = []

    def reply(client: int, message: Message) -> Message:
        if client == 3 and round_of(message) == 2:
            return lost(message)
        given = answer_in_child(run, client, message)
        if asks_for_recovery(message) and client == 0 and len(lost_ones) < 2:
            lost_ones.append(client)
            return lost(message)
        return given

    run.run(reply)
    assert lost_ones == [0, 0]
    same_model(run, range(5))


def test_the_last_message_can_be_lost_too(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    reply = first_time(run, lambda c, m: lost(m), lambda c, m: c == 0 and m.metadata.message_type == FINISH)
    run.run(reply)
    assert reply.happened
    assert run.store()["missing"] == []
    assert np.array_equal(same_model(run), undisturbed(run))


# --- after the end ---------------------------------------------------------------------------------------------------


class SlowGrid(LocalGrid):
    """A grid on which a message takes its time: longer to one node, whose machine is slower, than to the others."""

    def __init__(self, answer: Callable[[int, Message], Message | None], nodes: list[int], slow: int) -> None:
        super().__init__(answer, lambda: nodes)
        self.slow, self.ready = slow, dict[str, float]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            (message_id,) = super().push_messages([message])
            pushed.append(message_id)
            self.ready[message_id] = time.monotonic() + (2.0 if message.metadata.dst_node_id == self.slow else 0.1)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages([m for m in message_ids if self.ready[m] <= time.monotonic()])


def test_a_slow_site_that_was_away_gets_the_model_in_the_next_sitting_and_the_others_are_not_asked(
    tmp_path: Path,
) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    run.run(online=lambda: [0, 2, 3] if run.store().get("round") == 3 else range(4))
    assert run.store()["missing"] == [1]
    run.sent.clear()
    run_locally(server_app(TinyNet), SlowGrid(run._watched(run.answer), [100, 101, 102, 103], 101), run.run_config)
    assert run.store()["missing"] == []
    assert [len(run.sent_to(client, FINISH)) for client in range(4)] == [0, 1, 0, 0]
    assert np.array_equal(same_model(run), undisturbed(run))


def test_a_site_that_stays_away_is_not_waited_for(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT))
    run.run(online=lambda: [0, 2, 3] if run.store().get("round") == 3 else range(4))
    began = time.monotonic()
    run.run(online=lambda: [0, 2, 3])
    assert time.monotonic() - began < 60  # of a round-timeout of 120
    assert run.store()["missing"] == [1]


# --- a store from a copy ---------------------------------------------------------------------------------------------


def test_a_store_that_the_sites_are_past_cannot_go_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedrp-subspace", **EXACT, rounds=4), round_timeout=3.0, attempts=2)
    store, copy = tmp_path / "store", tmp_path / "copy"

    def reply(client: int, message: Message) -> Message:
        if round_of(message) == 2 and not copy.exists():
            shutil.copytree(store, copy)
        return run.answer(client, message)

    run.run(reply)
    shutil.rmtree(store)
    copy.rename(store)
    caplog.clear()
    with pytest.raises(QuorumError, match="round 2: 0 valid uploads"):
        run.run()
    assert "all refuse round 2 (ProtocolError): if this store was put back from a copy" in caplog.text
