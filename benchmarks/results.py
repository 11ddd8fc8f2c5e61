"""Every number of docs/results.md: run it, keep it, render it.

    python benchmarks/results.py list                    the experiments and which of their runs are kept
    python benchmarks/results.py run NAME [NAME ...]     run what is missing (all: every experiment)
    python benchmarks/results.py render                  fill the tables of docs/results.md and draw the figures

A kept run is a JSON file in benchmarks/results/ with the command, seed, commit and date that made it. The data folder
is FEDRP_DATA.
"""

import argparse
import datetime
import functools
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
BUDGETS = (1, 10, 50, 100, 500, 1000, 5000, 10000)


class Experiment(NamedTuple):
    """Runs that belong in one table."""

    title: str
    base: str  # options that all its runs share
    runs: dict[str, str]  # name of the run -> its own options
    seeds: tuple[int, ...] = (0,)


def _subspace(dims: Iterable[int], more: str = "") -> dict[str, str]:
    return {f"fedrp-subspace-{m}": f"--algorithm fedrp-subspace --projection sign --dim {m}{more}" for m in dims}


def _fedavg_rates(rates: Iterable[float]) -> dict[str, str]:
    return {"fedavg-default": "", **{f"fedavg-lr{lr}": f"--lr {lr}" for lr in rates}}


# What the subspace mode uses by default with LeNet-5 and 100 clients, with m of at least n/64 and below; said aloud
# because earlier versions had other defaults.
OWN = " --lr 0.2 --server-momentum 0.5"
WITHOUT = " --lr 0.2 --server-momentum 0"
MNIST = "--dataset mnist --clients 100 --rounds 30"
PRIVATE = "--dataset mnist --train-examples 10000 --clients 100 --rounds 20 --local-epochs 1"
PRIVATE_FULL = PRIVATE.replace(" --train-examples 10000", "")
PRIVATE_DIMS = (100, 1000, 10000)
LENET_PARAMETERS = 61_706
# With m = n the subspace mode is FedAvg-DP, but for how the first model is drawn.
SAME_BUT_FOR_THE_START = f"fedrp-subspace-{LENET_PARAMETERS}"
PRIVATE_METHODS = {"fedavg-dp": "--algorithm fedavg-dp", **_subspace((*PRIVATE_DIMS, LENET_PARAMETERS))}
COMPARED = ("fedavg-dp", "fedrp-subspace-1000", "fedrp-subspace-10000")
EPSILONS = (10, 5)
# What seed 0 chose on the grids of private-10 and private-5: method, clip, lr, momentum; for FedAvg-DP also the best
# without momentum.
PRIVATE_BEST = {
    10: (
        ("fedavg-dp", 1, 1, 0),
        ("fedavg-dp", 0.3, 0.3, 0.5),
        ("fedrp-subspace-1000", 0.3, 0.3, 0.5),
        ("fedrp-subspace-10000", 0.3, 0.3, 0.5),
        (SAME_BUT_FOR_THE_START, 0.3, 0.3, 0.5),
    ),
    5: (
        ("fedavg-dp", 0.1, 0.3, 0),
        ("fedavg-dp", 0.1, 0.3, 0.5),
        ("fedrp-subspace-1000", 0.3, 0.3, 0.5),
        ("fedrp-subspace-10000", 0.3, 0.3, 0.5),
    ),
}


def _private(method: str, clip: float, lr: float, momentum: float = 0) -> str:
    # FedAvg-DP has no momentum unless it is asked for; FedRP-Subspace may.
    said = f" --server-momentum {momentum}" if momentum or method != "fedavg-dp" else ""
    return f"{PRIVATE_METHODS[method]} --clip {clip} --lr {lr}{said}"


