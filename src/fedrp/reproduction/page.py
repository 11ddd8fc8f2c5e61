"""The page of a reproduction: table 2, the figures, and beside each what the paper claims and what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedrp.errors import ConfigError
from fedrp.files import writing
from fedrp.reproduction.claims import Curves, Verdict, about_bytes, about_m, about_rounds
from fedrp.reproduction.plan import ALONE, FEDADMM, FEDAVG, PRINTED, SUBSPACE, Figure
from fedrp.reproduction.traffic import Sent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "reproduction.md"
TABLE2_FILE = "table2.json"
_COLOURED = (FEDAVG, FEDADMM, SUBSPACE, PRINTED)  # alike in all panels, also where some curves are missing
# How the claims are to be read.
NOTES = (
    "FedRP stands for FedRP as printed. Its figures are of one client's own model, drawn at random.",
    "It has no noise: next to FedAvg with noise privacy is not equal.",
    "The paper counts payloads; a message has its framing beside.",
)


class Shown(NamedTuple):
    """A panel as far as its runs are done."""

    title: str
    curves: Curves
    missing: tuple[str, ...] = ()  # labels of curves that are not there


def write_table2(root: Path, lines: Sequence[Sent]) -> list[str]:
    """Keep the table, and return its part of the page."""
    with writing(root / TABLE2_FILE):
        (root / TABLE2_FILE).write_text(json.dumps([line._asdict() for line in lines], indent=2) + "\n")
    return ["## Table 2: bytes that a client sends in a round", "", *table2_lines(lines), ""]


def table2_lines(lines: Sequence[Sent]) -> list[str]:
    """The table, and what the paper claims."""
    rows = [
        f"| {line.what} | {line.numbers:,} | {line.bits:g} | {line.payload:,} | {line.message:,} | {line.paper or ''} |"
        for line in lines
    ]
    head = ["| | numbers | bits | payload B | message B | paper |", "|---|---:|---:|---:|---:|---:|"]
    return [*head, *rows, "", *claims_lines(about_bytes(lines))]


def write_figure(root: Path, figure: Figure, panels: Sequence[Shown], again: str) -> list[str]:
    """Draw a figure, and return its part of the page. A panel without curves is left out."""
    file = f"{figure.name}.svg"
    there = [panel for panel in panels if panel.curves]
    lines = [f"## {figure.name}: {figure.title}", "", f"`{again}`", ""]
    if there:
        with writing(root / file):
            draw(root / file, figure.title, figure.against, there)
        lines += [f"![{figure.title}]({file})", ""]
    for panel in panels:
        lines += [f"**{panel.title}**", ""]
        if panel.curves:
            lines += [*claims_lines(verdicts(figure.against, panel.curves)), "", *_numbers(panel.curves), ""]
        if panel.missing:
            lines += [f"Missing: {', '.join(panel.missing)}.", ""]
    return lines


def draw(path: Path, title: str, against: str, panels: Sequence[Shown]) -> None:
    """Draw panels beside each other, against "round" or "m". The same results give the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'fedrp[report]'") from None
    drawing = Drawing(figsize=(6.5 * len(panels), 5), layout="constrained")
    drawing.suptitle(title)
    for axes, panel in zip(drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        (_against_round if against == "round" else _against_m)(axes, panel.curves)
        axes.set_title(panel.title, fontsize="medium")
        axes.set_ylabel("test accuracy %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with matplotlib.rc_context({"svg.hashsalt": "fedrp"}):
        drawing.savefig(path, metadata={"Date": None})


def verdicts(against: str, curves: Curves) -> list[Verdict]:
    """What the paper claims of a panel."""
    return about_rounds(curves) if against == "round" else about_m(curves)


def write_page(root: Path, parts: Sequence[Sequence[str]], scale: str) -> Path:
    """The whole page."""
    lead = [f"# The FedRP paper, reproduced at scale `{scale}`", "", *NOTES, ""]
    with writing(root / PAGE):
        (root / PAGE).write_text("\n".join([*lead, *(line for lines in parts for line in lines)]))
    return root / PAGE


def claims_lines(told: Sequence[Verdict]) -> list[str]:
    """A table of claims; nothing if there are none."""
    rows = [f"| {v.claim} | {v.measured} | {'yes' if v.holds else '**no**'} |" for v in told]
    return ["| the paper claims | measured | holds |", "|---|---|---|", *rows] if rows else []


def _numbers(curves: Curves) -> list[str]:
    rows = [
        f"| {_named(label, result)} | {result['accuracy']:.2f} | {result['bytes_up']:,} | {result['seed']} |"
        for label, result in curves
    ]
    return ["| run | accuracy % | sent B | seed |", "|---|---:|---:|---:|", *rows]


def _named(label: str, result: Mapping[str, Any]) -> str:
    return label if result["dim"] is None or "m = " in label else f"{label}, m = {result['dim']:,}"


def _colours(curves: Curves) -> dict[str, str]:
    labels = dict.fromkeys((*_COLOURED, *(label for label, _ in curves)))
    return {label: f"C{number}" for number, label in enumerate(labels)}


def _against_round(axes: "Axes", curves: Curves) -> None:
    colours = _colours(curves)
    for label, result in curves:
        scored = [record for record in result["history"] if record.get("accuracy") is not None]
        if label == ALONE:
            axes.axhline(result["accuracy"], color="grey", linestyle="--", label=label)
        else:
            style = ":" if "DP" in label else "-"
            rounds, values = ([record[key] for record in scored] for key in ("round", "accuracy"))
            axes.plot(rounds, values, style, marker=".", color=colours[label], label=label)
    axes.set_xlabel("round")


def _against_m(axes: "Axes", curves: Curves) -> None:
    colours = _colours(curves)
    for name in dict.fromkeys(label for label, _ in curves):
        points = sorted((result["dim"], result["accuracy"]) for label, result in curves if label == name)
        axes.plot(*zip(*points, strict=True), marker="o", color=colours[name], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("m")
