"""Benchmarks of the simulator: the reference computes FedAvg, and the command says what it measured."""

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from fedrp import RunConfig, Speed, simulate
from fedrp.benchmarking.plain_loop import Reference
from fedrp.benchmarking.simulator import BASE, simulator_benchmark, start_up, synthetic_images
from fedrp.cli import main
from fedrp.learning.task import named_task
from fedrp.learning.zoo import MODELS
from helpers import ROOT, tiny_task

KEYS = {"ratio", "images_per_second", "reference_images_per_second", "seconds_to_first_round", "peak_rss_mb"}
SMALL = ["--clients=4", "--examples=20", "--repeats=2", "--starts=1", "--workers=1", "--batch-size=10"]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_plain_loop_computes_what_the_simulator_does(processes: int) -> None:
    config = RunConfig(algorithm="fedavg", clients=4, rounds=2, batch_size=8, lr=0.05, local_epochs=2)
    expected = simulate(config, tiny_task()).model
    reference = Reference(config, tiny_task(), processes)
    try:
        start = reference.model
        seconds = [reference.round() for _ in range(config.rounds)]
    finally:
        reference.stop()
    assert min(seconds) > 0
    assert np.abs(expected - start).max() > 1e-2
    assert np.allclose(reference.model, expected, atol=1e-5)


def test_ratios_are_of_neighbouring_rounds_and_the_warm_up_does_not_count() -> None:
    seen = simulator_benchmark(dataclasses.replace(BASE, clients=4), tiny_task(), Speed(), 3, (1, 2))
    assert (seen["repeats"], seen["warm_up_rounds"]) == (3, 1)
    for compared in seen["references"].values():
        low, high = compared["ratio_range"]
        assert 0 < low <= compared["ratio"] <= high
    assert seen["ratio"] == seen["references"][1]["ratio"]
    low, high = seen["images_per_second_range"]
    assert low <= seen["images_per_second"] <= high


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "simulator", *SMALL, "--processes=2", "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    measured = json.loads(out)
    assert all(measured[key] > 0 for key in KEYS)
    assert (measured["algorithm"], measured["workers"], measured["repeats"]) == ("fedavg", 1, 2)
    assert set(measured["references"]) == {"1", "2"}
    assert measured["images_per_round"] == 4 * 20


def test_a_table_names_algorithm_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "simulator", *SMALL, "--algorithm=fedrp-subspace", "--dim=20", "--projection=sign"])
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["algorithm"], shown["projection"], shown["dim"]) == ("fedrp-subspace", "sign", "20")
    assert " to " in shown["ratio_range"]
    assert set(shown) >= KEYS


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats=0"], "repeats=0 is not valid"),
        (["--examples=-1"], "examples=-1 is not valid"),
        (["--starts=0"], "starts=0 is not valid"),
        (["--processes=0"], "processes=0 is not valid"),
        (["--clients=0"], "clients=0 is not valid"),
        (["--workers=0"], "workers=0 is not valid"),
        (["--algorithm=fedagv"], "did you mean 'fedavg'"),
        (["--model=lenet"], "did you mean 'lenet5'"),
        (["--repeats=many"], "'many' is not a valid integer"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "simulator", *SMALL, *arguments])
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, "")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_fails_is_told_of() -> None:
    config = dataclasses.replace(BASE, dataset=f"npz:{Path(__file__)}", clients=2)
    with pytest.raises(Exception, match=r"'fedrp run' failed: fedrp: .*expected npz arrays"):
        start_up(config, Speed(), 1)


def test_peers_train_the_model_of_the_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    theirs = importlib.import_module("peer_task").lenet5()
    assert str(theirs) == str(MODELS["lenet5"].build((1, 28, 28), 10))


@pytest.mark.slow
def test_the_simulator_is_not_slower_than_a_plain_loop() -> None:
    """A ratio of rounds in turn, so that other work hits both sides; a bad median has two more chances."""
    with synthetic_images("lenet5", 6000) as dataset:
        config = dataclasses.replace(BASE, dataset=dataset, clients=20)
        task = named_task(config)
        medians = []
        while len(medians) < 3 and max(medians, default=0.0) < 1.0:
            medians.append(simulator_benchmark(config, task, Speed(workers=1), repeats=5)["ratio"])
    assert max(medians) >= 1.0, f"the plain loop is faster: {medians}"
