"""The runs of the published experiments, and what was kept of each."""

import functools
import itertools
from typing import Any, NamedTuple

import kept
from experiments import BUDGETS, BYTES, EXPERIMENTS

GIVEN = "yes"  # value of an option that takes none

Options = dict[str, str]


class Run(NamedTuple):
    """One run of an experiment."""

    experiment: str
    name: str
    seed: int

    @property
    def options(self) -> str:
        """All options of the run."""
        experiment = EXPERIMENTS[self.experiment]
        return f"{experiment.base} {experiment.runs[self.name]} --seed {self.seed}"

    @property
    def command(self) -> str:
        """The options that it is run with: kept rows of printed FedRP are one client's model, by any default."""
        options = self.options
        return f"{options} --deliver client" if parsed(options).get("algorithm") == "fedrp" else options

    def result(self) -> kept.Result | None:
        """What was kept of it, if it was run."""
        return everything().get(kept.normal(self.options))


@functools.cache
def everything() -> dict[str, kept.Result]:
    """All that is kept of the experiments, by options; read once."""
    tables = sorted(set(kept.read_index().values()) & set(EXPERIMENTS))
    return {options: result for table in tables for options, result in kept.read(table).items()}


def runs_of(name: str) -> list[Run]:
    experiment = EXPERIMENTS[name]
    return [Run(name, run, seed) for seed in experiment.seeds for run in experiment.runs]


def kept_results(experiment: str, name: str) -> list[kept.Result]:
    """What was kept of the seeds of one run."""
    seeds = EXPERIMENTS[experiment].seeds
    return [result for seed in seeds if (result := Run(experiment, name, seed).result())]


def parsed(options: str) -> Options:
    """Options by name, in their order."""
    found: Options = {}
    for word in options.split():
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = GIVEN
        else:
            found[name] = word
    return found


def written(options: Options) -> str:
    """The options as one gives them."""
    return " ".join(f"--{name}" if value == GIVEN else f"--{name} {value}" for name, value in options.items())


# --- accuracy by all bytes of a run ----------------------------------------------------------------------------------


class Point(NamedTuple):
    """A method in the comparison by total bytes."""

    family: str
    name: str
    results: list[dict[str, Any]]
    key: str = "accuracy"

    @property
    def keys(self) -> int:
        """Bytes of keys of a client and round."""
        return sum(self.results[0].get(f"bytes_keys_{way}", 0) for way in ("up", "down"))

    @property
    def total(self) -> float:
        """Bytes of a client in a run: up, down, and keys where there are any."""
        first = self.results[0]
        return float((first["bytes_up"] + first["bytes_down"] + self.keys) * first["rounds"])


def points() -> list[Point]:
    """Everything that is compared by total bytes, as far as it was run."""
    sizes = list(itertools.chain.from_iterable(BYTES.values()))
    found = [
        *(
            Point(
                "FedRP-Subspace, 1 bit" if b == 1 else "FedRP-Subspace, 2 and 4 bits",
                f"m = {m:,}" if b == 1 else f"m = {m:,}, {b} bits",
                kept_results("bits", f"subspace-{m}-{b}"),
            )
            for m, b in sorted(sizes, key=lambda size: size[1] > 1)
        ),
        *(
            Point("FedRP-Subspace, float32", f"m = {m:,}", kept_results("budget", f"fedrp-subspace-{m}"))
            for m in BUDGETS[3:]
        ),
        *(
            Point("FedRP-Subspace, masked", f"m = {m:,}, {_bits_in_words(b)}", kept_results("bits", f"masked-{m}-{b}"))
            for m, b in ((4064, 1), (2032, 2))
        ),
        Point("FedAvg", "lr 0.4", kept_results("fedavg-grid", "fedavg-lr0.4")),
        Point("FedAvg", "lr 0.4, server momentum", kept_results("fedavg-grid", "fedavg-lr0.4-momentum")),
        *(
            Point("FedAvg with EDEN up", f"lr 0.4, {_bits_in_words(b)}", kept_results("bits", f"fedavg-{b}"))
            for b in (1, 2, 4)
        ),
        *(
            Point("FedRP as printed, 1 bit", f"m = {BYTES[nbytes][0][0]:,}", runs, "accuracy_average")
            for nbytes in (4096, 512)
            for runs in [kept_results("bits-printed", f"printed-{nbytes}")]
        ),
        *(
            Point("FedRP as printed, float32", f"m = {m:,}", kept_results("budget", f"fedrp-{m}"), "accuracy_average")
            for m in BUDGETS[3:]
        ),
    ]
    outcomes = list(kept.read("compression").values())
    for method, label in (("topk", "top-k"), ("qsgd-sparse", "QSGD, sparse")):
        runs = [
            {**outcome["methods"][method], **{key: outcome[key] for key in ("rounds", "seed", "origin")}}
            for outcome in outcomes
        ]
        found.append(Point(label, "4 kB up", runs))
    return [point for point in found if point.results]


def _bits_in_words(count: int) -> str:
    return "1 bit" if count == 1 else f"{count} bits"
