"""Every number of docs/results.md: run it, keep it, render it.

    python benchmarks/results.py list                    the experiments and which of their runs are kept
    python benchmarks/results.py run [NAME ...]          run what is missing (without a name: of every experiment)
    python benchmarks/results.py again NAME [NAME ...]   run all of an experiment anew, over what was kept
    python benchmarks/results.py render                  fill the tables of docs/results.md and draw the figures

What is run is in experiments.py. A kept run is a line of benchmarks/results/TABLE.jsonl (kept.py) with the command,
seed, commit and date that made it. The data folder is FEDRP_DATA.
"""

import argparse
import functools
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kept
from experiments import BUDGETS, BYTES, EPSILONS, EXPERIMENTS, LENET_PARAMETERS, PRIVATE_DIMS
from origin import origin_of
from robust import RULES, STUDIES, about_of, lines_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "results"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
TRAFFIC = ("bytes_up", "bytes_down")
ONE_BIT = [sizes[0][0] for sizes in BYTES.values()]  # numbers, at one bit each
# Measurements with a script of their own: the commands, each of which writes a file.
COMPRESSION = (
    "python benchmarks/compression.py --dataset mnist --clients 100 --rounds 30 --budget 4000 --lr 0.2 "
    "--methods topk,randomk,qsgd-sparse,sketch --workers 2"
)
PART = " # "  # between a command and which of its runs a line is about
OWN_SCRIPTS = {
    "compression": [f"{COMPRESSION} --seed {seed}" for seed in (0, 1, 2)],
    "robust": ["python benchmarks/robust.py"],
    "rounds": ["python benchmarks/rounds.py --repeats 6"],
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

    def result(self) -> kept.Result | None:
        """What was kept of it, if it was run."""
        return kept.find(self.options)


def runs_of(name: str) -> list[Run]:
    experiment = EXPERIMENTS[name]
    return [Run(name, run, seed) for seed in experiment.seeds for run in experiment.runs]


def kept_results(experiment: str, name: str) -> list[kept.Result]:
    """What was kept of the seeds of one run."""
    seeds = EXPERIMENTS[experiment].seeds
    return [result for seed in seeds if (result := Run(experiment, name, seed).result())]


def perform(run: Run) -> None:
    """Run it, or go on with it where it was stopped, and keep the result."""
    origin = origin_of(f"fedrp run {run.options}")
    out = WORK / kept.options_hash(run.options)
    command = [str(Path(sys.executable).with_name("fedrp")), "run", *run.options.split(), "--json", "--out", str(out)]
    command += ["--workers", "2"]  # changes no result
    if (out / "config.json").exists():  # else it was killed before it began
        command.append("--resume")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 - our own command
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    result = json.loads(done.stdout)
    shown = ("round", "accuracy", "accuracy_average", "seconds")
    result["history"] = [{key: record[key] for key in shown} for record in result["history"]]
    kept.keep(run.experiment, {run.options: {"origin": origin, **result}})
    shutil.rmtree(out)  # so that it starts from nothing when it is asked for again


def table(name: str) -> str:
    """A Markdown table of the kept runs of an experiment."""
    experiment = EXPERIMENTS[name]
    by_run = {run_name: kept_results(name, run_name) for run_name in experiment.runs}
    everything = [result for results in by_run.values() for result in results]
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
    for run_name, results in by_run.items():
        if results:
            options = experiment.runs[run_name]
            seeds = ", ".join(str(result["seed"]) for result in results)
            cells = [f"`{options}`" if options else "default", seeds, _spread(results, "accuracy")]
            if own_models:
                low = min(result["accuracy_client_min"] for result in results)
                high = max(result["accuracy_client_max"] for result in results)
                cells.append(f"{_spread(results, 'accuracy_client_mean')} ({low:.1f}..{high:.1f})")
                cells.append(_spread(results, "accuracy_average"))
            lines.append(_row([*cells, f"{results[0]['bytes_up']:,}", f"{results[0]['bytes_down']:,}"]))
    commits = sorted({result["origin"]["commit"] for result in everything})
    return "\n".join([*lines, "", f"Commits: {', '.join(commits) or 'none yet'}."])


def grid_table(name: str) -> str:
    """A table of a grid of clips and learning rates: a line for each method, with and without momentum."""
    experiment = EXPERIMENTS[name]
    accuracies: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    commits = set()
    for run_name in experiment.runs:
        method, clip, rate, momentum = re.split("-clip|-lr|-momentum", run_name)
        for result in kept_results(name, run_name):
            accuracies.setdefault((method, momentum), {})[clip, rate] = f"{result['accuracy']:.1f}"
            commits.add(result["origin"]["commit"])
    columns = sorted({column for line in accuracies.values() for column in line})
    options = "METHOD --clip C --lr R --server-momentum M"
    return "\n".join(
        [
            f"**{experiment.title}; accuracy %.** Every cell: `fedrp run {experiment.base} {options} --seed 0`; METHOD "
            "is `--algorithm fedavg-dp` or `--algorithm fedrp-subspace --projection sign --dim m`.",
            "",
            _row(["method", "M", *(f"C {clip}, R {rate}" for clip, rate in columns)]),
            "|---" * (len(columns) + 2) + "|",
            *(_row([*line, *(cells.get(column, "") for column in columns)]) for line, cells in accuracies.items()),
            "",
            f"Commits: {', '.join(sorted(commits))}.",
        ]
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(results: Iterable[dict[str, Any]], key: str) -> str:
    numbers = [result[key] for result in results]
    mean = statistics.mean(numbers)
    return f"{mean:.2f}" if len(numbers) == 1 else f"{mean:.2f} ± {statistics.stdev(numbers):.2f}"


def _mean(results: Iterable[dict[str, Any]], key: str) -> str:
    return f"{statistics.mean(result[key] for result in results):,.0f}"


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
        ("FedAvg, best learning rate of four", "*", [("fedavg-grid", "fedavg-lr0.4")], "accuracy"),
    ]
    alone = [result["accuracy_client_mean"] for result in kept_results("mnist", "fwc")]
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
        if alone:
            label = "no communication, clients' mean"
            axes.axhline(statistics.mean(alone), color="grey", linestyle=":", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("bytes sent by a client in 30 rounds")
        axes.grid(alpha=0.3)
    whole.set_ylabel("test accuracy %")
    top.set_ylim(88, 100)
    whole.legend(loc="lower right", fontsize="small")
    figure.suptitle("MNIST, LeNet-5, 100 clients, E = 1, three seeds; m = " + ", ".join(f"{m:,}" for m in BUDGETS))
    _save(figure, path)


class Point(NamedTuple):
    """A method in the comparison by total bytes."""

    family: str
    name: str
    results: list[dict[str, Any]]
    key: str = "accuracy"

    @property
    def total(self) -> float:
        """Bytes of a client in a run: up, down, and keys where there are any."""
        first = self.results[0]
        keys = sum(first.get(f"bytes_keys_{way}", 0) for way in ("up", "down"))
        return float((sum(first[way] for way in TRAFFIC) + keys) * first["rounds"])


# Li et al., "Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order Optimization" (DeComFL),
# ICLR 2025: MNIST, 100 clients, scalars that a client sends in the whole run. As published, not run here.
PUBLISHED = {"DeComFL (published)": ((30_000, 95.2), (200_000, 97.0))}


def points() -> list[Point]:
    """Everything that is compared by total bytes, as far as it was run."""
    found = [
        *(Point("FedRP-Subspace, 1 bit", f"m = {m:,}", kept_results("bits", f"subspace-{m}-1")) for m in ONE_BIT),
        *(
            Point("FedRP-Subspace, 2 and 4 bits", f"m = {m:,}, {b} bits", kept_results("bits", f"subspace-{m}-{b}"))
            for sizes in BYTES.values()
            for m, b in sizes
            if b > 1
        ),
        *(
            Point("FedRP-Subspace, float32", f"m = {m:,}", kept_results("budget", f"fedrp-subspace-{m}"))
            for m in BUDGETS[3:]
        ),
        *(
            Point("FedRP-Subspace, masked", f"m = {m:,}, {b} bits", kept_results("bits", f"masked-{m}-{b}"))
            for m, b in ((4064, 1), (2032, 2))
        ),
        Point("FedAvg", "learning rate 0.4", kept_results("fedavg-grid", "fedavg-lr0.4")),
        Point("FedAvg", "learning rate 0.4, server momentum", kept_results("fedavg-grid", "fedavg-lr0.4-momentum")),
        *(
            Point("FedAvg with EDEN up", f"{b} bits" if b > 1 else "1 bit", kept_results("bits", f"fedavg-{b}"))
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
            {**outcome["methods"][method], "rounds": outcome["rounds"], "seed": outcome["seed"]} for outcome in outcomes
        ]
        found.append(Point(label, "4 kB up", runs))
    return [point for point in found if point.results]


def draw_total(path: Path) -> None:
    """Accuracy against all bytes of a client in a run, up, down and keys; mean and range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    shown = points()
    for family in dict.fromkeys(point.family for point in shown):
        own = sorted((point for point in shown if point.family == family), key=lambda point: point.total)
        accuracies = [[result[point.key] for result in point.results] for point in own]
        means = [statistics.mean(values) for values in accuracies]
        below = [mean - min(values) for mean, values in zip(means, accuracies, strict=True)]
        above = [max(values) - mean for mean, values in zip(means, accuracies, strict=True)]
        style = "o-" if family.startswith("FedRP-Subspace, 1") else "o--" if len(own) > 1 else "D"
        axes.errorbar([point.total for point in own], means, yerr=[below, above], fmt=style, capsize=3, label=family)
    for label, numbers in PUBLISHED.items():
        scalars, accuracy = zip(*numbers, strict=True)
        axes.plot([4 * count for count in scalars], accuracy, "x:", color="grey", label=label)
    axes.set_xscale("log")
    axes.set_ylim(90, 99.5)
    axes.set_xlabel("bytes of a client in 30 rounds: up, down and keys")
    axes.set_ylabel("test accuracy %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    axes.set_title("MNIST, LeNet-5, 100 clients, E = 1 (printed FedRP: average of all clients)")
    _save(figure, path)


def total_table() -> str:
    """The same as a table: bytes of a client and round, and all of them in the run."""
    lines = [
        "| method | | seeds | accuracy % | sent B | received B | keys B | in 30 rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in sorted(points(), key=lambda point: point.total):
        first = point.results[0]
        keys = sum(first.get(f"bytes_keys_{way}", 0) for way in ("up", "down"))
        seeds = ", ".join(str(result["seed"]) for result in point.results)
        traffic = (f"{first[way]:,.0f}" for way in TRAFFIC)
        cells = [point.family, point.name, seeds, _spread(point.results, point.key), *traffic, f"{keys:,}"]
        lines.append(_row([*cells, f"{point.total / 1000:,.0f} kB"]))
    return "\n".join(lines)


def draw_private(path: Path) -> None:
    """Accuracy against m by epsilon: the best of each grid, and the same settings with seeds that did not choose."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    sizes = {"fedavg-dp": LENET_PARAMETERS, **{f"fedrp-subspace-{m}": m for m in PRIVATE_DIMS}}
    for axes, epsilon in zip(figure.subplots(1, len(EPSILONS), sharey=True), EPSILONS, strict=True):
        chosen, again = _best_by_size(f"private-{epsilon}", sizes), _best_by_size(f"private-best-{epsilon}", sizes)
        for values, style, label in (
            (chosen, "x--", "best of the grid, by seed 0"),
            (again, "o-", "the best again, seeds 1 to 3"),
        ):
            means = [statistics.mean(accuracies) for accuracies in values.values()]
            spread = [statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0 for accuracies in values.values()]
            axes.errorbar(list(values), means, yerr=spread, fmt=style, capsize=3, label=label)
        axes.axvline(LENET_PARAMETERS, color="grey", linestyle=":", label="m = n: FedAvg-DP")
        axes.set_xscale("log")
        axes.set_xlabel("numbers that a client sends a round, m")
        axes.set_title(f"epsilon {epsilon}")
        axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.supylabel("test accuracy %")
    figure.suptitle("MNIST, 100 clients with 100 images each, 20 rounds, delta 1e-5; mean and deviation of the seeds")
    _save(figure, path)


def _best_by_size(experiment: str, sizes: dict[str, int]) -> dict[int, list[float]]:
    """The accuracies, by seed, of the run with the best mean for each number of sent values."""
    best: dict[int, list[float]] = {}
    for name in EXPERIMENTS[experiment].runs:
        size = sizes.get(name.split("-clip")[0])
        accuracies = [result["accuracy"] for result in kept_results(experiment, name)]
        if size and accuracies and statistics.mean(accuracies) > statistics.mean(best.get(size, [0.0])):
            best[size] = accuracies
    return dict(sorted(best.items()))


def compression_table() -> str:
    """What `benchmarks/compression.py` kept, next to FedRP-Subspace at the same bytes up."""
    outcomes = list(kept.read("compression").values())
    ours = [Run("subspace", "fedrp-subspace-1000", outcome["seed"]).result() or {} for outcome in outcomes]
    rows = {"fedrp-subspace, m = 1,000": ours}
    rows |= {f"`{method}`": [outcome["methods"][method] for outcome in outcomes] for method in outcomes[0]["methods"]}
    seeds = ", ".join(str(outcome["seed"]) for outcome in outcomes)
    return "\n".join(
        [
            f"Every line but the first: `{COMPRESSION} --seed SEED --out FILE`.",
            "",
            "| method | seeds | accuracy % | sent B | received B |",
            "|---|---|---|---|---|",
            *(
                _row([name, seeds, _spread(results, "accuracy"), *(_mean(results, key) for key in TRAFFIC)])
                for name, results in rows.items()
            ),
            "",
            f"Commits: {', '.join(sorted({outcome['origin']['commit'] for outcome in outcomes}))}.",
        ]
    )


def rounds_table() -> str:
    """What `benchmarks/rounds.py` kept."""
    (measured,) = kept.read("rounds").values()
    lines = [
        f"`{measured['origin']['command']}`, commit {measured['origin']['commit']}, load before it "
        f"{measured['origin']['load_average_before']:.1f}.",
        "",
        "| method | seconds per round, each repeat | ratio to FedAvg in the same repeat, median (min..max) |",
        "|---|---|---|",
    ]
    for name, seconds in measured["seconds"].items():
        ratios = measured["ratios"][name]
        shown = ", ".join(f"{value:.1f}" for value in seconds)
        lines.append(f"| {name} | {shown} | {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |")
    return "\n".join(lines)


def robust_table() -> str:
    """What `benchmarks/robust.py` kept: for each study, a line for each algorithm and rule."""
    everything = list(kept.read("robust").values())
    parts = ["Every cell: a run of `python benchmarks/robust.py --out FILE`.", ""]
    for name, study in STUDIES.items():
        seeds = ", ".join(map(str, study.seeds))
        parts += [f"**{study.title}; seeds {seeds}; accuracy %.**", ""]
        parts += [_row(["algorithm", "aggregation", *study.attacks]), "|---" * (len(study.attacks) + 2) + "|"]
        for algorithm, rule in itertools.product(study.algorithms, RULES):
            lines = [line for line in everything if line["study"] == name]
            lines = [line for line in lines if _is_of(line["config"], algorithm=algorithm, aggregation=rule)]
            cells = [_outcome([line for line in lines if line["attack"] == attack]) for attack in study.attacks]
            parts.append(_row([f"`{algorithm}`", f"`{rule}`", *cells]))
        parts.append("")
    return "\n".join([*parts, f"Commits: {', '.join(sorted({line['origin']['commit'] for line in everything}))}."])


def _is_of(config: dict[str, Any], **settings: str) -> bool:
    return all(config[name] == value for name, value in settings.items())


def _outcome(lines: list[dict[str, Any]]) -> str:
    """The accuracies of the seeds; and in how many of them training diverged."""
    good = [line for line in lines if line["diverged"] is None]
    shown = [_spread(good, "accuracy_client_mean")] if good else []
    lost = len(lines) - len(good)
    return ", ".join([*shown, *([f"diverged ({lost} of {len(lines)})"] if lost else [])])


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
    "accuracy_against_total_bytes.svg": draw_total,
    "accuracy_with_noise.svg": draw_private,
}
OTHER_TABLES: dict[str, Callable[[], str]] = {
    **{f"private-{epsilon}": functools.partial(grid_table, f"private-{epsilon}") for epsilon in EPSILONS},
    "compression": compression_table,
    "robust": robust_table,
    "rounds": rounds_table,
    "total": total_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "run", "again", "render"))
    parser.add_argument("names", nargs="*", help="experiments; none for every one")
    arguments = parser.parse_args()
    known = [*EXPERIMENTS, *OWN_SCRIPTS]
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise SystemExit(f"unknown experiment {unknown[0]}; known: {', '.join(known)}")
    if arguments.action == "again" and not arguments.names:
        raise SystemExit("again: name the experiments whose kept runs may be replaced")
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
