"""Where the time of a round goes, by sampling the simulator's stack, and what share of the arithmetic bound it reaches.

    python benchmarks/profile_round.py                 # keeps the shares and draws docs/figures/round_profile.svg
    python benchmarks/profile_round.py --clients 10 --results /tmp/try --figure /tmp/try.svg       # a try
    python benchmarks/profile_round.py --render        # table and figure of docs/performance.md from what is kept

A thread looks at the stack of the one that computes, every few milliseconds; the simulator runs in one process, with
one worker. The bound is the rate of a matrix product on one thread, measured before and after.
"""

import argparse
import dataclasses
import json
import linecache
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import kept
import matplotlib
import torch
from origin import origin_of
from page import FIGURES, came_from, placed, table

from fedrp import RunConfig, Speed
from fedrp.benchmarking.simulator import BASE, WARM_UP, synthetic_images
from fedrp.learning.task import named_task
from fedrp.simulation.result import RoundRecord
from fedrp.simulation.simulate import simulate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TABLE = "profile"
MEGAFLOP_PER_IMAGE = 2.264  # LeNet-5, forward and backward
SQUARE = 2000  # rows of the matrices whose product gives the bound
PERIOD = 0.002
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "fedrp-subspace, sign": {"algorithm": "fedrp-subspace", "projection": "sign", "dim": 1000},
    "fedrp-subspace, gaussian": {"algorithm": "fedrp-subspace", "projection": "gaussian", "dim": 1000},
}


class Place(NamedTuple):
    """A line of a stack."""

    file: str
    function: str
    line: str


Rule = tuple[str, Callable[[Place], bool]]


def within(*parts: str) -> Callable[[Place], bool]:
    return lambda place: any(part in place.file for part in parts)


def in_engine(*words: str) -> Callable[[Place], bool]:
    """A line of an engine that has one of these words."""
    return lambda place: "/fedrp/engines/" in place.file and any(word in place.line for word in words)


def in_function(*names: str) -> Callable[[Place], bool]:
    return lambda place: "/fedrp/engines/" in place.file and place.function in names


# The first rule that any line of a stack meets names it. Order matters: evaluation has a forward pass of its own.
RULES: list[Rule] = [
    ("evaluation", within("/learning/evaluate.py")),
    ("waiting for workers", within("/backends/processes.py", "/multiprocessing/")),
    ("projection", within("/fedrp/projection/")),
    ("backward", in_engine("autograd.grad(", ".backward()")),
    ("forward", in_engine("program(", "client_losses(", "model.module(", "model.loss(")),
    ("gathering batches", in_function("batches", "_batches", "_window", "_side_by_side", "_padded")),
    ("optimiser", in_function("advance", "clipped", "_norm")),
    ("rest of training", within("/fedrp/engines/", "/fedrp/learning/")),
    ("encoding and aggregation", within("/fedrp/protocol/", "/fedrp/crypto/", "/fedrp/compression/")),
]
REST = "rest"
SHARES = [*(name for name, _ in RULES), REST]


def stack_of(frame: FrameType | None) -> Iterator[Place]:
    """From the innermost line outwards."""
    while frame is not None:
        file = frame.f_code.co_filename
        yield Place(file, frame.f_code.co_name, linecache.getline(file, frame.f_lineno))
        frame = frame.f_back


def named(places: list[Place]) -> str:
    """What a stack is busy with. A packet on the way in is in the outer lines of all: protocol only counts inside."""
    inner = places[: next((i for i, p in enumerate(places) if "/fedrp/algorithms/" in p.file), len(places))]
    return next((name for name, holds in RULES if any(holds(place) for place in inner)), REST)


class Sampler:
    """Counts what the thread that makes it is busy with, while it is on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.on = False
        self._watched = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look every few milliseconds."""
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(PERIOD):
            frame = sys._current_frames().get(self._watched)
            if self.on:
                self.counts[named(list(stack_of(frame)))] += 1


