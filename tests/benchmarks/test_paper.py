"""The paper's figures from kept runs: their curves are the runs that `fedrp reproduce` makes."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedrp.algorithms.fedavg import step_size
from fedrp.algorithms.resolve import resolved
from fedrp.cli.common import cli, read_settings
from fedrp.config import RunConfig
from fedrp.reproduction.plan import figures, speed_of
from helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # where a script finds its siblings
PARAMETERS = {"lenet5": 61_706, "cnn": 846_634}
IMAGES = {"mnist": 60_000}

Keep = Callable[[dict[tuple[str, str, int], dict[str, Any]]], None]


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return importlib.import_module("paper")


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """These results, by (experiment, run, seed), and no others, are kept."""
    kept_runs = importlib.import_module("kept_runs")

    def only(results: dict[tuple[str, str, int], dict[str, Any]]) -> None:
        by_options = {
            kept_runs.kept.normal(kept_runs.Run(*which).options): {
                **{"seed": which[2], "dim": None, "bytes_up": 100, "origin": {"commit": "abc"}},
                **{"history": [{"round": 1, "accuracy": 10.0 + which[2]}], **result},
            }
            for which, result in results.items()
        }
        monkeypatch.setattr(kept_runs, "everything", functools.cache(lambda: by_options))

    return only


def as_run(config: RunConfig) -> dict[str, Any]:
    """All settings of a run, with the learning rate that FedAvg comes to by itself."""
    found = resolved(config, PARAMETERS[config.model])
    settings = {name: value for name, value in vars(found).items() if name not in ("lr_rule", "unset")}
    if found.lr_rule == "steps":
        images = (found.train_examples or IMAGES[found.dataset]) // found.clients
        settings["lr"] = step_size(found.lr, -(-images // found.batch_size) * found.local_epochs)
    return settings


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig3"])
def test_curves_are_the_runs_that_the_command_makes(paper: ModuleType, name: str) -> None:
    """Settings are compared as they are resolved; an experiment says aloud what were defaults when it was run."""
    run_command = cli.commands["run"]
    for _, curve, (experiment, run) in paper.places_of(paper.figure_of(name)):
        options = importlib.import_module("kept_runs").Run(experiment, run, 0).command
        with run_command.make_context("run", options.split()) as context:
            config, speed, _ = read_settings(None, {**context.params, "config": None})
        assert as_run(config) == as_run(curve.config), f"{experiment}, {run}"
        assert speed.eval_every == speed_of(curve.config, None).eval_every, f"{experiment}, {run}"


def test_nothing_is_declared_that_no_figure_shows(paper: ModuleType) -> None:
    shown = {place for name in paper.NAMES for _, _, place in paper.places_of(paper.figure_of(name))}
    for experiment in ("paper-mnist", "paper-mnist-five", "cifar-five-epochs", "cifar-dims"):
        runs = importlib.import_module("experiments").EXPERIMENTS[experiment].runs
        assert {(experiment, run) for run in runs} <= shown


def test_without_kept_runs_all_curves_are_named_and_nothing_is_drawn(
    paper: ModuleType, keep: Keep, tmp_path: Path
) -> None:
    keep({})
    for name in paper.NAMES:
        told = " ".join(paper.figure_table(name).split())
        for panel in figures("standard", (name,))[0].panels:
            assert f"**{panel.title}.** Too little is kept for a claim." in told
            assert f"Declared, and not run yet: {'; '.join(curve.name for curve in panel.curves)}." in told
        paper.draw_figure(name, tmp_path / f"{name}.svg")
    assert not list(tmp_path.iterdir())


def test_what_is_kept_is_drawn_and_judged_and_the_rest_is_named(paper: ModuleType, keep: Keep, tmp_path: Path) -> None:
    """The first seed is drawn, the mean of all is judged."""
    keep(
        {
            ("fedavg-grid", "fedavg-lr0.4", 0): {"accuracy": 99.0, "bytes_up": 4000},
            ("fedavg-grid", "fedavg-lr0.4", 1): {"accuracy": 97.0, "bytes_up": 4000},
            ("budget", "fedrp-1000", 0): {"accuracy": 97.5, "dim": 1000},
        }
    )
    told = paper.figure_table("fig1")
    assert "| FedRP is as accurate as FedAvg. | 97.5 %; FedAvg 98.0 %. | yes |" in told
    assert re.search(r"not run yet: FedADMM; FedRP-Subspace; FedAvg \+\s", told)
    assert "# commits abc\nfedrp reproduce fig1 --scale standard\n# what is missing:\n" in told
    assert "python benchmarks/results.py run mnist bits paper-mnist cifar-40" in told
    (first, second) = paper.shown(paper.figure_of("fig1"))
    assert [result["history"][0]["accuracy"] for _, result in first.curves] == [10.0, 10.0]
    assert not second.curves
    paper.draw_figure("fig1", tmp_path / "fig1.svg")
    drawn = (tmp_path / "fig1.svg").read_text()
    assert "FedRP as printed" in drawn
    assert "CIFAR" not in drawn


def test_lines_of_a_table_fit_the_page_at_worst(paper: ModuleType, keep: Keep) -> None:
    """With everything kept, and nothing as claimed."""
    places = {name: paper.places_of(paper.figure_of(name)) for name in paper.NAMES}
    keep(
        {
            (*place, seed): {"accuracy": 10.0, "bytes_up": 1e5 if curve.label == "FedAvg" else 100}
            | {"dim": curve.config.dim}
            for found in places.values()
            for _, curve, place in found
            for seed in (0, 1)
        }
    )
    for name in paper.NAMES:
        told = paper.figure_table(name)
        assert max(map(len, told.splitlines())) <= 100
        assert "not run yet" not in told


@pytest.mark.slow
def test_the_page_has_the_bytes_of_today(paper: ModuleType) -> None:
    assert paper.bytes_table() in (ROOT / "docs" / "results.md").read_text()
