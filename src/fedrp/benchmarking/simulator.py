"""How fast the simulator is on this machine, next to a plain PyTorch loop over the same clients in the same run."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedrp.algorithms.resolve import resolved
from fedrp.benchmarking.plain_loop import Reference
from fedrp.config import Resolved, RunConfig, Speed
from fedrp.engines.calibration import LONG, Workload, choose_engine
from fedrp.errors import FedRPError
from fedrp.learning.layout import built, layout_of
from fedrp.learning.task import Task, split_among_clients
from fedrp.rng import RunSeed
from fedrp.simulation.result import RoundRecord
from fedrp.simulation.simulate import simulate

WARM_UP = 1  # rounds of each side that are not counted
_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)
_CLASSES, _TEST = 10, 1000
# The learning rate is given because both sides must have the same; without a limit on gradients, as in plain FedAvg.
BASE = RunConfig(algorithm="fedavg", clients=100, lr=0.01, grad_clip=0.0)


class StartUp(NamedTuple):
    """What a `fedrp run` in a process of its own took."""

    seconds_to_first_round: float
    peak_rss_mb: float  # of all its processes


@contextmanager
def synthetic_images(model: str, examples: int) -> Iterator[str]:
    """A data set of random images, as `RunConfig.dataset` names it: MNIST's shape for LeNet-5, else CIFAR-10's.

    Each class is a pattern under noise, so that training has something to learn and stays finite.
    """
    generator = RunSeed(0).generator("benchmark-images")
    shape = _MNIST if model == "lenet5" else _CIFAR
    patterns = generator.integers(0, 128, (_CLASSES, *shape), np.uint8)
    arrays = {}
    for part, count in (("train", examples), ("test", _TEST)):
        labels = np.arange(count) % _CLASSES
        arrays[f"x_{part}"] = patterns[labels] + generator.integers(0, 128, (count, *shape), np.uint8)
        arrays[f"y_{part}"] = labels
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        np.savez(path, allow_pickle=False, **arrays)
        yield f"npz:{path}"


def simulator_benchmark(
    config: RunConfig, task: Task, speed: Speed, repeats: int = 5, processes: Sequence[int] = (1,)
) -> dict[str, Any]:
    """Measure rounds of the simulator and, between them, of the plain loop in each of these numbers of processes.

    The first round of either side is a warm-up and does not count; nor does evaluation, which the plain loop leaves
    out. Speeds are medians of `repeats` rounds; ratios, of two neighbouring rounds, too.

    - `ratio`, `reference_images_per_second`: against the plain loop in the first number of processes
    - `references`: the same and its range for each number of processes
    - `engine`: the one that a long run of this kind would choose
    """
    config = dataclasses.replace(config, rounds=repeats + WARM_UP)
    settings = resolved(config, layout_of(built(task.model)).size)  # finds a mistake before any process is started
    seconds: dict[int, list[float]] = {count: [] for count in processes}
    with contextlib.ExitStack() as afterwards:
        references = {}
        for count in processes:  # before the simulator, whose settings of this process they must not inherit
            references[count] = Reference(config, task, count)
            afterwards.callback(references[count].stop)
            for _ in range(WARM_UP):
                references[count].round()

        speed = _with_engine(speed, task, settings)

        def between(record: RoundRecord, _model: object) -> None:
            if record.round > WARM_UP:
                for count, reference in references.items():
                    seconds[count].append(reference.round())

        result = simulate(config, task, speed, on_round=between)
    own = [record.seconds for record in result.records[WARM_UP:]]
    images = result.images_per_round
    compared = {
        count: _spread("ratio", [slow / fast for slow, fast in zip(times, own, strict=True)])
        | _spread("images_per_second", [images / time for time in times])
        for count, times in seconds.items()
    }
    first = compared[processes[0]]
    return {
        "algorithm": config.algorithm,
        "projection": result.config.projection if result.secret else None,
        "dim": result.config.dim if result.secret else None,
        "model": result.config.model,
        "parameters": result.parameters,
        "clients": config.clients,
        "images_per_round": round(images),
        "workers": speed.workers,
        "engine": speed.engine,
        "repeats": repeats,
        "warm_up_rounds": WARM_UP,
        "ratio": first["ratio"],
        "ratio_range": first["ratio_range"],
        **_spread("images_per_second", [images / time for time in own]),
        "reference_images_per_second": first["images_per_second"],
        "reference_images_per_second_range": first["images_per_second_range"],
        "references": compared,
    }


def _with_engine(speed: Speed, task: Task, settings: Resolved) -> Speed:
    """With the engine of a long run: in the few rounds of a benchmark the simulator would not try which is faster."""
    work = Workload(split_among_clients(task, settings), settings.batch_size, LONG)
    return dataclasses.replace(
        speed, engine=choose_engine(speed.engine, task.model, task.loss, torch.device(speed.device), work)
    )


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}


def start_up(config: RunConfig, speed: Speed, repeats: int = 3) -> StartUp:
    """Time `fedrp run` of a named task from the start of its process to the beginning of its first round.

    The median of `repeats` processes, after one that fills the caches of the disk and of compiled kernels. What passes
    between the end of round 1 and its line on standard error, writing a checkpoint, counts as well.
    """
    runs = [_started(config, speed) for _ in range(repeats + 1)][1:]
    return StartUp(statistics.median(run.seconds_to_first_round for run in runs), max(run.peak_rss_mb for run in runs))


def _started(config: RunConfig, speed: Speed) -> StartUp:
    config = dataclasses.replace(config, rounds=1)
    settings = {
        field.name: getattr(record, field.name)
        for record, usual in ((config, RunConfig()), (speed, Speed()))
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(usual, field.name)
    }
    options = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedrp", "run", *options, "--json", "--out", str(Path(folder) / "run")]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 - ours
        with process:
            told = []
            for line in process.stderr or ():
                told.append((time.monotonic() - began, line))
            printed = process.stdout.read() if process.stdout else ""
    reached = [seconds for seconds, line in told if " round 1/1:" in line]
    if process.returncode or not reached:
        raise FedRPError(f"'fedrp run' failed: {told[-1][1].strip() if told else 'it said nothing'}")
    result = json.loads(printed)
    (record,) = result["history"]
    return StartUp(reached[0] - record["seconds"] - record["evaluation_seconds"], result["peak_rss_mb"])
