"""Progress of runs, for people: bars in a terminal, a line that renews itself in a notebook, else a line per round."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Show = Callable[[str, int, str, float], None]  # (run, its last round, how good that was, seconds that it took)

_WIDTH = 30  # of a bar in a notebook


@contextmanager
def showing(names: Sequence[str], rounds: int) -> Iterator[Show]:
    """A display of runs of so many rounds, on standard error; it is told of each round."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        yield _renewed_lines(rounds)
    elif console.is_terminal:
        with _bars(console, names, rounds) as show:
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
        yield lambda _run, _round, _now, _seconds: None


@contextmanager
def _bars(console: Any, names: Sequence[str], rounds: int) -> Iterator[Show]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        tasks = {name: progress.add_task(name, total=rounds, now="", start=False) for name in names}

        def show(name: str, round_: int, now: str, seconds: float) -> None:  # noqa: ARG001 - the bar has a clock
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=round_, now=now)

        yield show


def _renewed_lines(rounds: int) -> Show:
    """By IPython itself: rich would need ipywidgets as well."""
    display: Any = importlib.import_module("IPython.display").display  # untyped, where it is there at all
    handles: dict[str, Any] = {}

    def show(name: str, round_: int, now: str, seconds: float) -> None:
        done = "█" * (_WIDTH * round_ // rounds)
        text = {"text/plain": f"{name:<12} |{done:<{_WIDTH}}| {round_}/{rounds}  {now}, {seconds:.1f} s"}
        if name in handles:
            handles[name].update(text, raw=True)
        else:
            handles[name] = display(text, raw=True, display_id=True)

    return show


def _lines(rounds: int) -> Show:
    def show(name: str, round_: int, now: str, seconds: float) -> None:
        print(f"{name} round {round_}/{rounds}: {now}, {seconds:.1f} s", file=sys.stderr, flush=True)

    return show
