"""Measured tables in docs/performance.md: each between two comments, and written there by what measures it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
FIGURES = PAGE.parent / "figures"


def placed(name: str, text: str, page: Path = PAGE) -> None:
    """Put a text between the comments of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no place for it: {begin} ... {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [header, rule, *lines])


def spread(median: float, bounds: Sequence[float], digits: int = 2) -> str:
    """A median and its range."""
    return f"{median:,.{digits}f} ({bounds[0]:,.{digits}f} to {bounds[1]:,.{digits}f})"


def came_from(origins: Iterable[dict[str, Any]]) -> str:
    """A line for under a table: where its numbers come from, each origin once."""
    lines = {f"`{o['command']}`, commit {o['commit']}, {o['date']}, {o['machine']}" for o in origins}
    if not lines:
        raise SystemExit("nothing is kept yet: measure first")
    return "Made by " + "; ".join(sorted(lines)) + "."
