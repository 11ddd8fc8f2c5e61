"""Commands that measure this machine."""

import json

import click

from fedrp.cli.common import ListedOption, cli, projection_names

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
    from fedrp.projection.benchmark import projection_benchmark

    measured = projection_benchmark(family, params, dim)
    if as_json:
        print(json.dumps(measured))
    else:
        for name, value in measured.items():
            print(f"{name:<24} {value:,.6g}" if isinstance(value, float) else f"{name:<24} {value}")
