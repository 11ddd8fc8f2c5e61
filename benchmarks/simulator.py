"""The simulator against a plain PyTorch loop in 1 and 2 processes, by algorithm, model and number of workers.

    python benchmarks/simulator.py --repeats 5                     # all rows; keeps results, writes the table
    python benchmarks/simulator.py --rows fedavg,cnn --workers 2   # some
    python benchmarks/simulator.py --scale 0.1 --repeats 2 --results /tmp/try     # a try, with fewer clients
    python benchmarks/simulator.py --render                        # the table of docs/performance.md from what is kept

Rounds of the simulator and of the references take turns in one run; the first of each is a warm-up. Data are random:
the speed does not depend on them.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kept
import torch
from origin import origin_of
from page import came_from, placed, spread, table
from torch import nn

from fedrp import RunConfig, Speed, Task
from fedrp.benchmarking.simulator import BASE, simulator_benchmark, start_up, synthetic_images
from fedrp.learning.zoo import MODELS

TABLE = "simulator"
PROCESSES = (1, 2)
WORDS, LENGTH, WIDTH, CLASSES = 1000, 32, 128, 10


class TextClassifier(nn.Module):
    """Four encoder layers over embedded words, and a linear layer on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        scores: torch.Tensor = self.output(self.encoder(self.embedding(words)).mean(dim=1))
        return scores


class Row(NamedTuple):
    """A row of the table: what is trained, on how much."""

    title: str
    config: RunConfig
    examples: int  # of each client: as many as a round of seconds allows
    shape: tuple[int, ...] = (1, 28, 28)

    def task(self, clients: int) -> Task:
        """Random data of the shape; words where it has one dimension."""
        generator = torch.Generator().manual_seed(0)
        sizes = (clients, self.examples, *self.shape)
        text = len(self.shape) == 1
        x = torch.randint(WORDS, sizes, generator=generator) if text else torch.randn(sizes, generator=generator)
        y = torch.randint(CLASSES, sizes[:2], generator=generator)
        model = TextClassifier if text else functools.partial(MODELS[self.config.model].build, self.shape, CLASSES)
        name = "transformer" if text else self.config.model
        return Task(model, list(zip(x, y, strict=True)), (x[0], y[0]), model_name=name)


def changed(**settings: Any) -> RunConfig:
    return dataclasses.replace(BASE, **settings)


SUBSPACE: dict[str, Any] = {"algorithm": "fedrp-subspace", "dim": 1000}
CIFAR = (3, 32, 32)
ROWS = {
    "fedavg": Row("FedAvg, LeNet-5", BASE, 600),
    "sign": Row("`fedrp-subspace`, sign, m = 1,000, LeNet-5", changed(projection="sign", **SUBSPACE), 600),
    "gaussian": Row("`fedrp-subspace`, gaussian, m = 1,000, LeNet-5", changed(projection="gaussian", **SUBSPACE), 600),
    # CIFAR-10 among 50 clients is 1,000 images each; of such clients as many as a round of seconds allows.
    "cnn": Row("FedAvg, cnn, CIFAR-10's shape", changed(model="cnn", clients=10), 1000, CIFAR),
    "cnn-few": Row("FedAvg, cnn, four steps a round", changed(model="cnn", clients=50), 200, CIFAR),
    "resnet18": Row("FedAvg, resnet18, CIFAR-10's shape", changed(model="resnet18", clients=2), 1000, CIFAR),
    "resnet18-few": Row(
        "FedAvg, resnet18, two steps a round", changed(model="resnet18", clients=4, batch_size=32), 64, CIFAR
    ),
    "transformer": Row("FedAvg, 4-layer transformer encoder", changed(clients=20), 128, (LENGTH,)),
}


def options_of(name: str, row: Row, clients: int, speed: Speed, repeats: int) -> str:
    """What a result is found by."""
    shown = {"clients": clients, "examples": row.examples, "workers": speed.workers, "repeats": repeats}
    engine = getattr(speed, "engine", "auto")
    extra = "" if engine == "auto" else f" --engine {engine}"
    return f"simulator --row {name} " + " ".join(f"--{key} {value}" for key, value in shown.items()) + extra


def measure(row: Row, clients: int, speed: Speed, repeats: int, starts: int) -> dict[str, Any]:
    """One row with one number of workers."""
    config = dataclasses.replace(row.config, clients=clients)
    measured = simulator_benchmark(config, row.task(clients), speed, repeats, PROCESSES)
    measured["load_average_after"] = os.getloadavg()[0]
    if len(row.shape) == 3 and starts:  # the command has no model of words
        with synthetic_images(config.model, clients * row.examples) as dataset:
            named = dataclasses.replace(config, dataset=dataset)
            measured |= start_up(named, speed, starts)._asdict()
    return measured


def rendered(results: Mapping[str, Any]) -> str:
    """Two tables with a line for each row and number of workers: speed, and what it is the speed of."""
    speeds, about = [], []
    for options, result in results.items():
        name = f"`{options.split()[2]}`"  # simulator --row NAME ...
        references = [result["references"][str(count)] for count in PROCESSES]  # keys as JSON has them
        start, memory = result.get("seconds_to_first_round"), result.get("peak_rss_mb")
        speeds.append(
            (
                *(name, result["workers"]),
                *(spread(reference["ratio"], reference["ratio_range"]) for reference in references),
                spread(result["images_per_second"], result["images_per_second_range"], 0),
                f"{references[0]['images_per_second']:,.0f}",
            )
        )
        about.append(
            (
                *(name, result["title"], result["workers"], "-" if start is None else f"{start:.1f}"),
                "-" if memory is None else f"{memory:,.0f}",
            )
        )
    header = ["", "workers", "times the plain loop", "in 2 processes", "images/s", "plain loop"]
    return "\n\n".join(
        [
            table(header, speeds),
            table(["", "model, data", "workers", "first round, s", "peak MB"], about),
            came_from(result["origin"] for result in results.values()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="default all: %(default)s")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, by commas")
    parser.add_argument("--engine", help="engine of local training; default auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="runs whose start is timed; 0: none")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the clients, for a try")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table into the page")
    arguments = parser.parse_args()
    if arguments.render:
        placed(TABLE, rendered(kept.read(TABLE, arguments.results)))
        return
    names, workers = arguments.rows.split(","), [int(count) for count in arguments.workers.split(",")]
    unknown = [name for name in names if name not in ROWS]
    if unknown or arguments.repeats < 1 or not 0 < arguments.scale <= 1:
        parser.error(f"unknown row {unknown[0]}" if unknown else "repeats from 1, scale above 0 and at most 1")
    origin = origin_of(" ".join(["python benchmarks/simulator.py", *sys.argv[1:]]))
    engine = {"engine": arguments.engine} if arguments.engine else {}
    for name in names:
        for count in workers:
            row, speed = ROWS[name], Speed(workers=count, **engine)
            clients = max(2, round(arguments.scale * row.config.clients))
            load = os.getloadavg()[0]
            result = measure(row, clients, speed, arguments.repeats, arguments.starts)
            title = f"{row.title}, {clients} clients x {row.examples}"
            told = {"origin": {**origin, "load_average_before": load}, "title": title, **result}
            options = options_of(name, row, clients, speed, arguments.repeats)
            kept.keep(TABLE, {options: told}, arguments.results)  # at once: a later row may fail
            print(json.dumps(told), flush=True)
    print(rendered(kept.read(TABLE, arguments.results)))


if __name__ == "__main__":
    main()
