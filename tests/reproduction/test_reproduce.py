"""The paper's table and figures: what is run, kept, drawn and said of it."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.cli import main
from fedrp.config import RunConfig
from fedrp.errors import INTERRUPTED
from fedrp.reproduction.claims import about_bytes, about_m, about_rounds
from fedrp.reproduction.page import PAGE, write_figure, write_page
from fedrp.reproduction.plan import (
    ALONE,
    EPSILONS,
    FEDAVG,
    PRINTED,
    SCALES,
    SUBSPACE,
    Curve,
    Figure,
    Panel,
    figures,
    speed_of,
)
from fedrp.reproduction.running import of_figure, run_all, run_name
from fedrp.reproduction.traffic import table2

FIGURES = ("fig1", "fig2", "fig3")
PARAMETERS = {"lenet5": 61_706, "cnn": 846_634}
OF_THE_MACHINE = re.compile("seconds|per_second|peak_rss")  # fields of a result that tell how it was computed


NOISY = "FedAvg + DP, epsilon 5"


def small_figure(rounds: int = 2, labels: tuple[str, ...] = ()) -> Figure:
    """Every kind of curve of figure 1, or those asked for, in few rounds with thirty images a client."""
    (panel,) = figures("quick", ("fig1",))[0].panels
    changed = {"clients": 3, "rounds": rounds, "train_examples": 90}
    settings = [(curve.label, {**vars(curve.config), **changed}) for curve in panel.curves if "DP" not in curve.label]
    curves = tuple(Curve(label, RunConfig(**given)) for label, given in settings)
    noisy = Curve(NOISY, RunConfig(**(settings[0][1] | {"algorithm": "fedavg-dp", "dp_epsilon": 5.0})))
    chosen = tuple(curve for curve in (*curves, noisy) if not labels or curve.label in labels)
    return Figure("fig1", "small", "round", (Panel("a few images", chosen),))


def with_a_failure() -> Figure:
    """The second of three diverges."""
    figure = small_figure(labels=(FEDAVG, "FedADMM", SUBSPACE))
    curves = [
        Curve(label, RunConfig(**{**vars(config), "lr": 1e30})) if label == "FedADMM" else Curve(label, config)
        for label, config in figure.panels[0].curves
    ]
    return Figure("fig1", "small", "round", (Panel("a few images", tuple(curves)),))


def of_the_run(value: Any) -> Any:
    """A result without what differs from machine to machine."""
    if isinstance(value, dict):
        return {name: of_the_run(item) for name, item in value.items() if not OF_THE_MACHINE.search(name)}
    return [of_the_run(item) for item in value] if isinstance(value, list) else value


def results_in(root: Path) -> dict[str, Any]:
    return {path.parent.name: of_the_run(json.loads(path.read_text())) for path in root.glob("*/result.json")}


# --- what is run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "name"), list(itertools.product(SCALES, FIGURES)))
def test_every_run_of_every_figure_has_settings_that_can_be_run(scale: str, name: str) -> None:
    (figure,) = figures(scale, (name,))
    assert len(figure.panels) == (1 if scale == "quick" else 2)
    for panel in figure.panels:
        names = [run_name(curve.config) for curve in panel.curves]
        assert len(set(names)) == len(names)
        for curve in panel.curves:
            resolved(curve.config, PARAMETERS[curve.config.model])


def test_figures_have_the_papers_epsilons_clients_and_rounds() -> None:
    for name, epochs in (("fig1", 1), ("fig2", 5)):
        (figure,) = figures("full", (name,))
        for panel, sizes in zip(figure.panels, ((100, 30), (50, 40)), strict=True):
            configs = [curve.config for curve in panel.curves]
            assert {(config.clients, config.rounds, config.local_epochs) for config in configs} == {(*sizes, epochs)}
            assert {config.dp_epsilon for config in configs} == {None, *EPSILONS[epochs]}


def test_a_night_has_a_fifth_of_cifar_with_fewer_rounds_where_they_are_long() -> None:
    one, five, dims = (figure.panels[1].curves for figure in figures("standard", FIGURES))
    assert {c.config.train_examples for c in (*one, *five, *dims)} == {10_000}
    assert {c.config.rounds for c in one} == {40}
    assert {c.config.rounds for c in (*five, *dims)} == {20}
    assert {c.label for c in five} == {FEDAVG, PRINTED, SUBSPACE}
    assert [c.config.dim for c in dims if c.label == SUBSPACE] == [100, 1000, 5000, 10000, 50000]
    assert [c.config.dim for c in dims if c.label == PRINTED] == [100, 10000, 50000]


def test_models_of_every_client_are_scored_seldom_where_they_are_large() -> None:
    seldom = {"fedrp", "fwc"}
    for panel in figures("standard", ("fig1",))[0].panels:
        for curve in panel.curves:
            often = curve.config.model == "lenet5" or curve.config.algorithm not in seldom
            assert speed_of(curve.config, None).eval_every == (1 if often else 10)


@pytest.mark.slow
def test_bytes_of_table_2_are_those_of_messages_and_agree_with_the_paper() -> None:
    """The payloads of 134 million numbers are really encoded. 241 KB, 42 MB, 512 MB are the paper's."""
    lines = table2()
    assert [line.payload for line in lines[:3]] == [4 * 61_706, 4 * 11_173_962, 4 * 134_301_514]
    assert {line.message - line.payload for line in lines} == {28}
    (verdict,) = about_bytes(lines)
    assert verdict.holds
    (wrong,) = about_bytes([lines[0]._replace(payload=2 * lines[0].payload)])
    assert not wrong.holds


