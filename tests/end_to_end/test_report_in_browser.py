"""The report in a real browser: what it shows, what it looks like, and that it keeps to itself."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from browser import PHONE, Seen, opened, started
from fedrp import simulate
from fedrp.algorithms.resolve import resolved
from fedrp.reporting.live import runs_below, served
from fedrp.reporting.page import write_report
from fedrp.reporting.runs import read_runs
from fedrp.simulation.measures import RoundModel
from fedrp.simulation.result import RoundRecord
from fedrp.storage.server import ServerFolder
from helpers import tiny_config, tiny_task

HOSTILE = "<img src=x onerror=alert(1)> <b>%{x}"  # the name of a folder
CLOSING = "</script><script>alert(2)</script>"  # the name of a data set
COMMON = ["measure-0", "bytes-so-far", "measure-1", "traffic", "time"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one algorithm, so that their names are those of their folders, and one without messages."""
    root = tmp_path_factory.mktemp("runs")
    task = dataclasses.replace(tiny_task(), dataset=CLOSING)
    for name, algorithm in ((HOSTILE, "fedrp"), ("plain", "fedrp"), ("alone", "fwc")):
        simulate(tiny_config(algorithm, projection="gaussian" if algorithm == "fedrp" else None), task, out=root / name)
    return root


@pytest.fixture(scope="module")
def report(runs: Path) -> str:
    write_report(read_runs([runs]), runs / "report.html")
    return (runs / "report.html").as_uri()


@pytest.fixture(scope="module")
def seen(browser: Browser, report: str) -> Iterator[Seen]:
    with opened(browser, report) as page:
        yield page


def result(runs: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((runs / name / "result.json").read_text()))


def test_charts_draw_the_numbers_of_the_runs(seen: Seen, runs: Path) -> None:
    drawn = seen.page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map((plot) => plot.id)")
    assert set(drawn) == {f"chart-{name}" for name in [*COMMON, "spread", "certificate"]}
    assert seen.page.locator(".plot .scatterlayer .trace").count() > len(drawn)
    order = [HOSTILE, "alone", "plain"]
    solid = [trace for trace in seen.data("measure-0") if not trace["meta"]["average"]]
    for trace, name in zip(solid, order, strict=True):
        history = result(runs, name)["history"]
        assert trace["x"] == [line["round"] for line in history]
        assert trace["y"] == [line["accuracy"] for line in history]
    certified = [trace["y"] for trace in seen.data("certificate")]
    assert certified == [[line["consensus_bound"] for line in result(runs, n)["history"]] for n in (HOSTILE, "plain")]


def test_tables_hold_the_numbers_of_the_runs(seen: Seen, runs: Path) -> None:
    shown = set(seen.page.eval_on_selector_all("#summary data", "items => items.map((item) => Number(item.value))"))
    for name in (HOSTILE, "alone", "plain"):
        told = result(runs, name)
        assert {told[key] for key in ("accuracy", "loss", "bytes_up", "bytes_down", "seconds")} <= shown


def test_the_page_makes_no_error_and_no_request(seen: Seen, report: str) -> None:
    assert seen.errors == []
    assert seen.requests == [report]


def test_hostile_names_stay_text(seen: Seen) -> None:
    assert seen.dialogs == []
    assert seen.page.locator("img, b").count() == 0
    assert seen.page.locator("h1").inner_text().startswith(CLOSING)
    name = f"fedrp, {HOSTILE}"
    assert seen.page.locator("#legend button").first.inner_text() == name
    assert seen.page.locator("#summary tbody th").first.inner_text() == name
    labels = seen.page.locator("#chart-spread .ytick text").all_text_contents()
    assert name in [label.replace("\u00a0", " ") for label in labels]


def test_the_page_cannot_call_out(browser: Browser, report: str) -> None:
    call = "fetch('http://127.0.0.1:9/').then(() => 'called', () => 'refused')"
    with opened(browser, report) as seen:
        assert seen.page.evaluate(call) == "refused"
        assert any("Content Security Policy" in text for text in seen.errors)
        seen.page.evaluate(
            "document.body.append(document.createRange().createContextualFragment("
            "'<script>window.foreign = 1</script>'))"
        )
        assert seen.page.evaluate("window.foreign === undefined")


