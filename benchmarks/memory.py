"""What a simulation takes of memory, as a function of clients, parameters, workers and data; fitted to measured runs.

    python benchmarks/memory.py                 # measures, fits and keeps (minutes; other work does not matter)
    python benchmarks/memory.py --quick --results /tmp/try       # a try
    python benchmarks/memory.py --render        # table and formula of docs/performance.md from what is kept

Each point is one round of FedAvg by `fedrp run` with two workers or more (a single one is in the process of the command
itself, and takes less). Its memory is the largest sum over all its
processes of the proportional set size, looked at every 0.2 s, which counts pages that processes share once. The
formula has coefficients of at least 0, by least squares of relative errors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kept
import numpy as np
from origin import origin_of
from page import PAGE, came_from, placed, table
from scipy.optimize import nnls

from fedrp.benchmarking.simulator import synthetic_images
from fedrp.simulation.population import grouped

TABLE = "memory"
PERIOD = 0.2
PARAMETERS = {"lenet5": 61_706, "cnn": 846_634}
NUMBERS = {"lenet5": 28 * 28, "cnn": 3 * 32 * 32}  # bytes of an image
TERMS = ("1", "workers", "clients", "cohort", "group", "data")


class Point(NamedTuple):
    """A run."""

    clients: int
    cohort: int  # that take part in a round
    workers: int
    model: str
    images: int


QUICK = (Point(20, 20, 2, "lenet5", 400), Point(20, 20, 3, "lenet5", 400))
POINTS = (
    *(Point(100, 100, workers, "lenet5", 2000) for workers in (2, 3, 4)),
    Point(100, 100, 2, "lenet5", 30_000),
    Point(1000, 1000, 2, "lenet5", 4000),
    Point(10_000, 100, 2, "lenet5", 20_000),
    Point(20, 20, 2, "cnn", 200),
    Point(100, 100, 2, "cnn", 200),
    Point(100, 100, 3, "cnn", 200),
)


def terms(point: Point) -> list[float]:
    """What memory is a sum of multiples of: 1, workers, clients, and MB of three kinds."""
    n = PARAMETERS[point.model]
    model = 4 * n / 2**20
    together = max(map(len, grouped(point.clients, n).values())) * point.cohort / point.clients
    data = point.images * NUMBERS[point.model] / 2**20
    return [1, point.workers, point.clients, point.cohort * model, point.workers * together * model, data]


def measured(point: Point) -> float:
    """The largest memory of a run, in MB."""
    with synthetic_images(point.model, point.images) as dataset, tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dataset": dataset, "model": point.model, "algorithm": "fedavg", "rounds": 1}
        options |= {"clients": point.clients, "participation": point.cohort / point.clients, "batch-size": 16}
        options |= {"workers": point.workers, "engine": "stacked:4", "out": f"{folder}/run"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "fedrp", "run", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional, family(process.pid))))
            time.sleep(PERIOD)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return peak


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it is over
            continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def proportional(process: int) -> float:
    """The proportional set size in MB; nothing for one that is over."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def fitted(points: Sequence[Point], megabytes: Sequence[float]) -> dict[str, float]:
    """The coefficient of each term, and the share that the worst point is off by."""
    columns, values = np.array([terms(point) for point in points]), np.array(megabytes)
    found, _ = nnls(columns / values[:, None], np.ones(len(values)))
    return dict(zip(TERMS, found.tolist(), strict=True)) | {
        "worst": float(np.abs(values / (columns @ found) - 1).max())
    }


def rendered(results: Mapping[str, Any]) -> str:
    """The formula and the points behind it."""
    result = list(results.values())[-1]
    points = [Point(*point) for point in result["points"]]
    c = fitted(points, result["megabytes"])
    formula = (
        f"MB = {c['1']:.0f} + {c['workers']:.0f} W + {c['clients']:.3f} K "
        f"+ {c['cohort']:.2f} C N + {c['group']:.2f} W G N + {c['data']:.2f} D"
    )
    lines = [
        [f"{p.clients:,}", f"{p.cohort:,}", p.workers, p.model, f"{p.images:,}", f"{m:,.0f}", f"{f:,.0f}"]
        for p, m, f in (
            (point, mb, float(np.dot(terms(point), [c[term] for term in TERMS])))
            for point, mb in zip(points, result["megabytes"], strict=True)
        )
    ]
    header = ["clients K", "in a round C", "workers W", "model", "images", "MB", "by the formula"]
    parts = [f"```\n{formula}\n```", table(header, lines), came_from([result["origin"]])]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small points, which is too few for a formula")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table")
    arguments = parser.parse_args()
    if arguments.render:
        placed(TABLE, rendered(kept.read(TABLE, arguments.results)), arguments.page)
        return
    origin = origin_of(" ".join(["python benchmarks/memory.py", *sys.argv[1:]]))
    points = QUICK if arguments.quick else POINTS
    megabytes = []
    for point in points:
        megabytes.append(measured(point))
        print(f"{point}: {megabytes[-1]:.0f} MB", file=sys.stderr, flush=True)
    result = {"origin": origin, "points": points, "megabytes": megabytes}
    kept.keep(TABLE, {"memory" + " --quick" * arguments.quick: result}, arguments.results)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
