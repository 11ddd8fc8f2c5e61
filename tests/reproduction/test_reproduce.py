"""The paper's table and figures: what is run, kept, drawn and said of it."""

import itertools
import re
from pathlib import Path

import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.cli import main
from fedrp.config import RunConfig, Speed
from fedrp.reproduction.claims import about_bytes, about_m, about_rounds
from fedrp.reproduction.page import PAGE, write_figure, write_page
from fedrp.reproduction.plan import ALONE, EPSILONS, SCALES, Curve, Figure, Panel, figures
from fedrp.reproduction.running import of_figure, run_all, run_name
from fedrp.reproduction.traffic import table2

FIGURES = ("fig1", "fig2", "fig3")
PARAMETERS = {"lenet5": 61_706, "cnn": 846_634}


def small_figure() -> Figure:
    """Every kind of curve of figure 1, in three rounds with thirty images a client."""
    (panel,) = figures("quick", ("fig1",))[0].panels
    changed = {"clients": 3, "rounds": 3, "train_examples": 90}
    settings = [(curve.label, {**vars(curve.config), **changed}) for curve in panel.curves if "DP" not in curve.label]
    curves = tuple(Curve(label, RunConfig(**given)) for label, given in settings)
    noisy = Curve(
        "FedAvg + DP, epsilon 5", RunConfig(**(settings[0][1] | {"algorithm": "fedavg-dp", "dp_epsilon": 5.0}))
    )
    return Figure("fig1", "small", "round", (Panel("a few images", (*curves, noisy)),))


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


def test_a_stopped_reproduction_goes_on_and_makes_nothing_twice(tmp_path: Path) -> None:
    figure, said = small_figure(), []
    speed = Speed(workers=1, engine="sequential")

    def stop_after_two(text: str) -> None:
        said.append(text)
        if text.startswith("run 2 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([figure], tmp_path / "runs", speed, None, stop_after_two)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/result.json")}
    assert len(kept) == 2
    results = run_all([figure], tmp_path / "runs", speed, None, said.append)
    assert "2 of them done" in said[-len(figure.panels[0].curves) + 1]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again = run_all([figure], tmp_path / "runs", speed, None, said.append)
    assert {name: again[name]["accuracy"] for name in again} == {name: results[name]["accuracy"] for name in results}

    lines = write_figure(tmp_path, figure, of_figure(figure, again), "fedrp reproduce fig1")
    page = write_page(tmp_path, [lines], "quick")
    assert page == tmp_path / PAGE
    drawn = (tmp_path / "fig1.svg").read_text()
    for curve in figure.panels[0].curves:
        assert curve.label in drawn
        assert f"{again[run_name(curve.config)]['accuracy']:.2f}" in page.read_text()


def test_a_reproduction_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "fedrp.cli.reproduce.figures", lambda *_: [small_figure()]
    )  # the smallest of the paper's is minutes
    main(["reproduce", "fig1", "--workers=1", "--live", f"--out={tmp_path}"])
    shown = capsys.readouterr()
    assert re.search(r"^live: http://127\.0\.0\.1:\d+/\?token=[\w-]{43}$", shown.err, re.MULTILINE)
    assert f"report: {tmp_path / 'runs' / 'report.html'}" in shown.err
    assert "fedrp-subspace" in (tmp_path / "runs" / "report.html").read_text()


def _rounds(printed: float, noisy: float, alone: float, ours: float) -> list[tuple[str, dict[str, float]]]:
    def result(accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy, "bytes_up": 1000.0}

    named = {"FedAvg": 98.0, "FedADMM": 97.5, "FedRP as printed": printed, "FedRP-Subspace": ours, ALONE: alone}
    return [(label, result(value)) for label, value in (named | {"FedAvg + DP, epsilon 5": noisy}).items()]


def test_claims_hold_or_fail_by_the_numbers() -> None:
    assert [v.holds for v in about_rounds(_rounds(97.5, 90.0, 92.0, 97.9))] == [True, True, True, True]
    assert [v.holds for v in about_rounds(_rounds(91.0, 95.0, 92.0, 95.0))] == [False, False, False, False]
    for values, holds in (((50.0, 60.0, 70.0), True), ((50.0, 70.0, 60.0), False), ((50.0, 70.0, 69.9), True)):
        curves = [("A", {"dim": 10**i, "accuracy": value}) for i, value in enumerate(values)]
        assert [v.holds for v in about_m(curves)] == [holds]


def test_a_wrong_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "fig9"])
    assert stopped.value.code == 2
    assert "fig9" in capsys.readouterr().err