def test_the_legend_switches_a_run_off_in_all_charts_also_by_keyboard(browser: Browser, report: str) -> None:
    def shown(seen: Seen) -> list[set[bool]]:
        return [{t["visible"] for t in seen.data(name) if t["meta"]["run"] == 0} for name in COMMON]

    with opened(browser, report) as seen:
        chip = seen.page.locator("#legend button").first
        chip.click()
        assert chip.get_attribute("aria-pressed") == "false"
        assert shown(seen) == [{False}] * len(COMMON)
        chip.focus()
        seen.page.keyboard.press("Enter")
        assert shown(seen) == [{True}] * len(COMMON)
        seen.page.locator("#chart-measure-0").focus()
        for _ in range(2):
            seen.page.keyboard.press("ArrowRight")
        tooltip = seen.page.locator("#chart-measure-0 .hoverlayer")
        assert HOSTILE in tooltip.text_content()
        expect(tooltip).to_contain_text(f"{seen.data('measure-0')[0]['y'][1]:.2f} %")  # drawn a moment later


def test_the_page_follows_the_colours_of_the_reader(browser: Browser, report: str) -> None:
    with opened(browser, report, color_scheme="dark") as seen:
        dark = seen.colour("soft")
        font = "document.getElementById('chart-measure-0').layout.font.color"
        assert seen.page.evaluate(font) == dark
        seen.page.emulate_media(color_scheme="light")
        assert seen.colour("soft") != dark
        seen.wait_for(f"{font} === '{seen.colour('soft')}'")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, report: str) -> None:
    with opened(browser, report, viewport=PHONE) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        widths = seen.page.eval_on_selector_all(".plot .main-svg", "all => all.map((svg) => svg.clientWidth)")
        assert widths
        assert max(widths) < PHONE["width"]


def test_without_scripts_the_numbers_are_there(browser: Browser, report: str, runs: Path) -> None:
    with opened(browser, report, java_script_enabled=False) as seen:
        text = seen.page.locator("body").inner_text()
        assert "Charts need JavaScript" in text
        assert f"{result(runs, 'plain')['accuracy']:.2f} %" in text
        assert "against whoever gets the final model" in seen.page.locator("#privacy").text_content()


# --- live ------------------------------------------------------------------------------------------------------------


def test_the_curve_of_a_live_page_grows_with_the_run(browser: Browser, tmp_path: Path) -> None:
    """A real run, which waits after its first and its second round until the page has shown them."""
    shown = {1: threading.Event(), 2: threading.Event()}

    def wait(record: RoundRecord, _model: RoundModel) -> None:
        if record.round in shown:
            assert shown[record.round].wait(60)

    count = "(document.getElementById('chart-measure-0')?.data[0].y.length ?? 0)"
    with ThreadPoolExecutor(1) as pool, served(runs_below(tmp_path), "ended; see there") as address:
        run = pool.submit(simulate, tiny_config("fedavg"), tiny_task(), out=tmp_path, on_round=wait)
        with opened(browser, address) as seen:
            for round_, event in shown.items():
                seen.wait_for(f"{count} === {round_}")
                expect(seen.page.locator("#live")).to_have_text("live")
                expect(seen.page.locator("#summary")).to_contain_text(f"round {round_} of 3")
                event.set()
            seen.wait_for(f"{count} === 3")
            assert seen.data("measure-0")[0]["y"] == [line["accuracy"] for line in run.result().history]
            assert seen.errors == []
            origin = address.split("?")[0]
            assert [request.split("?")[0] for request in seen.requests] == [origin, f"{origin}events"]


def test_the_store_of_a_server_is_watched_as_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    """What `fedrp status --live` serves, of lines as a deployed server writes them. Names are the sites' own."""
    config = resolved(tiny_config("fedavg", dim=None), 100)
    about = {"role": "server", "algorithm": "fedavg", "rounds": 3, "clients": 4, "finished": False}

    def close(folder: ServerFolder, round_: int) -> None:
        line = {"round": round_, "participants": [0, 2], "refused": {1: HOSTILE}, "absent": [3], "seconds": 0.5}
        folder.log("round", {**line, "bytes_up": 400, "bytes_down": 800})
        folder.report({**about, **line, "sites": [HOSTILE]})

    with ServerFolder.open(tmp_path, config) as folder, served(runs_below(tmp_path), "over") as address:
        close(folder, 1)
        with opened(browser, address) as seen:
            assert [trace["y"] for trace in seen.data("growth")] == [[300]]
            close(folder, 2)
            seen.wait_for("document.getElementById('chart-growth').data[0].x.length === 2")
            assert [trace["y"] for trace in seen.data("growth")] == [[300, 600]]
            assert [trace["y"] for trace in seen.data("participants")] == [[2, 2]]
            assert HOSTILE in seen.page.locator("#status").inner_text()
            assert seen.page.locator("img, b").count() == 0
            assert seen.errors == []
