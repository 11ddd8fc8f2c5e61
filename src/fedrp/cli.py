"""The command line: parse, call, print. No logic of its own."""

import dataclasses
import functools
import json
import os
import sys
import typing
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedrp._version import __version__
from fedrp.config import RunConfig, Speed, from_settings, read_toml
from fedrp.errors import ConfigError, FedRPError, PrivacyError

_COMPARED = "fedavg,fedadmm,fedrp-subspace,fedrp,fwc"
_CLI_WORKERS = max(1, min(8, os.cpu_count() or 1))
_INTERRUPTED = 130


class _StoppedError(FedRPError):
    """Ctrl-C in the middle of a run."""

    exit_code = _INTERRUPTED


def main(arguments: list[str] | None = None) -> None:
    """Entry point: a user's mistake is one line and an exit code, never a traceback."""
    try:
        cli.main(args=arguments, prog_name="fedrp", standalone_mode=False)
    except FedRPError as error:
        _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("stopped", _INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        os._exit(0)  # the reader of our output went away: nothing left to say


def _fail(text: str, code: int) -> None:
    one_line = " ".join(text.split())
    print(f"fedrp: {one_line}", file=sys.stderr)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fedrp")
def cli() -> None:
    """Federated learning with secret random projections."""


# --- run and compare -----------------------------------------------------------------------------------------------


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of `RunConfig` and `Speed`: what TOML can say, the command line can say."""
    for record in (Speed, RunConfig):
        hints = typing.get_type_hints(record)
        for setting in reversed(dataclasses.fields(record)):
            kind = next(
                k for k in (bool, str, float, int) if k in (hints[setting.name], *typing.get_args(hints[setting.name]))
            )
            shown = _CLI_WORKERS if setting.name == "workers" else setting.default
            text = setting.metadata["help"] + ("" if shown is None else f"  [default: {shown}]")
            option = "--" + setting.name.replace("_", "-")
            if kind is bool:
                option, text = f"{option}/--no-{option[2:]}", setting.metadata["help"]
            command = click.option(option, setting.name, type=kind, default=None, help=text)(command)
    for option in (
        click.option("--json", is_flag=True, default=None, help="print one JSON object on standard output"),
        click.option("--resume", is_flag=True, default=None, help="go on with what is in --out"),
        click.option("--out", help="folder for what is made  [default: a new one below runs/]"),
        click.option("--data-dir", help="data folder (also FEDRP_DATA)"),
        click.argument("config", required=False, type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class _Command:
    """Settings that belong to a command, not to a run."""

    data_dir: str | None = None
    out: str | None = None
    algorithms: str = _COMPARED
    resume: bool = False
    json: bool = False

    def folder(self, name: str) -> Path:
        """The folder that was asked for, or a new one."""
        return Path(self.out) if self.out else _new_folder(name)


def _read(config: Path | None, given: dict[str, Any]) -> tuple[RunConfig, Speed, _Command]:
    """What the config file and the options together ask for; options win."""
    known = [field.name for record in (RunConfig, Speed, _Command) for field in dataclasses.fields(record)]
    settings: dict[str, Any] = {"workers": _CLI_WORKERS}
    if config is not None:
        settings |= read_toml(config, known)
    settings |= {name: value for name, value in given.items() if value is not None}
    return from_settings(RunConfig, settings), from_settings(Speed, settings), from_settings(_Command, settings)


@cli.command()
@_settings
def run(config: Path | None, **given: Any) -> None:
    """Train with one algorithm. CONFIG is a TOML file with the same settings as the options; options win."""
    from fedrp.report import print_table, result_details
    from fedrp.simulate import simulate
    from fedrp.task import named_task

    settings, speed, command = _read(config, given)
    name = settings.algorithm
    if command.resume and command.out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    out = command.folder(f"{name}-{settings.dataset.split(':')[0]}")
    task = named_task(settings, _path(command.data_dir))
    with _stoppable(out), _progress([name], settings.rounds) as on_round:
        shown = functools.partial(on_round, name)
        result = simulate(settings, task, speed, out, command.resume, shown).as_json()
    if command.json:
        print(json.dumps(result))
    else:
        print_table([result])
        print("\n".join([*result_details(result), f"run folder: {out}"]))


@cli.command()
@_settings
@click.option("--algorithms", help=f"comma-separated  [default: {_COMPARED}]")
def compare(config: Path | None, **given: Any) -> None:
    """Train several algorithms on the same split; one table and one plot of accuracy per round."""
    from fedrp.report import plot_accuracy, print_table
    from fedrp.simulate import simulate
    from fedrp.task import named_task

    settings, speed, command = _read(config, given)
    names = [name.strip() for name in command.algorithms.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"algorithms '{command.algorithms}' is not valid: give different names, separated by commas")
    configs = [_for_algorithm(settings, name) for name in names]
    task = named_task(settings, _path(command.data_dir))
    _require_all_valid(configs, task)
    out = command.folder("compare")
    results = []
    with _stoppable(out), _progress(names, settings.rounds) as on_round:
        for item in configs:
            folder = out / item.algorithm
            again = command.resume and folder.exists()
            shown = functools.partial(on_round, item.algorithm)
            results.append(simulate(item, task, speed, folder, again, shown).as_json())
    plot = out / "accuracy.png"
    plot_accuracy(results, plot)
    if command.json:
        print(json.dumps({"runs": results, "plot": str(plot)}))
    else:
        print_table(results)
        print(f"plot: {plot}")


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _for_algorithm(config: RunConfig, name: str) -> RunConfig:
    """The shared settings for one algorithm; privacy targets and masks are for those that can have them."""
    from fedrp.algorithms import ALGORITHMS

    if name in ALGORITHMS and not ALGORITHMS[name].private:
        config = dataclasses.replace(config, dp_epsilon=None, noise_multiplier=None)
    if name in ALGORITHMS and not ALGORITHMS[name].bounds_models:
        config = dataclasses.replace(config, ball=None, sensitivity=None, norm_floor=None)
    if name in ALGORITHMS and not ALGORITHMS[name].exchanges:
        config = dataclasses.replace(config, secure_aggregation=False)
    return dataclasses.replace(config, algorithm=name)


def _require_all_valid(configs: list[RunConfig], task: Any) -> None:
    """Find a mistake in the last algorithm before the first has run."""
    from fedrp.models import built, layout_of
    from fedrp.simulate import resolved

    parameters = layout_of(built(task.model)).size
    for config in configs:
        resolved(config, parameters)


def _new_folder(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path


@contextmanager
def _stoppable(out: Path) -> typing.Iterator[None]:
    """Ctrl-C ends what is inside with a hint how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise _StoppedError(f"stopped; what is done is kept, go on with --resume --out {out}") from None


@contextmanager
def _progress(names: list[str], rounds: int) -> typing.Iterator[Callable[[str, Any], None]]:
    """A progress bar per run on standard error; plain lines where that is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=rounds, now="", start=False) for name in names}

        def on_round(name: str, record: Any) -> None:
            accuracy = f"{record.evaluation.delivered.accuracy:.2f} %"
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=record.round, now=accuracy)
            if not console.is_terminal:
                seconds = f"{record.seconds:.1f} s"
                print(f"{name} round {record.round}/{rounds}: {accuracy}, {seconds}", file=sys.stderr, flush=True)

        yield on_round


# --- tables --------------------------------------------------------------------------------------------------------


@cli.command()
def algorithms() -> None:
    """List the algorithms."""
    from fedrp.algorithms import ALGORITHMS

    for name, algorithm in ALGORITHMS.items():
        print(f"{name:<16} {algorithm.summary}")


@cli.group()
def data() -> None:
    """Data sets: what there is, and how to get it."""


@data.command("list")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
def data_list(data_dir: Path | None) -> None:
    """List the data sets and whether they are here."""
    from fedrp.fetch import available

    for name, where, present in available(data_dir):
        print(f"{name:<14} {'present' if present else 'missing':<8} {where}")


@data.command("fetch")
@click.argument("name")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--base-url", help="fetch from a mirror instead of the official address")
def data_fetch(name: str, data_dir: Path | None, base_url: str | None) -> None:
    """Download a data set, check it, and put it into the data folder."""
    from fedrp.fetch import fetch_dataset

    for path in fetch_dataset(name, data_dir, base_url):
        print(path)


# --- who takes part ------------------------------------------------------------------------------------------------


@cli.group()
def keys() -> None:
    """A silo's own keys."""


@keys.command("new")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="name of the silo, as all others will know it")
def keys_new(path: Path, name: str) -> None:
    """Make a silo's private key file at PATH, and print the public entry for the roster."""
    from fedrp.roster import entry_of, new_identity

    print(entry_of(new_identity(path, name)).to_toml(), end="")
    print(f"private key: {path} (keep it; only the printed entry is for others)", file=sys.stderr)


