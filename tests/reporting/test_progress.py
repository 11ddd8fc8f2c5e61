"""Progress is shown as the place allows: a table in a terminal, a renewed line in a notebook, else plain lines."""

import builtins
import io
import os
import pty
import subprocess
import sys
import types

import pytest
from rich.console import Console

from fedrp import simulate
from fedrp.reporting.progress import board, score_text, showing, sparkline
from helpers import environment, tiny_config, tiny_task

PROGRAM = """
from fedrp import simulate
from helpers import tiny_config, tiny_task
simulate(tiny_config("fedavg"), tiny_task(), progress=True)
"""


def test_without_a_terminal_there_is_a_line_per_round(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(tiny_config("fedavg"), tiny_task(), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(",")[0] for line in lines] == [
        f"fedavg round {line['round']}/3: {line['accuracy']:.2f} %" for line in result.history
    ]


def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tiny_config("fedavg"), tiny_task())
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_there_is_a_table_with_a_bar() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM]
    path = os.pathsep.join(["tests/support", environment().get("PYTHONPATH", "")])
    place = {**environment(), "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": path}
    subprocess.run(command, stderr=theirs, env=place, check=True, timeout=120)
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    assert "━" in shown.decode()
    assert "3/3" in shown.decode()
    assert "0:00" in shown.decode()  # left


class ZMQInteractiveShell:
    """What a notebook's kernel calls its shell; rich tells notebooks by this name."""


def test_in_a_notebook_one_line_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython is no dependency: this is the part of `IPython.display` that is used, by its documentation."""
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(("update", data["text/plain"]))

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(("display", data["text/plain"]))
        return Handle()

    module = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    with showing(["fedavg"], 4) as show:
        show("fedavg", {"round": 1, "accuracy": 50.0, "accuracy_average": 50.0, "seconds": 0.25})
        show("fedavg", {"round": 2, "auroc": 0.9, "auroc_average": 0.9, "loss_average": 1.0, "seconds": 0.25})
    assert [how for how, _ in shown] == ["display", "update"]
    assert "1/4  50.00 %, 0.2 s" in shown[0][1]
    assert "2/4  auroc 0.9" in shown[1][1]


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_trend_goes_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 3.5, 7.0, 7.0]) == "▁▅██"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_a_round_is_told_by_what_the_run_is_judged_by() -> None:
    assert score_text({"round": 1}) == "not scored"
    assert (
        score_text({"auroc": 0.91234, "auroc_average": 0.9, "accuracy": 1.0, "accuracy_average": 1.0}) == "auroc 0.9123"
    )
    assert score_text({"loss": None, "loss_average": None}) == "loss is no number"


def rows(told: dict[str, list[dict[str, object]]], rounds: int) -> list[str]:
    """The lines of the table below its head."""
    console = Console(file=io.StringIO(), width=120)
    console.print(board(told, rounds))
    return console.file.getvalue().splitlines()[3:-1]


def test_the_table_says_how_good_how_costly_and_how_long() -> None:
    """Two rounds of 30 s each in five; 1,000 bytes of each of two clients in each."""
    line = {
        "participants": 2,
        "seconds": 29.0,
        "evaluation_seconds": 1.0,
        "bytes_up_total": 1500,
        "bytes_keys_down_total": 500,
    }
    first = {**line, "round": 1, "accuracy": 10.0, "accuracy_average": 10.0}
    lines = [first, {**line, "round": 2}]  # the second was not scored
    done, waiting = rows({"fedrp": lines, "fwc": []}, 5)
    assert "2/5" in done
    assert "10.00 %" in done
    assert "2.0 kB" in done
    assert done.rstrip().endswith("1:30")
    assert "0/5" in waiting
    assert "%" not in waiting
