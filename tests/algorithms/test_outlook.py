"""What noise lets a run learn: the rule is held against every kept run with noise, and the noise against real runs."""

import dataclasses
import json
import logging
import math
from typing import Any

import numpy as np
import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.config.run import RunConfig
from fedrp.learning.norm_floor import initial_norm_floor
from fedrp.learning.task import Task, named_task
from fedrp.mechanisms.outlook import Expectation, Outlook, outlook_of
from fedrp.simulation.simulate import simulate
from helpers import ROOT

LENET_PARAMETERS = 61_706


def kept_outlooks() -> list[tuple[float, Outlook]]:
    """Accuracy and outlook of every kept run with noise, all of LeNet-5 on MNIST."""
    found, start = [], initial_norm_floor(named_task(RunConfig(model="lenet5", dataset="mnist-mini")).model)
    for path in sorted((ROOT / "benchmarks" / "results").glob("private-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            outlook = outlook_of(resolved(config_of(line["options"]), LENET_PARAMETERS), LENET_PARAMETERS, start)
            assert outlook is not None
            found.append((line["result"]["accuracy"], outlook))
    return found


def config_of(options: str) -> RunConfig:
    words = options.split()
    given = {
        word.removeprefix("--").replace("-", "_"): text for word, text in zip(words[::2], words[1::2], strict=True)
    }
    kinds: dict[str, Any] = {"algorithm": str, "dataset": str, "projection": str}
    whole = {"clients", "rounds", "dim", "seed", "train_examples", "local_epochs"}
    return RunConfig(**{n: (kinds.get(n) or (int if n in whole else float))(v) for n, v in given.items()})


def test_the_rule_announces_the_kept_runs_at_chance_and_no_useful_one() -> None:
    kept = kept_outlooks()
    assert len(kept) >= 194
    by_kind = {kind: [accuracy for accuracy, o in kept if o.expectation is kind] for kind in Expectation}
    assert min(len(found) for found in by_kind.values()) > 10
    assert max(by_kind[Expectation.CHANCE]) < 50
    assert float(np.median(by_kind[Expectation.CHANCE])) < 20
    assert all(o.expectation is Expectation.CHANCE for accuracy, o in kept if accuracy < 14)
    assert min(by_kind[Expectation.LEARN]) > 50
    for kind, accuracies in by_kind.items():  # as docs/results.md has it
        low, high, middle = min(accuracies), max(accuracies), float(np.median(accuracies))
        assert f"| {len(accuracies)} | {low:.0f} to {high:.0f} | {middle:.0f} |" in page_row(kind)


def page_row(kind: Expectation) -> str:
    page = (ROOT / "docs" / "results.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {kind.value} |")]
    return row


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("algorithm", "dim"), [("fedavg-dp", 10), ("fedrp-subspace", 10)])
def test_the_drift_is_how_far_noise_moves_a_model(task: Task, algorithm: str, dim: int, momentum: float) -> None:
    """The same run with noise and almost without, clipped so much that the data moves nothing."""
    config = RunConfig(algorithm, clients=4, rounds=3, dim=dim, clip=1e-3, server_momentum=momentum)
    loud = simulate(dataclasses.replace(config, noise_multiplier=20.0), task)
    still = simulate(dataclasses.replace(config, noise_multiplier=1e-6), task)
    assert loud.outlook is not None
    moved = float(np.linalg.norm(loud.model.astype(np.float64) - still.model))
    assert moved == pytest.approx(loud.outlook.drift, rel=0.35)  # sqrt(2/n) and, projected, sqrt(2/(3 m)) of spread


def test_a_run_at_chance_is_announced_before_round_1(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    told_before: list[int] = []

    def on_round(_record: object, _model: object) -> None:
        told_before.append(caplog.text.count("expected to"))

    with caplog.at_level(logging.WARNING, "fedrp.simulation.simulate"):
        config = RunConfig("fedavg-dp", clients=3, rounds=2, noise_multiplier=1000.0)
        result = simulate(config, task, on_round=on_round).as_json()
    assert "this model is expected to stay near chance" in caplog.text
    assert "more clients, a larger epsilon or a smaller model would help" in caplog.text
    assert told_before == [1, 1]
    assert result["outlook"] == "expected to stay near chance"
    assert result["signal_to_noise"] < 0.15


def test_without_noise_nothing_is_announced(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    for algorithm, given in (("fedavg", {}), ("fedavg-dp", {"noise_multiplier": 0.0})):
        result = simulate(RunConfig(algorithm, clients=3, rounds=1, **given), task).as_json()
        assert (result["outlook"], result["signal_to_noise"]) == (None, None)
    assert not [record for record in caplog.records if record.name == "fedrp.simulation.simulate"]


def test_the_ratio_grows_with_clients_and_not_with_the_clip() -> None:
    def ratio(**given: Any) -> float:
        config = RunConfig(**{"algorithm": "fedavg-dp", "rounds": 16, "noise_multiplier": 2.0, "clients": 50, **given})
        found = outlook_of(resolved(config, 10_000), 10_000)
        assert found is not None
        return found.signal_to_noise

    share = math.sqrt(50 / 49)  # a curious client knows its own share of the noise, so all add a little more
    assert ratio() == pytest.approx(math.sqrt(16) * 50 / (2.0 * 100) / share)
    assert ratio(clip=7.0) == pytest.approx(ratio())
    assert ratio(clients=200) == pytest.approx(4 * ratio(), rel=0.02)
    assert ratio(dp_noise="local") == pytest.approx(math.sqrt(16 * 50) / (2.0 * 100))


@pytest.mark.parametrize(
    ("reach", "drift", "start", "expected", "remedy"),
    [
        (1.0, 10.0, 5.0, Expectation.CHANCE, "more clients"),
        (40.0, 100.0, 5.0, Expectation.CHANCE, "a smaller clip"),
        (40.0, 100.0, None, Expectation.LEARN, ""),  # where the clip adapts, only the ratio counts
        (1.0, 4.0, 5.0, Expectation.LESS, "more clients"),
        (10.0, 12.0, 5.0, Expectation.LESS, "a smaller clip"),
        (0.5, 0.1, 5.0, Expectation.LESS, "a larger clip"),
        (6.0, 8.0, 5.0, Expectation.LEARN, ""),
    ],
)
def test_each_level_has_its_remedy(
    reach: float, drift: float, start: float | None, expected: Expectation, remedy: str
) -> None:
    outlook = Outlook(reach, drift, start)
    assert outlook.expectation is expected
    assert str(outlook).partition(") ")[2] == "" if not remedy else remedy in str(outlook)
