"""The methods of benchmarks/compression.py do what their papers say, and its FedAvg is the library's."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedrp import RunConfig, Task, simulate
from fedrp.errors import ConfigError
from fedrp.rng import RunSeed
from helpers import ROOT, environment, tiny_config, tiny_task

SCRIPT = ROOT / "benchmarks" / "compression.py"
SIZE, BUDGET, SEED = 3000, 400, RunSeed(5)
BUDGETED = ("topk", "randomk", "qsgd-sparse", "sketch")
ALL = (*BUDGETED, "qsgd", "qsgd:7", "fedavg")

sys.path.append(str(SCRIPT.parent))  # where a script finds its siblings
spec = importlib.util.spec_from_file_location("compression", SCRIPT)
compression = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compression)


def method(name: str, budget: int = BUDGET, size: int = SIZE) -> "compression.Method":
    return compression.make_method(name, size, budget, SEED)


def update(client: int = 0, size: int = SIZE) -> np.ndarray:
    """Heavy-tailed, as updates are."""
    return np.random.default_rng(client).standard_t(3, size).astype(np.float32)


# --- numbers and bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2, 3, 15, 16, 61_706, 2**16, 846_634, 2**32, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 39, 40, 41, 200])
def test_digits_survive_packing(base: int, count: int) -> None:
    top = min(base, 2**63)
    digits = np.random.default_rng(count).integers(0, top, count)
    digits[: count // 2] = top - 1
    data = compression.pack(digits, base)
    assert np.array_equal(compression.unpack(data, base)[:count], digits)
    assert len(data) == 8 * math.ceil(count / compression.per_word(base))
    assert base ** compression.per_word(base) <= 2**64


@pytest.mark.parametrize("size", [2, 83, 61_706, 846_634])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 50])
def test_sparse_vectors_survive_and_their_length_tells_their_entries(size: int, count: int) -> None:
    count = min(count, size)
    rng = np.random.default_rng(count)
    vector = np.zeros(size, np.float32)
    vector[rng.choice(size, count, replace=False)] = rng.uniform(1, 2, count)
    data = compression.to_sparse(vector)
    assert np.array_equal(compression.from_sparse(data, size), vector)
    assert compression.entries(len(data), size) == count
    assert compression.entries(len(data) + 3, size) == count
    assert compression.entries(len(data) - 1, size) == count - 1


def test_the_bytes_of_lenet5() -> None:
    assert compression.entries(4000, 61_706) == 666  # 4 bytes of value and 2 of position
    sizes = {
        name: len(method(name, 4000, 61_706).encode(update(0, 61_706), compression.NO_MEMORY, 1, 0)[0]) for name in ALL
    }
    assert sizes["fedavg"] == 4 * 61_706
    assert sizes["topk"] == sizes["randomk"] == sizes["sketch"] == 4000
    assert 3000 < sizes["qsgd-sparse"] <= 4000
    scales = 4 * math.ceil(61_706 / 512)
    assert sizes["qsgd"] == scales + 8 * math.ceil(61_706 / 40)  # 1.6 bits
    assert sizes["qsgd:7"] == scales + 8 * math.ceil(61_706 / 16)  # 4 bits


# --- all methods ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_encoding_is_pure(name: str) -> None:
    vector, memory = update(), np.zeros(SIZE, np.float32)
    first = method(name).encode(vector, memory, 2, 3)
    again = method(name).encode(vector, memory, 2, 3)
    assert type(first[0]) is bytes
    assert first[0] == again[0]
    assert np.array_equal(first[1], again[1])
    assert np.array_equal(vector, update())
    assert not memory.any()


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("budget", [400, 401, 1022, 4000, 100_000])
def test_no_upload_exceeds_its_budget(name: str, budget: int) -> None:
    flat, zero = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    single = compression.scattered(np.float32([-3]), np.array([17]), SIZE)
    for vector in (update(), flat, -flat, single, zero, 1e-30 * flat, 1e30 * update()):
        memory = compression.NO_MEMORY
        for round_ in (1, 2):
            payload, memory = method(name, budget).encode(np.float32(vector), memory, round_, 0)
            assert len(payload) <= budget
            assert np.isfinite(method(name, budget).decode(payload, round_)).all()


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_without_room_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allow more bytes"):
        method(name, 3).encode(update(), compression.NO_MEMORY, 1, 0)


@pytest.mark.parametrize("name", ALL)
def test_replies_are_read_as_they_were_meant(name: str) -> None:
    used, memory = method(name), compression.NO_MEMORY
    payloads = [used.encode(update(client), compression.NO_MEMORY, 1, client)[0] for client in range(3)]
    step, memory = used.aggregate(payloads, memory, 1)
    reply = used.reply(step, 1)
    assert np.array_equal(used.read(reply, 1), step)
    assert len(reply) <= 4 * SIZE
    if name in ("randomk", "sketch"):
        assert len(reply) <= BUDGET


@pytest.mark.parametrize("name", [name for name in ALL if name != "sketch"])
def test_the_step_is_the_mean_of_what_was_sent(name: str) -> None:
    used = method(name)
    payloads = [used.encode(update(client), compression.NO_MEMORY, 1, client)[0] for client in range(3)]
    step, _ = used.aggregate(payloads, compression.NO_MEMORY, 1)
    expected = np.mean([used.decode(payload, 1).astype(np.float64) for payload in payloads], axis=0)
    np.testing.assert_allclose(step, expected, rtol=1e-6)


# --- error feedback ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_nothing_is_lost_what_is_not_sent_is_remembered(name: str) -> None:
    used, memory = method(name), compression.NO_MEMORY
    for round_ in (1, 2, 3):
        total = update(round_) + memory
        payload, memory = used.encode(update(round_), memory, round_, 0)
        sent = used.decode(payload, round_)
        assert np.array_equal(sent + memory, total)
        assert not (sent * memory).any()


def test_top_k_sends_exactly_the_largest() -> None:
    count = compression.entries(BUDGET, SIZE)
    memory = update(1)
    payload, _ = method("topk").encode(update(), memory, 1, 0)
    sent = method("topk").decode(payload, 1)
    total = update() + memory
    expected = set(np.argsort(-np.abs(total))[:count].tolist())
    assert set(np.flatnonzero(sent).tolist()) == expected
    assert len(expected) == count > 50


def test_random_k_draws_other_coordinates_each_round_and_the_same_for_all() -> None:
    used = method("randomk")
    payloads = {(r, c): used.encode(update(c), compression.NO_MEMORY, r, c)[0] for r, c in ((1, 0), (1, 1), (2, 0))}
    drawn = [set(np.flatnonzero(used.decode(payload, r)).tolist()) for (r, _), payload in payloads.items()]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == BUDGET // 4


# --- QSGD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qsgd", "qsgd:7", "qsgd-sparse"])
def test_qsgd_is_right_on_average(name: str) -> None:
    """Chi-square over the entries: right on average is accepted, a shrinkage by a tenth would be rejected."""
    size, draws = 40, 4000
    used, vector = method(name, 200, size), update(7, size)
    seen = np.array(
        [used.decode(used.encode(vector, compression.NO_MEMORY, r, 0)[0], r) for r in range(draws)], np.float64
    )
    spread = seen.std(axis=0, ddof=1)
    random = spread > 0  # the largest of a bucket is sent as it is
    assert random.sum() >= size - 1
    np.testing.assert_allclose(seen.mean(axis=0)[~random], vector[~random], rtol=1e-6)

    def deviation(truth: np.ndarray) -> float:
        return float((((seen.mean(axis=0) - truth)[random] / spread[random]) ** 2).sum() * draws / random.sum())

    assert deviation(vector) < 1.9  # chi-square of 39 degrees: exceeded once in 1,500
    assert deviation(1.1 * vector) > 1.9


@pytest.mark.parametrize(("name", "levels"), [("qsgd", 1), ("qsgd:7", 7)])
def test_fixed_rate_qsgd_stays_within_a_step(name: str, levels: int) -> None:
    used, vector = method(name), update()
    decoded = used.decode(used.encode(vector, compression.NO_MEMORY, 1, 0)[0], 1)
    for start in range(0, SIZE, compression.BUCKET):
        bucket = slice(start, start + compression.BUCKET)
        scale = np.abs(vector[bucket]).max()
        assert np.abs(decoded[bucket]).max() == pytest.approx(scale)
        assert np.abs(decoded - vector)[bucket].max() < 1.0001 * scale / levels
        assert len(np.unique(decoded[bucket])) <= 2 * levels + 1


def test_sparse_qsgd_stays_within_a_step_of_the_norm() -> None:
    used, vector = method("qsgd-sparse"), update()
    payload, _ = used.encode(vector, compression.NO_MEMORY, 1, 0)
    step = np.linalg.norm(vector) / payload[4]
    assert np.abs(used.decode(payload, 1) - vector).max() < 1.0001 * step
    finer, _ = method("qsgd-sparse", 2 * BUDGET).encode(vector, compression.NO_MEMORY, 1, 0)
    assert finer[4] > payload[4] >= 1


# --- count-sketch --------------------------------------------------------------------------------------------------


def test_sketches_are_linear() -> None:
    used = method("sketch")

    def sketched(vector: np.ndarray) -> np.ndarray:
        return used.decode(used.encode(np.float32(vector), compression.NO_MEMORY, 1, 0)[0], 1)

    both = sketched(2 * update(0) - 3 * update(1))
    np.testing.assert_allclose(both, 2 * sketched(update(0)) - 3 * sketched(update(1)), atol=1e-3)
    assert np.abs(both).max() > 1


def test_the_sketch_finds_what_is_large_in_the_mean_of_the_clients() -> None:
    used = method("sketch:5:4:0.9", 4000)
    positions, values = np.array([3, 700, 1500, 2999]), np.float32([5, -4, 3, 2])
    signal = compression.scattered(values, positions, SIZE)
    payloads = [used.encode(signal + 0.01 * update(c), compression.NO_MEMORY, 1, c)[0] for c in range(4)]
    step, _ = used.aggregate(payloads, compression.NO_MEMORY, 1)
    assert np.flatnonzero(step).tolist() == positions.tolist()
    np.testing.assert_allclose(step[positions], values, atol=0.2)


def test_the_server_remembers_what_the_sketch_did_not_send() -> None:
    used = method("sketch:5:1:0", 4000)
    signal = compression.scattered(np.float32([5, -4]), np.array([3, 700]), SIZE)
    nothing = used.encode(np.zeros(SIZE, np.float32), compression.NO_MEMORY, 2, 0)[0]
    first, memory = used.aggregate([used.encode(signal, compression.NO_MEMORY, 1, 0)[0]], compression.NO_MEMORY, 1)
    second, memory = used.aggregate([nothing], memory, 2)
    third, _ = used.aggregate([nothing], memory, 3)
    assert np.array_equal(first + second, signal)
    assert not third.any()


def test_momentum_goes_on_in_the_sketch() -> None:
    used = method("sketch:5:1:0.5", 4000)
    signal = compression.scattered(np.float32([5, -4]), np.array([3, 700]), SIZE)
    nothing = used.encode(np.zeros(SIZE, np.float32), compression.NO_MEMORY, 2, 0)[0]
    _, memory = used.aggregate([used.encode(signal, compression.NO_MEMORY, 1, 0)[0]], compression.NO_MEMORY, 1)
    second, _ = used.aggregate([nothing], memory, 2)
    assert second[700] == -6  # 4 not sent, and half of it again


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"clients": 5, "local_epochs": 2, "partition": "dirichlet:0.5", "seed": 3}])
def test_fedavg_is_the_librarys_fedavg(task: Task, changes: dict) -> None:
    config = tiny_config("fedavg", **changes)
    rounds = list(compression.run("fedavg", 0, config, task))
    reference = simulate(config, task)
    assert np.array_equal(rounds[-1][0], reference.model)
    assert [record["accuracy"] for _, record in rounds] == [r.evaluation.delivered.accuracy for r in reference.records]


@pytest.mark.parametrize("name", ["topk", "randomk", "sketch:1:83:0", "qsgd", "qsgd:7"])
def test_methods_learn(name: str) -> None:
    """With bytes for every number, or nearly: what is left of a method's error is small."""
    *_, (_, last) = compression.run(name, 600, tiny_config("fedavg", rounds=8), tiny_task())
    assert last["accuracy"] > 80


def test_the_command_writes_its_outcome(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    arguments = ["--dataset", f"npz:{images}", "--clients", "2", "--rounds", "2", "--budget", "1000", "--out", out]
    command = [sys.executable, SCRIPT, *arguments, "--methods", "topk,qsgd:7"]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert "--budget 1000" in result["origin"]["command"]
    assert list(result["methods"]) == ["topk", "qsgd:7"]
    outcome = result["methods"]["topk"]
    assert [record["round"] for record in outcome["history"]] == [1, 2]
    assert outcome["bytes_up"] <= 1000 + result["header"] == 1028
    assert outcome["accuracy"] == outcome["history"][-1]["accuracy"]


def test_a_run_that_diverges_is_told(images: Path) -> None:
    config = RunConfig(algorithm="fedavg", dataset=f"npz:{images}", clients=2, rounds=2, lr=1e30, grad_clip=0.0)
    outcome = compression.measure("topk", 1000, config, 1)
    assert "training diverged" in outcome["diverged"]
    assert len(outcome["history"]) == 1
