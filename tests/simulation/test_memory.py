"""What a simulation keeps in memory, and that results do not depend on it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrp import Speed, Task, simulate
from fedrp.algorithms.table import methods
from fedrp.backends.states import StateStore
from fedrp.learning.holdings import Holdings
from fedrp.learning.objective import Examples
from helpers import tiny_config, tiny_task


@pytest.mark.parametrize("name", methods())
def test_states_on_disk_are_as_good_as_in_memory(name: str) -> None:
    config = tiny_config(name, participation=0.6)
    found = simulate(config, tiny_task(), Speed(client_memory=0))
    np.testing.assert_array_equal(found.model, simulate(config, tiny_task()).model)


def store(tmp_path: Path, budget: int) -> StateStore[np.ndarray]:
    def read(path: Path) -> np.ndarray:
        return np.frombuffer(path.read_bytes(), np.float32)

    return StateStore(lambda client: np.full(4, client, np.float32), lambda a: [a], lambda a: a.tobytes(), read, budget)


def test_the_longest_unchanged_go_to_disk_and_come_back(tmp_path: Path) -> None:
    states = store(tmp_path, budget=32)
    for client in range(5):
        states[client] = np.full(4, 10 + client, np.float32)
    states.settle()
    assert sorted(states._here) == [3, 4]
    assert [states[client][0] for client in range(6)] == [10, 11, 12, 13, 14, 5]
    folder = next(iter(states._away.values())).parent
    states.close()
    assert not folder.exists()


def test_arrays_that_clients_share_count_once(tmp_path: Path) -> None:
    states, shared = store(tmp_path, budget=32), np.zeros(8, np.float32)
    for client in range(100):
        states[client] = shared
    states.settle()
    assert not states._away


def test_many_clients_with_data_of_any_shape_are_sent_in_few_tensors() -> None:
    parts = {c: Examples(torch.full((c + 1, 2 + c % 3), c).float(), torch.arange(c + 1)) for c in range(40)}
    for share in (Holdings(parts).near([1, 5, 39]), Holdings(parts).far([1, 5, 39])):
        assert list(share) == [1, 5, 39]
        assert all(torch.equal(a, b) for c in share for a, b in zip(share[c], parts[c], strict=True))
        with pytest.raises(KeyError):
            share[2]
    far = Holdings(parts).far([1, 5])
    held = sum(tensor.numel() for client in far for tensor in parts[client])
    assert sum(flat.numel() for flat in far._blocks._flat) == held  # nothing of others goes to another machine


MANY = """
import json, torch, fedrp
from fedrp.learning.zoo import MODELS
net = lambda: MODELS["lenet5"].build((1, 28, 28), 10)
x = torch.randn(10_000, 1, 28, 28)
task = fedrp.Task(net, (x, torch.arange(10_000) % 10), (x[:100], torch.arange(100) % 10))
config = fedrp.RunConfig(algorithm=ALGORITHM, clients=10_000, rounds=3, participation=0.01)
print(json.dumps(fedrp.simulate(config, task, fedrp.Speed(client_memory=64)).as_json()["peak_rss_mb"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadmm", "fedrp-subspace"])
def test_ten_thousand_lenet_clients_of_whom_a_hundred_take_part_stay_small(algorithm: str) -> None:
    program = MANY.replace("ALGORITHM", repr(algorithm))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(ended.stdout) < 1500  # MB; data alone are 31


def test_rounds_that_are_not_scored_change_no_model_and_the_last_is_scored(tmp_path: Path) -> None:
    task: Task = tiny_task()
    for name in ("fedavg", "fedrp"):
        config = tiny_config(name, rounds=5)
        thin = simulate(config, task, Speed(eval_every=2), out=tmp_path / name)
        whole = simulate(config, task)
        np.testing.assert_array_equal(thin.model, whole.model)
        assert [record.round for record in thin.records if record.evaluation] == [2, 4, 5]
        for record, other in zip(thin.records, whole.records, strict=True):
            assert record.evaluation in (None, other.evaluation)
        assert thin.accuracy == whole.accuracy
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert ["accuracy" not in line for line in lines] == [True, False, True, False, False]
        again = simulate(config, task, Speed(eval_every=2), out=tmp_path / name, resume=True)
        assert [record.evaluation for record in again.records] == [record.evaluation for record in thin.records]
