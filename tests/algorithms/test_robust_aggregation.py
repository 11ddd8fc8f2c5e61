"""Median and trimmed mean: hostile uploads move them no further than the honest ones reach; a mean, anywhere."""

import dataclasses
import importlib.util
import itertools
import json
import math
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp import RunConfig, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, for_each
from fedrp.errors import ConfigError, QuorumError
from fedrp.flower.settings import run_settings
from fedrp.means import cut_at_each_end, trimmed_mean
from fedrp.mechanisms.cohort import least_uploads
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.simulation.clients import Tap
from fedrp.types import Packets
from helpers import ROOT, Federation, tiny_config, tiny_task

OFFERED = [name for name, algorithm in ALGORITHMS.items() if "aggregation" in algorithm.settings]
ROBUST = ("median", "trimmed:0.25")
PARAMETERS = 83
HUGE = 1e30

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
COLUMNS = st.lists(NUMBERS, min_size=1, max_size=12)
SHARES = st.sampled_from([0.1, 0.2, 0.25, 0.29, 0.4, 0.49, 0.5])


def vectors_of(numbers: list[float]) -> list[np.ndarray]:
    return [np.array([number], np.float32) for number in numbers]


# --- the arithmetic --------------------------------------------------------------------------------------------------


@given(COLUMNS)
def test_half_cut_off_at_each_end_is_the_median(numbers: list[float]) -> None:
    expected = np.float32(np.median(np.array(numbers, np.float64)))
    assert trimmed_mean(vectors_of(numbers), 0.5)[0] == expected


@given(COLUMNS, SHARES)
def test_a_trimmed_mean_is_that_of_what_is_left(numbers: list[float], share: float) -> None:
    cut = cut_at_each_end(share, len(numbers))
    left = sorted(np.float32(number) for number in numbers)[cut : len(numbers) - cut]
    assert left
    expected = math.fsum(left) / len(left)
    assert trimmed_mean(vectors_of(numbers), share)[0] == pytest.approx(expected, rel=1e-6, abs=2.0**76)


@given(COLUMNS, SHARES, st.randoms())
def test_the_order_of_uploads_changes_no_bit(numbers: list[float], share: float, random) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)
    assert trimmed_mean(vectors_of(numbers), share) == trimmed_mean(vectors_of(shuffled), share)


@given(NUMBERS, st.integers(1, 50), SHARES)
def test_equal_uploads_give_that_upload(number: float, count: int, share: float) -> None:
    assert trimmed_mean(vectors_of([number] * count), share)[0] == np.float32(number)


@given(st.lists(NUMBERS, min_size=3, max_size=12), SHARES, st.data())
def test_as_many_liars_as_are_cut_off_stay_within_what_the_others_sent(
    honest: list[float], share: float, data: st.DataObject
) -> None:
    liars = max(n for n in range(len(honest)) if n <= cut_at_each_end(share, len(honest) + n))
    lies = data.draw(st.lists(NUMBERS, min_size=liars, max_size=liars))
    result = trimmed_mean(vectors_of([*lies, *honest]), share)[0]
    assert min(np.float32(honest)) <= result <= max(np.float32(honest))


@pytest.mark.parametrize(("share", "count", "cut"), [(0.29, 100, 29), (0.2, 20, 4), (0.2, 4, 0), (0.1, 30, 3)])
def test_a_fraction_is_taken_as_written(share: float, count: int, cut: int) -> None:
    assert cut_at_each_end(share, count) == cut  # 0.29 * 100 is 28.999999999999996


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.1, 0.2, 0.25, 0.3, 0.4, 0.49, 0.5])
def test_the_least_number_of_uploads_is_the_first_of_which_something_is_cut_off(share: float) -> None:
    least = least_uploads(share)
    assert cut_at_each_end(share, least) >= 1
    assert cut_at_each_end(share, least - 1) == 0


