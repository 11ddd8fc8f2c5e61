"""What a round costs as clients, parameters n and projected numbers m grow, and what a million uploads cost the server.

    python benchmarks/growth.py rounds                    # measures, fits, keeps, draws docs/figures/growth.svg
    python benchmarks/growth.py rounds --quick --results /tmp/try --figure /tmp/try.svg      # a try
    python benchmarks/growth.py uploads --count 1000000 --dim 1000      # time and memory of the server's aggregation
    python benchmarks/growth.py uploads --count 20000 --dim 61706       # the same of whole models, LeNet-5
    python benchmarks/growth.py render                    # the tables of docs/performance.md from what is kept

Clients have few examples, so that what grows is what is looked at. Fits are seconds = a + b x, by least squares of
relative errors. With uploads of two lengths or more, `render` also says what a million sampled clients would cost.
"""

import argparse
import dataclasses
import functools
import json
import os
import resource
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kept
import matplotlib
import numpy as np
import torch
from origin import origin_of
from page import FIGURES, PAGE, came_from, placed, table
from scipy.optimize import nnls

from fedrp import RunConfig, Speed, Task
from fedrp.algorithms.resolve import resolved
from fedrp.benchmarking.simulator import BASE
from fedrp.learning.zoo import MODELS
from fedrp.protocol import wire
from fedrp.protocol.server import close_round
from fedrp.protocol.server_state import Server, new_server
from fedrp.protocol.tally import Tally, take_upload
from fedrp.protocol.wire import Kind, Message
from fedrp.simulation.simulate import simulate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TABLE = "growth"
LENET = 61_706
MILLION = 1_000_000
FIGURE = "![Seconds of a round against clients, n and m, with the fitted lines](figures/growth.svg)"
POOL = 64  # different vectors among the uploads
MODELS_BY_SIZE = {"lenet5": LENET, "cnn": 846_634, "resnet18": 11_173_962, "vgg16": 134_301_514}


class Curve(NamedTuple):
    """Points of one line in the figure."""

    axis: str
    points: dict[int, RunConfig]  # by what is on the axis
    examples: int  # of each client
    engine: str = "stacked:4"  # the same at all points: `auto` would change it with the length of the run


def changed(**settings: Any) -> RunConfig:
    """Two rounds, with steps so short that VGG-16 does not diverge on random images."""
    return dataclasses.replace(BASE, rounds=2, lr=1e-5, **settings)


def curves(quick: bool) -> dict[str, Curve]:
    clients = (10, 30, 100) if quick else (10, 30, 100, 300, 1000)
    models = list(MODELS_BY_SIZE)[: 2 if quick else None]
    dims = (10, 100, 1000) if quick else (10, 100, 1000, 10_000)
    found = {
        "fedavg, clients": Curve("clients", {k: changed(clients=k) for k in clients}, 16),
        "fedavg, n": Curve(
            "n", {MODELS_BY_SIZE[m]: changed(clients=2, model=m, batch_size=2) for m in models}, 2, "sequential"
        ),
    }
    for family in ("sign", "gaussian"):
        configs = {
            m: changed(clients=10, algorithm="fedrp-subspace", projection=family, dim=m)
            for m in (dims if family == "sign" else dims[:3])  # a matrix of 10,000 rows has 2.5 GB
        }
        found[f"fedrp-subspace {family}, m"] = Curve("m", configs, 16)
    return found


