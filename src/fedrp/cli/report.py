"""Commands that show results: a report to open in a browser, a table of many runs."""

from pathlib import Path

import click

from fedrp.cli.common import cli


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
