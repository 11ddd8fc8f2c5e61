"""Accuracy when a tenth of the clients' uploads are hostile, for each way to aggregate them.

    python benchmarks/robust.py --out FILE.jsonl     and then     python benchmarks/robust.py --keep FILE.jsonl

Runs are those of `fedrp run` with the same settings and seed, except that the uploads of a tenth of the clients, the
same in all rounds, are changed between client and server. The clients behind them train as all others do and count in
the accuracy. The attacks:

    honest      nothing is changed
    flip:S      the upload times -S
    random:S    normal numbers with S times the norm of the upload

One line of JSON is kept for each run. The file appears when it is whole; until then the lines are in FILE.jsonl.part,
and a run that was stopped goes on from there. MNIST is read from the folder FEDRP_DATA.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kept import keep
from origin import origin_of

from fedrp import RunConfig, simulate
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.task import Task, named_task
from fedrp.protocol import wire
from fedrp.rng import RunSeed
from fedrp.simulation.clients import Tap
from fedrp.simulation.result import RoundRecord
from fedrp.types import Packets, Vector

HONEST = "honest"
HOSTILE_SHARE = 0.1
_ALWAYS_SAID = ("dataset", "algorithm", "aggregation", "rounds", "seed")
_UNSAID = {"dim": 1000}  # was the default when the kept lines were made
RULES = ("mean", "median", "trimmed:0.2")
_PROJECTED = {"projection": "sign", "dim": 1000}
ALGORITHMS: dict[str, dict[str, Any]] = {"fedavg": {}, "fedrp": _PROJECTED, "fedrp-subspace": _PROJECTED}


class Study(NamedTuple):
    """Runs that belong in one table: all combinations of algorithms, rules, attacks and seeds."""

    title: str
    settings: dict[str, Any]
    attacks: tuple[str, ...]
    seeds: tuple[int, ...]
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)

    def runs(self) -> Iterator[tuple[RunConfig, str]]:
        """Each run's settings and attack."""
        for seed, name, attack, rule in itertools.product(self.seeds, self.algorithms, self.attacks, RULES):
            changes = {**self.settings, **ALGORITHMS[name]}
            yield RunConfig(algorithm=name, aggregation=rule, seed=seed, **changes), attack


STUDIES = {
    "mnist-mini": Study(
        "mnist-mini, 20 clients of whom 2 are hostile, 10 rounds, E = 1, m = 1,000 with sign",
        {"dataset": "mnist-mini", "clients": 20, "rounds": 10},
        (HONEST, "flip:1", "flip:10", "random:10"),
        seeds=(0, 1, 2),
    ),
    "uneven": Study(
        "mnist-mini with about two digits a client (shards:2), 20 clients of whom 2 are hostile, 10 rounds, E = 1, "
        "m = 1,000 with sign",
        {"dataset": "mnist-mini", "clients": 20, "rounds": 10, "partition": "shards:2"},
        (HONEST, "flip:10"),
        seeds=(0, 1, 2),
        algorithms=("fedavg", "fedrp-subspace"),
    ),
    "mnist": Study(
        "Full MNIST, 100 clients of whom 10 are hostile, 10 rounds, E = 1, m = 1,000 with sign",
        {"dataset": "mnist", "clients": 100, "rounds": 10},
        (HONEST, "flip:10"),
        seeds=(0,),
        algorithms=("fedrp-subspace",),
    ),
}


def hostile_clients(config: RunConfig) -> list[int]:
    """A tenth of the clients, drawn by the run's seed."""
    count = round(HOSTILE_SHARE * config.clients)
    return sorted(RunSeed(config.seed).generator("hostile").choice(config.clients, count, replace=False).tolist())


