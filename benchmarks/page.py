"""Parts of the pages of measurements: what is between two comments is written there by what measures it."""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
FIGURES = PAGE.parent / "figures"
WIDTH = 100  # of a line of the page
_TIED = "\N{NO-BREAK SPACE}"  # no line ends here


def placed(name: str, text: str, page: Path = PAGE) -> None:
    """Put a text between the comments of this name; print one that the page leaves out."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        sys.stdout.write(f"{text.strip()}\n\n")
        return
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table, numbers to the right."""
    shown = [f"| {' | '.join(map(str, cells))} |" for cells in [header, *lines]]
    return "\n".join([shown[0], "|---" + "|---:" * (len(header) - 1) + "|", *shown[1:]])


def spread(median: float, bounds: Sequence[float], digits: int = 2) -> str:
    """A median and its range."""
    return f"{median:,.{digits}f} ({bounds[0]:,.{digits}f} to {bounds[1]:,.{digits}f})"


def filled(text: str) -> str:
    """A paragraph in lines that fit the page."""
    return _wrapped(re.sub(r" (?==)|(?<==) | (?=%)|(?<=\d,) (?=\d)", _TIED, text))


def command(line: str) -> str:
    """A command for a block of shell, over several lines where it is long; an option stays with its value."""
    return " \\\n".join(_wrapped(re.sub(r" (?!--)", _TIED, line), WIDTH - 2, after="  ").splitlines())


def remark(text: str) -> str:
    """A comment for a block of shell."""
    return _wrapped(text, before="# ", after="#   ")


def _wrapped(text: str, width: int = WIDTH, before: str = "", after: str = "") -> str:
    lines = textwrap.wrap(text, width, initial_indent=before, subsequent_indent=after, break_on_hyphens=False)
    return "\n".join(lines).replace(_TIED, " ")


def shell(*parts: str) -> str:
    """A block of shell."""
    return "\n".join(["```sh", *parts, "```"])


def came_from(origins: Iterable[dict[str, Any]]) -> str:
    """A block for under a table: the commands that made it, each once, with commit, date and machine."""
    made: dict[str, list[str]] = {}
    for origin in origins:
        commands = made.setdefault(f"commit {origin['commit']}, {origin['date']}, {origin['machine']}", [])
        if origin["command"] not in commands:
            commands.append(origin["command"])
    if not made:
        raise SystemExit("nothing is kept yet: measure first")
    return shell(*(line for told, commands in made.items() for line in (remark(told), *map(command, commands))))
