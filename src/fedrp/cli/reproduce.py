"""The paper's table and figures in one command."""

import sys
from pathlib import Path

import click

from fedrp.backends.processes import start_fork_server
from fedrp.cli.common import DATA_DIR_OPTION, StoppedError, cli, path_or_none
from fedrp.cli.live import watched
from fedrp.config.speed import Speed, most_workers
from fedrp.errors import ConfigError, FedRPError
from fedrp.reproduction.plan import SCALES, figures

TARGETS = ("table2", "fig1", "fig2", "fig3")


class UnfinishedError(FedRPError):
    """Some runs failed; the others are kept and shown."""


@cli.command()
@click.argument("target", type=click.Choice([*TARGETS, "all"]), default="all")
@click.option("--scale", type=click.Choice(SCALES), default="quick", show_default=True, help="how much is run")
@click.option("--out", type=click.Path(path_type=Path), help="folder  [default: runs/reproduce-SCALE]")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="runs at a time, of one worker each")
@click.option("--workers", type=click.IntRange(1), help="worker processes of a run; default by machine")
@click.option("--live", is_flag=True, help="show the runs in a browser while they go on")
@DATA_DIR_OPTION
def reproduce(
    target: str, scale: str, out: Path | None, jobs: int, workers: int | None, live: bool, data_dir: str | None
) -> None:
    """Run what the paper shows, and put its claims beside what was measured.

    quick: bundled images, minutes. standard: MNIST in full, a fifth of CIFAR-10, a night on 2 cores. full: the paper's
    sizes. What was run before is not run again; after a stop the same command goes on.
    """
    if jobs > 1 and workers is not None:
        raise ConfigError(f"workers={workers} does not go with jobs={jobs}, where a run has one: leave out workers=...")
    if target != "table2" and (jobs > 1 or most_workers(Speed(workers=workers)) > 1):
        start_fork_server()
    from fedrp.reproduction.page import write_figure, write_page, write_table2
    from fedrp.reproduction.running import of_figure, run_all
    from fedrp.reproduction.traffic import table2

    root = out or Path("runs") / f"reproduce-{scale}"
    root.mkdir(parents=True, exist_ok=True)
    names = TARGETS if target == "all" else (target,)
    again = f"fedrp reproduce {target} --scale {scale}" + (f" --out {out}" if out else "")
    shown = figures(scale, tuple(name for name in names if name != "table2"))
    failed: tuple[str, ...] = ()
    try:
        parts = [write_table2(root, table2())] if "table2" in names else []
        if shown:
            with watched(root / "runs", live):
                results, failed = run_all(shown, root / "runs", path_or_none(data_dir), _say, workers, jobs)
            parts += [write_figure(root, figure, of_figure(figure, results), again) for figure in shown]
    except KeyboardInterrupt:
        jobs_again = f" --jobs {jobs}" if jobs > 1 else ""
        raise StoppedError(f"stopped; what is done is kept, go on with: {again}{jobs_again}") from None
    page = write_page(root, parts, scale)
    print(page.read_text())
    print(f"page: {page}")
    if failed:
        raise UnfinishedError(f"failed: {'; '.join(failed)}. The others are kept; try again with: {again}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