def test_long_vectors_are_taken_in_parts_that_give_the_same() -> None:
    rng = np.random.default_rng(0)
    vectors = [rng.normal(0, 1, (1 << 20) + 5).astype(np.float32) for _ in range(5)]
    tracemalloc.start()
    result = trimmed_mean(vectors, 0.5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(result, np.median(np.stack(vectors), axis=0))
    assert peak < result.nbytes + 16 * 2**20  # a copy of all of them would be 20 MB more


# --- the protocol ----------------------------------------------------------------------------------------------------


def with_upload(packet: bytes, vector: np.ndarray) -> bytes:
    """The packet as a hostile wire or client makes it: everything is valid but the numbers."""
    messages = wire.decode(packet)
    return wire.encode(
        dataclasses.replace(m, payload=vector.astype(np.float32)) if m.kind is Kind.UPLOAD else m for m in messages
    )


def upload_of(packet: bytes) -> np.ndarray:
    (message,) = wire.messages_of(wire.decode(packet), Kind.UPLOAD)
    return message.payload.view(np.float32)


def test_robust_aggregation_is_offered_wherever_single_vectors_without_noise_are_sent() -> None:
    noiseless = [name for name in ALGORITHMS if not resolved(RunConfig(algorithm=name, dim=9), PARAMETERS).private]
    assert noiseless == OFFERED


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("name", OFFERED)
def test_the_aggregate_is_taken_per_coordinate_of_what_was_uploaded(name: str, rule: str) -> None:
    run = Federation(tiny_config(name, aggregation=rule, clients=5))
    for round_ in (1, 2):
        replies = run.deliver(run.open())
        uploads = np.sort([upload_of(packet).astype(np.float64) for packet in replies.values()], axis=0)
        run.close(replies)
        expected = uploads[2] if rule == "median" else uploads[1:4].mean(axis=0)
        np.testing.assert_array_equal(run.server.aggregates[round_], expected.astype(np.float32))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("name", OFFERED)
def test_equal_uploads_in_any_order_are_aggregated_to_themselves(name: str, rule: str) -> None:
    run = Federation(tiny_config(name, aggregation=rule))
    replies = run.deliver(run.open())
    same = upload_of(replies[0])
    equal = {client: with_upload(packet, same) for client, packet in replies.items()}
    run.close(dict(reversed(equal.items())))
    np.testing.assert_array_equal(run.server.aggregates[1], same)


@pytest.mark.parametrize("liar", [0, 3])
@pytest.mark.parametrize("rule", ["mean", *ROBUST])
@pytest.mark.parametrize("name", OFFERED)
def test_one_upload_of_any_size_moves_only_the_mean_out_of_the_others_range(name: str, rule: str, liar: int) -> None:
    run = Federation(tiny_config(name, aggregation=rule))
    replies = run.deliver(run.open())
    honest = [upload_of(packet) for client, packet in replies.items() if client != liar]
    lies = np.where(np.arange(honest[0].size) % 2, HUGE, -HUGE)
    report = run.close({**replies, liar: with_upload(replies[liar], lies)})
    assert report.participants == (0, 1, 2, 3)
    aggregate = run.server.aggregates[1]
    within = (np.min(honest, axis=0) <= aggregate) & (aggregate <= np.max(honest, axis=0))
    assert within.all() == (rule != "mean")
    if rule == "mean":
        np.testing.assert_allclose(aggregate, lies / 4, rtol=1e-6)


@pytest.mark.parametrize("name", OFFERED)
def test_one_client_that_sends_nonsense_costs_accuracy_with_a_mean_alone(name: str) -> None:
    def nonsense(_sent: Packets, replies: Packets) -> None:
        for client, packet in replies.items():
            if client == 1 and wire.messages_of(wire.decode(packet), Kind.UPLOAD):
                replies[client] = with_upload(packet, np.full(upload_of(packet).size, 50.0))

    config = tiny_config(name, clients=5, rounds=12, dim=30, grad_clip=1.0)

    def accuracy(rule: str, tap: Tap | None) -> float:
        told = simulate(dataclasses.replace(config, aggregation=rule), tiny_task(), tap=tap).as_json()
        assert told["aggregation"] == rule
        return told["accuracy_client_mean"]

    honest = accuracy("mean", None)
    assert accuracy("mean", nonsense) < honest - 5
    for rule in ("median", "trimmed:0.2"):
        assert accuracy(rule, nonsense) > honest - 3
        assert accuracy(rule, None) > honest - 3


@pytest.mark.parametrize(("rule", "clients", "least"), [("median", 5, 3), ("trimmed:0.25", 6, 4)])
def test_a_round_in_which_too_few_came_to_cut_any_off_is_asked_again(rule: str, clients: int, least: int) -> None:
    """With fewer, it would silently be the mean."""
    run = Federation(tiny_config("fedavg", aggregation=rule, clients=clients, quorum=0.1))
    replies = run.deliver(run.open())
    few = dict(itertools.islice(replies.items(), least - 1))
    with pytest.raises(QuorumError, match=f"round 1: {least - 1} valid uploads, {least} needed"):
        run.close(few)
    run.close(dict(itertools.islice(replies.items(), least)))
    assert run.server.round == 1


def test_coins_never_choose_fewer_than_can_be_trimmed() -> None:
    config = tiny_config("fedavg", aggregation="median", clients=8, participation=0.1, sampling="poisson", rounds=12)
    run = Federation(config)
    counts = [len(run.round().participants) for _ in range(12)]
    assert min(counts) == 3


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["trimmed", "trimmed:", "trimmed:0", "trimmed:0.5", "trimmed:-0.1", "trimmed:nan", "trimmed:1e-9", "meen", ""],
)
def test_an_aggregation_that_is_none_is_refused_by_name_and_value(value: str) -> None:
    expected = rf"aggregation={value} is not valid: expected mean, median or trimmed:F with F from 1e-06 to below 0\.5"
    with pytest.raises(ConfigError, match=expected):
        RunConfig(aggregation=value)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "fedavg",
            {"secure_aggregation": True},
            "needs the single uploads, .* leave it out, or use secure_aggregation=False",
        ),
        ("fedrp-subspace", {"noise_multiplier": 1.0}, "does not go with noise, .* leave out one of them"),
        ("fedrp-subspace", {"dp_epsilon": 1.0}, "does not go with noise, .* leave out one of them"),
        ("fedavg", {"weighting": "samples"}, "counts every client once, .* or use weighting='uniform'"),
        ("fedavg", {"clients": 2}, "cuts nothing off 2 uploads a round, 3 are needed: .* or more clients"),
        ("fedavg", {"clients": 9, "participation": 0.2}, "cuts nothing off 2 uploads a round, 3 are needed"),
        ("fwc", {}, "does nothing with algorithm 'fwc': leave it out, or use fedrp-subspace or fedrp or fedavg or fed"),
        ("fedavg-dp", {}, "does nothing with algorithm 'fedavg-dp': leave it out, or use fedrp-subspace or fedrp or"),
    ],
)
def test_a_median_is_refused_where_it_cannot_be_had_or_breaks_a_promise(
    name: str, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"^aggregation=median {told}"):
        resolved(tiny_config(name, aggregation="median", **changes), PARAMETERS)