@keys.command("show")
@click.argument("path", type=click.Path(path_type=Path))
def keys_show(path: Path) -> None:
    """Print the public entry of the key file at PATH."""
    from fedrp.roster import entry_of, load_identity

    print(entry_of(load_identity(path)).to_toml(), end="")


@cli.group()
def roster() -> None:
    """The list of all silos and their public keys."""


@roster.command("make")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("entries", nargs=-1, required=True, type=click.Path(path_type=Path))
def roster_make(out: Path, entries: tuple[Path, ...]) -> None:
    """Make the roster OUT of public ENTRIES, in this order."""
    from fedrp.roster import Roster, merged, write_roster

    made = merged(Roster.load(path) for path in entries)
    write_roster(out, made)
    _print_roster(made)


@roster.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def roster_show(file: Path) -> None:
    """Check a roster and print its silos and fingerprints; compare the last line with the other silos', by phone."""
    from fedrp.roster import Roster

    _print_roster(Roster.load(file))


def _print_roster(shown: Any) -> None:
    for number, member in enumerate(shown.members):
        print(f"{number:>4}  {member.name:<24} {member.fingerprint}")
    print(f"roster{' ' * 25}{shown.fingerprint}")


# --- deployment ----------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print one JSON object per run")
def status(folder: Path, as_json: bool) -> None:
    """How a deployed run is doing: FOLDER is the state folder of a site, or the store of a server."""
    from fedrp.status import statuses

    for place, run in enumerate(statuses(folder)):
        if as_json:
            print(json.dumps(run))
            continue
        lines = [f"{name:<14} {value}" for name, value in run.items()]
        print("\n".join(([""] if place else []) + lines))