# --- how it is run ---------------------------------------------------------------------------------------------------


def test_a_stopped_reproduction_goes_on_and_makes_nothing_twice(tmp_path: Path) -> None:
    figure, said = small_figure(labels=(FEDAVG, "FedADMM", SUBSPACE, ALONE)), []

    def stop_after_two(text: str) -> None:
        said.append(text)
        if text.startswith("run 2 ") and text.endswith("left"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([figure], tmp_path / "runs", None, stop_after_two, workers=1)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/result.json")}
    assert len(kept) == 2
    said.clear()
    results, failed = run_all([figure], tmp_path / "runs", None, said.append, workers=1)
    assert "2 of them done" in said[0]
    assert not failed
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again, _ = run_all([figure], tmp_path / "runs", None, said.append, workers=1)
    assert {name: again[name]["accuracy"] for name in again} == {name: results[name]["accuracy"] for name in results}

    lines = write_figure(tmp_path, figure, of_figure(figure, again), "fedrp reproduce fig1")
    page = write_page(tmp_path, [lines], "quick")
    assert page == tmp_path / PAGE
    drawn = (tmp_path / "fig1.svg").read_text()
    for curve in figure.panels[0].curves:
        assert curve.label in drawn
        assert f"{again[run_name(curve.config)]['accuracy']:.2f}" in page.read_text()


def test_results_are_the_same_however_many_runs_are_made_at_a_time(tmp_path: Path) -> None:
    figure = small_figure()
    said: dict[int, list[str]] = {1: [], 2: []}
    for jobs, lines in said.items():
        made = run_all([figure], tmp_path / str(jobs), None, lines.append, jobs=jobs)
        assert not made.failed
        assert made.results.keys() == {run_name(curve.config) for curve in figure.panels[0].curves}
        assert sum(line.endswith(" left") for line in lines) == len(made.results)
        assert all(re.match(r"run \d of \d, mnist-mini, E = 1, ", line) for line in lines[1:])
        assert any(f"{NOISY}: this model" in line for line in lines), "a warning names its run"
    assert results_in(tmp_path / "1") == results_in(tmp_path / "2")
    for name in results_in(tmp_path / "1"):
        models = [(tmp_path / str(jobs) / name / "model.safetensors").read_bytes() for jobs in said]
        assert models[0] == models[1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named_and_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    monkeypatch.setattr("fedrp.cli.reproduce.figures", lambda *_: [with_a_failure()])
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "fig1", f"--jobs={jobs}", f"--out={tmp_path}"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert len(results_in(tmp_path / "runs")) == len(with_a_failure().panels[0].curves) - 1
    assert "Missing: FedADMM." in shown.out
    assert re.search(r"^run 2 of 3, mnist-mini, E = 1, FedADMM: failed: .*diverged", shown.err, re.MULTILINE)
    last = shown.err.splitlines()[-1]
    assert last.startswith("fedrp: failed: run 2 of 3, mnist-mini, E = 1, FedADMM. ")
    assert last.endswith(f"try again with: fedrp reproduce fig1 --scale quick --out {tmp_path}")


def test_runs_side_by_side_have_one_worker_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "fig1", "--jobs=2", "--workers=2"])
    assert ended.value.code == 2
    assert "leave out --workers" in capsys.readouterr().err


LONG = """
import sys
from pathlib import Path
sys.path += [{tests!r}, {support!r}]
import fedrp.cli.reproduce
from fedrp.cli import main
from test_reproduce import small_figure
fedrp.cli.reproduce.figures = lambda *_: [small_figure(500, ("FedAvg", "FedADMM", "FedRP-Subspace"))]
main(["reproduce", "fig1", "--jobs=2", "--out", {out!r}])
"""


def processes_with(text: str) -> list[int]:
    """Those whose open files or folders have this text in their names."""
    found = []
    for files in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(text in os.readlink(file) for file in files.iterdir()):
                found.append(int(files.parent.name))
        except OSError:
            continue
    return found


