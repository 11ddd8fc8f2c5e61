"""Every number of docs/results.md: run it, keep it, render it.

    python benchmarks/results.py list                    the experiments and which of their runs are kept
    python benchmarks/results.py run [NAME ...]          run what is missing (without a name: of every experiment)
    python benchmarks/results.py again NAME [NAME ...]   run all of an experiment anew, over what was kept
    python benchmarks/results.py show NAME [NAME ...]    print tables, also those that the page leaves out
    python benchmarks/results.py render                  fill the tables of docs/results.md and draw the figures

What is run is in experiments.py. A kept run is a line of benchmarks/results/TABLE.jsonl (kept.py) with the command,
seed, commit and date that made it. The data folder is FEDRP_DATA.
"""

import argparse
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kept
from experiments import EXPERIMENTS
from figures import FIGURE_MAKERS
from kept_runs import Run, runs_of
from origin import origin_of
from robust import about_of, lines_of
from tables import COMPRESSION, TABLES

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "results"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
PART = " # "  # between a command and which of its runs a line is about
# Measurements with a script of their own: the commands, each of which writes a file.
OWN_SCRIPTS = {
    "compression": [f"{COMPRESSION} --seed {seed}" for seed in (0, 1, 2)],
    "robust": ["python benchmarks/robust.py"],
    "rounds": ["python benchmarks/rounds.py --repeats 6"],
}


def perform(run: Run) -> None:
    """Run it, or go on with it where it was stopped, and keep the result."""
    origin = origin_of(f"fedrp run {run.command}")
    out = WORK / kept.options_hash(run.options)
    command = [str(Path(sys.executable).with_name("fedrp")), "run", *run.command.split(), "--json", "--out", str(out)]
    command += ["--workers", "2"]  # changes no result
    if (out / "config.json").exists():  # else it was killed before it began
        command.append("--resume")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 - our own command
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    result = json.loads(done.stdout)
    shown = ("round", "accuracy", "accuracy_average", "seconds")
    scored = [record for record in result["history"] if "accuracy" in record]  # with --eval-every not every round is
    result["history"] = [{key: record[key] for key in shown} for record in scored]
    kept.keep(run.experiment, {run.options: {"origin": origin, **result}})
    shutil.rmtree(out)  # so that it starts from nothing when it is asked for again


def render() -> None:
    page = PAGE.read_text()
    for name, draw in FIGURE_MAKERS.items():
        if name in page:
            draw(FIGURES / name)
    for name, make in TABLES.items():
        start, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        if start in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}\n\n{make()}\n\n{end}{rest.split(end, 1)[1]}"
    PAGE.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "run", "again", "show", "render"))
    parser.add_argument("names", nargs="*", help="experiments; none for every one")
    arguments = parser.parse_args()
    known = list(TABLES) if arguments.action == "show" else [*EXPERIMENTS, *OWN_SCRIPTS]
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise SystemExit(f"unknown experiment {unknown[0]}; known: {', '.join(known)}")
    if arguments.action == "again" and not arguments.names:
        raise SystemExit("again: name the experiments whose kept runs may be replaced")
    if arguments.action == "show":
        print("\n\n".join(TABLES[name]() for name in arguments.names or known))
        return
    if arguments.action == "render":
        render()
        return
    for name in arguments.names or known:
        for label, done, make in _measurements(name):
            print(f"{name}: {label}: {'kept' if done else 'missing'}", flush=True)
            if arguments.action == "again" or (arguments.action == "run" and not done):
                make()


def _measurements(name: str) -> list[tuple[str, bool, Callable[[], None]]]:
    """What an experiment consists of: how it is called, whether it is kept, and what makes it."""
    if name in OWN_SCRIPTS:
        made_by = {options.split(PART)[0] for options in kept.read(name)}
        scripts = [(command, functools.partial(_run_script, name, command)) for command in OWN_SCRIPTS[name]]
        return [(command, command in made_by, make) for command, make in scripts]
    return [
        (f"{run.name} seed {run.seed}", kept.is_kept(run.options), functools.partial(perform, run))
        for run in runs_of(name)
    ]


def _run_script(table: str, command: str) -> None:
    """Run a script and keep what it wrote."""
    out = WORK / f"{kept.options_hash(command)}.jsonl"
    script = [sys.executable, *command.split()[1:], "--out", str(out.relative_to(ROOT))]
    if subprocess.run(script, cwd=ROOT, check=False).returncode:  # noqa: S603 - our own script
        raise SystemExit(f"failed: {command}")
    lines = lines_of(out)
    parts = {command: lines[0]} if len(lines) == 1 else {f"{command}{PART}{about_of(line)}": line for line in lines}
    kept.keep(table, parts)
    out.unlink()


if __name__ == "__main__":
    main()