# --- measuring -----------------------------------------------------------------------------------------------------


@cli.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("projection")
@click.option("--family", default="sign", show_default=True, help="gaussian, sign or hadamard")
@click.option("--params", default=1_000_000, show_default=True, help="length n of the vector")
@click.option("--dim", default=1_000, show_default=True, help="projection dimension m")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def bench_projection(family: str, params: int, dim: int, as_json: bool) -> None:
    """Time a projection against a plain copy of the vector in the same run."""
    from fedrp.bench import projection_benchmark

    measured = projection_benchmark(family, params, dim)
    if as_json:
        print(json.dumps(measured))
    else:
        for name, value in measured.items():
            print(f"{name:<24} {value:,.6g}" if isinstance(value, float) else f"{name:<24} {value}")


# --- privacy -------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("run_folder", required=False, type=click.Path(path_type=Path))
@click.option("--dim", type=int, help="projection dimension m")
@click.option("--alpha", type=float, help="sensitivity-to-norm ratio")
@click.option("--sensitivity", type=float, help="largest distance between the vectors of adjacent data sets")
@click.option("--norm-min", type=float, help="smallest norm of a vector")
@click.option("--delta", type=float, default=1e-5, show_default=True, help="delta of every statement")
@click.option("--rounds", type=int, default=1, show_default=True, help="rounds T to compose")
@click.option("--clients", type=int, help="clients K that share the matrix, for the joint and the aggregate view")
@click.option("--distance", type=float, help="distance of a client's vector to the span of the others'")
@click.option("--secure-aggregation", is_flag=True, help="also the view of a server that sees sums only")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def privacy(run_folder: Path | None, as_json: bool, dim: int | None, **view: Any) -> None:
    """What a projection is worth by each bound, or the ledger of the run in RUN_FOLDER."""
    if run_folder is not None:
        _print_ledger(run_folder, as_json)
        return
    from fedrp.privacy import projection_report

    if dim is None:
        raise ConfigError("give --dim, or the folder of a finished run")
    report = projection_report(dim, **view).as_json()
    if as_json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:<24} {json.dumps(value)}")


def _print_ledger(folder: Path, as_json: bool) -> None:
    try:
        ledger = json.loads((folder / "result.json").read_text())["privacy"]
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"{folder} is not the folder of a finished run: it has no readable result.json") from None
    if as_json:
        print(json.dumps(ledger))
        return
    for item in ledger:
        print(f"against {item['adversary']}; neighbours: {item['adjacency']}")
        if item["epsilon"] is None:
            print(f"    no guarantee: {item['reason']}")
        else:
            print(f"    epsilon {item['epsilon']:.4g} at delta {item['delta']:g} (bound: {item['bound']})")
            for assumption in item["assumptions"]:
                print(f"    assuming: {assumption}")


