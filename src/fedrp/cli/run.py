"""Commands that train, and the tables of what there is to train."""

import dataclasses
import json
import shlex
import typing
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fedrp.backends.processes import start_fork_server
from fedrp.cli.common import (
    COMPARED,
    Command,
    Settings,
    SettingsCommand,
    StoppedError,
    cli,
    given_settings,
    path_or_none,
    settings_options,
    with_defaults,
)
from fedrp.cli.live import watched
from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed, most_workers
from fedrp.config.toml import from_settings
from fedrp.errors import ConfigError


@cli.command(cls=SettingsCommand)
@settings_options
def run(config: Path | None, **given: Any) -> None:
    """Train with one algorithm. CONFIG is a TOML file with the same settings as the options; options win."""
    settings, speed, command = _asked(config, given, several=False)
    from fedrp.learning.task import named_task
    from fedrp.reporting.report import print_table, result_details
    from fedrp.simulation.runfolder import CONFIG_FILE
    from fedrp.simulation.simulate import simulate
    from fedrp.trackers import tracking

    name = settings.algorithm
    task = named_task(settings, path_or_none(command.data_dir))
    with command.folder(f"{name}-{settings.dataset.split(':')[0]}") as out:
        again = _again("run", out, speed, command)
        with _stoppable(out / CONFIG_FILE, again), watched(out, command.live), tracking(command.log, out) as tracker:
            done = simulate(settings, task, speed, out, command.resume, tracker, keep=command.keep, progress=True)
            tracker.finish(done)
    result = done.as_json()
    if command.json:
        print(json.dumps(result))
    else:
        print_table([result])
        print("\n".join([*result_details(result), f"run folder: {out}"]))


@cli.command(cls=SettingsCommand)
@settings_options
@click.option("--algorithms", help=f"comma-separated  [default: {COMPARED}]")
def compare(config: Path | None, **given: Any) -> None:
    """Train several algorithms on the same split; one table and one plot of accuracy per round.

    An option is for those of the algorithms that use it; one that none of them uses is an error.
    """
    settings, speed, command = _asked(config, given, several=True)
    from fedrp.algorithms.table import for_each
    from fedrp.backends.choice import open_backend
    from fedrp.cli.comparison import COMPARISON_FILE, begin_comparison
    from fedrp.learning.task import named_task
    from fedrp.reporting.progress import showing
    from fedrp.reporting.report import plot_headline, print_table, privacy_lines
    from fedrp.simulation.simulate import simulate
    from fedrp.trackers import tracking

    names = [name.strip() for name in command.algorithms.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"algorithms '{command.algorithms}' is not valid: give different names, separated by commas")
    configs = for_each(settings, names)
    task = named_task(settings, path_or_none(command.data_dir))
    _require_all_valid(configs, task)
    results = []
    with command.folder("compare") as out:
        begin_comparison(out, names, settings, command.resume)
        again = _again("compare", out, speed, command)
        with (
            _stoppable(out / COMPARISON_FILE, again),
            watched(out, command.live),
            open_backend(speed) as backend,
            showing(names, settings.rounds) as show,
        ):
            for item in configs:
                folder = out / item.algorithm
                with tracking(command.log, folder, shared=out) as tracker:
                    done = simulate(
                        *(item, task, speed, folder, command.resume, tracker),
                        backend=backend,
                        keep=command.keep,
                        progress=show,
                    )
                    tracker.finish(done)
                results.append(done.as_json())
        plot = out / "accuracy.png"
        plot_headline(results, plot)
    if command.json:
        print(json.dumps({"runs": results, "plot": str(plot)}))
    else:
        print_table(results)
        for result in results:
            if any(statement["epsilon"] is not None for statement in result["privacy"]) or result["warnings"]:
                print("\n".join([result["algorithm"], *(f"  {line}" for line in privacy_lines(result))]))
        print(f"no epsilon: why, adversary by adversary, says fedrp privacy {out}/ALGORITHM")
        print(f"plot: {plot}")


def _asked(config: Path | None, given: Settings, several: bool) -> tuple[RunConfig, Speed, Command]:
    """What is asked for; with --resume, what was not given is as it was begun, for one run or several.

    Where worker processes will be needed, what they are forked from starts here: it imports torch while we do.
    """
    if several and given.get("algorithm") is not None:
        raise ConfigError(f"--algorithm {given['algorithm']} is for 'fedrp run': name it in --algorithms, by commas")
    asked = given_settings(config, given)
    speed, command = from_settings(Speed, asked), from_settings(Command, asked)
    if command.resume and command.out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    if speed.backend == "processes" and most_workers(speed) > 1:
        start_fork_server()
    if command.resume and command.out:
        from fedrp.cli.comparison import begun_comparison
        from fedrp.simulation.runfolder import begun_settings

        asked = (begun_comparison if several else begun_settings)(Path(command.out), asked)
    return with_defaults(asked)


def _again(name: str, out: Path, speed: Speed, command: Command) -> str:
    """The command that goes on: with what the folder does not keep, because it does not change the result."""
    usual = dataclasses.asdict(Speed())
    options = {name: value for name, value in dataclasses.asdict(speed).items() if value != usual[name]}
    if command.data_dir:
        options["data_dir"] = command.data_dir
    options |= {name: given for name in ("keep", "log") if (given := getattr(command, name)) != getattr(Command, name)}
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return shlex.join(["fedrp", name, "--resume", "--out", str(out), *words])


def _require_all_valid(configs: list[RunConfig], task: Any) -> None:
    """Find a mistake in the last algorithm before the first has run."""
    from fedrp.algorithms.resolve import resolved
    from fedrp.learning.layout import built, layout_of

    parameters = layout_of(built(task.model)).size
    for config in configs:
        resolved(config, parameters)


@contextmanager
def _stoppable(begun: Path, again: str) -> typing.Iterator[None]:
    """Ctrl-C ends what is inside with the command that goes on, if the file `begun` says that there is something."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; what is done is kept, go on with: {again}" if begun.exists() else " before anything was done"
        raise StoppedError(f"stopped{kept}") from None


# --- tables --------------------------------------------------------------------------------------------------------


@cli.command()
def algorithms() -> None:
    """List the algorithms."""
    from fedrp.algorithms.table import methods

    for name, method in methods().items():
        print(f"{name:<16} {method.summary}")


@cli.group()
def data() -> None:
    """Data sets: what there is, and how to get it."""


@data.command("list")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
def data_list(data_dir: Path | None) -> None:
    """List the data sets and whether they are here."""
    from fedrp.learning.fetch import available

    for name, where, present in available(data_dir):
        print(f"{name:<14} {'present' if present else 'missing':<8} {where}")


@data.command("fetch")
@click.argument("name")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--base-url", help="fetch from a mirror instead of the official address")
def data_fetch(name: str, data_dir: Path | None, base_url: str | None) -> None:
    """Download a data set, check it, and put it into the data folder."""
    from fedrp.learning.fetch import fetch_dataset

    for path in fetch_dataset(name, data_dir, base_url):
        print(path)
