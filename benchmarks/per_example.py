"""Per-example gradients against plain training: time of a step and memory, as ratios.

    python benchmarks/per_example.py                 # measures and keeps (about three minutes; alone on the machine)
    python benchmarks/per_example.py --quick --results /tmp/try      # a try
    python benchmarks/per_example.py --show          # the kept ratios

A plain step is the loss of a batch and its gradient. A step per example takes the same examples in microbatches, cuts
each gradient to norm 1 and sums them. Times are of the processor with one thread, in turns, and a ratio is of
measurements next to each other. Memory is what a process of its own needs at most beyond what it has once model and
examples are there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import kept
import torch
from origin import origin_of
from torch import nn

from fedrp.engines.memory import keep_freed_memory
from fedrp.engines.per_example import FUNC, OPACUS, per_example
from fedrp.learning.layout import layout_of, trainable
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.learning.zoo import MODELS

TABLE = "per-example"
SHAPES = {"lenet5": (1, 28, 28), "cnn": (3, 32, 32)}
PLAIN, CLIP = "plain", 1.0


class Case(NamedTuple):
    """A model, a batch, and how it is taken in."""

    model: str
    batch: int
    microbatches: Sequence[int]


CASES = (Case("lenet5", 256, (256, 64, 32, 16)), Case("cnn", 64, (64, 16, 4)))
QUICK = (Case("lenet5", 32, (32, 8)),)
REPEATS = 5


def steps(case: Case, only: str = "") -> dict[str, Callable[[], object]]:
    """A step of each kind, or of one of them, by name."""
    module = MODELS[case.model].build(SHAPES[case.model], 10)
    model = LocalModel(module, nn.functional.cross_entropy, layout_of(module), torch.device("cpu"))
    x, y = torch.randn(case.batch, *SHAPES[case.model]), torch.randint(0, 10, (case.batch,))
    weights = torch.from_numpy(model.layout.flatten(module))

    def plain() -> None:
        for parameter in trainable(module):
            parameter.grad = None
        model.loss(module(batch_input(x, model.device)), y).backward()  # type: ignore[no-untyped-call]

    def stepper(way: str, microbatch: int) -> Callable[[], torch.Tensor]:
        gradients = per_example(model, way).gradients

        def step() -> torch.Tensor:
            total = torch.zeros_like(weights)
            for block in gradients(weights, x, y, microbatch, seed=0):
                rows = block.rows[: block.used]
                norms = torch.linalg.vector_norm(rows, dim=1)
                total.addmv_(rows.T, (CLIP / norms).clamp_(max=1.0))
            return total

        return step

    every: dict[str, Callable[[], Callable[[], object]]] = {PLAIN: lambda: plain}
    for way in (FUNC, OPACUS):
        for microbatch in case.microbatches:
            every[f"{way} {microbatch}"] = lambda way=way, own=microbatch: stepper(way, own)  # type: ignore[misc]
    return {name: make() for name, make in every.items() if not only or name == only}


def seconds(case: Case, repeats: int) -> dict[str, list[float]]:
    """Of the steps of each kind, in turns."""
    runs = steps(case)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:  # the first warms up
                taken[name].append(time.process_time() - began)
    return taken


def megabytes(case: Case, name: str) -> float:
    """What a few steps of a kind take at most, beyond model and examples."""
    prepare()
    steps(case._replace(batch=1, microbatches=case.microbatches), name)[name]()  # what is loaded at the first step
    run = steps(case, name)[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = status("VmRSS")
    for _ in range(3):
        run()
    return (status("VmHWM") - before) / 1024


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def prepare() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Median and range of the ratios of each kind to plain training."""
    taken = seconds(case, repeats)
    room: dict[str, list[float]] = {name: [] for name in taken}
    for _ in range(repeats):
        for name, values in room.items():
            with get_context("spawn").Pool(1) as pool:
                values.append(pool.apply(megabytes, (case, name)))
    found = {}
    for name in taken:
        times = [own / plain for own, plain in zip(taken[name], taken[PLAIN], strict=True)]
        sizes = [own / plain for own, plain in zip(room[name], room[PLAIN], strict=True)]
        found[name] = {
            "milliseconds": 1e3 * statistics.median(taken[name]),
            "time": [statistics.median(times), min(times), max(times)],
            "megabytes": statistics.median(room[name]),
            "memory": [statistics.median(sizes), min(sizes), max(sizes)],
        }
    return found


def shown(results: dict[str, kept.Result]) -> str:
    """The ratios in lines."""
    lines = []
    for result in results.values():
        lines.append(f"{result['model']}, batch {result['batch']}: {result['origin']['command']}")
        for name, own in result["kinds"].items():
            ratios = (
                f"{kind} {own[kind][0]:.2f} ({own[kind][1]:.2f}-{own[kind][2]:.2f})" for kind in ("time", "memory")
            )
            lines.append(f"  {name:12} {own['milliseconds']:7.1f} ms {own['megabytes']:7.1f} MB   {'   '.join(ratios)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small batch, twice")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--show", action="store_true", help="measure nothing, print what is kept")
    given = parser.parse_args()
    if not given.show:
        origin = origin_of(" ".join(["python benchmarks/per_example.py", *sys.argv[1:]]))
        prepare()
        for case in QUICK if given.quick else CASES:
            kinds = measured(case, 2 if given.quick else REPEATS)
            result = {"origin": origin, "model": case.model, "batch": case.batch, "kinds": kinds}
            kept.keep(TABLE, {f"per-example {case.model} {case.batch}": result}, given.results)
    print(shown(kept.read(TABLE, given.results)) if not given.quick else json.dumps(kinds))


if __name__ == "__main__":
    main()
