"""Other simulators on the same task, each in an environment of its own, next to ours and to a plain loop.

    python benchmarks/peers/run.py --repeats 5             # FedAvg, 100 clients x 600 images, LeNet-5, batch 64, E = 1
    python benchmarks/peers/run.py --repeats 1 --clients 8 --only fedrp-2,flower --results /tmp/try    # a try
    python benchmarks/peers/run.py --render                # the table of docs/performance.md from what is kept

Environments are made at the first use, below --environments. In each repeat every entrant runs once, in a process of
its own: a round of warm-up, which is not counted, and then --rounds rounds. A ratio is over the plain loop in one
process of the same repeat. What cannot run is named, with the reason, and left out.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
import kept
from origin import origin_of
from page import came_from, placed, spread, table

HERE = Path(__file__).resolve().parent
TABLE = "peers"
RESULT = "RESULT "  # as peer_task says it
WARM_UP = 1
REFERENCE = "plain-1"
OURS = "fedrp"  # the environment that this script runs in
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Entrant(NamedTuple):
    """One row of the table."""

    name: str
    environment: str
    script: str
    cores: int
    launcher: tuple[str, ...] = ()


def entrants(cores: int) -> dict[str, Entrant]:
    return {
        REFERENCE: Entrant("plain loop, 1 process", OURS, "plain_rounds.py", 1),
        f"plain-{cores}": Entrant(f"plain loop, {cores} processes", OURS, "plain_rounds.py", cores),
        "fedrp-1": Entrant("fedrp, 1 worker", OURS, "fedrp_rounds.py", 1),
        f"fedrp-{cores}": Entrant(f"fedrp, {cores} workers", OURS, "fedrp_rounds.py", cores),
        "flower": Entrant(f"Flower with Ray, {cores} actors", "flower", "flower_rounds.py", cores),
        "pfl-1": Entrant("pfl, 1 process", "pfl", "pfl_rounds.py", 1),
        f"pfl-{cores}": Entrant(
            f"pfl, torchrun, {cores} processes", "pfl", "pfl_rounds.py", cores, (*TORCHRUN, str(cores))
        ),
        "fluke-1": Entrant("fluke, 1 thread", "fluke", "fluke_rounds.py", 1),
        f"fluke-{cores}": Entrant(f"fluke, {cores} threads", "fluke", "fluke_rounds.py", cores),
    }


def python_of(environment: str, folder: Path) -> Path:
    """The interpreter of an environment, made with the versions of its requirements file if it is not there yet."""
    if environment == OURS:
        return Path(sys.executable)
    where, requirements = folder / environment, HERE / f"{environment}.txt"
    python, done = where / "bin" / "python", where / ".ready"
    if not done.exists() or done.read_text() != requirements.read_text():
        print(f"making {where}", file=sys.stderr, flush=True)
        options = ["install", "--quiet", "--constraint", str(HERE / "constraints.txt"), "--requirement"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(where)],
            [str(python), "-m", "pip", *options, str(requirements)],
        ):
            subprocess.run(command, check=True)  # noqa: S603 - of this file alone
        done.write_text(requirements.read_text())
    return python


def surroundings(environment: str, folder: Path) -> dict[str, str]:
    """Environment variables: nobody phones home, installs things or listens outside; the peers do not see our code."""
    variables = {name: value for name, value in os.environ.items() if environment == OURS or name != "PYTHONPATH"}
    flower = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(folder / "flower-home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    # torchrun sets it for several processes; alone, pfl's one thread is set in its script.
    return variables | (flower if environment == "flower" else {}) | {"OMP_NUM_THREADS": "1"}


class Measured(NamedTuple):
    """What one process told."""

    seconds_to_first_round: float
    rounds: list[float]  # after the warm-up


def run_once(entrant: Entrant, size: Mapping[str, int], folder: Path, timeout: float) -> Measured:
    """Run an entrant in a process of its own, which is ended with all that it started if it takes too long."""
    python = python_of(entrant.environment, folder)
    options = [word for name, value in {**size, "cores": entrant.cores}.items() for word in (f"--{name}", str(value))]
    command = [str(python), *entrant.launcher, str(HERE / entrant.script), *options]
    variables = surroundings(entrant.environment, folder)
    if entrant.script == "fluke_rounds.py":
        variables["OMP_NUM_THREADS"] = str(entrant.cores)
    began = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - of this file alone
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=folder,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"no result within {timeout:.0f} s") from None
    told = [line for line in out.splitlines() if line.startswith(RESULT)]
    if process.returncode or len(told) != 1:
        last = [line for line in err.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise RuntimeError(f"exit code {process.returncode}: {last[0]}")
    result = json.loads(told[0].removeprefix(RESULT))
    return Measured(result["first_round"] - began, result["rounds"][WARM_UP:])


def measure(chosen: Mapping[str, Entrant], arguments: argparse.Namespace) -> dict[str, Any]:
    """All entrants in turn, `--repeats` times; the kept result of each."""
    size = {
        "clients": arguments.clients,
        "examples": arguments.examples,
        "rounds": WARM_UP + arguments.rounds,
        "batch": arguments.batch,
    }
    origin = origin_of(" ".join(["python benchmarks/peers/run.py", *sys.argv[1:]]))
    load = os.getloadavg()[0]
    speeds: dict[str, list[float]] = {key: [] for key in chosen}
    starts: dict[str, list[float]] = {key: [] for key in chosen}
    failed: dict[str, str] = {}
    for repeat in range(arguments.repeats):
        for key, entrant in chosen.items():
            if key in failed:
                continue
            try:
                seen = run_once(entrant, size, arguments.environments, arguments.timeout)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                failed[key] = str(error)
                print(f"{entrant.name}: {error}", file=sys.stderr, flush=True)
                continue
            images = arguments.clients * arguments.examples
            speeds[key].append(images / statistics.median(seen.rounds))
            starts[key].append(seen.seconds_to_first_round)
            print(
                f"repeat {repeat + 1}: {entrant.name}: {speeds[key][-1]:,.0f} images/s, first round after "
                f"{starts[key][-1]:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    results = {}
    for key, entrant in chosen.items():
        result: dict[str, Any] = {"entrant": entrant.name, "cores": entrant.cores, **size, "repeats": arguments.repeats}
        if key in failed:
            result["failed"] = failed[key]
        else:
            ratios = [own / plain for own, plain in zip(speeds[key], speeds[REFERENCE], strict=True)]
            for name, values in (
                ("ratio", ratios),
                ("images_per_second", speeds[key]),
                ("seconds_to_first_round", starts[key]),
            ):
                result |= {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}
        results[f"peers --entrant {key} " + " ".join(f"--{n} {v}" for n, v in size.items())] = {
            "origin": {**origin, "load_average_before": load},
            **result,
        }
    return results


def rendered(results: Mapping[str, Any]) -> str:
    """The table."""
    lines = []
    for result in results.values():
        if "failed" in result:
            lines.append((result["entrant"], f"did not run: {result['failed']}", "-", "-"))
            continue
        lines.append(
            (
                result["entrant"],
                spread(result["ratio"], result["ratio_range"]),
                spread(result["images_per_second"], result["images_per_second_range"], 0),
                spread(result["seconds_to_first_round"], result["seconds_to_first_round_range"], 1),
            )
        )
    header = ["", "times the plain loop", "images/s", "seconds to the first round"]
    return table(header, lines) + "\n\n" + came_from(result["origin"] for result in results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    everyone = entrants(cores)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="counted rounds of each process")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--examples", type=int, default=600, help="of each client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", default=",".join(everyone), help=f"of {', '.join(everyone)}")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "fedrp-peers")
    parser.add_argument("--results", type=Path, default=kept.FOLDER, help="folder that the results are kept in")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table into the page")
    arguments = parser.parse_args()
    if arguments.render:
        placed(TABLE, rendered(kept.read(TABLE, arguments.results)))
        return
    asked = [REFERENCE, *arguments.only.split(",")]
    unknown = [name for name in asked if name not in everyone]
    if unknown or min(arguments.repeats, arguments.rounds, arguments.clients, arguments.examples, arguments.batch) < 1:
        parser.error(f"unknown entrants: {', '.join(unknown)}" if unknown else "numbers must be at least 1")
    arguments.environments.mkdir(parents=True, exist_ok=True)
    results = measure({name: everyone[name] for name in everyone if name in asked}, arguments)
    kept.keep(TABLE, results, arguments.results)
    for result in results.values():
        print(json.dumps(result))
    print(rendered(results))


if __name__ == "__main__":
    main()
