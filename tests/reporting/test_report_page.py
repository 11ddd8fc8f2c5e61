"""The page of a report, as far as it can be read without a browser: where numbers come from, what stays text."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedrp import Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import methods
from fedrp.cli.common import read_settings
from fedrp.cli.run import run as run_command
from fedrp.errors import ConfigError, DataError
from fedrp.learning.layout import layout_of
from fedrp.reporting.markup import Markup, element, script_json, table
from fedrp.reporting.page import page, policy, write_report
from fedrp.reporting.runs import Run, read_runs
from fedrp.reporting.sections import again
from helpers import tiny_config, tiny_task

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&\u2028"


class Numbers(HTMLParser):
    """The exact numbers of a page, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.values: set[float] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "data":
            self.values.add(float(dict(attrs)["value"] or "nan"))


def numbers_of(text: str) -> set[float]:
    parser = Numbers()
    parser.feed(text.partition("<script")[0])
    return parser.values


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "one"
    simulate(tiny_config("fedrp", projection="gaussian"), tiny_task(), out=out)
    return out


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A finished run, to be altered."""
    return Path(shutil.copytree(finished, tmp_path / "one"))


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_every_number_of_the_run_is_in_a_table(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    shown = numbers_of(page(read_runs([folder])))
    ends = ("", "_average", "_client_min", "_client_mean", "_client_max")
    expected = [result[f"{name}{end}"] for name in ("accuracy", "loss") for end in ends]
    expected += [result[f"bytes_{use}_{way}"] for use in ("payload", "framing", "keys") for way in ("up", "down")]
    expected += [result[name] for name in ("bytes_up", "bytes_down", "seconds", "seconds_per_round", "peak_rss_mb")]
    expected += [line[name] for line in result["history"] for name in ("accuracy", "loss_average", "consensus_bound")]
    assert not set(expected) - shown


def test_bytes_so_far_are_those_of_all_messages(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (run,) = read_runs([folder])
    total = sum(line[f"bytes_{name}_total"] for line in lines for name in ("up", "down", "keys_up", "keys_down"))
    assert list(run.bytes_so_far()) == [1, 2, 3]
    assert run.bytes_so_far()[3] == pytest.approx(total / 4)


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(folder: Path) -> None:
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])  # the last one is being written
    (run,) = read_runs([folder])
    assert run.state == "round 2 of 3"
    assert run.headline == "accuracy"
    assert json.loads(lines[1])["loss"] in numbers_of(page([run]))


def test_the_result_of_an_earlier_sitting_is_not_that_of_more_rounds(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "seconds": 1.0}) + "\n")
    (run,) = read_runs([folder])
    assert run.result is None


def test_a_run_without_a_score_has_a_page(folder: Path) -> None:
    for name in ("result.json", "metrics.jsonl"):
        (folder / name).unlink()
    (run,) = read_runs([folder])
    assert run.state == "round 0 of 3"
    assert "round 0 of 3" in page([run])


def test_a_metric_of_the_task_comes_first(tmp_path: Path) -> None:
    task = dataclasses.replace(tiny_task(), metrics={"spread <b>": lambda outputs, targets: outputs.std()})
    simulate(tiny_config("fedavg"), task, out=tmp_path)
    (run,) = read_runs([tmp_path])
    assert run.measures == ["spread <b>", "accuracy", "loss"]
    assert "<b>" not in page([run]).partition("<script")[0]


def test_numbers_that_are_none_are_not_drawn(folder: Path) -> None:
    """A loss that is not finite is null in a run's files; a file by someone else may hold NaN."""
    result = json.loads((folder / "result.json").read_text())
    for name in ("loss", "loss_client_min", "bytes_keys_up", "consensus_bound"):
        result[name] = float("nan")
    result["accuracy"] = "<i>"
    (folder / "result.json").write_text(json.dumps(result))
    assert "<i>" not in page(read_runs([folder])).partition("<script")[0]


# --- names -----------------------------------------------------------------------------------------------------------


def test_runs_of_a_comparison_come_in_its_order_with_names_that_differ(tmp_path: Path, task: Task) -> None:
    for name, dim in (("b", 3), ("a", 4), ("c", 4)):
        simulate(tiny_config("fedrp", rounds=1, dim=dim), task, out=tmp_path / name)
    assert [run.name for run in read_runs([tmp_path])] == ["fedrp (m=4), a", "fedrp (m=3)", "fedrp (m=4), c"]
    (tmp_path / "compare.json").write_text(json.dumps({"algorithms": "c,b,a"}))
    assert [run.folder.name for run in read_runs([tmp_path])] == ["c", "b", "a"]


def test_text_stays_text(folder: Path) -> None:
    (run,) = read_runs([folder])
    config = {**run.config, "dataset": HOSTILE, "model": HOSTILE}
    text = page([run._replace(name=HOSTILE, config=config)])
    assert HOSTILE not in text
    parser = Numbers()
    parser.feed(text.partition("<script")[0])
    assert "img" not in parser.tags
    assert len(re.findall("<script", text)) == len(re.findall("</script>", text)) == 3


def test_what_is_inlined_as_json_reads_back() -> None:
    text = script_json({"name": HOSTILE})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_only_markup_is_markup() -> None:
    assert element("p", {"title": '"<'}, "<b>", Markup("<i></i>")) == '<p title="&quot;&lt;">&lt;b&gt;<i></i></p>'
    assert "&lt;b&gt;" in table("<b>", ["<b>"], [["<b>"]])
    assert "<b>" not in table("<b>", ["<b>"], [["<b>"]])


def test_the_page_may_do_nothing_but_run_its_own_scripts(folder: Path) -> None:
    text = page(read_runs([folder]))
    (found,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in found.replace("&#x27;", "'").split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-\S{44}' 'sha256-\S{44}'", rules["script-src"])
    assert "connect-src 'self'" in policy([], live=True)


# --- again -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", methods())
def test_the_command_of_a_run_asks_for_the_same_settings(algorithm: str, tmp_path: Path) -> None:
    changes = {"secure_aggregation": True} if algorithm == "fedavg-dp" else {}
    size = layout_of(tiny_task().model()).size
    config = resolved(tiny_config(algorithm, dim=None, lr=None, seed=5, **changes), size).stored
    command = again(Run("a", tmp_path, dataclasses.asdict(config), [], engine="sequential"))
    words = shlex.split(command)
    assert words[:2] == ["fedrp", "run"]
    given = run_command.make_context("run", words[2:]).params
    asked, speed, _ = read_settings(None, given)
    assert resolved(asked, size).stored == config
    assert speed.engine == "sequential"


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run: give the folder"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("result.json", "{"),
        ("result.json", "[1]"),
        ("result.json", '{"headline": "accuracy", "history": [], "privacy": [{}]}'),
        ("config.json", '{"algorithm": "fedrp", "clients": "many"}'),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "none\n"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=name):
        read_runs([folder])


def test_without_plotly_one_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fedrp.reporting.page import plotly_script

    plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=re.escape("reports need plotly: pip install 'fedrp[report]'")):
        write_report(read_runs([folder]), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
