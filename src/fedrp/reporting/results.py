"""Many runs as one table: for the terminal, or as comma-separated values for a spreadsheet or pandas."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fedrp.reporting.progress import score_text
from fedrp.reporting.runs import Run, measures_of

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a spreadsheet begins to compute


def results_csv(runs: Sequence[Run]) -> str:
    """A row per run: its folder, its state, what its result says; of a run that goes on, its settings."""
    rows = [{"folder": run.name, "state": run.state, **_flat(run.result or run.config)} for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["folder", "state"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _as_text(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _flat(values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, list | dict)}


def _as_text(value: object) -> object:
    """Words as words: the name of a folder or a data set is no formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def results_table(runs: Sequence[Run]) -> Table:
    """What one looks for first."""
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for name in ("folder", "algorithm", "data", "model"):
        table.add_column(name, overflow="fold")
    for name in ("m", "state", "score", "sent B", "recv B", "eps", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        known, config = run.result or {}, run.config
        last = run.result or next((line for line in reversed(run.history) if measures_of(line)), {})
        dim = config.get("dim")
        table.add_row(
            *(escape(str(text)) for text in (run.name, *(config[name] for name in ("algorithm", "dataset", "model")))),
            *("" if dim is None else f"{dim:,}", run.state, score_text(last) if last else ""),
            *(_number(known.get(name), ",") for name in ("bytes_up", "bytes_down")),
            *(_number(known.get("epsilon"), ".2f", "none" if known else ""), _number(known.get("seconds"), ".1f")),
        )
    return table


def _number(value: object, form: str, missing: str = "") -> str:
    return format(value, form) if isinstance(value, int | float) else missing
