"""Commands that measure this machine."""

import dataclasses
import json
from typing import Any

import click

from fedrp.cli.common import ListedOption, cli, given_settings, projection_names, some_settings, with_defaults
from fedrp.config import Speed, require
from fedrp.config.speed import most_workers

# --- measuring -----------------------------------------------------------------------------------------------------


@cli.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("projection")
@click.option("--family", default="sign", show_default=True, help="{names}", cls=ListedOption, names=projection_names)
@click.option("--params", default=1_000_000, show_default=True, help="length n of the vector")
@click.option("--dim", default=1_000, show_default=True, help="projection dimension m")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def bench_projection(family: str, params: int, dim: int, as_json: bool) -> None:
    """Time a projection against a plain copy of the vector in the same run."""
    from fedrp.benchmarking.projection import projection_benchmark

    _print(projection_benchmark(family, params, dim), as_json)


@bench.command("simulator")
@some_settings(
    *("algorithm", "model", "clients", "batch_size", "dim", "projection"),
    *(field.name for field in dataclasses.fields(Speed)),
    usual={"algorithm": "fedavg", "clients": 100},
)
@click.option("--examples", default=600, show_default=True, help="images of each client")
@click.option("--repeats", default=5, show_default=True, help="measured rounds of each side, after one of warm-up")
@click.option("--starts", default=3, show_default=True, help="runs of 'fedrp run' whose start is timed, after one")
@click.option("--processes", default=1, show_default=True, help="also time the plain loop in this many processes")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def bench_simulator(examples: int, repeats: int, starts: int, processes: int, as_json: bool, **given: Any) -> None:
    """Time rounds of the simulator against a plain PyTorch loop over the same clients in the same run.

    Images are random, of MNIST's shape for lenet5 and of CIFAR-10's for other models. The first round of each side is
    a warm-up and not counted, nor is evaluation.
    """
    counts = {"examples": examples, "repeats": repeats, "starts": starts, "processes": processes}
    for name, value in counts.items():
        require(value >= 1, name, value, "a whole number of at least 1")
    from fedrp.benchmarking.simulator import BASE, simulator_benchmark, start_up, synthetic_images
    from fedrp.learning.task import named_task

    config, speed, _ = with_defaults(dataclasses.asdict(BASE) | given_settings(None, given))
    speed = dataclasses.replace(speed, workers=most_workers(speed))  # also where one would do
    with synthetic_images(config.model, config.clients * examples) as dataset:
        config = dataclasses.replace(config, dataset=dataset)
        measured = simulator_benchmark(config, named_task(config), speed, repeats, sorted({1, processes}))
        measured |= start_up(config, speed, starts)._asdict()
    _print(measured, as_json)


def _print(measured: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(measured))
        return
    width = max(map(len, measured)) + 1
    for name, value in measured.items():
        if not isinstance(value, dict):
            print(f"{name:<{width}} {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(_shown, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