# --- audit ---------------------------------------------------------------------------------------------------------

_ADVERSARIES = ("server", "one-vector", "server-and-client", "clients", "model-holder")


def _some_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options for some fields of `RunConfig`, as `fedrp run` has them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(RunConfig)
        fields = {setting.name: setting for setting in dataclasses.fields(RunConfig)}
        for name in reversed(names):
            kind = next(k for k in (str, float, int) if k in (hints[name], *typing.get_args(hints[name])))
            option = "--" + name.replace("_", "-")
            command = click.option(option, name, type=kind, default=None, help=fields[name].metadata["help"])(command)
        return command

    return decorate


@cli.command()
@_some_settings("algorithm", "clients", "rounds", "dim", "projection", "seed", "clip", "noise_multiplier")
@_some_settings("dp_epsilon", "dp_delta", "dp_noise", "ball", "norm_floor")
@click.option("--secure-aggregation", is_flag=True, default=None, help="mask uploads: the server learns sums only")
@click.option("--trials", default=1000, show_default=True, help="runs in each of the two worlds")
@click.option("--confidence", default=0.95, show_default=True, help="of the lower bound")
@click.option("--adversary", type=click.Choice(_ADVERSARIES), help="whose claim is tested  [default: the strongest]")
@click.option("--broken", help="break it on purpose: no-noise, half-noise or reused-key")
@click.option("--parameters", default=40, show_default=True, help="size of the stand-in model")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def audit(
    trials: int,
    confidence: float,
    adversary: str | None,
    broken: str | None,
    parameters: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Try to refute what an algorithm claims: a lower bound on epsilon from many runs of the real mechanism."""
    from fedrp.config import require_choice
    from fedrp.game import Fault
    from fedrp.game import audit as play
    from fedrp.privacy import Adversary

    fault = broken or Fault.NONE.value
    require_choice("broken", fault, [known.value for known in Fault])
    settings = {"algorithm": "fedrp-subspace", "clients": 2, "rounds": 1, "dim": 8, "projection": "gaussian"}
    settings |= {name: value for name, value in given.items() if value is not None}
    config = from_settings(RunConfig, settings)
    whom = Adversary[adversary.upper().replace("-", "_")] if adversary else None
    with _counting("trials") as on_step:
        result = play(config, trials, confidence, Fault(fault), whom, parameters, lambda done: on_step(done, trials))
    told = result.as_json()
    if as_json:
        print(json.dumps(told))
    else:
        claimed = "none" if told["claimed_epsilon"] is None else f"{told['claimed_epsilon']:.4g}"
        print(f"claimed epsilon          {claimed} at delta {told['delta']:g}, against {told['adversary']}")
        print(f"neighbours               {told['adjacency']}")
        print(f"epsilon is at least      {told['lower_bound']:.4g} (confidence {confidence:g}, {trials} runs a world)")
        print(f"verdict                  {told['verdict']}")
    if result.violated:
        raise PrivacyError(
            f"the mechanism leaks more than claimed: epsilon is at least {told['lower_bound']:.4g}, "
            f"claimed {told['claimed_epsilon']:.4g}"
        )


@cli.command()
@_settings
@click.option("--neighbours", default=8, show_default=True, help="data sets that differ in one record")
@click.option("--change", default="replace", show_default=True, help="what happens to the record: replace or remove")
@click.option("--client", default=0, show_default=True, help="whose data set")
def sensitivity(config: Path | None, neighbours: int, change: str, client: int, **given: Any) -> None:
    """Estimate how far one record moves a client's model, by training again on neighbouring data sets."""
    from fedrp.neighbours import estimate_sensitivity
    from fedrp.task import named_task

    settings, speed, command = _read(config, given)
    task = named_task(settings, _path(command.data_dir))
    told = estimate_sensitivity(settings, task, neighbours, change, client, speed.workers).as_json()
    if command.json:
        print(json.dumps(told))
        return
    print(f"sensitivity              {told['sensitivity']:.4g}, ESTIMATED: {told['reason']}")
    if told["norm_floor"] is not None:
        print(f"norm floor               {told['norm_floor']:.4g}, alpha {told['alpha']:.4g}")
    for number, spread in enumerate(told["rounds"], 1):
        shown = f"{spread['smallest']:.4g} to {spread['largest']:.4g}, mean {spread['mean']:.4g}"
        print(f"round {number:<4} distances     {shown}, deviation {spread['deviation']:.2g}")
    print("an estimate is no bound: enforce one with --ball (fedrp) or --clip (private algorithms)")


# --- attacks -------------------------------------------------------------------------------------------------------


@cli.group()
def attack() -> None:
    """Attack what a run gives away: recorded bytes, or the final model. See docs/attacks.md."""


@attack.command("inversion")
@click.option("--algorithm", default="fedavg", show_default=True, help="fedavg, fedavg-dp, fedrp or fedrp-subspace")
@click.option("--adversary", default="server", show_default=True, help="server, server+client or client")
@click.option("--images", "targets", default=4, show_default=True, help="clients to attack")
@click.option("--clients", default=10, show_default=True, help="number of clients K")
@click.option("--pictures", default=1, show_default=True, help="pictures of each client, all in one step")
@click.option("--dim", default=1000, show_default=True, help="projection dimension m")
@click.option("--projection", help="gaussian, sign or hadamard  [default: by size]")
@click.option("--model", default="lenet-sigmoid", show_default=True, help="attacked model; see also 'fedrp run --help'")
@click.option("--dataset", default="mnist-mini", show_default=True, help="a data set of grey pictures")
@click.option("--dp-epsilon", type=float, help="client-level epsilon of the run, for fedavg-dp and fedrp-subspace")
@click.option("--rounds", default=10, show_default=True, help="rounds of the run, which decide the noise")
@click.option("--round", default=1, show_default=True, help="round that is attacked")
@click.option("--method", default="lbfgs", show_default=True, help="lbfgs or adam")
@click.option("--iterations", default=200, show_default=True, help="steps of the search")
@click.option("--restarts", default=1, show_default=True, help="searches from different starts; the best one counts")
@click.option("--smoothness", default=1e-3, show_default=True, help="weight of total variation")
@click.option("--known-step", is_flag=True, help="match lengths too, trusting the stated learning rate")
@click.option("--seed", default=0, show_default=True, help="pictures, run and guesses")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--out", type=click.Path(path_type=Path), help="folder for pictures.png and result.json")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_inversion(data_dir: Path | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Reconstruct clients' pictures from what one adversary sees of a run."""
    from fedrp.attacks.experiment import Scenario, attack_pictures
    from fedrp.attacks.gallery import write
    from fedrp.attacks.inversion import Effort

    effort = Effort(**{name: given.pop(name) for name in Effort._fields})
    scenario = Scenario(**given)
    with _counting(f"{scenario.algorithm}, {scenario.adversary}") as on_step:
        outcome = attack_pictures(scenario, effort, data_dir, on_step)
    if out:
        write(outcome, out)
    _print_object(outcome.as_json(), as_json)


@attack.command("membership")
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option("--references", default=2, show_default=True, help="reference models to train; 0 for the plain loss only")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_membership_of(run_folder: Path, references: int, data_dir: Path | None, as_json: bool) -> None:
    """Tell members of the training set from others by the final model in RUN_FOLDER."""
    from fedrp.attacks.membership import attack_membership

    _print_object(attack_membership(run_folder, references, data_dir), as_json)


@attack.command("key-search")
@click.option("--bits", default=16, show_default=True, help="size of the seed to find")
@click.option("--seed", default=0, show_default=True, help="what the secret seed is drawn from")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_key_search(bits: int, seed: int, as_json: bool) -> None:
    """Find the seed of a matrix made as in common practice; then try as long for a real key."""
    from fedrp.attacks.experiment import attack_keys

    with _counting("seeds") as on_step:
        found = attack_keys(bits, seed, lambda tried: on_step(tried, 2**bits))
    _print_object(found, as_json)


@contextmanager
def _counting(name: str) -> typing.Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, or a line for every tenth of the way; fed with what is done, of how much."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)

        def on_step(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if not console.is_terminal and (done == total or done % max(1, total // 10) == 0):
                print(f"{name} {done}/{total}", file=sys.stderr, flush=True)

        yield on_step


def _print_object(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name:<28} {f'{value:.4g}' if isinstance(value, float) else value}")
