"""Masked uploads of few bits: their sum is that of the levels, whoever drops out, and a sum that is none is refused."""

import dataclasses
import logging

import numpy as np
import pytest
from scipy.stats import chisquare

from fedrp import Task, simulate
from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression.coding import MaskedWords
from fedrp.crypto.masks import Masker
from fedrp.errors import WireError
from fedrp.mechanisms.shared_grid import SharedGrid
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.types import Words
from helpers import Federation, tiny_config

CLIENTS = 6


def few(name: str = "fedrp-subspace", /, **changes: object) -> Federation:
    given = {"clients": CLIENTS, "bits": 1.0, "secure_aggregation": True, **changes}
    return Federation(tiny_config(name, **given))


def words(run: Federation, packet: bytes, kind: Kind = Kind.UPLOAD) -> np.ndarray:
    (message,) = wire.messages_of(wire.decode(packet), kind)
    return wire.numbers(message, run.bench.pipeline.upload_coding(run.bench.upload_size), run.run)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> list[Words]:
    """What clients have put under masks, one after the other."""
    seen: list[Words] = []
    mask = Masker.masked

    def masked(masker: Masker, upload: Words) -> Words:
        seen.append(upload.copy())
        return mask(masker, upload)

    monkeypatch.setattr(Masker, "masked", masked)
    return seen


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedavg-dp"])
@pytest.mark.parametrize("bits_down", [1.0, 32.0])
def test_the_sum_under_masks_is_that_of_the_levels(name: str, bits_down: float, hidden: list[Words]) -> None:
    projected = {"bits_down": bits_down} if "bits_down" in ALGORITHMS[name].settings else {}
    run = few(name, **projected)
    for round_ in (1, 2, 3):
        replies = run.deliver(run.open())
        coding, mechanism = run.bench.pipeline.upload_coding(run.bench.upload_size), run.bench.pipeline.mechanisms[-1]
        assert isinstance(mechanism, SharedGrid)
        assert isinstance(coding, MaskedWords)
        assert coding.width == mechanism.width == 4  # one bit, and three as there are six clients
        total = np.sum([words(run, reply) for reply in replies.values()], axis=0, dtype=np.uint32)
        total[:-2] %= 2**coding.width
        levels = np.sum(hidden[-CLIENTS:], axis=0, dtype=np.uint32)
        np.testing.assert_array_equal(total, levels)
        assert levels[:-2].max() <= 2 * CLIENTS  # three levels
        assert levels[:-2].sum() == levels[-1]
        assert run.close(replies).participants == tuple(range(CLIENTS))
        made = run.server.decoded(round_, run.server.aggregates[round_])
        assert made.size == run.bench.aggregate_size == run.bench.upload_size - 1


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedavg"])
def test_who_drops_out_is_not_in_the_sum_and_the_rest_is_exact(name: str, hidden: list[Words]) -> None:
    run = few(name, rounds=5)
    run.round()
    replies = run.deliver(run.open())
    made = dict(zip(replies, hidden[-CLIENTS:], strict=True))
    previous = run.server.decoded(1, run.server.aggregates[1])
    report = run.close({c: replies[c] for c in (0, 1, 2, 4, 5)})
    assert len(report.participants) == 4
    rest = np.sum([made[c] for c in report.participants], axis=0, dtype=np.uint32)
    true = run.server.pipeline.aggregate([previous], rest, 4.0, run.clients[0].call)
    np.testing.assert_array_equal(run.server.decoded(2, run.server.aggregates[2]), true)
    assert run.round().participants == tuple(range(CLIENTS))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_dropouts_a_run_ends_well_and_repeats(name: str, task: Task) -> None:
    given = {"clients": 9, "rounds": 4, "dropout": 0.15, "quorum": 0.4, "seed": 5}
    config = tiny_config(name, secure_aggregation=True, bits=2.0, **given)
    result = simulate(config, task)
    dropped = [record.dropped for record in result.records]
    assert max(dropped) >= 2
    assert 1 not in dropped
    assert simulate(config, task).model.tobytes() == result.model.tobytes()


def test_many_bits_under_masks_are_the_mean_up_to_rounding(task: Task) -> None:
    """The first round of equally long vectors apart, there is nothing but rounding between them."""
    plain, masked = (
        simulate(tiny_config("fedrp-subspace", clients=CLIENTS, rounds=1, secure_aggregation=True, bits=bits), task)
        for bits in (32.0, 16.0)
    )
    moved = np.linalg.norm(plain.model - masked.model)
    assert 0 < moved < 0.2 * np.linalg.norm(plain.model)
    assert masked.as_json()["bytes_up"] == 28 + -(-12 * 19 // 8) + 8
    assert plain.as_json()["bytes_up"] == 28 + 4 * 12


def test_what_is_sent_is_uniform_whatever_is_under_it() -> None:
    run = few(dim=80)
    counts = np.zeros(16, int)
    for _ in range(3):
        replies = run.deliver(run.open())
        for reply in replies.values():
            counts += np.bincount(words(run, reply)[:-2], minlength=16)
        run.close(replies)
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_random_words_under_masks_spoil_no_model(name: str) -> None:
    """Nobody can tell whose they are, but the server can tell that the sum is none of honest clients."""
    run = few(name, clients=5, rounds=4)
    replies = run.deliver(run.open())
    first, *rest = wire.decode(replies[2])
    coding = run.bench.pipeline.upload_coding(run.bench.upload_size)
    noise = np.random.default_rng(0).integers(0, 2**32, run.bench.upload_size, dtype=np.uint32)
    replies[2] = wire.encode([dataclasses.replace(first, payload=coding.encode(noise, b"")), *rest])
    report = run.close(replies)
    assert report.participants == ()
    assert "garbage" in report.void
    assert run.round().participants == tuple(range(5))


def test_words_of_another_width_or_form_are_refused() -> None:
    run = few()
    replies = run.deliver(run.open())
    first, *rest = wire.decode(replies[2])
    coding = run.bench.pipeline.upload_coding(run.bench.upload_size)
    wrong = {
        "numbers of 5 bits, expected 4": dataclasses.replace(first, width=5),
        "masked words of": dataclasses.replace(first, payload=first.payload[:-1]),
        "numbers of 0 bits": dataclasses.replace(first, width=0),
    }
    for why, message in wrong.items():
        with pytest.raises(WireError, match=why):
            wire.numbers(message, coding, run.run)
    spoiled = {**replies, 2: wire.encode([wrong["masked words of"], *rest])}
    assert "masked words of" in run.tallied(spoiled).refused[2]


def test_a_client_whose_update_is_far_longer_than_the_others_tells_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    run = few(rounds=4)
    with caplog.at_level(logging.WARNING):
        run.round()
        run.round()
    assert "cut off" not in caplog.text
    small = run.server.decoded(2, run.server.aggregates[2]).copy()
    small[-1] /= 100  # what the server says of the norms
    run.server = dataclasses.replace(run.server, aggregates={**run.server.aggregates, 2: small})
    with caplog.at_level(logging.WARNING):
        run.deliver(run.open())
    assert "of 12 numbers were cut off before masking: the update has norm" in caplog.text