def sgemm_gflops() -> float:
    """The rate of a product of square matrices on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    square, out = torch.ones(SQUARE, SQUARE), torch.ones(SQUARE, SQUARE)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        torch.mm(square, square, out=out)
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return 2e-9 * SQUARE**3 / min(times)


def profile(config: RunConfig, rounds: int, engine: str | None) -> dict[str, Any]:
    """Shares of the time of rounds after the warm-up, evaluation included, and the share of the bound."""
    config = dataclasses.replace(config, rounds=WARM_UP + rounds)
    sampler, rates = Sampler(), [sgemm_gflops()]

    def on_round(record: RoundRecord, _model: object) -> None:
        sampler.on = WARM_UP <= record.round < config.rounds  # what ends a run is no part of a round

    chosen: dict[str, Any] = {"engine": engine} if engine else {}
    with sampler.looking():
        result = simulate(config, named_task(config), Speed(workers=1, **chosen), on_round=on_round)
    rates.append(sgemm_gflops())
    seconds = [record.seconds for record in result.records[WARM_UP:]]
    speed, rate = result.images_per_round / statistics.median(seconds), max(rates)
    total = sampler.counts.total()
    return {
        "samples": total,
        "shares": {name: sampler.counts[name] / total for name in SHARES},
        "images_per_second": speed,
        "sgemm_gflops": rate,
        "bound_images_per_second": 1e3 * rate / MEGAFLOP_PER_IMAGE,
        "share_of_bound": speed * MEGAFLOP_PER_IMAGE / (1e3 * rate),
    }


def draw(profiles: Mapping[str, Any], path: Path) -> None:
    """A bar for each method, in parts."""
    plt.rcParams["svg.hashsalt"] = TABLE  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.6 * len(profiles)), layout="constrained")
    left = dict.fromkeys(profiles, 0.0)
    for number, share in enumerate(SHARES):
        widths = [100 * found["shares"][share] for found in profiles.values()]
        axes.barh(list(profiles), widths, left=list(left.values()), color=f"C{number}", label=share)
        left = {name: left[name] + width for name, width in zip(left, widths, strict=True)}
    for height, found in enumerate(profiles.values()):
        axes.text(101, height, f"{100 * found['share_of_bound']:.0f} % of the bound", va="center", fontsize=8)
    axes.set(xlabel="percent of the time of a round with its evaluation", xlim=(0, 125))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def rendered(results: Mapping[str, Any]) -> str:
    """The table: a column for each method."""
    parts = []
    for result in results.values():
        profiles = result["profiles"]
        lines: list[list[str]] = [
            [share, *(f"{100 * found['shares'][share]:.1f} %" for found in profiles.values())] for share in SHARES
        ]
        for label, key, digits in (
            ("images/s", "images_per_second", 0),
            ("sgemm, Gflop/s", "sgemm_gflops", 1),
            ("images/s at that rate", "bound_images_per_second", 0),
            ("share of the bound", "share_of_bound", 3),
        ):
            lines.append([label, *(f"{found[key]:,.{digits}f}" for found in profiles.values())])
        parts.append(table(["", *profiles], lines))
    return "\n\n".join([*parts, came_from(result["origin"] for result in results.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--examples", type=int, default=600, help="of each client")
    parser.add_argument("--rounds", type=int, default=3, help="after the warm-up")
    parser.add_argument("--engine", help="engine of local training; default auto")
    parser.add_argument("--figure", type=Path, default=FIGURES / "round_profile.svg")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--render", action="store_true", help="measure nothing, write table and figure")
    arguments = parser.parse_args()
    if not arguments.render:
        if min(arguments.clients, arguments.examples, arguments.rounds) < 1:
            parser.error("numbers must be at least 1")
        origin = origin_of(" ".join(["python benchmarks/profile_round.py", *sys.argv[1:]]))
        profiles = {}
        with synthetic_images("lenet5", arguments.clients * arguments.examples) as dataset:
            for name, settings in METHODS.items():
                config = dataclasses.replace(BASE, dataset=dataset, clients=arguments.clients, **settings)
                profiles[name] = profile(config, arguments.rounds, arguments.engine)
                print(json.dumps({name: profiles[name]}), flush=True)
        options = f"profile --clients {arguments.clients} --examples {arguments.examples} --rounds {arguments.rounds}"
        kept.keep(TABLE, {options: {"origin": origin, "profiles": profiles}}, arguments.results)
    results = kept.read(TABLE, arguments.results)
    if arguments.render:
        placed(TABLE, rendered(results))
    draw(list(results.values())[-1]["profiles"], arguments.figure)


if __name__ == "__main__":
    main()
