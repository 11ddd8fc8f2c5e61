"""Progress is shown as the place allows: bars in a terminal, a line that is renewed in a notebook, else plain lines."""

import builtins
import os
import pty
import subprocess
import sys
import types

import pytest

from fedrp import simulate
from fedrp.progress import showing
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


def test_in_a_terminal_there_is_a_bar() -> None:
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
        show("fedavg", 1, "50.00 %", 0.25)
        show("fedavg", 2, "auroc 0.9", 0.25)
    assert [how for how, _ in shown] == ["display", "update"]
    assert "1/4  50.00 %, 0.2 s" in shown[0][1]
    assert "2/4  auroc 0.9" in shown[1][1]
