"""Many runs in one table; one result in a notebook."""

import csv
import html
import io
import json
import re
import sys
from pathlib import Path

import pytest

from fedrp import RunResult, simulate
from fedrp.cli import main
from fedrp.reporting.page import plotly_script
from helpers import tiny_config, tiny_task


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs at different depths, one that goes on, one that is damaged, and a file of someone else's."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("=1+1", "deep/er", "going", "damaged"):
        simulate(tiny_config("fedavg", rounds=2), tiny_task(), out=root / name)
    (root / "going" / "result.json").unlink()
    (root / "damaged" / "result.json").write_text("{")
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text("{}")
    return root


def test_all_runs_below_a_folder_are_rows_of_a_csv(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["results", str(root), "--csv"])
    shown = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert [row["folder"] for row in rows] == ["'=1+1", "deep/er", "going"]  # a spreadsheet does not compute the first
    result = json.loads((root / "deep" / "er" / "result.json").read_text())
    assert float(rows[1]["accuracy"]) == result["accuracy"]
    assert int(rows[1]["bytes_up"]) == result["bytes_up"]
    assert (rows[2]["state"], rows[2]["accuracy"], rows[2]["algorithm"]) == ("round 2 of 2", "", "fedavg")
    assert shown.err.count("\n") == 1
    assert "result.json cannot be read" in shown.err


def test_without_csv_there_is_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["results", str(root)])
    accuracy = json.loads((root / "deep" / "er" / "result.json").read_text())["accuracy"]
    assert capsys.readouterr().out.count(f"{accuracy:.2f} %") == 3


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["results", str(tmp_path)])
    assert stop.value.code == 2
    assert "holds no runs" in capsys.readouterr().err


# --- in a notebook ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> RunResult:
    return simulate(tiny_config("fedavg"), tiny_task())


def test_a_result_shows_its_report_in_a_frame_that_may_only_draw(result: RunResult) -> None:
    shown = result._repr_html_()
    assert re.match(r'<iframe srcdoc="[^"]*" sandbox="allow-scripts" ', shown)
    assert f'<data value="{result.accuracy!r}">' in html.unescape(shown)


def test_without_plotly_a_result_shows_its_table(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    shown = result._repr_html_()
    assert "iframe" not in shown
    assert f"{result.accuracy:.2f} %" in shown
