"""Ctrl-C at any moment is one line and exit code 130, whatever the program is doing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers import command, environment

# Ends the wait for a moment of the start: the import of a module, which is told as `-X importtime` tells it.
MOMENTS = [
    "click",
    "fedrp.config.run",
    "fedrp.cli.run",
    "numpy",
    "torch._C",
    "torch.nn.modules",
    "fedrp.backends.states",
]


def as_in_a_terminal() -> None:
    """A job in the background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(line: list[str]) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, **pipes, env=environment(), start_new_session=True, preexec_fn=as_in_a_terminal)


@pytest.mark.parametrize("moment", MOMENTS)
def test_while_it_imports(moment: str, images: Path, tmp_path: Path) -> None:
    options = [f"--dataset=npz:{images}", "--clients=3", "--workers=2", f"--out={tmp_path / 'run'}"]
    _, *rest = command("run", *options)
    process = started([sys.executable, "-X", "importtime", *rest])
    rescue = threading.Timer(60, process.kill)
    rescue.start()
    shown = []
    for line in process.stderr:
        shown.append(line)
        if line.rpartition("|")[2].strip() == moment:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
            break
    printed, rest_shown = process.communicate()
    rescue.cancel()
    told = [line for line in (*shown, *rest_shown.splitlines()) if not line.startswith("import time:")]
    assert (process.returncode, printed, told) == (130, "", ["fedrp: stopped"])


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5, 3.0])
def test_after_a_while(seconds: float, images: Path, tmp_path: Path) -> None:
    options = [f"--dataset=npz:{images}", "--clients=3", "--rounds=2000", "--workers=2", f"--out={tmp_path / 'run'}"]
    process = started(command("run", *options))
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    printed, shown = process.communicate(timeout=60)
    told = [line for line in shown.splitlines() if " round " not in line]
    assert (process.returncode, printed, len(told)) == (130, "", 1), shown
    assert told[0].startswith("fedrp: stopped")


def test_one_that_is_ignored_stays_ignored(images: Path) -> None:
    """As under nohup, or in the background of a shell."""
    line = command("run", f"--dataset=npz:{images}", "--clients=3", "--rounds=1", "--json")
    ignored = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    program = f"{ignored}import os; os.execv(sys.executable, {line!r})"
    process = started([sys.executable, "-c", program])
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    printed, shown = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert printed.startswith("{")


def test_the_module_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "fedrp", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(",")[0], done.stderr) == (0, "fedrp", "")
