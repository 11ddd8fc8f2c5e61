"""Metrics of users: over the whole test set, in results, tables and plots; accuracy only where there are classes."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import roc_auc_score
from torch import nn
from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

from fedrp import RunConfig, Speed, Task, load_vector, simulate
from fedrp.errors import ConfigError
from fedrp.learning.evaluate import EVALUATION_BATCH, Evaluation, Headline, NoAccuracyError, Score, Spread
from fedrp.reporting.report import plot_headline, result_details, result_table
from helpers import tiny_config

FEATURES = 6


def rare(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes, one of them rare."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + x[:, 1] > 2.2).long()


def auroc(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """By scikit-learn, of logits."""
    return float(roc_auc_score(targets.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy()))


def two_outputs() -> nn.Module:
    return nn.Linear(FEATURES, 2)


def one_output() -> nn.Module:
    return nn.Linear(FEATURES, 1)


CLASSES = (rare(400, 1), rare(EVALUATION_BATCH + 101, 2))
X = CLASSES[0][0]
NUMBERS = ((X, X[:, :1] * 2 + 1), (CLASSES[1][0], CLASSES[1][0][:, :1] * 2 + 1))


def rare_task(**changes: object) -> Task:
    return Task(two_outputs, *CLASSES, **{"metrics": {"auroc": auroc}, **changes})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "fwc"])
def test_a_metric_sees_all_test_examples_at_once(name: str, workers: int) -> None:
    """It is not the mean of its values on batches; there are two."""
    result = simulate(tiny_config(name), rare_task(), Speed(workers=workers))
    x, y = CLASSES[1]
    outputs = load_vector(two_outputs(), result.model)(x).detach()
    assert result.metrics["auroc"] == pytest.approx(auroc(outputs, y), abs=1e-6)
    assert result.accuracy == pytest.approx(100 * (outputs.argmax(1) == y).double().mean().item())
    told = result.as_json()
    assert (told["headline"], told["goal"], told["auroc"]) == ("auroc", "max", result.metrics["auroc"])
    assert told["auroc_client_min"] <= told["auroc_client_mean"] <= told["auroc_client_max"]
    assert all(0 <= line["auroc"] <= 1 and 0 <= line["auroc_average"] <= 1 for line in result.history)


def test_functions_of_torchmetrics_are_metrics_as_they_are() -> None:
    assert torchmetrics.__version__
    area = functools.partial(multiclass_auroc, num_classes=2)
    score = functools.partial(multiclass_f1_score, num_classes=2, average="macro")
    result = simulate(tiny_config("fedavg"), rare_task(metrics={"area": area, "f1": score, "auroc": auroc}))
    assert result.metrics["area"] == pytest.approx(result.metrics["auroc"], abs=1e-6)
    assert 0 < result.metrics["f1"] < 1
    assert result.headline == Headline("area", "max")


def test_numbers_are_judged_by_the_loss_and_have_no_accuracy(tmp_path: Path) -> None:
    task = Task(one_output, *NUMBERS, loss=nn.functional.mse_loss)
    result = simulate(tiny_config("fedavg", rounds=20, lr=0.1), task, out=tmp_path)
    assert result.loss < 0.1
    assert result.headline == Headline("loss", "min")
    assert not hasattr(result, "accuracy")
    with pytest.raises(NoAccuracyError, match="targets are no classes"):
        _ = result.accuracy
    told = json.loads((tmp_path / "result.json").read_text())
    assert not [name for name in [*told, *told["history"][0]] if "accuracy" in name]
    assert told["loss"] == pytest.approx(result.loss)


def test_classes_with_one_output_have_no_accuracy_but_a_metric() -> None:
    (x, y), (test_x, test_y) = CLASSES

    def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs[:, 0] > 0) == targets[:, 0]).float().mean()

    loss = nn.functional.binary_cross_entropy_with_logits
    train, test = (x, y[:, None].float()), (test_x, test_y[:, None].float())
    result = simulate(tiny_config("fedavg"), Task(one_output, train, test, loss, {"right": right}))
    assert set(result.metrics) == {"right"}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ([auroc], "metrics is a list: expected functions by name"),
        ({1: auroc}, "1 is no name for a metric"),
        ({"": auroc}, "'' is no name for a metric"),
        ({"loss": auroc}, "'loss' is no name for a metric, results use it already"),
        ({"auroc_average": auroc}, "'auroc_average' is no name for a metric"),
        ({"auroc": 0.5}, "metric 'auroc' is a float: expected a function"),
        ({"auroc": nn.MSELoss}, "metric 'auroc' is the class MSELoss: expected a function"),
    ],
)
def test_what_is_no_metric_is_refused_when_the_task_is_made(metrics: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rare_task(metrics=metrics)


def test_a_goal_is_max_or_min() -> None:
    with pytest.raises(ConfigError, match="unknown goal 'maximum', did you mean 'max'"):
        rare_task(goal="maximum")


def test_no_name_that_results_use_can_be_a_metric() -> None:
    result = simulate(tiny_config("fedavg"), rare_task())
    for name in {*result.as_json(), *result.history[0]} - {"auroc"}:
        with pytest.raises(ConfigError, match=f"'{name}' is no name for a metric"):
            rare_task(metrics={name: auroc})


def test_a_metric_that_fails_is_told_before_round_1() -> None:
    (x, y), test = CLASSES
    alike = test[0], torch.zeros_like(test[1])

    def picky(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise ValueError(f"only {len(set(targets.tolist()))} class")

    with pytest.raises(ConfigError, match=r"'picky' does not take the test set: only 1 class; outputs \(351, 2\)"):
        simulate(tiny_config("fedavg"), Task(two_outputs, (x, y), alike, metrics={"picky": picky}))


def test_scores_survive_json_also_where_they_are_not_finite() -> None:
    good, bad = Score(0.5, {"auroc": 0.9, "accuracy": 97.0}), Score(np.inf, {"auroc": np.nan, "accuracy": 1.0})
    kept = json.loads(json.dumps(Evaluation(good, bad, Spread(good, good, good)).as_json(), allow_nan=False))
    again = Evaluation.from_json(kept)
    assert (again.delivered, again.clients.most) == (good, good)
    assert np.isnan(again.average.metrics["auroc"])
    assert Evaluation.from_json({"round": 1}) is None


@pytest.mark.parametrize(("goal", "better"), [("max", 2.0), ("min", 1.0)])
def test_a_goal_says_what_is_better_and_nan_never_is(goal: str, better: float) -> None:
    headline = Headline("x", goal)
    assert headline.better(better, 3.0 - better)
    assert not headline.better(3.0 - better, better)
    assert not headline.better(float("nan"), better)


def test_tables_and_plots_show_what_a_run_is_judged_by(tmp_path: Path) -> None:
    rare_result = simulate(tiny_config("fwc"), rare_task()).as_json()
    names = [column.header for column in result_table([rare_result]).columns]
    assert names[2:5] == ["auroc", "avg auroc", "accuracy"]
    assert result_details(rare_result)[0].startswith("clients' own models: auroc 0.")
    number = simulate(tiny_config("fedavg"), Task(one_output, *NUMBERS, loss=nn.functional.mse_loss)).as_json()
    assert [column.header for column in result_table([number]).columns][2:4] == ["loss", "avg loss"]
    for result in (rare_result, number):
        plot_headline([result], tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_algorithm_default_still_has_accuracy_first() -> None:
    config = RunConfig(algorithm="fedavg", clients=2, rounds=1)
    result = simulate(config, Task(two_outputs, *CLASSES))
    assert result.headline == Headline("accuracy", "max")
    assert list(result.metrics) == ["accuracy"]
