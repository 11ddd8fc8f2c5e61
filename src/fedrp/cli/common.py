"""What all commands share: the group they belong to, options made of config fields, progress."""

import dataclasses
import itertools
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fedrp import __version__
from fedrp.config.checks import require_types
from fedrp.config.run import GROUPS, RunConfig
from fedrp.config.speed import Speed
from fedrp.config.toml import from_settings, read_toml
from fedrp.errors import INTERRUPTED, FedRPError, PrivacyError

COMPARED = "fedavg,fedadmm,fedrp-subspace,fedrp,fwc"
Settings = dict[str, Any]  # by name, of any of the records below


class StoppedError(FedRPError):
    """Ctrl-C."""

    exit_code = INTERRUPTED


class _Commands(click.Group):
    """The commands. Ctrl-C ends any of them with one line: click would print an empty one before it."""

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        """Read the options."""
        with _stopped():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _stopped():
            return super().invoke(ctx)


@contextmanager
def _stopped() -> typing.Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError("stopped") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fedrp")
def cli() -> None:
    """Federated learning with secret random projections."""


# What most runs are about; `fedrp run --help` shows it first.
FOREMOST = (
    *("algorithm", "dataset", "model", "clients", "rounds", "local_epochs", "lr", "dim"),
    *("dp_epsilon", "secure_aggregation"),
)
_RECORDS = (RunConfig, Speed)
_FIELDS = {field.name: field for record in _RECORDS for field in dataclasses.fields(record)}
_HINTS = {name: hint for record in _RECORDS for name, hint in typing.get_type_hints(record).items()}

CONFIG_ARGUMENT = click.argument("config", required=False, type=click.Path(path_type=Path))
DATA_DIR_OPTION = click.option("--data-dir", help="data folder (also FEDRP_DATA)")
JSON_OPTION = click.option("--json", is_flag=True, default=None, help="print one JSON object on standard output")


