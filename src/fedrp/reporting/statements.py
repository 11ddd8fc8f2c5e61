"""Statements about privacy on the terminal: a table of all adversaries, a line to quote for each, what they assume."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from fedrp.privacy.bounds import MEANINGS

Statement = Mapping[str, Any]  # `Guarantee.as_json()`, as a result has it


def quote(item: Statement, marks: Sequence[int] = ()) -> str:
    """One line that can stand alone: against whom, how much, by which bound, for which neighbours, or why nothing."""
    if item["epsilon"] is None:
        return f"against {item['adversary']}: no guarantee ({item['reason']})"
    amount = f"epsilon at most {upwards(item['epsilon'])} at delta {item['delta']:g}"
    assumed = f"; assuming {' '.join(f'[{mark}]' for mark in sorted(marks))}" if marks else ""
    named = f" ({item['bound']} bound)" if item["epsilon"] else ""
    return f"against {item['adversary']}: {amount}{named}; neighbours: {item['adjacency']}{assumed}"


def upwards(epsilon: float) -> str:
    """An upper bound in three digits, never rounded down but for the last digits of a computation."""
    if epsilon == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / step - 1e-6) * step:.3g}"


def statement_table(items: Sequence[Statement]) -> Table:
    """A line per adversary, and where statements are about clients and about records a line for each."""
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("against", overflow="fold")
    several = len({_unit(item) for item in items}) > 1
    if several:
        table.add_column("unit", no_wrap=True)
    for name in ("epsilon", "delta", "bound"):
        table.add_column(name, justify="left" if name == "bound" else "right", no_wrap=True)
    for item in items:
        numbers = ("none", "", "") if item["epsilon"] is None else _numbers(item)
        table.add_row(item["adversary"], *[_unit(item)] * several, *numbers)
    return table


def _unit(item: Statement) -> str:
    """Whom it protects: neighbours differ by "one record ..." or "one client ..."."""
    return "record" if str(item["adjacency"]).startswith("one record") else "client"


def _numbers(item: Statement) -> tuple[str, str, str]:
    return upwards(item["epsilon"]), f"{item['delta']:g}", item["bound"] if item["epsilon"] else "nothing is seen"


def statement_lines(items: Sequence[Statement]) -> list[str]:
    """A line to quote per adversary, then what the bounds are and what is assumed, each once."""
    proved = [item for item in items if item["epsilon"] is not None]
    assumptions = list(dict.fromkeys(text for item in proved for text in item["assumptions"]))
    marks = {text: number for number, text in enumerate(assumptions, 1)}
    lines = ["to quote:"]
    for item in items:
        own = item["assumptions"] if item in proved else []
        lines.append(f"  {quote(item, [marks[text] for text in own])}")
    named = dict.fromkeys(item["bound"] for item in proved if item["epsilon"])
    lines += [f"{name} bound: {MEANINGS[name]}" for name in named if name in MEANINGS]
    return [*lines, *(f"[{number}] {text}" for text, number in marks.items())]