def test_a_fraction_that_cuts_nothing_off_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"aggregation=trimmed:0\.2 cuts nothing off 4 uploads a round, 5 are needed"):
        resolved(tiny_config("fedavg", aggregation="trimmed:0.2"), PARAMETERS)
    resolved(tiny_config("fedavg", aggregation="trimmed:0.25"), PARAMETERS)


def test_in_a_comparison_noise_and_median_go_to_those_who_use_them() -> None:
    shared = RunConfig(aggregation="median", noise_multiplier=1.0)
    for config in for_each(shared, ("fedavg", "fedavg-dp")):
        resolved(config, PARAMETERS)


def test_in_a_deployment_the_message_says_how_to_switch_masks_off() -> None:
    asked = {"algorithm": "fedavg", "clients": 4, "aggregation": "median"}
    config, _ = run_settings(asked)
    with pytest.raises(ConfigError, match=r"\(secure-aggregation = false in a Flower run config, where masks are the "):
        resolved(config, PARAMETERS)
    config, _ = run_settings({**asked, "secure-aggregation": False})
    resolved(config, PARAMETERS)


# --- the benchmark ---------------------------------------------------------------------------------------------------

SCRIPT = ROOT / "benchmarks" / "robust.py"
sys.path.append(str(SCRIPT.parent))  # where a script finds its siblings
spec = importlib.util.spec_from_file_location("robust", SCRIPT)
robust = importlib.util.module_from_spec(spec)
spec.loader.exec_module(robust)


@pytest.mark.parametrize(("attack", "size"), [("flip:3", 3.0), ("random:10", 10.0)])
def test_the_benchmark_changes_the_uploads_of_the_hostile_and_nothing_else(attack: str, size: float) -> None:
    run = Federation(tiny_config("fedrp-subspace", clients=10))
    replies = run.deliver(run.open())
    arrived = dict(replies)
    robust.hostile_wire(run.config, attack)({}, arrived)
    (hostile,) = robust.hostile_clients(run.config)
    assert [client for client in replies if arrived[client] != replies[client]] == [hostile]
    before, after = wire.decode(replies[hostile]), wire.decode(arrived[hostile])
    unlike = [a.kind for a, b in zip(before, after, strict=True) if a != b]
    assert unlike == [Kind.UPLOAD]
    old, new = upload_of(replies[hostile]), upload_of(arrived[hostile])
    assert np.linalg.norm(new) == pytest.approx(size * np.linalg.norm(old), rel=1e-5)
    if attack.startswith("flip"):
        np.testing.assert_allclose(new, -size * old, rtol=1e-6)
    assert len(run.close(arrived).participants) == 10


def test_an_honest_run_of_the_benchmark_is_a_run_of_the_library() -> None:
    config = tiny_config("fedavg", clients=10)
    kept = robust.measure(config, "honest", tiny_task())
    assert kept["accuracy_client_mean"] == simulate(config, tiny_task()).accuracy


def test_the_benchmark_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 10, "rounds": 1, "dim": 12}
    study = robust.Study("tiny", settings, ("honest", "flip:1"), (0,), ("fedavg",))
    monkeypatch.setattr(robust, "STUDIES", {"tiny": study})
    monkeypatch.setattr(robust, "named_task", lambda _config: tiny_task())
    out = tmp_path / "kept.jsonl"
    robust.perform(["tiny"], out)
    whole = out.read_text().splitlines()
    assert len(whole) == 6
    (tmp_path / "kept.jsonl.part").write_text("\n".join(whole[:4]) + "\n")
    done: list[str] = []
    measure = robust.measure
    monkeypatch.setattr(robust, "measure", lambda *asked: done.append(asked[1]) or measure(*asked))
    robust.perform(["tiny"], out)
    assert done == ["flip:1", "flip:1"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [json.loads(line) for line in whole]