def test_ctrl_c_stops_all_runs_and_loses_at_most_a_round_of_each(tmp_path: Path) -> None:
    here = Path(__file__).parent
    program = LONG.format(tests=str(here), support=str(here.parent / "support"), out=str(tmp_path))
    running = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def rounds() -> list[int]:
        metrics = (tmp_path / "runs").glob("*/metrics.jsonl")
        return [len(path.read_text().splitlines()) for path in metrics]

    for _ in range(1200):
        if len([done for done in rounds() if done > 2]) == 2:
            break
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: every process of the group hears it
    _, told = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED
    assert told.splitlines()[-1] == (
        "fedrp: stopped; what is done is kept, go on with: "
        f"fedrp reproduce fig1 --scale quick --out {tmp_path} --jobs 2"
    )
    assert "Traceback" not in told
    assert not processes_with(str(tmp_path))
    before = rounds()
    assert len(before) == 2
    for folder in (tmp_path / "runs").iterdir():
        checkpoints = [path.name for path in (folder / "checkpoint").iterdir() if path.suffix != ".partial"]
        kept = max(int(name.removeprefix("round-")) for name in checkpoints)
        assert kept >= len((folder / "metrics.jsonl").read_text().splitlines()) - 1


def test_a_reproduction_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "fedrp.cli.reproduce.figures", lambda *_: [small_figure(labels=(SUBSPACE,))]
    )  # the smallest of the paper's is minutes
    main(["reproduce", "fig1", "--workers=1", "--live", f"--out={tmp_path}"])
    shown = capsys.readouterr()
    assert re.search(r"^live: http://127\.0\.0\.1:\d+/\?token=[\w-]{43}$", shown.err, re.MULTILINE)
    assert f"report: {tmp_path / 'runs' / 'report.html'}" in shown.err
    assert "fedrp-subspace" in (tmp_path / "runs" / "report.html").read_text()


# --- what is said of it ----------------------------------------------------------------------------------------------


def _rounds(printed: float, noisy: float, alone: float, ours: float) -> list[tuple[str, dict[str, float]]]:
    def result(accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy, "bytes_up": 1000.0}

    named = {FEDAVG: 98.0, "FedADMM": 97.5, PRINTED: printed, SUBSPACE: ours, ALONE: alone}
    return [(label, result(value)) for label, value in (named | {NOISY: noisy}).items()]


def test_claims_hold_or_fail_by_the_numbers() -> None:
    assert [v.holds for v in about_rounds(_rounds(97.5, 90.0, 92.0, 97.9))] == [True, True, True, True]
    assert [v.holds for v in about_rounds(_rounds(91.0, 95.0, 92.0, 95.0))] == [False, False, False, False]
    for values, holds in (((50.0, 60.0, 70.0), True), ((50.0, 70.0, 60.0), False), ((50.0, 70.0, 69.9), True)):
        curves = [("A", {"dim": 10**i, "accuracy": value}) for i, value in enumerate(values)]
        assert [v.holds for v in about_m(curves)] == [holds]


def test_what_cannot_be_compared_is_not_claimed() -> None:
    """Any curve may be missing, and more than one be ours."""
    curves = _rounds(97.5, 90.0, 92.0, 97.9)
    for length in range(len(curves) + 1):
        for some in itertools.combinations(curves, length):
            labels = {label for label, _ in some}
            claims = [v.claim for v in about_rounds(some)]
            assert len(claims) == (
                (PRINTED in labels and bool(labels & {FEDAVG, "FedADMM"}))
                + (PRINTED in labels and NOISY in labels)
                + (PRINTED in labels and ALONE in labels)
                + (SUBSPACE in labels and FEDAVG in labels)
            )
    without = [(label, result) for label, result in curves if label != "FedADMM"]
    assert about_rounds(without)[0].claim == "FedRP is as accurate as FedAvg."
    more = (f"{SUBSPACE}, 1 bit a parameter", {"accuracy": 90.0, "bytes_up": 100.0})
    assert [v.holds for v in about_rounds([*without, more])][-2:] == [True, False]
    assert about_m([("A", {"dim": 10, "accuracy": 50.0})]) == []


def test_a_figure_shows_what_is_there(tmp_path: Path) -> None:
    """Nothing, or a panel of two, drawn again as the same bytes."""
    (figure,) = figures("standard", ("fig1",))
    lines = write_figure(tmp_path, figure, of_figure(figure, {}), "again")
    assert not list(tmp_path.iterdir())
    assert not any(line.startswith(("!", "|")) for line in lines)
    history = [{"round": 1, "accuracy": None}, {"round": 2, "accuracy": 90.0}]
    result = {"accuracy": 90.0, "bytes_up": 10, "seed": 0, "dim": None, "history": history}
    some = {run_name(figure.panels[0].curves[0].config): result}
    lines = write_figure(tmp_path, figure, of_figure(figure, some), "again")
    drawn = (tmp_path / "fig1.svg").read_bytes()
    assert figure.panels[1].title.encode() not in drawn
    assert f"**{figure.panels[1].title}**" in lines
    write_figure(tmp_path, figure, of_figure(figure, some), "again")
    assert (tmp_path / "fig1.svg").read_bytes() == drawn


def test_a_wrong_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "fig9"])
    assert stopped.value.code == 2
    assert "fig9" in capsys.readouterr().err
