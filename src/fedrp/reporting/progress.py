"""Progress of runs, for people: a table in a terminal, a line that renews itself in a notebook, else a line per round.

A display is told of each round by its line of `metrics.jsonl`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedrp.reporting.runs import ACCURACY, Line, is_number, measures_of, traffic_of

if TYPE_CHECKING:
    from rich.table import Table

Show = Callable[[str, Line], None]  # (run, its last round)

_WIDTH = 30  # of a bar in a notebook
_BLOCKS = "▁▂▃▄▅▆▇█"
_TREND = 12  # rounds that a sparkline shows


@contextmanager
def showing(names: Sequence[str], rounds: int) -> Iterator[Show]:
    """A display of runs of so many rounds, on standard error; it is told of each round."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        yield _renewed_lines(rounds)
    elif console.is_terminal:
        with _board(console, names, rounds) as show:
            yield show
    else:
        yield _lines(rounds)


@contextmanager
def asked_for(progress: bool | Show, name: str, rounds: int) -> Iterator[Show]:
    """What `simulate(progress=...)` asks for: nothing, a display of this run alone, or one that is open already."""
    if callable(progress):
        yield progress
    elif progress:
        with showing([name], rounds) as show:
            yield show
    else:
        yield lambda _run, _line: None


def score_text(line: Line) -> str:
    """How good a round was, by what the run is judged by."""
    name = next(iter(measures_of(line)), None)
    if name is None:
        return "not scored"
    value = line[name]
    if not is_number(value):
        return f"{name} is no number"
    return f"{value:.2f} %" if name == ACCURACY else f"{name} {value:.4g}"


def sparkline(values: Sequence[float]) -> str:
    """The trend of numbers, the lowest and the highest as far apart as a line of text allows."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * steps) if high > low else 0] for value in values)


@contextmanager
def _board(console: Any, names: Sequence[str], rounds: int) -> Iterator[Show]:
    from rich.live import Live

    told: dict[str, list[Line]] = {name: [] for name in names}
    with Live(board(told, rounds), console=console, auto_refresh=False) as live:

        def show(name: str, line: Line) -> None:
            told[name].append(line)
            live.update(board(told, rounds), refresh=True)

        yield show


def board(told: Mapping[str, Sequence[Line]], rounds: int) -> "Table":
    """A row per run: how far, how good, what it cost a client, how long it will take if rounds stay as they are."""
    from rich.box import SIMPLE
    from rich.filesize import decimal
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for name in ("run", "", "round", "score", "trend", "a client", "left"):
        table.add_column(name, justify="left" if name in ("run", "", "trend") else "right", no_wrap=True)
    for name, lines in told.items():
        done = lines[-1]["round"] if lines else 0
        bar = ProgressBar(total=rounds, completed=done, width=10)
        scored = [line for line in lines if measures_of(line)]
        values = [line[measures_of(line)[0]] for line in scored]
        trend = sparkline([value for value in values if is_number(value)][-_TREND:])
        score = score_text(scored[-1]) if scored else ""
        sent = sum(traffic_of(line) / max(1, line["participants"]) for line in lines)
        table.add_row(
            name, bar, f"{done}/{rounds}", score, trend, decimal(int(sent)) if lines else "", _left(lines, rounds)
        )
    return table


def _left(lines: Sequence[Line], rounds: int) -> str:
    """Minutes and seconds."""
    if not lines:
        return ""
    spent = [line["seconds"] + line["evaluation_seconds"] for line in lines]
    left = round(sum(spent) / len(spent) * (rounds - lines[-1]["round"]))
    hours, minutes = divmod(left // 60, 60)
    return f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"


def _renewed_lines(rounds: int) -> Show:
    """By IPython itself: rich would need ipywidgets as well."""
    display: Any = importlib.import_module("IPython.display").display  # untyped, where it is there at all
    handles: dict[str, Any] = {}

    def show(name: str, line: Line) -> None:
        done = "█" * (_WIDTH * line["round"] // rounds)
        about = f"{line['round']}/{rounds}  {score_text(line)}, {line['seconds']:.1f} s"
        text = {"text/plain": f"{name:<12} |{done:<{_WIDTH}}| {about}"}
        if name in handles:
            handles[name].update(text, raw=True)
        else:
            handles[name] = display(text, raw=True, display_id=True)

    return show


def _lines(rounds: int) -> Show:
    def show(name: str, line: Line) -> None:
        about = f"{score_text(line)}, {line['seconds']:.1f} s"
        print(f"{name} round {line['round']}/{rounds}: {about}", file=sys.stderr, flush=True)

    return show