EXPERIMENTS: dict[str, Experiment] = {
    "mnist": Experiment(
        "The paper's algorithms, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1, default settings",
        f"{MNIST} --local-epochs 1",
        {
            "fedavg": "--algorithm fedavg",
            "fedadmm": "--algorithm fedadmm",
            "fwc": "--algorithm fwc",
            "fedrp-1000": "--algorithm fedrp --projection gaussian --dim 1000",
            "fedrp-10000": "--algorithm fedrp --projection sign --dim 10000",
        },
    ),
    "subspace": Experiment(
        "FedRP-Subspace against FedAvg, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1, default settings",
        f"{MNIST} --local-epochs 1",
        {"fedavg": "--algorithm fedavg", **_subspace((1000,), OWN), **_subspace((100, 10, 1), WITHOUT)},
        seeds=(0, 1, 2),
    ),
    "other-momentum": Experiment(
        "Momentum over rounds the other way round",
        f"{MNIST} --local-epochs 1",
        {**_subspace((1000,), WITHOUT), **_subspace((100,), OWN)},
        seeds=(0, 1, 2),
    ),
    "fedavg-grid": Experiment(
        "FedAvg's learning rate (0.1 is the default), full MNIST, E = 1",
        f"{MNIST} --local-epochs 1 --algorithm fedavg",
        _fedavg_rates((0.2, 0.4)),
        seeds=(0, 1, 2),
    ),
    "few-clients": Experiment(
        "Few clients with much data: 3 clients with 3,333 pictures of mnist-mini each, 6 rounds, E = 1",
        "--dataset mnist-mini --clients 3 --rounds 6 --local-epochs 1",
        {
            **{f"fedavg-{lr}": f"--algorithm fedavg --lr {lr}" for lr in (0.1, 0.2, 0.4)},
            **_subspace((1000,)),
            **{
                f"subspace{option}".replace(" ", "_"): f"{_subspace((1000,))['fedrp-subspace-1000']} {option}"
                for option in ("--server-momentum 0.5", "--lr 0.1", "--lr 0.4")
            },
        },
        seeds=(0, 1, 2),
    ),
    "budget": Experiment(
        "Accuracy against what a client sends, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1",
        {
            "fedavg": "--algorithm fedavg",
            **_subspace(BUDGETS[:5], WITHOUT),
            **_subspace(BUDGETS[5:], OWN),
            **{f"fedrp-{m}": f"--algorithm fedrp --projection sign --dim {m}" for m in BUDGETS},
        },
        seeds=(0, 1, 2),
    ),
    "five-epochs": Experiment(
        "Five local epochs, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 5, default settings",
        f"{MNIST} --local-epochs 5",
        {"fedavg": "--algorithm fedavg", **_subspace((1000,), OWN), **_subspace((100, 10, 1), WITHOUT)},
    ),
    "five-epochs-grid": Experiment(
        "FedAvg's learning rate (0.1 is the default), full MNIST, E = 5",
        f"{MNIST} --local-epochs 5 --algorithm fedavg",
        _fedavg_rates((0.2, 0.4)),
    ),
    "non-iid": Experiment(
        "Clients with different data, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1",
        {
            f"{name}-{split}": f"--partition {split} {options}"
            for split in ("dirichlet:0.1", "shards:2")
            for name, options in {
                "fedavg": "--algorithm fedavg",
                "fedavg-momentum": "--algorithm fedavg --server-momentum 0.5",
                **_subspace((1000,), OWN),
                "without": _subspace((1000,), WITHOUT)["fedrp-subspace-1000"],
                "samples": _subspace((1000,), f"{OWN} --weighting samples")["fedrp-subspace-1000"],
            }.items()
            if not (name == "samples" and split == "shards:2")  # there all have equally many
        },
        seeds=(0, 1, 2),
    ),
    "non-iid-options": Experiment(
        "What helps with different data: m = 1,000, 100 clients, 100 pictures each on average, 30 rounds, E = 1",
        f"{MNIST} --train-examples 10000 --local-epochs 1 {_subspace((1000,))['fedrp-subspace-1000']}",
        {
            f"{split}{option}".replace(" ", "_"): f"--partition {split} --lr 0.2 --server-momentum {option}"
            for split in ("iid", "dirichlet:0.1", "shards:2")
            for option in (
                *("0", "0.5", "0.9", "0 --proximal 0.01"),
                *(("0 --weighting samples",) if split == "dirichlet:0.1" else ()),  # elsewhere all have equally many
            )
        },
    ),
    "cifar": Experiment(
        "CIFAR-10, a fifth of the training pictures, the paper's GroupNorm network, 50 clients, 12 rounds, E = 1",
        "--dataset cifar10 --train-examples 10000 --model cnn --clients 50 --rounds 12 --local-epochs 1",
        {
            "fedavg": "--algorithm fedavg",
            "fedadmm": "--algorithm fedadmm",
            "fedrp-10000": "--algorithm fedrp --projection sign --dim 10000",
            **_subspace((10000,)),
            "fwc": "--algorithm fwc",
        },
    ),
    **{
        f"private-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5): the grid of each method, 100 clients with 100 pictures of MNIST each, "
            "20 rounds",
            f"{PRIVATE} --dp-epsilon {epsilon}",
            {
                f"{name}-clip{clip}-lr{lr}-momentum{momentum}": _private(name, clip, lr, momentum)
                for name in ("fedrp-subspace-100", *COMPARED)
                for momentum in (0, 0.5)
                for clip in (0.1, 0.3, 1)
                for lr in (0.3, 1)
                if momentum == 0 or (name in COMPARED and (clip, lr) != (1, 0.3))
            },
        )
        for epsilon in EPSILONS
    },
    "private-default": Experiment(
        "Client-level (10, 1e-5), 100 pictures a client: learning rate and momentum as they are by default, two clips",
        f"{PRIVATE} --dp-epsilon 10",
        {
            f"{name}-clip{clip}": _private(name, clip, *rest)
            for name, rest in zip(COMPARED, ((0.1, 0), (0.2, 0.5), (0.2, 0.5)), strict=True)
            for clip in (0.3, 1)
        },
        seeds=(0, 1, 2),
    ),
    **{
        f"private-best-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5): the best of each grid again, with seeds that chose nothing",
            f"{PRIVATE} --dp-epsilon {epsilon}",
            {f"{chosen[0]}-momentum{chosen[-1]}": _private(*chosen) for chosen in best},
            seeds=(1, 2, 3),
        )
        for epsilon, best in PRIVATE_BEST.items()
    },
    "private-1000": Experiment(
        "What clipping alone costs: (1000, 1e-5), where the noise is small",
        f"{PRIVATE} --dp-epsilon 1000",
        {
            f"{name}-clip{clip}-lr{lr}": _private(name, clip, lr)
            for name, clip, lr in (
                ("fedavg-dp", 0.3, 0.3),
                ("fedavg-dp", 1, 0.3),
                ("fedrp-subspace-1000", 0.3, 1),
                ("fedrp-subspace-10000", 0.3, 0.3),
                ("fedrp-subspace-10000", 1, 0.3),
            )
        },
    ),
    **{
        f"private-full-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5) with all of MNIST, 600 pictures a client, 20 rounds, clip 0.3",
            f"{PRIVATE_FULL} --dp-epsilon {epsilon}",
            {
                f"{name}-lr{lr}-momentum{momentum}": _private(name, 0.3, lr, momentum)
                for name in COMPARED
                for lr, momentum in ((0.1, 0), (0.3, 0), (0.1, 0.5))
            },
            seeds=(0, 1, 2),
        )
        for epsilon in EPSILONS
    },
    "fashion": Experiment(
        "Not used to choose any default: Fashion-MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        "--dataset fashion-mnist --clients 100 --rounds 30 --local-epochs 1",
        {
            "fedavg": "--algorithm fedavg",
            "fedavg-0.2": "--algorithm fedavg --lr 0.2",
            **_subspace((1000,), OWN),
            **_subspace((100,), WITHOUT),
            "without": _subspace((1000,), WITHOUT)["fedrp-subspace-1000"],
        },
        seeds=(0, 1, 2),
    ),
}


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
    def path(self) -> Path:
        """Runs with the same options are the same run, whichever experiment asks for them."""
        return KEPT / (re.sub(r"[^a-z0-9.]+", "_", self.options.replace("--", "").lower()).strip("_") + ".json")

    def result(self) -> dict[str, Any] | None:
        """What was kept of it, if it was run."""
        return json.loads(self.path.read_text()) if self.path.exists() else None


