"""The measured part of docs/privacy.md: run it, keep it, render it.

    python benchmarks/privacy_measured.py run joint-view     the clients' vectors along a training run (10 minutes)
    python benchmarks/privacy_measured.py run audit          lower bounds on epsilon, mechanism by mechanism (minutes)
    python benchmarks/privacy_measured.py render             write the tables of docs/privacy.md, print the others

What was measured is kept in benchmarks/results/privacy.jsonl with the command, seed and commit that made it.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kept
import numpy as np
import numpy.typing as npt
from origin import origin_of
from page import placed

from fedrp.algorithms.resolve import resolved
from fedrp.backends.processes import ProcessBackend
from fedrp.config import RunConfig, Speed
from fedrp.learning.layout import built, layout_of
from fedrp.learning.task import examples, named_task, split_among_clients
from fedrp.privacy import distances_to_span, exact_epsilon, joint_epsilon
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.rounds import begin, rounds
from fedrp.protocol.server_state import new_server
from fedrp.protocol.wire import Kind
from fedrp.rng import RunSeed
from fedrp.simulation.carrier import NoStore, SimulatedCarrier
from fedrp.simulation.clients import Clients
from fedrp.simulation.identities import simulated_roster
from fedrp.simulation.population import ShardSetup, grouped, set_threads
from fedrp.types import Packets

ROOT = Path(__file__).resolve().parents[1]
TABLE = "privacy"
COMMAND = "python benchmarks/privacy_measured.py run"
PAGE = ROOT / "docs" / "privacy.md"
DELTA = 1e-5
SENSITIVITY = 0.01  # given, not measured: what a record would have to be bounded to
SHOWN_ROUNDS = (1, 2, 3, 5, 7, 10, 15, 20)

Matrix = npt.NDArray[np.float64]


# --- the joint view along a training run ---------------------------------------------------------------------------


class Seen(NamedTuple):
    """One round: what the server got, and the models behind it, which only a simulation can look at."""

    round: int
    uploads: Matrix  # (clients, m)
    models: Matrix  # (clients, n)


def watched(config: RunConfig, images: int) -> Iterator[Seen]:
    """A run in this process, round by round."""
    task = named_task(config)
    whole = examples(task.train, "the training set")  # type: ignore[arg-type]  # one table of images, not yet split
    task = type(task)(task.model, (whole.x[:images], whole.y[:images]), task.test, dataset=task.dataset)
    parameters = layout_of(built(task.model)).size
    config = resolved(config, parameters)
    data = dict(enumerate(split_among_clients(task, config)))
    run, groups = b"privacy measured", grouped(config.clients, parameters)
    roster = simulated_roster(RunSeed(config.seed), config.clients)
    test = examples(task.test, "the test set")
    set_threads(Speed())
    setup = ShardSetup(config, Speed(), run, task.model, task.loss, task.metrics, groups, data, test)
    replies: Packets = {}  # of the last exchange: where all clients fit into a wave and none is away, of a round

    def tap(_sent: Packets, came: Packets) -> None:
        replies.clear()
        replies.update(came)

    clients = Clients(setup, roster, ProcessBackend(), tap)
    server = new_server(config, run, parameters)
    carrier = SimulatedCarrier.of(server, clients)
    server = begin(server, carrier, NoStore(), config.clients)
    for closed in rounds(server, carrier, NoStore(), lambda _server: np.zeros(config.clients)):
        sent = [wire.messages_of(wire.decode(r), Kind.UPLOAD)[0].payload for r in replies.values()]
        models = clients.final_models(dict(server_side.finish(closed.server, tuple(replies))))
        seen = (np.stack(vectors).astype(np.float64) for vectors in (sent, list(models.values())))
        yield Seen(closed.server.round, *seen)


def joint_view(images: int = 6000, rounds: int = 20) -> dict[str, Any]:
    lines = []
    for algorithm in ("fedrp", "fedrp-subspace"):
        own = "client" if algorithm == "fedrp" else None  # rounds alone are measured
        config = RunConfig(algorithm=algorithm, deliver=own, clients=10, rounds=rounds, dim=1000, projection="gaussian")
        for seen in watched(config, images):
            lines.append({"algorithm": algorithm, "round": seen.round, **_views(algorithm, seen, 1000)})
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return {
        "settings": {"dataset": "mnist-mini", "images": images, "clients": 10, "dim": 1000, "seed": 0},
        "sensitivity": SENSITIVITY,
        "delta": DELTA,
        "rounds": lines,
    }


def _views(algorithm: str, seen: Seen, rows: int) -> dict[str, float | None]:
    """Norms and distances of what was projected; epsilons of one round by each view, for the least protected client."""
    vectors = seen.models if algorithm == "fedrp" else seen.uploads
    norms, distances = np.linalg.norm(vectors, axis=1), distances_to_span(vectors)
    lengths: dict[str, float | None] = {
        "norm_min": float(norms.min()),
        "distance_min": float(distances.min()),
        "distance_median": float(np.median(distances)),
        "sum_norm": float(np.linalg.norm(vectors.sum(axis=0))),
    }
    if algorithm != "fedrp":  # theta depends on the matrix: the theorems are not about it
        return lengths
    for name, floor, epsilon in (
        ("single", lengths["norm_min"], exact_epsilon),
        ("joint", lengths["distance_min"], joint_epsilon),
        ("sum", lengths["sum_norm"], exact_epsilon),
    ):
        left = (floor or 0.0) - SENSITIVITY  # a neighbour's may be shorter by that
        lengths[f"epsilon_{name}"] = epsilon(rows, SENSITIVITY / left, DELTA) if left > 0 else None
    return lengths


def joint_view_table(result: dict[str, Any]) -> str:
    printed = {line["round"]: line for line in result["rounds"] if line["algorithm"] == "fedrp"}
    subspace = {line["round"]: line for line in result["rounds"] if line["algorithm"] == "fedrp-subspace"}
    header = ["round", "norm", "distance", "norm of sum", "eps alone", "eps joint", "eps sum"]
    lines = [[*header, "theta: norm", "distance"]]
    for round_ in (r for r in SHOWN_ROUNDS if r in printed):
        line, theta = printed[round_], subspace[round_]
        cells = [line[key] for key in ("norm_min", "distance_min", "sum_norm")]
        cells += [line[f"epsilon_{view}"] for view in ("single", "joint", "sum")]
        cells += [theta["norm_min"], theta["distance_min"]]
        lines.append([str(round_), *("none" if cell is None else f"{cell:.3g}" for cell in cells)])
    return rows(lines, "|---:" * 9 + "|")


# --- audit ---------------------------------------------------------------------------------------------------------

TRIALS = "--trials 1000"
NOISY = f"--dp-epsilon 4 {TRIALS}"
BALL = f"--dim 8 --ball 0.02 --parameters 2000 {TRIALS}"
AUDITS = (
    f"--algorithm fedavg-dp {NOISY}",
    f"--algorithm fedavg-dp --rounds 3 --clients 3 {NOISY}",
    f"--algorithm fedrp-subspace {NOISY}",
    f"--algorithm fedrp-subspace --dp-noise local {NOISY}",
    f"--algorithm fedrp --clients 1 {BALL}",
    f"--algorithm fedrp --clients 2 --adversary one-vector {BALL}",
    f"--algorithm fedrp --clients 2 --adversary server {BALL}",
    f"--algorithm fedavg {TRIALS}",
    f"--algorithm fedrp-subspace --broken no-noise {NOISY}",
    f"--algorithm fedrp-subspace --broken half-noise {NOISY}",
    f"--algorithm fedrp-subspace --broken reused-key {NOISY}",
    f"--algorithm fedrp --clients 1 --broken reused-key {BALL}",
)


def audits() -> dict[str, Any]:
    lines = []
    for options in AUDITS:
        command = [sys.executable, "-c", "from fedrp.cli import main; main()", "audit", *options.split(), "--json"]
        done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - our own command
        if not done.stdout:
            raise SystemExit(f"failed: fedrp audit {options}: {done.stderr}")
        lines.append({"command": f"fedrp audit {options}", **json.loads(done.stdout)})
        print(lines[-1]["command"], lines[-1]["verdict"], file=sys.stderr, flush=True)
    return {"audits": lines}


def audit_table(result: dict[str, Any]) -> str:
    header = ["algorithm", "options", "against", "claimed", "any", "family", "refuted"]
    lines = [header]
    for item in result["audits"]:
        claimed = item["claimed_epsilon"]
        numbers = [claimed, item["lower_bound_any"], item["lower_bound_family"]]
        shown = ["none" if number is None else f"{number:.2f}" for number in numbers]
        algorithm, _, options = item["command"].removeprefix("fedrp audit --algorithm ").partition(" ")
        for common in (NOISY, BALL, TRIALS):
            options = options.removesuffix(common).rstrip()
        against = item["adversary"].split(",")[0].removeprefix("the ")
        against = against.replace("a server that looks at one client's vector", "one vector")
        refuted = "no claim" if claimed is None else "yes" if "VIOLATED" in item["verdict"] else "no"
        lines.append([f"`{algorithm}`", f"`{options}`" if options else "", against, *shown, refuted])
    note = f"All with `{TRIALS}`; noise with `{NOISY.removesuffix(f' {TRIALS}')}`; `fedrp` with\n"
    return note + f"`{BALL.removesuffix(f' {TRIALS}')}`.\n\n" + rows(lines, "|---|---|---|---:|---:|---:|---|")


def rows(lines: Sequence[Sequence[str]], rule: str) -> str:
    """A Markdown table; the first line is its header."""
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


EXPERIMENTS = {"joint-view": (joint_view, joint_view_table), "audit": (audits, audit_table)}


# --- keeping -------------------------------------------------------------------------------------------------------


def command_of(name: str) -> str:
    return f"{COMMAND} {name}"


def keep(name: str, origin: dict[str, str]) -> None:
    own = {**origin, "command": command_of(name), "seed": 0}
    measured, _ = EXPERIMENTS[name]
    kept.keep(TABLE, {command_of(name): {"origin": own, **_finite(measured())}})


def _finite(value: Any) -> Any:
    """Floats to six digits: more would only be noise in the file."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


def render() -> None:
    for name, (_, table) in EXPERIMENTS.items():
        if result := kept.find(command_of(name)):
            origin = f"`{result['origin']['command']}`, seed 0, commit {result['origin']['commit']}."
            placed(f"measured {name}", f"{table(result)}\n\n{origin}", PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "render"))
    parser.add_argument("names", nargs="*", choices=(*EXPERIMENTS, []), help="what to run")
    arguments = parser.parse_args()
    if arguments.action == "render":
        render()
    origin = origin_of(COMMAND)  # once, for the code that is loaded now
    for name in arguments.names:
        keep(name, origin)


if __name__ == "__main__":
    main()
