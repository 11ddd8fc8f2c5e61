"""What is done after a round: callbacks, early stops, the best model, more rounds later, and how a result looks."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedrp
from fedrp import RunConfig, Speed, Stop, Task, simulate
from fedrp.errors import ConfigError
from fedrp.simulation.measures import OnRound, RoundModel
from fedrp.simulation.result import RoundRecord, RunResult
from helpers import FrozenNet, tiny_config, tiny_task


@pytest.fixture
def task() -> Task:
    return tiny_task()


def score_of(module: nn.Module, task: Task) -> float:
    x, y = task.test
    return 100 * (module(x).argmax(1) == y).double().mean().item()


# --- callbacks and early stops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedrp", "fwc"])
def test_a_callback_is_given_the_model_of_its_round(name: str) -> None:
    task = dataclasses.replace(tiny_task(), model=FrozenNet)
    seen: list[tuple[float, float]] = []

    def look(record: RoundRecord, model: RoundModel) -> None:
        assert model() is model()
        seen.append((score_of(model(), task), record.evaluation.delivered.accuracy))

    result = simulate(tiny_config(name), task, on_round=look)
    assert len(seen) == len(result.records)
    assert all(found == pytest.approx(told) for found, told in seen)


def test_a_model_that_nobody_asks_for_is_not_built(task: Task) -> None:
    built: list[int] = []

    def counting() -> nn.Module:
        built.append(1)
        return task.model()

    counted = dataclasses.replace(task, model=counting)
    simulate(tiny_config("fedavg"), counted)
    before = len(built)
    simulate(tiny_config("fedavg"), counted, on_round=lambda record, model: None)
    assert len(built) == 2 * before


def test_what_a_callback_does_to_its_model_changes_nothing(task: Task) -> None:
    def spoil(_record: RoundRecord, model: RoundModel) -> None:
        with torch.no_grad():
            for parameter in model().parameters():
                parameter.zero_()

    spoiled = simulate(tiny_config("fedrp-subspace"), task, on_round=spoil)
    assert np.array_equal(spoiled.model, simulate(tiny_config("fedrp-subspace"), task).model)


def test_a_model_cannot_be_had_after_its_round(task: Task) -> None:
    models: list[RoundModel] = []
    simulate(tiny_config("fedavg"), task, on_round=lambda record, model: models.append(model))
    with pytest.raises(ConfigError, match=r"the model of round 1 was asked for too late: call model\(\) in on_round"):
        models[0]()


@pytest.mark.parametrize(
    ("on_round", "told"),
    [
        (3, "on_round=3 is not valid: expected a function"),
        (lambda record: None, "on_round does not take"),
        (print, None),
    ],
)
def test_what_cannot_be_called_after_a_round_is_refused_before_it(on_round: OnRound, told: str, task: Task) -> None:
    if told is None:
        simulate(tiny_config("fedavg"), task, on_round=on_round)
        return
    with pytest.raises(ConfigError, match=told):
        simulate(tiny_config("fedavg"), task, on_round=on_round)


def stop_at(round_: int) -> Callable[[RoundRecord, RoundModel], object]:
    return lambda record, model: fedrp.Stop if record.round == round_ else None


@pytest.mark.parametrize("name", ["fedrp-subspace", "fedrp", "fwc"])
def test_a_stopped_run_has_the_result_of_its_rounds(name: str, task: Task, tmp_path: Path) -> None:
    config = tiny_config(name, rounds=5)
    stopped = simulate(config, task, Speed(eval_every=3), out=tmp_path, on_round=stop_at(2))
    assert [record.round for record in stopped.records] == [1, 2]
    evaluation = stopped.records[-1].evaluation
    assert evaluation.clients is not None
    assert stopped.as_json()["rounds_done"] == 2
    models = []
    simulate(config, task, on_round=lambda record, model: models.append(model()))
    assert score_of(models[1], task) == pytest.approx(stopped.accuracy)
    resumed = simulate(config, task, Speed(eval_every=3), out=tmp_path, resume=True)
    assert np.array_equal(resumed.model, simulate(config, task).model)


# --- the best model --------------------------------------------------------------------------------------------------


def spoiled_later(task: Task) -> tuple[RunConfig, Task]:
    """A run that is best before its last round: its metric is how far outputs are from a size that they outgrow."""

    def small(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return (outputs.abs().mean() - 1.3).abs()

    return tiny_config("fedavg", rounds=6, lr=0.3), dataclasses.replace(task, metrics={"small": small}, goal="min")


def test_the_best_model_is_delivered_and_the_last_lies_beside_it(task: Task, tmp_path: Path) -> None:
    config, task = spoiled_later(task)
    last = simulate(config, task)
    best = simulate(config, task, out=tmp_path, keep="best")
    values = [line["small"] for line in last.history]
    assert 1 < best.delivered_round == 1 + int(np.argmin(values)) < config.rounds
    assert best.metrics["small"] == min(values) < last.metrics["small"]
    assert all(torch.equal(best.last_state[key], tensor) for key, tensor in last.state.items())
    for name, state in (("model", best.state), ("last", best.last_state)):
        kept = load_file(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(kept[key], tensor) for key, tensor in state.items())
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["delivered_round"], told["small"]) == (best.delivered_round, min(values))
    assert f"best in round {best.delivered_round}" in repr(best)


def killed_after(last: int) -> OnRound:
    def kill(record: RoundRecord, _model: RoundModel) -> None:
        if record.round == last:
            raise KeyboardInterrupt

    return kill


@pytest.mark.parametrize("last", [1, 3, 5])
def test_a_killed_run_still_knows_its_best_model(last: int, task: Task, tmp_path: Path) -> None:
    config, task = spoiled_later(task)
    whole = simulate(config, task, keep="best")
    with pytest.raises(KeyboardInterrupt):
        simulate(config, task, out=tmp_path, keep="best", on_round=killed_after(last))
    resumed = simulate(config, task, out=tmp_path, resume=True)  # what it keeps, it goes on keeping
    assert (resumed.delivered_round, resumed.metrics) == (whole.delivered_round, whole.metrics)
    assert np.array_equal(resumed.model, whole.model)


def test_the_best_of_rounds_that_are_gone_cannot_be_asked_for(task: Task, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(tiny_config("fedavg"), task, out=tmp_path, on_round=killed_after(2))
    with pytest.raises(ConfigError, match="was started with keep='last', its earlier models are gone"):
        simulate(tiny_config("fedavg"), task, out=tmp_path, resume=True, keep="best")
    with pytest.raises(ConfigError, match="unknown keep 'bets', did you mean 'best'"):
        simulate(tiny_config("fedavg"), task, keep="bets")


# --- more rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
def test_more_rounds_with_secret_matrices_go_on_from_where_the_run_was(name: str, task: Task, tmp_path: Path) -> None:
    """Who deals the key of the first new round is another client than at once, so only what came before is the same."""
    ends = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        first = simulate(tiny_config(name, rounds=2), task, out=folder)
        extended = simulate(tiny_config(name, rounds=9), task, out=folder, resume=True)
        assert [record.evaluation for record in extended.records[:2]] == [record.evaluation for record in first.records]
        assert extended.loss < first.loss
        ends.append(extended.model)
    assert np.array_equal(*ends)


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "fwc"])
def test_more_rounds_lead_where_they_would_have_led_at_once(name: str, task: Task, tmp_path: Path) -> None:
    config, longer = tiny_config(name, rounds=2), tiny_config(name, rounds=5)
    simulate(config, task, out=tmp_path)
    extended = simulate(longer, task, out=tmp_path, resume=True)
    at_once = simulate(longer, task)
    assert [record.round for record in extended.records] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "config.json").read_text())["rounds"] == 5
    assert extended.accuracy == at_once.accuracy
    assert np.array_equal(extended.model, at_once.model)
    with pytest.raises(ConfigError, match="was started with rounds=5, not 2"):
        simulate(config, task, out=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "fedavg-dp",
            {"dp_epsilon": 8.0, "noise_multiplier": None},
            "rounds=2, and its epsilon holds for these alone, more would spend more",
        ),
        ("fedrp-subspace", {"noise_multiplier": 1.0}, "rounds=2, and its epsilon holds for these alone"),
        ("fedrp", {"ball": 0.5}, "rounds=2, and its epsilon holds for these alone"),
        ("fedavg", {"secure_aggregation": True}, "rounds=2, its masks are bound to all settings"),
        ("fedavg", {"lr_schedule": "cosine"}, "rounds=2, which its lr_schedule=cosine ends with: start a new run"),
    ],
)
def test_more_rounds_are_refused_where_something_was_promised_for_those(
    name: str, settings: dict[str, object], told: str, task: Task, tmp_path: Path
) -> None:
    simulate(tiny_config(name, rounds=2, **settings), task, out=tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=told):
        simulate(tiny_config(name, rounds=3, **settings), task, out=tmp_path, resume=True)
    assert (tmp_path / "config.json").read_bytes() == before


# --- how a result looks ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> RunResult:
    return simulate(tiny_config("fedrp-subspace"), tiny_task(), Speed(eval_every=2))


def test_a_result_is_shown_in_one_line(result: RunResult) -> None:
    shown = repr(result)
    assert len(shown) < 160
    assert shown.startswith(f"<RunResult fedrp-subspace on custom: {result.accuracy:.2f} %, 3 of 3 rounds, ")


def test_a_history_has_a_dict_per_round(result: RunResult) -> None:
    assert [line["round"] for line in result.history] == [1, 2, 3]
    assert "accuracy" not in result.history[0]
    assert result.history[-1]["accuracy"] == result.accuracy


def test_a_frame_has_a_row_per_round(result: RunResult) -> None:
    frame = result.frame()
    assert list(frame.index) == [1, 2, 3]
    assert frame["accuracy"].isna().tolist() == [True, False, False]
    assert frame.loc[3, "accuracy"] == result.accuracy


def test_without_pandas_it_is_said_what_to_install(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"needs pandas: pip install 'fedrp\[frame\]', or use result.history"):
        result.frame()


def test_stop_is_what_the_package_offers() -> None:
    assert fedrp.Stop is Stop
