"""Commands that check privacy: bounds and ledgers, audits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedrp.cli.common import (
    CONFIG_ARGUMENT,
    DATA_DIR_OPTION,
    JSON_OPTION,
    Settings,
    cli,
    counting,
    leaks_more,
    path_or_none,
    read_settings,
    some_settings,
    tell_audit,
)
from fedrp.config.run import RunConfig
from fedrp.config.speed import most_workers
from fedrp.config.toml import from_settings
from fedrp.errors import ConfigError

if TYPE_CHECKING:
    from fedrp.privacy import ProjectionReport

_DELTA = 1e-5
_PLANNED = ("records", "batch_size", "local_epochs", "dp_epsilon", "noise_multiplier", "results")

# --- privacy -------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--agreed", type=click.Path(path_type=Path), help="a site's caps  [default: those of its last run]")
@click.option("--dim", type=int, help="projection dimension m")
@click.option("--alpha", type=float, help="sensitivity-to-norm ratio")
@click.option("--sensitivity", type=float, help="largest distance between the vectors of adjacent data sets")
@click.option("--norm-min", type=float, help="smallest norm of a vector")
@click.option("--delta", type=float, help="delta of every statement  [default: 1e-05; of a site, its total_delta]")
@click.option("--rounds", type=int, default=1, show_default=True, help="rounds T to compose")
@click.option("--clients", type=int, help="clients K that share the matrix, for the joint and the aggregate view")
@click.option("--distance", type=float, help="distance of a client's vector to the span of the others'")
@click.option("--secure-aggregation", is_flag=True, help="also the view of a server that sees sums only")
@click.option("--records", help="plan noise for records: how many each site has, as 6000 or 6000,800")
@click.option("--batch-size", type=int, help="with --records: of a local step  [default: as in a run, 256]")
@click.option("--local-epochs", type=int, default=1, show_default=True, help="with --records: of a round")
@click.option("--dp-epsilon", type=float, help="with --records: target, from which the noise follows")
@click.option("--noise-multiplier", type=float, help="with --records: noise, from which epsilon follows")
@click.option("--results", type=click.Path(path_type=Path), help="with --records: folder of runs, to see what they got")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def privacy(
    folder: Path | None, agreed: Path | None, as_json: bool, dim: int | None, delta: float | None, **view: Any
) -> None:
    """What a projection is worth by each bound, or what was released according to FOLDER.

    FOLDER is that of a finished run, or the state folder of a site: what all its runs spent, and what is left.
    With --records: the noise that protects each record of a site, before a run.
    """
    planned = {name: view.pop(name) for name in _PLANNED}
    if folder is not None:
        if (folder / "result.json").exists() or not _is_site(folder):
            _print_ledger(folder, as_json)
        else:
            _print_budgets(folder, agreed, delta, as_json)
        return
    if planned["records"] is not None:
        from fedrp.cli.records import print_plan

        print_plan(**planned, delta=_DELTA if delta is None else delta, rounds=view["rounds"], as_json=as_json)
        return
    from fedrp.privacy import projection_report

    if dim is None:
        raise ConfigError("give --dim, --records, or the folder of a finished run or of a site")
    report = projection_report(dim, delta=_DELTA if delta is None else delta, **view)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print_report(report)


def _print_report(report: "ProjectionReport") -> None:
    """Every bound for one vector, then what holds against whom."""
    from rich.console import Console

    from fedrp.reporting.bounds import bound_table

    Console().print(bound_table(report))
    _print_statements(report.statements)


def _print_statements(items: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console

    from fedrp.reporting.statements import statement_lines, statement_table

    Console().print(statement_table(items))
    print("\n".join(statement_lines(items)))


def _is_site(folder: Path) -> bool:
    from fedrp.storage.ledger import FILE

    return (folder / FILE).exists() or any(folder.glob("*/run.json"))


def _print_budgets(folder: Path, agreed: Path | None, delta: float | None, as_json: bool) -> None:
    from fedrp.storage.budget import budgets

    found = budgets(folder, agreed, delta)
    if as_json:
        print(json.dumps([budget.as_json() for budget in found]))
        return
    for budget in found:
        print("\n".join(budget.lines()))
        for entry in budget.entries:
            print(f"    run {entry.run}, begun {entry.begun}: {entry.algorithm}, {entry.rounds} rounds")


def _print_ledger(folder: Path, as_json: bool) -> None:
    try:
        result = json.loads((folder / "result.json").read_text())
        ledger, warnings = result["privacy"], result.get("warnings", [])  # earlier versions had none
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            f"{folder} is not the folder of a finished run or of a site: it has no readable result.json or ledger.json"
        ) from None
    if as_json:
        print(json.dumps(ledger))
        return
    _print_statements(ledger)
    for text in warnings:
        print(f"warning: {text}")


# --- audit ---------------------------------------------------------------------------------------------------------

_AUDITED = {"algorithm": "fedrp-subspace", "clients": 2, "rounds": 1, "dim": 8}
_STAND_IN = 40  # parameters
_ADVERSARIES = ("server", "one-vector", "server-and-client", "clients", "model-holder")


@cli.command()
@click.argument("run_folder", required=False, type=click.Path(path_type=Path))
@some_settings(
    *("algorithm", "clients", "rounds", "dim", "projection", "seed", "clip", "noise_multiplier", "dp_epsilon"),
    *("dp_delta", "dp_noise", "ball", "norm_floor", "secure_aggregation", "dp_unit", "batch_size", "local_epochs"),
    usual=_AUDITED,
)
@click.option("--records", type=int, help="with --dp-unit record: how many a site has  [default: 8]")
@click.option(
    "--canary",
    type=click.Choice(["gradient", "example"]),
    help="with --dp-unit record: a gradient of any choice (default), or an image that does not belong to the others",
)
@click.option("--canaries", type=int, help="with --dp-unit record: of the game in one run  [default: all records]")
@click.option("--trials", default=1000, show_default=True, help="runs in each of the two worlds")
@click.option("--confidence", default=0.95, show_default=True, help="of the lower bound")
@click.option("--adversary", type=click.Choice(_ADVERSARIES), help="whose claim is tested  [default: the strongest]")
@click.option("--broken", help="break it on purpose: no-noise, half-noise or reused-key; records: see the manual")
@click.option("--parameters", type=int, help=f"size of the stand-in model  [default: {_STAND_IN}, or --dim if larger]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def audit(
    run_folder: Path | None,
    trials: int,
    confidence: float,
    adversary: str | None,
    broken: str | None,
    parameters: int | None,
    as_json: bool,
    records: int | None,
    canary: str | None,
    canaries: int | None,
    **given: Any,
) -> None:
    """Try to refute what an algorithm claims: a lower bound on epsilon from many runs of the real mechanism.

    RUN_FOLDER is that of a run whose settings are audited, from `fedrp run`; options win. With noise, what is claimed
    depends on the noise and the rounds alone: --clients 4 --dim 8 is much faster than a large run's own numbers.
    With --dp-unit record: the local steps of a site with so many --records, each of which may be a canary.
    With --dp-noise shared as well: masked sums of all sites, as without --dp-unit, and the canary is one record.
    """
    if given.get("dp_unit") == "record" and given.get("dp_noise") != "shared":
        from fedrp.cli.records import print_audit

        print_audit(given, records, trials, canary, canaries, confidence, broken, as_json)
        return
    for name, value in (("records", records), ("canary", canary), ("canaries", canaries)):
        if value is not None:
            raise ConfigError(f"--{name} is for a site's own noise: add --dp-unit record, without --dp-noise shared")
    from fedrp.auditing.canary import Fault
    from fedrp.auditing.canary import audit as play
    from fedrp.config.checks import require_choice
    from fedrp.privacy import Adversary

    fault = broken or Fault.NONE.value
    require_choice("broken", fault, [known.value for known in Fault])
    config = _audited(run_folder, {name: value for name, value in given.items() if value is not None})
    size = max(_STAND_IN, config.dim or 0) if parameters is None else parameters
    whom = Adversary[adversary.upper().replace("-", "_")] if adversary else None
    with counting("trials") as on_step:
        result = play(config, trials, confidence, Fault(fault), whom, size, lambda done: on_step(done, trials))
    told = result.as_json()
    mechanism = f"{_mechanism(config)}{f' (settings of {run_folder})' if run_folder else ''}"
    value = "none" if told["claimed_epsilon"] is None else f"{told['claimed_epsilon']:.4g}"
    claimed = f"{value} at delta {told['delta']:g}, against {told['adversary']}"
    tell_audit(told, mechanism, claimed, f"confidence {confidence:g}, {trials} runs a world", as_json)
    if result.violated:
        raise leaks_more(told["lower_bound"], told["claimed_epsilon"])


def _audited(folder: Path | None, given: Settings) -> RunConfig:
    """The settings to audit: those of a run or the command's own, but for what is given."""
    if folder is None:
        return from_settings(RunConfig, _AUDITED | given)
    from fedrp.storage.begun import begun_config, settings_of

    kept = settings_of(begun_config(folder))
    kept["rho"] = None  # local training is replaced, and its step with it
    if "dp_epsilon" in given:  # what is kept is the noise that followed from another one
        kept["noise_multiplier"] = None
    if kept["ball"] is not None:  # a stand-in model starts elsewhere, and its floor follows from that
        kept["norm_floor"] = None
    return from_settings(RunConfig, kept | given)


