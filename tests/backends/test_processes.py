"""Worker processes: forked from a warm server, used by several runs, and lost without harm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedrp import Speed, Task, simulate
from fedrp.backends.choice import open_backend
from fedrp.backends.processes import ProcessBackend
from fedrp.errors import ConfigError, DivergenceError, FedRPError
from helpers import tiny_config, tiny_task

TWO = Speed(workers=2)
NAMES = ("fedavg", "fwc", "fedadmm")


class Held:
    """Something that a worker can hold."""

    def process(self) -> int:
        return os.getpid()

    def close(self) -> None:
        pass


@pytest.fixture
def task() -> Task:
    return tiny_task()


def processes(backend: ProcessBackend) -> list[int]:
    workers = backend.workers(2)
    for worker in workers:
        worker.begin(Held)
        worker.send("process")
    return [worker.receive() for worker in workers]


def test_runs_of_one_backend_share_its_workers_and_find_what_they_find_alone(task: Task) -> None:
    with open_backend(TWO) as backend:
        assert isinstance(backend, ProcessBackend)
        before = processes(backend)
        models = [
            simulate(tiny_config(name), task, TWO, backend=backend).model for name in ("fedavg", "fwc", "fedadmm")
        ]
        assert processes(backend) == before
    for name, model in zip(NAMES, models, strict=True):
        np.testing.assert_array_equal(model, simulate(tiny_config(name), task).model)


def test_a_killed_worker_is_one_line_and_the_next_run_has_new_ones(task: Task) -> None:
    with open_backend(TWO) as backend:
        assert isinstance(backend, ProcessBackend)
        os.kill(processes(backend)[1], signal.SIGKILL)
        with pytest.raises(FedRPError, match="ended unexpectedly"):
            simulate(tiny_config("fedavg"), task, TWO, backend=backend)
        again = simulate(tiny_config("fedavg"), task, TWO, backend=backend)
    np.testing.assert_array_equal(again.model, simulate(tiny_config("fedavg"), task).model)


def test_after_a_run_that_failed_no_answer_of_it_reaches_the_next(task: Task) -> None:
    with open_backend(TWO) as backend:
        with pytest.raises(DivergenceError):
            simulate(tiny_config("fedavg", lr=1e30, grad_clip=0.0), task, TWO, backend=backend)
        again = simulate(tiny_config("fedavg"), task, TWO, backend=backend)
    np.testing.assert_array_equal(again.model, simulate(tiny_config("fedavg"), task).model)


SCRIPT = """
import fedrp, torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

x = torch.randn(60, 4)
data = x, (x[:, 0] > 0).long()
config = fedrp.RunConfig(algorithm="fedavg", clients=4, rounds=1)
fedrp.simulate(config, fedrp.Task(Net, data, data), fedrp.Speed(workers=2))
"""


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert ended.stderr.strip().splitlines()[-1].endswith("or use workers=1")
    assert "__name__ == '__main__'" in ended.stderr


def test_an_address_is_for_ray_only(task: Task) -> None:
    with pytest.raises(ConfigError, match=r"address=auto.*backend='ray'"):
        simulate(tiny_config("fedavg"), task, Speed(address="auto"))
