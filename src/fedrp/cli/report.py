"""Commands that show results: a report to open in a browser, a table of many runs."""

import sys
from pathlib import Path

import click

from fedrp.cli.common import cli
from fedrp.errors import ConfigError


@cli.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--out", default="report.html", show_default=True, type=click.Path(path_type=Path), help="the page")
def report(folders: tuple[Path, ...], out: Path) -> None:
    """One page about one or many runs, to open in a browser: RUN is the folder of a run or of a comparison.

    The page needs no other file and no network.
    """
    from fedrp.reporting.page import write_report
    from fedrp.reporting.runs import read_runs

    runs = read_runs(folders)
    write_report(runs, out)
    print(f"report of {len(runs)} run{'s' if len(runs) > 1 else ''}: {out}")


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--csv", "as_csv", is_flag=True, help="comma-separated values on standard output, a row per run")
def results(folder: Path, as_csv: bool) -> None:
    """All runs below FOLDER in one table, finished or not."""
    from rich.console import Console

    from fedrp.reporting.results import results_csv, results_table
    from fedrp.reporting.runs import simulated_below

    runs, flaws = simulated_below(folder)
    for flaw in flaws:
        print(f"fedrp: {flaw}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"{folder} holds no runs that can be read: give the folder above them")
    if as_csv:
        print(results_csv(runs), end="")
    else:
        Console().print(results_table(runs))