def changed(attack: str, vector: Vector, rng: np.random.Generator) -> Vector:
    """What arrives in place of an upload."""
    name, _, strength = attack.partition(":")
    if name == "flip":
        return np.float32(-float(strength)) * vector
    if name == "random":
        noise = rng.standard_normal(vector.size)
        return (float(strength) * np.linalg.norm(vector) / np.linalg.norm(noise) * noise).astype(np.float32)
    raise ConfigError(f"unknown attack '{attack}': expected {HONEST}, flip:S or random:S")


def hostile_wire(config: RunConfig, attack: str) -> Tap | None:
    """A wire that changes the uploads of the hostile clients, and nothing else."""
    if attack == HONEST:
        return None
    hostile, seed = hostile_clients(config), RunSeed(config.seed)

    def changed_message(message: wire.Message) -> wire.Message:
        if message.kind is not wire.Kind.UPLOAD:
            return message
        rng = seed.generator("attack", message.round, message.sender)
        vector = message.payload.view(np.float32)
        return dataclasses.replace(message, payload=changed(attack, vector, rng))

    def tap(_sent: Packets, replies: Packets) -> None:
        for client in set(hostile) & set(replies):
            replies[client] = wire.encode(map(changed_message, wire.decode(replies[client])))

    return tap


def measure(config: RunConfig, attack: str, task: Task) -> dict[str, Any]:
    """What a run came to; one that diverges is told up to there."""
    records: list[RoundRecord] = []
    accuracy, diverged = None, None
    try:
        tap = hostile_wire(config, attack)
        deliver = "client" if config.algorithm == "fedrp" else None  # what is kept is one client's model
        result = simulate(
            dataclasses.replace(config, deliver=deliver),
            task,
            on_round=lambda record, _model: records.append(record),
            tap=tap,
        )
        accuracy = result.as_json()["accuracy_client_mean"]
    except DivergenceError as error:
        diverged = str(error)
    history = [round(record.evaluation.delivered.accuracy, 2) for record in records if record.evaluation]
    return {"accuracy_client_mean": accuracy, "diverged": diverged, "history": history}


def described(study: str, config: RunConfig, attack: str) -> dict[str, Any]:
    """What a line is about; most settings that have their default are left out."""
    fields = dataclasses.fields(config)
    given = {f.name: v for f in fields if (v := getattr(config, f.name)) not in (f.default, _UNSAID.get(f.name))}
    return {
        "study": study,
        "config": {**{name: getattr(config, name) for name in _ALWAYS_SAID}, **given},
        "attack": attack,
        "hostile": [] if attack == HONEST else hostile_clients(config),
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The kept lines of a file, if there is one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def about_of(line: dict[str, Any]) -> str:
    """Which run a line is about, as text."""
    return json.dumps({key: line[key] for key in ("study", "config", "attack", "hostile")}, sort_keys=True)


def perform(names: Iterable[str], out: Path) -> None:
    """Run the studies and keep a line for each run."""
    origin = origin_of(" ".join(["python benchmarks/robust.py", *sys.argv[1:]]))
    part = out.with_name(out.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    kept = [about_of(line) for line in lines_of(part)]
    for name in names:
        study = STUDIES[name]
        task = named_task(RunConfig(**study.settings))
        for config, attack in study.runs():
            about = described(name, config, attack)
            if about_of(about) in kept:
                continue
            line = {**about, **measure(config, attack, task), "origin": origin}
            with part.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = line["diverged"] or f"{line['accuracy_client_mean']:.2f} %"
            print(f"{name} {config.seed} {config.algorithm} {attack} {config.aggregation}: {shown}", flush=True)
    part.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default=",".join(STUDIES), help="by commas")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="the file to write, one JSON object a line")
    target.add_argument("--keep", type=Path, help="put what is in this file among the published results")
    arguments = parser.parse_args()
    if arguments.keep:
        keep("robust", {about_of(line): line for line in lines_of(arguments.keep)})
        return
    names = arguments.studies.split(",")
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise SystemExit(f"unknown study {unknown[0]}; known: {', '.join(STUDIES)}")
    perform(names, arguments.out)


if __name__ == "__main__":
    main()