class ListedOption(click.Option):
    """An option whose help names what it can be, `{names}`: read from the table when help is asked for, not before.

    Tables need torch, which takes seconds to import.
    """

    def __init__(self, *declarations: Any, names: Callable[[], Iterable[str]], **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self._names = names

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option and its help."""
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].replace("{names}", ", ".join(self._names())))


def algorithm_names() -> Iterable[str]:
    """Of all algorithms."""
    from fedrp.algorithms.table import methods

    return methods()


def dataset_names() -> Iterable[str]:
    """Of all data sets."""
    from fedrp.learning.data import DATASETS

    return DATASETS


def model_names() -> Iterable[str]:
    """Of all models."""
    from fedrp.learning.zoo import MODELS

    return MODELS


def projection_names() -> Iterable[str]:
    """Of all projection families."""
    from fedrp.projection.families import FAMILIES

    return FAMILIES


def rotation_names() -> Iterable[str]:
    """Of all kinds of rotation."""
    from fedrp.projection.rotation import ROTATIONS

    return ROTATIONS


_NAMES = {
    "algorithm": algorithm_names,
    "dataset": dataset_names,
    "model": model_names,
    "projection": projection_names,
    "rotation": rotation_names,
}


def users_of(setting: str) -> Callable[[], Iterable[str]]:
    """The names of all algorithms that use a setting, once they are asked for."""

    def users() -> Iterable[str]:
        from fedrp.algorithms.table import methods

        return [name for name, method in methods().items() if setting in method.settings]

    return users


class SettingsCommand(click.Command):
    """A command with an option per setting: its help shows them in groups, what matters first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options under the heading of each group."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        for heading, names in [
            ("The ten settings that matter most", FOREMOST),
            *((group.heading, group.settings) for group in GROUPS),
            ("Speed", [field.name for field in dataclasses.fields(Speed)]),
            ("Command", list(records)),
        ]:
            rows = [record for name in names if (record := records.pop(name, None))]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def some_settings(*names: str, usual: Settings | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for each of these fields of `RunConfig` and `Speed`; `usual` are the command's own defaults."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(names):
            kind = next(k for k in (bool, str, float, int) if k in (_HINTS[name], *typing.get_args(_HINTS[name])))
            option, text = "--" + name.replace("_", "-"), _FIELDS[name].metadata["help"]
            shown = (usual or {}).get(name, _FIELDS[name].default)
            if kind is bool:
                option = f"{option}/--no-{option[2:]}"
            elif shown is not None:
                text = f"{text}  [default: {shown}]"
            listed = {"cls": ListedOption, "names": _NAMES.get(name, users_of(name))}
            table: dict[str, Any] = listed if "{names}" in text else {}
            command = click.option(option, name, type=kind, default=None, help=text, **table)(command)
        return command

    return decorate


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """What TOML can say, the command line can say: an option per field, and what belongs to a command that trains."""
    command = some_settings(*_FIELDS)(command)
    for option in (
        JSON_OPTION,
        click.option("--live", is_flag=True, default=None, help="show the run in a browser while it goes on"),
        click.option("--resume", is_flag=True, default=None, help="go on with what is in --out"),
        click.option(
            "--keep", help="model that is delivered: of the last round, or the best on test data  [default: last]"
        ),
        click.option(
            *("--log", "log"),
            multiple=True,
            callback=lambda _context, _option, names: ",".join(names) or None,
            help="also write for a tracker below the run folder: tensorboard, mlflow or wandb; repeatable",
        ),
        click.option("--out", help="folder for what is made  [default: a new one below runs/]"),
        DATA_DIR_OPTION,
        CONFIG_ARGUMENT,
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Command:
    """Settings that belong to a command, not to a run."""

    data_dir: str | None = None
    out: str | None = None
    algorithms: str = COMPARED
    resume: bool = False
    keep: str = "last"
    live: bool = False
    log: str = ""
    json: bool = False

    def __post_init__(self) -> None:
        require_types(self)

    @contextmanager
    def folder(self, name: str) -> typing.Iterator[Path]:
        """The folder that was asked for, or a new one, which is removed if nothing came into it."""
        if self.out:
            yield Path(self.out)
            return
        path = _new_folder(name)
        try:
            yield path
        finally:
            with suppress(OSError):  # something came into it
                path.rmdir()


def read_settings(config: Path | None, given: Settings) -> tuple[RunConfig, Speed, Command]:
    """What the config file and the options together ask for, and defaults for the rest; options win."""
    return with_defaults(given_settings(config, given))


def given_settings(config: Path | None, given: Settings) -> Settings:
    """What the config file and the options together ask for, and nothing else; options win."""
    known = [field.name for record in (RunConfig, Speed, Command) for field in dataclasses.fields(record)]
    settings = {} if config is None else read_toml(config, known, table="run")
    for name in ("algorithms", "log"):
        if isinstance(listed := settings.get(name), list):
            settings[name] = ",".join(map(str, listed))
    return settings | {name: value for name, value in given.items() if value is not None}


def with_defaults(settings: Settings) -> tuple[RunConfig, Speed, Command]:
    """The settings, sorted into the records that they belong to."""
    return from_settings(RunConfig, settings), from_settings(Speed, settings), from_settings(Command, settings)


def _new_folder(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist, made here so that no other run takes it."""
    from fedrp.files import beginning

    parent = Path("runs")
    with beginning(parent):
        parent.mkdir(exist_ok=True)
        numbered = (parent / f"{name}-{number}" for number in itertools.count(1))
        return next(path for path in numbered if _made(path))


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def path_or_none(text: str | None) -> Path | None:
    """An option that may be left out."""
    return Path(text) if text else None


def as_options(text: str) -> str:
    """An error of the library, which speaks of arguments, with options in its last clause: that says what to do."""
    options = {*_FIELDS, *(field.name for field in dataclasses.fields(Command))}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in options:
            return found[0]
        words = {"True": f"--{name}", "False": f"--no-{name}"}.get(value, f"--{name} ").replace("_", "-")
        return words if value in ("True", "False") else words + value.strip("'")

    clause = max(text.rfind(": "), text.rfind("; ")) + 1
    return text[:clause] + re.sub(r"\b(\w+)=('[^']*'|\.\.\.|[\w.+-]*\w)", option, text[clause:])


@contextmanager
def counting(name: str) -> typing.Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, or a line for every tenth of the way; fed with what is done, of how much."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)

        def on_step(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and (done == total or done % max(1, total // 10) == 0):
                print(f"{name} {done}/{total}", file=sys.stderr, flush=True)

        yield on_step


def tell_audit(told: Mapping[str, Any], mechanism: str, claimed: str, how: str, as_json: bool) -> None:
    """Print what an audit found: a line each, or all of it as JSON."""
    if as_json:
        print(json.dumps(told))
        return
    print(f"mechanism                {mechanism}")
    print(f"claimed epsilon          {claimed}")
    print(f"neighbours               {told['adjacency']}")
    print(f"epsilon is at least      {told['lower_bound']:.4g} ({how})")
    print(f"verdict                  {told['verdict']}")


def leaks_more(found: float, claimed: float) -> PrivacyError:
    """What a refuted claim ends a command with."""
    return PrivacyError(
        f"the mechanism leaks more than claimed: epsilon is at least {found:.4g}, claimed {claimed:.4g}"
    )
