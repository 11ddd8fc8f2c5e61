"""What a round of FedRP-Subspace costs next to a round of FedAvg, measured in turn in the same run.

    python benchmarks/rounds.py --out FILE

Full MNIST, LeNet-5, 100 clients, E = 1. Each repeat runs two rounds of every method, one method after the other, and
takes the second; a ratio is over FedAvg's round of the same repeat. The data folder is FEDRP_DATA.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from origin import origin_of

from fedrp import RunConfig, Speed
from fedrp.learning.task import named_task
from fedrp.simulation.simulate import simulate

BASE = RunConfig(dataset="mnist", clients=100, rounds=2, algorithm="fedavg")
REFERENCE = "fedavg"
METHODS: dict[str, RunConfig] = {
    REFERENCE: BASE,
    **{
        f"fedrp-subspace, {family}, m = 1,000": RunConfig(
            dataset="mnist", clients=100, rounds=2, algorithm="fedrp-subspace", projection=family, dim=1000
        )
        for family in ("sign", "hadamard", "gaussian")
    },
}


def measured(repeats: int, workers: int) -> dict[str, Any]:
    """Seconds of a round by method and repeat, and the ratios to FedAvg's."""
    task = named_task(BASE)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for repeat in range(repeats):
        for name, config in METHODS.items():
            seconds[name].append(simulate(config, task, Speed(workers=workers)).records[-1].seconds)
            print(f"repeat {repeat + 1}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    ratios = {name: [t / r for t, r in zip(times, seconds[REFERENCE], strict=True)] for name, times in seconds.items()}
    return {
        "seconds": seconds,
        "ratios": ratios,
        "median_ratio": {name: statistics.median(values) for name, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, a line of JSON")
    arguments = parser.parse_args()
    origin = {
        **origin_of(" ".join(["python benchmarks/rounds.py", *sys.argv[1:]])),
        "load_average_before": os.getloadavg()[0],
    }
    result = {"origin": origin, **measured(arguments.repeats, arguments.workers)}
    arguments.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result["median_ratio"], indent=1))


if __name__ == "__main__":
    main()