def task_of(config: RunConfig, examples: int) -> Task:
    shape = (1, 28, 28) if config.model == "lenet5" else (3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(config.clients, examples, *shape, generator=generator)
    y = torch.randint(10, (config.clients, examples), generator=generator)
    model = functools.partial(MODELS[config.model].build, shape, 10)
    return Task(model, list(zip(x, y, strict=True)), (x[0], y[0]), model_name=config.model)


class Line(NamedTuple):
    """seconds = a + b x, and how far the worst point is from it, as a share of the line."""

    a: float
    b: float
    worst: float


def fitted(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with a, b >= 0 by least squares of relative errors: small points count as much as large ones."""
    places, times = np.array(x, float), np.array(seconds)
    (a, b), _ = nnls(np.stack([1 / times, places / times], axis=1), np.ones(len(times)))
    return Line(float(a), float(b), float(np.abs(times / (a + b * places) - 1).max()))


def measured_rounds(quick: bool, repeats: int, workers: int) -> dict[str, Any]:
    """Seconds of the second round, the median of several runs, at each point of each curve."""
    results = {}
    for name, curve in curves(quick).items():
        seconds = []
        for place, config in curve.points.items():
            task = task_of(config, curve.examples)
            speed = Speed(workers=workers, engine=curve.engine)
            runs = [simulate(config, task, speed).records[-1].seconds for _ in range(repeats)]
            seconds.append(float(np.median(runs)))
            print(f"{name} = {place:,}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
        line = fitted(list(curve.points), seconds)
        results[name] = {"axis": curve.axis, "x": list(curve.points), "seconds": seconds, **line._asdict()}
    return results


def draw(results: Mapping[str, Any], path: Path) -> None:
    """A panel for each axis, points and their fits."""
    plt.rcParams["svg.hashsalt"] = TABLE  # the same file for the same numbers
    axes = list(dict.fromkeys(result["axis"] for result in results.values()))
    figure, panels = plt.subplots(1, len(axes), figsize=(4 * len(axes), 3.4), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        for name, result in results.items():
            if result["axis"] != axis:
                continue
            (line,) = panel.loglog(result["x"], result["seconds"], "o", label=name)
            smooth = np.geomspace(result["x"][0], result["x"][-1], 100)
            panel.loglog(smooth, result["a"] + result["b"] * smooth, color=line.get_color())
        panel.set(xlabel=axis, ylabel="seconds of a round")
        panel.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


# --- uploads ---------------------------------------------------------------------------------------------------------


def open_server(count: int, dim: int) -> Server:
    """A server in the first round of a run that all clients take part in."""
    config = resolved(RunConfig(algorithm="fedrp-subspace", projection="sign", clients=count, dim=dim), LENET)
    server = new_server(config, bytes(wire.RUN_ID_BYTES), LENET)
    return dataclasses.replace(server, participants=tuple(range(count)))


def uploads(server: Server) -> Iterator[tuple[int, bytes]]:
    """Every participant's encoded upload, made when it is asked for."""
    pool = np.random.default_rng(0).standard_normal((POOL, server.upload_size), np.float32)
    for client in server.participants:
        message = Message(Kind.UPLOAD, server.context, 1, client, pool[client % POOL], 1)
        yield client, wire.encode([message])


def aggregate(server: Server, packets: Iterable[tuple[int, bytes]]) -> Server:
    """The server after the round: the one place here that knows how uploads get into it."""
    tally = Tally.of(server)
    for client, packet in packets:
        take_upload(server, tally, client, packet)
    closed, report = close_round(server, tally)
    if len(report.participants) != len(server.participants):
        raise SystemExit(f"{len(report.participants)} of {len(server.participants)} uploads were used")
    return closed


def measured_uploads(count: int, dim: int) -> dict[str, Any]:
    """Time and memory of a round's aggregation. For a process of its own, as the peak is that of the process."""
    server = open_server(count, dim)
    began = time.perf_counter()
    for _ in uploads(server):
        pass
    making = time.perf_counter() - began
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    closed = aggregate(server, uploads(server))
    seconds = time.perf_counter() - began - making
    pool = np.random.default_rng(0).standard_normal((POOL, dim), np.float32)
    expected = np.bincount(np.arange(count) % POOL, minlength=POOL) @ pool.astype(np.float64) / count
    if not np.allclose(closed.aggregates[1], expected, atol=1e-4):
        raise SystemExit("the aggregate is not the mean of the uploads")
    return {
        "count": count,
        "dim": dim,
        "seconds": seconds,
        "uploads_per_second": count / seconds,
        "making_seconds": making,  # of the uploads, which is not in the time
        "bytes": count * (wire.HEADER_BYTES + 4 * dim),
        "rss_before_mb": before,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


# --- what is kept ----------------------------------------------------------------------------------------------------


def on_paper(measured: Sequence[Mapping[str, Any]]) -> str:
    """What a million sampled clients would cost the server; nothing without uploads of two lengths."""
    dims = [result["dim"] for result in measured]
    if len(set(dims)) < 2:
        return ""
    line = fitted(dims, [result["seconds"] / result["count"] for result in measured])
    cases = {"m = 1,000": 1000, "LeNet-5 as a whole": LENET, "VGG-16 as a whole": MODELS_BY_SIZE["vgg16"]}
    costs = [
        f"{name}: {lasting(MILLION * (line.a + line.b * size))} and {volume(MILLION * (wire.HEADER_BYTES + 4 * size))}"
        for name, size in cases.items()
    ]
    return textwrap.fill(
        f"On paper, a million sampled clients: by these rows an upload costs the server {1e6 * line.a:.1f} µs, and "
        f"{1e9 * line.b:.2f} ns for each of its numbers. On one core, and with what it receives, that is "
        f"{'; '.join(costs)}. The time adds up over uploads, the memory does not: uploads are folded into one sum.",
        100,
    )


def lasting(seconds: float) -> str:
    unit, size = ("s", 1) if seconds < 600 else ("min", 60) if seconds < 36_000 else ("h", 3600)
    return f"{seconds / size:,.0f} {unit}"


def volume(count: float) -> str:
    unit, size = ("GB", 1e9) if count < 1e12 else ("TB", 1e12)
    return f"{count / size:,.0f} {unit}"


def rendered(kept_results: Mapping[str, Any]) -> str:
    """The table of fits and their figure, and the table of uploads."""
    fits, sums = [], []
    for result in kept_results.values():
        if "curves" in result:
            for name, curve in result["curves"].items():
                ends = [f"{curve['x'][i]:,}: {curve['seconds'][i]:.3g} s" for i in (0, -1)]
                fit = f"{curve['a']:.3g} + {curve['b']:.3g} {curve['axis']}"
                fits.append((name, *ends, fit, f"{100 * curve['worst']:.0f} %"))
        else:
            size = f"{result['bytes'] / 1e9:.2f} GB"
            memory = f"{result['peak_rss_mb']:,.0f} ({result['rss_before_mb']:,.0f} before)"
            sums.append((f"{result['count']:,}", f"{result['dim']:,}", size, f"{result['seconds']:.1f}", memory))
    parts = [
        table(["a round against", "smallest", "largest", "fit, in seconds", "worst point"], fits) if fits else "",
        FIGURE if fits else "",
        table(["uploads", "m", "encoded", "seconds", "peak MB"], sums) if sums else "",
        on_paper([result for result in kept_results.values() if "curves" not in result]),
        came_from(result["origin"] for result in kept_results.values()),
    ]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["rounds", "uploads", "render"])
    parser.add_argument("--quick", action="store_true", help="rounds: small points only")
    parser.add_argument("--repeats", type=int, default=3, help="rounds: runs at each point")
    parser.add_argument("--workers", type=int, default=1, help="rounds: worker processes")
    parser.add_argument("--figure", type=Path, default=FIGURES / "growth.svg")
    parser.add_argument("--count", type=int, default=1_000_000, help="uploads: how many")
    parser.add_argument("--dim", type=int, default=1000, help="uploads: numbers in each")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--page", type=Path, default=PAGE, help="render: the page with the tables")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.workers, arguments.count, arguments.dim) < 1:
        parser.error("numbers must be at least 1")
    if arguments.action == "render":
        results = kept.read(TABLE, arguments.results)
        for result in results.values():
            if "curves" in result:
                draw(result["curves"], arguments.figure)
        placed(TABLE, rendered(results), arguments.page)
        return
    origin = origin_of(" ".join(["python benchmarks/growth.py", *sys.argv[1:]]))
    origin["load_average_before"] = str(os.getloadavg()[0])
    if arguments.action == "rounds":
        measured = {"curves": measured_rounds(arguments.quick, arguments.repeats, arguments.workers)}
        draw(measured["curves"], arguments.figure)
        options = f"growth rounds --repeats {arguments.repeats} --workers {arguments.workers}"
    else:
        measured = measured_uploads(arguments.count, arguments.dim)
        options = f"growth uploads --count {arguments.count} --dim {arguments.dim}"
    result = {"origin": origin, **measured}
    kept.keep(TABLE, {options: result}, arguments.results)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
