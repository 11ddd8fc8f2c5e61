"""Worker processes: forked from a warm server, used by several runs, and lost without harm."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedrp import Speed, Task, simulate
from fedrp.backends.choice import open_backend
from fedrp.backends.processes import ProcessBackend
from fedrp.backends.workers import LostWorkerError
from fedrp.config.speed import chosen_workers
from fedrp.errors import ConfigError, DivergenceError
from fedrp.testing.problems import TinyNet
from helpers import environment, tiny_config, tiny_task

TWO = Speed(workers=2)
NAMES = ("fedavg", "fwc", "fedadmm")


class Held:
    """Something that a worker can hold."""

    def __init__(self, data: Sequence[torch.Tensor] = ()) -> None:
        self._data = data

    def process(self) -> int:
        return os.getpid()

    def memory(self) -> int:
        """Bytes of memory behind its data, each block once."""
        blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in self._data}
        return sum(blocks.values()) if all(part.is_shared() for part in self._data) else -1

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


def test_views_of_one_tensor_reach_a_worker_as_its_shared_memory() -> None:
    whole = torch.zeros(50, 1000)
    with open_backend(TWO) as backend:
        worker, _ = backend.workers(2)
        worker.begin(functools.partial(Held, list(whole)))
        worker.send("memory")
        held = worker.receive()
    assert held == whole.nbytes  # one block, not a copy of it for each view
    assert whole.is_shared()


def test_a_killed_worker_is_one_line_and_the_next_run_has_new_ones(task: Task) -> None:
    with open_backend(TWO) as backend:
        assert isinstance(backend, ProcessBackend)
        os.kill(processes(backend)[1], signal.SIGKILL)
        told = r"worker process \d+ was killed by signal SIGKILL.*fewer workers.*resume=True \(--resume\)"
        with pytest.raises(LostWorkerError, match=told):
            simulate(tiny_config("fedavg"), task, TWO, backend=backend)
        again = simulate(tiny_config("fedavg"), task, TWO, backend=backend)
    np.testing.assert_array_equal(again.model, simulate(tiny_config("fedavg"), task).model)


def test_the_exit_code_of_a_lost_worker_is_told() -> None:
    told = {code: str(LostWorkerError.of(7, code)) for code in (3, -signal.SIGSEGV, -99)}
    assert told[3].startswith("worker process 7 ended with exit code 3; ")
    assert told[-signal.SIGSEGV].startswith("worker process 7 was killed by signal SIGSEGV; ")
    assert told[-99].startswith("worker process 7 was killed by signal 99; ")


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

print("once")
scale = 0.5

def loss(outputs, targets):
    return scale * torch.nn.functional.cross_entropy(outputs, targets)

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
data = x, (x[:, 0] > 0).long()
config = fedrp.RunConfig(algorithm="fedavg", clients=4, rounds=1)
models = []
for workers in (1, 2):
    for net in (Net, lambda: Net()):
        task = fedrp.Task(net, data, data, loss=loss)
        backend = fedrp.backends.processes.ProcessBackend()
        models.append(fedrp.simulate(config, task, fedrp.Speed(workers=workers), backend=backend).model.tobytes())
        assert len(backend._started) == (workers if workers > 1 else 0)
        backend.stop()
print(len(set(models)))
"""


@pytest.mark.parametrize("notebook", [False, True], ids=["script", "notebook"])
def test_workers_need_no_guard_and_know_what_the_program_defines(notebook: bool, tmp_path: Path) -> None:
    """A notebook is a program without a file; read from standard input, this one is, too."""
    script = tmp_path / "unguarded.py"
    script.write_text("import fedrp.backends.processes\n" + SCRIPT)
    program, given = ([], script.read_text()) if notebook else ([str(script)], None)
    done = subprocess.run([sys.executable, *program], input=given, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "once\n1\n"  # workers do not run it again, and find what this process finds


class Locked:
    """Builds a model, and cannot leave this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> TinyNet:
        return TinyNet()


def nowhere() -> type[TinyNet]:
    """A class of a module that other processes cannot import."""
    module = ModuleType("nowhere")
    module.Net = type("Net", (TinyNet,), {"__module__": "nowhere", "__qualname__": "Net"})
    sys.modules["nowhere"] = module
    return module.Net


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Locked, "cannot be sent to another process (cannot pickle '_thread.lock' object)"),
        (nowhere, "cannot be read in another process (No module named 'nowhere')"),
    ],
    ids=["sent", "read"],
)
def test_what_other_processes_cannot_have_is_computed_in_this_one_and_said(
    make: Callable[[], Callable[[], TinyNet]], told: str, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    result = simulate(tiny_config("fedavg"), Task(make(), task.train, task.test), TWO)
    assert [record.getMessage() for record in caplog.records] == [
        f"model, loss or data {told}: all clients are computed in this one"
    ]
    np.testing.assert_array_equal(result.model, simulate(tiny_config("fedavg"), task).model)


def in_a_pool(_number: int) -> bytes:
    return simulate(tiny_config("fedavg"), tiny_task(), TWO).model.tobytes()


def test_in_a_pool_of_the_users_own_a_run_is_one_process(task: Task) -> None:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.map(in_a_pool, [0]) == [simulate(tiny_config("fedavg"), task).model.tobytes()]


@pytest.mark.parametrize(
    ("cores", "given", "work", "expected"),
    [
        (4, {}, 10**9, 4),
        (4, {}, 10**9 - 1, 1),
        (64, {}, 10**9, 8),
        (1, {}, 10**12, 1),
        (4, {"threads": 2}, 10**9, 2),
        (2, {"threads": 3}, 10**9, 1),
        (2, {"workers": 5}, 1, 5),
    ],
)
def test_the_number_of_workers_follows_machine_and_work_unless_it_is_given(
    cores: int, given: dict[str, int], work: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    assert chosen_workers(Speed(**given), work) == expected


def test_an_address_is_for_ray_only(task: Task) -> None:
    with pytest.raises(ConfigError, match=r"address=auto.*backend='ray'"):
        simulate(tiny_config("fedavg"), task, Speed(address="auto"))