def _mechanism(config: RunConfig) -> str:
    shown = f"{config.algorithm}, {config.clients} clients, {config.rounds} rounds"
    noise = "" if config.noise_multiplier is None else f", noise multiplier {config.noise_multiplier:.4g}"
    return f"{shown}{noise}, {'masked' if config.secure_aggregation else 'unmasked'}"


@cli.command()
@CONFIG_ARGUMENT
@DATA_DIR_OPTION
@JSON_OPTION
@some_settings(
    *("algorithm", "dataset", "model", "clients", "rounds", "local_epochs", "batch_size", "lr", "momentum"),
    *("lr_schedule", "augment", "grad_clip", "train_examples", "partition", "seed", "workers"),
)
@click.option("--neighbours", default=8, show_default=True, help="data sets that differ in one record")
@click.option("--change", default="replace", show_default=True, help="what happens to the record: replace or remove")
@click.option("--client", default=0, show_default=True, help="whose data set")
def sensitivity(config: Path | None, neighbours: int, change: str, client: int, **given: Any) -> None:
    """Estimate how far one record moves a client's model, by training again on neighbouring data sets.

    It is trained by plain SGD, the client alone, from the public start; the algorithm decides the default --lr only.
    CONFIG is a TOML file as for 'fedrp run', of which the same settings as below are used.
    """
    from fedrp.auditing.sensitivity import estimate_sensitivity
    from fedrp.learning.task import named_task

    settings, speed, command = read_settings(config, given)
    task = named_task(settings, path_or_none(command.data_dir))
    told = estimate_sensitivity(settings, task, neighbours, change, client, most_workers(speed)).as_json()
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
