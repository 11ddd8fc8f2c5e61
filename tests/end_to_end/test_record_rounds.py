"""Noise for records at a site: a round counts before it trains, so crashes are not free; errors do not show."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedrp.errors import ConfigError, ProtocolError
from fedrp.flower.client_app import make_client_app
from fedrp.flower.messages import HELLO, ROUND
from fedrp.flower.task import ClientContext, LocalTask
from fedrp.protocol import wire
from fedrp.protocol.client import begun, respond
from fedrp.protocol.client_state import Client
from fedrp.protocol.wire import Kind
from fedrp.protocol.wire import Message as WireMessage
from fedrp.records import training
from fedrp.simulation.measures import delivering_client
from fedrp.storage.site import SiteFolder
from flower_helpers import FlowerFederation, answer_in_child, simulated, tiny_load
from helpers import Federation, tiny_config

CONFIG = tiny_config("fedrp-subspace", projection="sign", dp_unit="record", noise_multiplier=1.0, clip=1.0)


def stored(run: FlowerFederation, client: int) -> Client:
    folder = run.folder(client)
    return SiteFolder(folder.parent, bytes.fromhex(folder.name)).load(client)


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.fixture
def federation() -> Federation:
    return Federation(tiny_config("fedavg", dp_unit="record", noise_multiplier=1.0))


def asked(run: Federation, round_: int, weight: int = 4) -> bytes:
    news = [WireMessage(Kind.VOID, run.bench.context, number, wire.SERVER, wire.EMPTY) for number in range(1, round_)]
    call = WireMessage(Kind.ROUND, run.bench.context, round_, wire.SERVER, wire.EMPTY, weight)
    return wire.encode([*news, call])


def test_a_round_that_was_begun_is_done_again_for_the_same_bytes_only(federation: Federation) -> None:
    run, packet = federation, asked(federation, 1)
    before, site = run.clients[0], run.sites[0]
    counted = begun(run.bench, before, site, packet)
    assert (counted.taken, counted.begun, counted.round, counted.reply) == (1, 1, 0, b"")
    assert begun(run.bench, counted, site, packet) is counted
    after, reply = respond(run.bench, [counted], [site], [packet])[0]
    assert reply == respond(run.bench, [before], [site], [packet])[0][1]
    assert after.taken == 1
    assert begun(run.bench, after, site, packet) is after
    assert respond(run.bench, [after], [site], [packet])[0] == (after, reply)
    for work in (begun, lambda *given: respond(*([part] if p else part for p, part in enumerate(given)))):
        with pytest.raises(ProtocolError, match="client 0 began round 1 for another packet"):
            work(run.bench, counted, site, asked(run, 1, weight=3))


def test_later_rounds_count_too_and_there_is_no_way_back(federation: Federation) -> None:
    run, site = federation, federation.sites[0]
    client = begun(run.bench, run.clients[0], site, asked(run, 1))
    client = begun(run.bench, client, site, asked(run, 2))
    assert (client.taken, client.begun, client.round) == (2, 2, 0)
    with pytest.raises(ProtocolError, match="past round 1: replayed message refused"):
        begun(run.bench, client, site, asked(run, 1))


def test_begun_rounds_are_rounds_that_a_site_may_take_part_in() -> None:
    run = Federation(
        tiny_config("fedavg", dp_unit="record", noise_multiplier=1.0, clients=10, rounds=100, participation=0.1)
    )
    client, site = run.clients[3], run.sites[3]
    for round_ in range(1, 28):  # as in test_hostile.py
        client = begun(run.bench, client, site, asked(run, round_, weight=1))
    with pytest.raises(ProtocolError, match="taken part in 27 of 100 rounds"):
        begun(run.bench, client, site, asked(run, 28, weight=1))


def test_what_is_refused_whatever_the_data_are_does_not_count(federation: Federation) -> None:
    call = WireMessage(Kind.ROUND, federation.bench.context, 2, wire.SERVER, wire.EMPTY, 4)  # without what came before
    with pytest.raises(ProtocolError):
        begun(federation.bench, federation.clients[0], federation.sites[0], wire.encode([call]))


# --- the site --------------------------------------------------------------------------------------------------------


def dies_while_it_trains() -> None:
    """Kills this process in the second step of a round."""
    real, calls = training.SiteRound.noised_mean, []

    def deadly(self: training.SiteRound, *arguments: object) -> object:
        calls.append(0)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)  # type: ignore[arg-type]

    training.SiteRound.noised_mean = deadly  # type: ignore[assignment, method-assign]


def test_a_site_that_is_killed_while_it_trains_has_counted_the_round_and_does_it_once(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, CONFIG)
    seen: list[Client] = []

    def reply(client: int, message: Message) -> Message:
        second = message.metadata.message_type == ROUND and run.status(client).get("round") == 1
        if client == 1 and second and not seen:
            given = answer_in_child(run, client, message, dies_while_it_trains)
            assert given.has_error()  # it did die
            seen.append(stored(run, 1))
            return given
        return run.answer(client, message)

    run.run(reply)
    assert [(c.round, c.begun, c.taken) for c in seen] == [(1, 2, 2)]
    assert (stored(run, 1).round, stored(run, 1).taken) == (3, 3)
    assert np.array_equal(run.model(delivering_client(CONFIG)), run.simulated().model)


def spoiled_load(context: ClientContext) -> LocalTask:
    """At one site a record has a label that the loss raises an error for; it is the largest one, too."""
    task = tiny_load(context)
    x, y = task.train
    assert isinstance(y, torch.Tensor)
    y = y.clone()
    y[3] = 77 if context.index == 1 else y[3]
    return LocalTask(task.model, (x, y), task.test)


def test_a_record_that_the_loss_raises_for_ends_no_round_and_no_preflight(tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, CONFIG, spoiled_load)
    run.run()
    assert [run.status(client)["round"] for client in range(4)] == [3] * 4
    assert stored(run, 1).taken == 3


def test_a_model_that_no_example_can_be_taken_of_is_found_before_round_1(tmp_path: Path) -> None:
    def load(context: ClientContext) -> LocalTask:
        task = tiny_load(context)
        return LocalTask(task.model, task.train, task.test, choosy)

    run = FlowerFederation(tmp_path, CONFIG, load, start_timeout=2.0)
    refused: list[str] = []

    def reply(client: int, message: Message) -> Message:
        given = run.answer(client, message, make_client_app(load, simulated))
        refused.append(message.metadata.message_type)
        return given

    with pytest.raises(Exception, match="ConfigError"):
        run.run(reply)
    assert set(refused) == {HELLO}


def choosy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    return loss if float(loss) > 0 else -loss


def test_a_simulation_finds_it_before_round_1_too() -> None:
    from fedrp import Task, simulate
    from helpers import tiny_task

    task, told = tiny_task(), []
    with pytest.raises(ConfigError, match="even for an example of zeros"):
        simulate(CONFIG, Task(task.model, task.train, task.test, choosy), on_round=lambda *given: told.append(given))
    assert not told
