"""The figures of docs/results.md, drawn from what is kept."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import BUDGETS, EPSILONS, EXPERIMENTS, LENET_PARAMETERS, PRIVATE_DIMS
from kept_runs import kept_results, points
from paper import PAPER_FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# Li et al., "Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order Optimization" (DeComFL),
# ICLR 2025: MNIST, 100 clients, scalars that a client sends in the whole run. As published, not run here.
PUBLISHED = {"DeComFL (published)": ((30_000, 95.2), (200_000, 97.0))}


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


FIGURE_MAKERS: dict[str, Callable[[Path], None]] = {
    "accuracy_against_bytes.svg": draw_budget,
    "accuracy_against_total_bytes.svg": draw_total,
    "accuracy_with_noise.svg": draw_private,
    **PAPER_FIGURES,
}
