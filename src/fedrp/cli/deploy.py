"""Commands for the people who run a site: keys, rosters, how a deployment is doing."""

import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import click

from fedrp.cli.common import cli

# --- who takes part ------------------------------------------------------------------------------------------------


@cli.group()
def keys() -> None:
    """A client's own keys."""


@keys.command("new")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="name of the client, as all others will know it")
def keys_new(path: Path, name: str) -> None:
    """Make a client's private key file at PATH, and print the public entry for the roster."""
    from fedrp.crypto.roster import entry_of, new_identity

    print(entry_of(new_identity(path, name)).to_toml(), end="")
    print(f"private key: {path} (keep it; only the printed entry is for others)", file=sys.stderr)


@keys.command("show")
@click.argument("path", type=click.Path(path_type=Path))
def keys_show(path: Path) -> None:
    """Print the public entry of the key file at PATH."""
    from fedrp.crypto.roster import entry_of, load_identity

    print(entry_of(load_identity(path)).to_toml(), end="")


@cli.group()
def roster() -> None:
    """The list of all clients and their public keys."""


@roster.command("make")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("entries", nargs=-1, required=True, type=click.Path(path_type=Path))
def roster_make(out: Path, entries: tuple[Path, ...]) -> None:
    """Make the roster OUT of public ENTRIES, in this order."""
    from fedrp.crypto.roster import Roster, merged, write_roster

    made = merged(Roster.load(path) for path in entries)
    write_roster(out, made)
    _print_roster(made)


@roster.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def roster_show(file: Path) -> None:
    """Check a roster and print its clients and fingerprints; compare the last line with the others', by phone."""
    from fedrp.crypto.roster import Roster

    _print_roster(Roster.load(file))


def _print_roster(shown: Any) -> None:
    for number, entry in enumerate(shown.entries):
        print(f"{number:>4}  {entry.name:<24} {entry.fingerprint}")
    print(f"roster{' ' * 25}{shown.fingerprint}")


# --- deployment ----------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("settings", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="look at everything but the network, and end")
def site(settings: Path, check: bool) -> None:
    """Take part as a site: run its SuperNode and answer with its own client app, as the TOML file SETTINGS says."""
    from fedrp.extras import require_flower

    require_flower()
    from fedrp.flower.site import check_site, read_site, run_site

    config = read_site(settings)
    if check:
        print(check_site(config)[1])
    else:
        run_site(config, lambda text: print(text, file=sys.stderr, flush=True))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--agreed", type=click.Path(path_type=Path), help="the site's caps  [default: those of its last run]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object per run, data set of a site, and failures")
@click.option("--live", is_flag=True, help="show it in a browser as it goes on, until Ctrl-C")
def status(folder: Path, agreed: Path | None, as_json: bool, live: bool) -> None:
    """How a deployed run is doing: FOLDER is the state folder of a site, or the store of a server.

    At a site also its last failures, what all runs have spent of its privacy budget, and what is left.
    """
    from fedrp.storage.budget import budgets
    from fedrp.storage.ledger import FILE
    from fedrp.storage.status import failures, statuses

    if live:
        _watch(folder)
        return
    for place, run in enumerate(statuses(folder)):
        if as_json:
            print(json.dumps(run))
            continue
        lines = [
            f"{name:<14} {line}" for name, value in run.items() for line in (value if name == "privacy" else [value])
        ]
        print("\n".join(([""] if place else []) + lines))
    for budget in budgets(folder, agreed) if (folder / FILE).exists() else ():
        print(json.dumps(budget.as_json()) if as_json else "\n".join(["", *budget.lines()]))
    if failed := failures(folder):
        print(json.dumps({"failures": failed}) if as_json else "\n".join(["", *map(_failure, failed)]))


def _watch(folder: Path) -> None:
    """Serve a page about the runs in a folder until Ctrl-C."""
    from fedrp.reporting.live import runs_below, served
    from fedrp.reporting.runs import read_runs

    read_runs([folder])  # what is wrong with it is said now
    with served(runs_below(folder), "no longer watched") as address:
        print(f"live: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _failure(entry: dict[str, Any]) -> str:
    where = entry.get("where") or ["?"]
    return f"failure        {entry.get('time')} {entry.get('error')}: {entry.get('reason')} ({where[-1]})"


@cli.group()
def ledger() -> None:
    """What the runs at a site have spent of its privacy budget; 'fedrp privacy STATE' shows it."""


@ledger.command("rebuild")
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--data", help="data set of runs from before sites named theirs  [default: default]")
def ledger_rebuild(state: Path, data: str | None) -> None:
    """Enter all runs that have a folder below STATE into the site's ledger.

    Runs whose folders were removed cannot be counted: what they spent must be added to what the ledger says.
    """
    from fedrp.storage.ledger import FILE, rebuild
    from fedrp.storage.site import DEFAULT_DATA

    print(f"{rebuild(state, data or DEFAULT_DATA)} runs entered into {state / FILE}")
