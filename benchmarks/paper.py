"""The paper's table and figures from kept runs: which run each curve of `fedrp reproduce --scale standard` is.

Curves that are declared and not run yet are left out, and named.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kept_runs import kept_results
from page import command, filled, remark, shell

from fedrp.reproduction.page import Shown, claims_lines, draw, table2_lines, verdicts
from fedrp.reproduction.plan import ALONE, DIMS, EPSILONS, FEDADMM, FEDAVG, PRINTED, SUBSPACE, Curve, Figure, figures
from fedrp.reproduction.traffic import table2

NAMES = ("fig1", "fig2", "fig3")
SCALE = "standard"

Place = tuple[str, str]  # experiment and run
Places = Mapping[str, Place]  # by the name of the curve


def _noisy(experiment: str, epochs: int) -> dict[str, Place]:
    return {f"FedAvg + DP, epsilon {epsilon:g}": (experiment, f"fedavg-dp-{epsilon:g}") for epsilon in EPSILONS[epochs]}


def _dims(experiment: str, curve: str, run: str, dims: Iterable[int]) -> dict[str, Place]:
    return {f"{curve}, m = {m:,}": (experiment, f"{run}-{m}") for m in dims}


# Of each figure: the curves of MNIST, and those of CIFAR-10.
PLACES: dict[str, tuple[Places, Places]] = {
    "fig1": (
        {
            FEDAVG: ("fedavg-grid", "fedavg-lr0.4"),
            FEDADMM: ("mnist", "fedadmm"),
            SUBSPACE: ("bits", "subspace-4064-1"),
            f"{PRINTED}, m = 1,000": ("budget", "fedrp-1000"),
            **_noisy("paper-mnist", 1),
            ALONE: ("mnist", "fwc"),
        },
        {
            FEDAVG: ("cifar-40", "fedavg"),
            FEDADMM: ("cifar-40", "fedadmm"),
            f"{SUBSPACE}, m = 84,640": ("cifar-40", "subspace-0.1"),
            f"{SUBSPACE}, m = n": ("cifar-40", "subspace-1"),
            f"{PRINTED}, m = 10,000": ("cifar-40", "fedrp-10000"),
            **_noisy("cifar-40", 1),
            ALONE: ("cifar-40", "fwc"),
        },
    ),
    "fig2": (
        {
            FEDAVG: ("five-epochs", "fedavg"),
            FEDADMM: ("paper-mnist-five", "fedadmm"),
            SUBSPACE: ("bits-five-epochs", "default"),
            f"{PRINTED}, m = 1,000": ("paper-mnist-five", "fedrp-1000"),
            **_noisy("paper-mnist-five", 5),
            ALONE: ("paper-mnist-five", "fwc"),
        },
        {
            FEDAVG: ("cifar-five-epochs", "fedavg"),
            f"{SUBSPACE}, m = 84,640": ("cifar-five-epochs", "subspace-0.1"),
            f"{PRINTED}, m = 10,000": ("cifar-five-epochs", "fedrp-10000"),
        },
    ),
    "fig3": (
        {
            **_dims("budget", SUBSPACE, "fedrp-subspace", DIMS),
            **_dims("budget", PRINTED, "fedrp", DIMS),
        },
        {
            **_dims("cifar-dims", SUBSPACE, "fedrp-subspace", (100, 1000, 5000, 10000, 50000)),
            **_dims("cifar-dims", PRINTED, "fedrp", (100, 10000, 50000)),
        },
    ),
}


def figure_of(name: str) -> Figure:
    """What `fedrp reproduce` draws."""
    (figure,) = figures(SCALE, (name,))
    return figure


def places_of(figure: Figure) -> list[tuple[str, Curve, Place]]:
    """The title of the panel of each curve, the curve, and the run that it is."""
    return [
        (panel.title, curve, places[curve.name])
        for panel, places in zip(figure.panels, PLACES[figure.name], strict=True)
        for curve in panel.curves
    ]


def shown(figure: Figure) -> list[Shown]:
    """Its panels, as far as runs are kept."""
    found = {(title, curve.name): _kept(place) for title, curve, place in places_of(figure)}
    return [
        Shown(
            panel.title,
            [(curve.label, result) for curve in panel.curves if (result := found[panel.title, curve.name])],
            tuple(curve.name for curve in panel.curves if not found[panel.title, curve.name]),
        )
        for panel in figure.panels
    ]


def _kept(place: Place) -> dict[str, Any] | None:
    """The first seed's result, with the mean of all seeds as its accuracy."""
    results = kept_results(*place)
    return {**results[0], "accuracy": statistics.mean(result["accuracy"] for result in results)} if results else None


def draw_figure(name: str, path: Path) -> None:
    """Draw what is kept of a figure; nothing where nothing is."""
    figure = figure_of(name)
    if there := [panel for panel in shown(figure) if panel.curves]:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path, figure.title, figure.against, there)


def figure_table(name: str) -> str:
    """What the paper claims of each panel, what was measured, whether it holds; and what was not run yet."""
    figure = figure_of(name)
    parts = []
    for panel in shown(figure):
        claims = claims_lines(verdicts(figure.against, panel.curves))
        parts.append(filled(f"**{panel.title}.**" + ("" if claims else " Too little is kept for a claim.")))
        if claims:
            parts.append("\n".join(claims))
        if panel.missing:
            parts.append(filled(f"Declared, and not run yet: {'; '.join(panel.missing)}."))
    results = [result for _, _, place in places_of(figure) for result in kept_results(*place)]
    commits = ", ".join(sorted({result["origin"]["commit"] for result in results}))
    unfinished = dict.fromkeys(place[0] for _, _, place in places_of(figure) if not kept_results(*place))
    lines = [remark(f"commits {commits}")] if results else []
    lines.append(f"fedrp reproduce {name} --scale {SCALE}")
    if unfinished:
        lines += [remark("what is missing:"), command(f"python benchmarks/results.py run {' '.join(unfinished)}")]
    return "\n\n".join([*parts, shell(*lines)])


def bytes_table() -> str:
    """Table 2, measured now on encoded messages."""
    return "\n\n".join(["\n".join(table2_lines(table2())), shell("fedrp reproduce table2")])


PAPER_TABLES: dict[str, Callable[[], str]] = {
    "paper-table2": bytes_table,
    **{f"paper-{name}": functools.partial(figure_table, name) for name in NAMES},
}
PAPER_FIGURES: dict[str, Callable[[Path], None]] = {
    f"paper_{name}.svg": functools.partial(draw_figure, name) for name in NAMES
}
