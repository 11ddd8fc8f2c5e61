"""Fits of growth and memory find the function that made the numbers, and their pages are written from what is kept."""

import importlib
import os
import sys

import numpy as np
import pytest

from helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # where a script finds its siblings
growth = importlib.import_module("growth")
memory = importlib.import_module("memory")
ORIGIN = {"command": "python some.py", "commit": "abc", "date": "today", "machine": "some"}


def test_a_line_is_found_and_never_falls() -> None:
    x = [10, 100, 1000]
    line = growth.fitted(x, [0.5 + 0.002 * place for place in x])
    assert (line.a, line.b) == pytest.approx((0.5, 0.002))
    assert line.worst < 1e-9
    falling = growth.fitted(x, [3.0, 2.0, 1.0])
    assert falling.b == 0
    assert falling.worst > 0.3


def test_the_cost_of_a_million_clients_needs_uploads_of_two_lengths() -> None:
    short = {"count": 1000, "dim": 1000, "seconds": 1000 * (20e-6 + 1e-9 * 1000)}
    long = {"count": 10, "dim": 61_706, "seconds": 10 * (20e-6 + 1e-9 * 61_706)}
    assert growth.on_paper([short]) == ""
    said = " ".join(growth.on_paper([short, long]).split())
    assert "20.0 µs, and 1.00 ns for each of its numbers" in said
    assert "m = 1,000: 21 s and 4 GB; LeNet-5 as a whole: 82 s and 247 GB; VGG-16 as a whole: 37 h and 537 TB" in said


def test_the_figure_of_growth_is_shown_where_there_are_curves() -> None:
    curve = {"axis": "clients", "x": [10, 100], "seconds": [0.1, 1.0], "a": 0.0, "b": 0.01, "worst": 0.02}
    text = growth.rendered({"rounds": {"origin": ORIGIN, "curves": {"fedavg, clients": curve}}})
    assert "| fedavg, clients | 10: 0.1 s | 100: 1 s | 0 + 0.01 clients | 2 % |" in text
    assert growth.FIGURE in text


def test_the_function_of_memory_is_found_and_shown() -> None:
    true = [450.0, 80.0, 0.02, 1.5, 5.0, 2.0]
    megabytes = [float(np.dot(memory.terms(point), true)) for point in memory.POINTS]
    fit = memory.fitted(memory.POINTS, megabytes)
    assert [fit[term] for term in memory.TERMS] == pytest.approx(true, rel=1e-6)
    text = memory.rendered({"memory": {"origin": ORIGIN, "points": memory.POINTS, "megabytes": megabytes}})
    assert "MB = 450 + 80 W + 0.020 K + 1.50 C N + 5.00 W G N + 2.00 D" in text


def test_memory_is_counted_of_a_process_and_all_below_it() -> None:
    assert os.getpid() in memory.family(os.getppid())
    assert memory.proportional(os.getpid()) > 1