def runs_of(name: str) -> list[Run]:
    experiment = EXPERIMENTS[name]
    return [Run(name, run, seed) for seed in experiment.seeds for run in experiment.runs]


def kept_results(experiment: str, name: str) -> list[dict[str, Any]]:
    """What was kept of the seeds of one run."""
    seeds = EXPERIMENTS[experiment].seeds
    return [result for seed in seeds if (result := Run(experiment, name, seed).result())]


def perform(run: Run) -> None:
    commit = _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "src") else "")
    out = ROOT / "runs" / "results" / run.path.stem
    command = [str(Path(sys.executable).with_name("fedrp")), "run", *run.options.split(), "--json", "--out", str(out)]
    if out.exists():
        command.append("--resume")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    result = json.loads(done.stdout)
    kept = ("round", "accuracy", "accuracy_average", "seconds")
    result["history"] = [{key: record[key] for key in kept} for record in result["history"]]
    origin = {
        "command": f"fedrp run {run.options}",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    run.path.write_text(json.dumps({"origin": origin, **result}, indent=1) + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def table(name: str) -> str:
    """A Markdown table of the kept runs of an experiment."""
    experiment = EXPERIMENTS[name]
    kept = {run_name: kept_results(name, run_name) for run_name in experiment.runs}
    everything = [result for results in kept.values() for result in results]
    own_models = any(result["accuracy_client_min"] < result["accuracy_client_max"] for result in everything)
    columns = ["options", "seeds", "accuracy %"]
    columns += ["clients' mean (min..max) %", "average model %"] if own_models else []
    columns += ["sent B", "received B"]
    lines = [
        f"**{experiment.title}.** Every line: `fedrp run {experiment.base} ...` with the options shown.",
        "",
        _row(columns),
        "|---" * len(columns) + "|",
    ]
    for run_name, results in kept.items():
        if results:
            options = experiment.runs[run_name]
            cells = [f"`{options}`" if options else "default", str(len(results)), _spread(results, "accuracy")]
            if own_models:
                low = min(result["accuracy_client_min"] for result in results)
                high = max(result["accuracy_client_max"] for result in results)
                cells.append(f"{_spread(results, 'accuracy_client_mean')} ({low:.1f}..{high:.1f})")
                cells.append(_spread(results, "accuracy_average"))
            lines.append(_row([*cells, f"{results[0]['bytes_up']:,}", f"{results[0]['bytes_down']:,}"]))
    commits = sorted({result["origin"]["commit"] for result in everything})
    return "\n".join([*lines, "", f"Commits: {', '.join(commits) or 'none yet'}."])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(results: Iterable[dict[str, Any]], key: str) -> str:
    numbers = [result[key] for result in results]
    mean = statistics.mean(numbers)
    return f"{mean:.2f}" if len(numbers) == 1 else f"{mean:.2f} ± {statistics.stdev(numbers):.2f}"


def _save(figure: "Figure", path: Path) -> None:
    """Write a figure so that the same data give the same bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "fedrp"}):
        figure.savefig(path, metadata={"Date": None})


def draw_budget(path: Path) -> None:
    """Accuracy against bytes sent over the whole run, mean and range of the seeds; once more from 88 % upwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    curves = [
        ("FedRP-Subspace", "o-", [("budget", f"fedrp-subspace-{m}") for m in BUDGETS], "accuracy"),
        ("FedRP as printed, clients' mean", "s-", [("budget", f"fedrp-{m}") for m in BUDGETS], "accuracy_client_mean"),
        ("FedRP as printed, average of all", "s--", [("budget", f"fedrp-{m}") for m in BUDGETS], "accuracy_average"),
        ("FedAvg, default", "D", [("budget", "fedavg")], "accuracy"),
        ("FedAvg, best learning rate of three", "*", [("fedavg-grid", "fedavg-lr0.4")], "accuracy"),
    ]
    floor = Run("mnist", "fwc", 0).result()
    whole, top = figure.subplots(1, 2)
    for axes in (whole, top):
        for label, style, names, key in curves:
            points = [results for experiment, name in names if (results := kept_results(experiment, name))]
            sent = [results[0]["bytes_up"] * results[0]["rounds"] for results in points]
            accuracies = [[result[key] for result in results] for results in points]
            means = [statistics.mean(values) for values in accuracies]
            below = [mean - min(values) for mean, values in zip(means, accuracies, strict=True)]
            above = [max(values) - mean for mean, values in zip(means, accuracies, strict=True)]
            axes.errorbar(sent, means, yerr=[below, above], fmt=style, capsize=3, label=label)
        if floor:
            axes.axhline(
                floor["accuracy_client_mean"], color="grey", linestyle=":", label="no communication, clients' mean"
            )
        axes.set_xscale("log")
        axes.set_xlabel("bytes sent by a client in 30 rounds")
        axes.grid(alpha=0.3)
    whole.set_ylabel("test accuracy %")
    top.set_ylim(88, 100)
    whole.legend(loc="lower right", fontsize="small")
    figure.suptitle(
        "MNIST, LeNet-5, 100 clients, E = 1, one to three seeds; m = " + ", ".join(f"{m:,}" for m in BUDGETS)
    )
    _save(figure, path)


def draw_private(path: Path) -> None:
    """Accuracy at the best clip and learning rate against m, by epsilon and momentum; m = n is FedAvg-DP."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sizes = {"fedavg-dp": LENET_PARAMETERS, **{f"fedrp-subspace-{m}": m for m in PRIVATE_DIMS}}
    for epsilon, momentum in itertools.product(EPSILONS, (0.5, 0)):
        best: dict[int, float] = {}
        for run in runs_of(f"private-{epsilon}"):
            size, result = sizes[run.name.split("-clip")[0]], run.result()
            if result and run.name.endswith(f"-momentum{momentum}"):
                best[size] = max(best.get(size, 0.0), result["accuracy"])
        style = {10: "C0", 5: "C1"}[epsilon] + ("-" if momentum else "--")
        label = f"epsilon {epsilon}, {f'momentum {momentum}' if momentum else 'no momentum'} over rounds"
        axes.plot(*zip(*sorted(best.items()), strict=True), style, marker="o", label=label)
    axes.axvline(LENET_PARAMETERS, color="grey", linestyle=":", label="m = n: FedAvg-DP")
    axes.set_xscale("log")
    axes.set_xlabel("numbers that a client sends, m")
    axes.set_ylabel("test accuracy %")
    axes.set_title("MNIST, 100 clients x 100 pictures, 20 rounds, delta 1e-5, seed 0")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    _save(figure, path)


def compression_table() -> str:
    """What `benchmarks/compression.py` kept, next to FedRP-Subspace at the same bytes up."""
    kept = json.loads((KEPT / "compression.json").read_text())
    ours = Run("subspace", "fedrp-subspace-1000", kept["seed"]).result() or {}
    rows = [("fedrp-subspace, m = 1,000", ours["accuracy"], ours["bytes_up"], ours["bytes_down"])]
    rows += [(f"`{k}`", m["accuracy"], m["bytes_up"], m["bytes_down"]) for k, m in kept["methods"].items()]
    return "\n".join(
        [
            f"`{kept['origin']['command']}`, commit {kept['origin']['commit']}, seed {kept['seed']}.",
            "",
            "| method | accuracy % | sent B | received B |",
            "|---|---|---|---|",
            *(f"| {name} | {accuracy:.2f} | {up:,.0f} | {down:,.0f} |" for name, accuracy, up, down in rows),
        ]
    )


def rounds_table() -> str:
    """What `benchmarks/rounds.py` kept."""
    kept = json.loads((KEPT / "rounds.json").read_text())
    lines = [
        f"`{kept['origin']['command']}`, commit {kept['origin']['commit']}, load before it "
        f"{kept['origin']['load_average_before']:.1f}.",
        "",
        "| method | seconds per round, each repeat | ratio to FedAvg in the same repeat, median (min..max) |",
        "|---|---|---|",
    ]
    for name, seconds in kept["seconds"].items():
        ratios = kept["ratios"][name]
        shown = ", ".join(f"{value:.1f}" for value in seconds)
        lines.append(f"| {name} | {shown} | {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |")
    return "\n".join(lines)


def render() -> None:
    page = PAGE.read_text()
    for name, draw in FIGURE_MAKERS.items():
        if name in page:
            draw(FIGURES / name)
    tables: dict[str, Callable[[], str]] = {name: functools.partial(table, name) for name in EXPERIMENTS}
    for name, make in {**tables, **OTHER_TABLES}.items():
        start, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        if start in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    PAGE.write_text(page)


FIGURE_MAKERS: dict[str, Callable[[Path], None]] = {
    "accuracy_against_bytes.svg": draw_budget,
    "accuracy_with_noise.svg": draw_private,
}
OTHER_TABLES: dict[str, Callable[[], str]] = {"compression": compression_table, "rounds": rounds_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "run", "render"))
    parser.add_argument("names", nargs="*", help="experiments; 'all' for every one")
    arguments = parser.parse_args()
    names = list(EXPERIMENTS) if arguments.names in ([], ["all"]) else arguments.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise SystemExit(f"unknown experiment {unknown[0]}; known: {', '.join(EXPERIMENTS)}")
    if arguments.action == "render":
        render()
        return
    for name in names:
        for run in runs_of(name):
            kept = run.path.exists()
            print(f"{name}: {run.name} seed {run.seed}: {'kept' if kept else 'missing'}", flush=True)
            if arguments.action == "run" and not kept:
                perform(run)


if __name__ == "__main__":
    main()
