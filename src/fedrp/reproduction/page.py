"""The page of a reproduction: table 2, the figures, and beside each what the paper claims and what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrp.errors import ConfigError
from fedrp.files import writing
from fedrp.reproduction.claims import Curves, Verdict, about_bytes, about_m, about_rounds
from fedrp.reproduction.plan import ALONE, Figure
from fedrp.reproduction.traffic import Sent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "reproduction.md"
TABLE2_FILE = "table2.json"


def write_table2(root: Path, lines: Sequence[Sent]) -> list[str]:
    """Keep the table, and return its part of the page."""
    with writing(root / TABLE2_FILE):
        (root / TABLE2_FILE).write_text(json.dumps([line._asdict() for line in lines], indent=2) + "\n")
    rows = [
        f"| {line.what} | {line.numbers:,} | {line.bits:g} | {line.payload:,} | {line.message:,} | {line.paper or ''} |"
        for line in lines
    ]
    head = ["| | numbers | bits | payload B | message B | paper |", "|---|---:|---:|---:|---:|---:|"]
    return ["## Table 2: bytes that a client sends in a round", "", *head, *rows, "", *_claims(about_bytes(lines)), ""]


def write_figure(root: Path, figure: Figure, curves: Sequence[Curves], again: str) -> list[str]:
    """Draw a figure, and return its part of the page."""
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'fedrp[report]'") from None
    drawing = Drawing(figsize=(6.5 * len(curves), 5), layout="constrained")
    drawing.suptitle(figure.title)
    lines = [f"## {figure.name}: {figure.title}", "", f"![{figure.title}]({figure.name}.svg)", "", f"`{again}`", ""]
    about = about_rounds if figure.against == "round" else about_m
    draw = _against_round if figure.against == "round" else _against_m
    for axes, panel, own in zip(drawing.subplots(1, len(curves), squeeze=False)[0], figure.panels, curves, strict=True):
        draw(axes, own)
        axes.set_title(panel.title, fontsize="medium")
        axes.set_ylabel("test accuracy %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        lines += [f"**{panel.title}**", "", *_claims(about(own)), "", *_numbers(own), ""]
    with writing(root / f"{figure.name}.svg"):
        drawing.savefig(root / f"{figure.name}.svg", metadata={"Date": None})
    return lines


def write_page(root: Path, parts: Sequence[Sequence[str]], scale: str) -> Path:
    """The whole page."""
    lead = [f"# The FedRP paper, reproduced at scale `{scale}`", ""]
    with writing(root / PAGE):
        (root / PAGE).write_text("\n".join([*lead, *(line for lines in parts for line in lines)]))
    return root / PAGE


def _claims(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [f"| {v.claim} | {v.measured} | {'yes' if v.holds else '**no**'} |" for v in verdicts]
    return ["| the paper claims | measured | holds |", "|---|---|---|", *rows]


def _numbers(curves: Curves) -> list[str]:
    rows = [
        f"| {label}{_m(result)} | {result['accuracy']:.2f} | {result['bytes_up']:,} | {result['seed']} |"
        for label, result in curves
    ]
    return ["| run | accuracy % | sent B | seed |", "|---|---:|---:|---:|", *rows]


def _m(result: Mapping[str, Any]) -> str:
    return "" if result["dim"] is None else f", m = {result['dim']:,}"


def _against_round(axes: "Axes", curves: Curves) -> None:
    for label, result in curves:
        scored = [record for record in result["history"] if record.get("accuracy") is not None]
        if label == ALONE:
            axes.axhline(result["accuracy"], color="grey", linestyle="--", label=label)
        else:
            style = ":" if "DP" in label else "-"
            rounds, values = ([record[key] for record in scored] for key in ("round", "accuracy"))
            axes.plot(rounds, values, style, marker=".", label=label)
    axes.set_xlabel("round")


def _against_m(axes: "Axes", curves: Curves) -> None:
    for name in dict.fromkeys(label for label, _ in curves):
        points = [(result["dim"], result["accuracy"]) for label, result in curves if label == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("m")
