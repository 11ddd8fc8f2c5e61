"""Likelihood-ratio attack: it finds those whom a model learned by heart, and nobody in a model that never saw them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.attacks import shadow_models
from fedrp.attacks.membership import attack_membership
from fedrp.attacks.shadow_models import confidences, likelihood_ratios, log_ratios, paired, shadow_settings
from fedrp.cli import main
from fedrp.config.run import Resolved
from fedrp.errors import DataError
from fedrp.learning.objective import Examples
from fedrp.learning.task import named_task
from fedrp.simulation.measures import delivering_client
from fedrp.testing.problems import CLASSES, FEATURES, TinyNet
from helpers import layout_of, tiny_config

SETTINGS = RunConfig("fedavg", clients=2, rounds=8, local_epochs=5, batch_size=10)


def noise(path: Path, seed: int) -> str:
    """Images and labels at random: nothing to learn but the members themselves."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", 60), ("test", 120)):
        arrays |= {f"x_{part}": rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)}
        arrays |= {f"y_{part}": np.concatenate([np.arange(3), rng.integers(0, 3, count - 3)])}
    np.savez(path, **arrays)
    return f"npz:{path}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and the folder of the same run with a model that was trained on nobody of it."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("own", 0), ("foreign", 1)):
        config = dataclasses.replace(SETTINGS, dataset=noise(folder / f"{name}.npz", seed))
        simulate(config, named_task(config), out=folder / name)
    shutil.copytree(folder / "own", folder / "swapped")
    shutil.copy(folder / "foreign" / "model.safetensors", folder / "swapped" / "model.safetensors")
    return folder / "own", folder / "swapped"


# --- from start to end -----------------------------------------------------------------------------------------------


def test_members_learned_by_heart_are_found(runs: tuple[Path, Path], tmp_path: Path) -> None:
    main(["attack", "membership", str(runs[0]), "--references=0", "--shadows=8", f"--out={tmp_path}"])
    found = json.loads((tmp_path / "result.json").read_text())
    ratio = found["likelihood_ratio"]
    assert ratio["auc_low"] > 0.7
    assert ratio["tpr_at_1_percent_fpr"] > 0.2  # by guessing 0.01; with so few, what the loss finds depends on rounding
    assert found["verdict"].startswith("MEMBERS TOLD FROM OTHERS")
    assert (found["shadows"], found["members"]) == (8, 60)
    assert 40 < found["pairs"] <= 60
    assert found["seconds_per_shadow"] > 0
    assert (tmp_path / "roc.png").exists()


def test_nobody_is_found_in_a_model_that_was_trained_without_them(runs: tuple[Path, Path]) -> None:
    found = attack_membership(runs[1], references=0, shadows=4).as_json()
    ratio = found["likelihood_ratio"]
    assert ratio["auc_low"] < 0.5 < ratio["auc_high"]
    assert ratio["tpr_low"] <= ratio["fpr_high"]
    assert found["verdict"].startswith("members not told from others")


# --- what shadow runs are --------------------------------------------------------------------------------------------


def examples_of(count: int, first: int) -> Examples:
    """Each with a number of its own."""
    x = torch.zeros(count, FEATURES)
    x[:, 0] = torch.arange(first, first + count)
    return Examples(x, torch.arange(count) % CLASSES)


def numbers(part: Examples) -> set[int]:
    return {int(number) for number in part.x[:, 0]}


def attacked(algorithm: str) -> tuple[Resolved, Task, list[Examples], Examples]:
    config = resolved(tiny_config(algorithm, clients=3, rounds=2), layout_of(TinyNet()).size)
    shares, strangers = [examples_of(10, 100 * client) for client in range(3)], examples_of(30, 1000)
    return config, Task(TinyNet, shares, strangers), shares, strangers


@pytest.mark.parametrize("algorithm", ["fedavg", "fwc"])
def test_every_candidate_is_in_half_of_the_shadow_runs(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, task, shares, strangers = attacked(algorithm)
    own = 1 if algorithm == "fwc" else None
    if own is not None:
        monkeypatch.setattr(shadow_models, "delivering_client", lambda given: own if given is config else seat(given))
    holders = [own] if own is not None else [0, 1, 2]
    clients, places = np.repeat(holders, 10), np.tile(np.arange(10), len(holders))
    trained: list[tuple[RunConfig, list[Examples]]] = []

    def watched(given: RunConfig, task: Task, speed: object) -> object:
        trained.append((given, list(task.train)))
        return simulate(given, task, speed)

    seat = delivering_client
    monkeypatch.setattr(shadow_models, "simulate", watched)
    candidates = paired(shares, clients, places, strangers)
    model = simulate(config.stored, task).model
    found = likelihood_ratios(model, task, config, candidates, 6)
    assert len(found.members) == len(found.strangers) == len(candidates.clients)
    members = [int(shares[c].x[p, 0]) for c, p in zip(candidates.clients, candidates.places, strict=True)]
    beside = [int(number) for number in candidates.strangers.x[:, 0]]
    inside = [set[int]().union(*map(numbers, parts)) for _, parts in trained]
    for member, stranger in zip(members, beside, strict=True):
        assert sum(member in everyone for everyone in inside) == 3
        assert all((member in everyone) != (stranger in everyone) for everyone in inside)
    assert len({given.seed for given, _ in trained} | {config.seed}) == 7  # never that of the run
    for given, parts in trained:
        assert dataclasses.replace(given, seed=config.seed) == config.stored
        assert [sorted(part.y.tolist()) for part in parts] == [sorted(share.y.tolist()) for share in shares]
        if own is not None:  # whose model is delivered holds the candidates
            assert numbers(parts[seat(Resolved.of(given))]) & set(members + beside)
    assert all(torch.equal(share.x, examples_of(10, 100 * client).x) for client, share in enumerate(shares))


def test_noise_of_the_run_is_in_its_shadow_runs() -> None:
    config = resolved(tiny_config("fedavg-dp", partition="dirichlet:0.5"), layout_of(TinyNet()).size)
    own = shadow_settings(config, 0)
    assert own.noise_multiplier == config.noise_multiplier > 0
    assert own.clip == config.clip
    assert own.partition == "iid"  # of data that come split as the run had them


def test_pairs_are_of_one_class() -> None:
    _, _, shares, strangers = attacked("fedavg")
    few = Examples(strangers.x[:7], strangers.y[:7])
    clients, places = np.array([2, 0, 1, 1]), np.array([0, 4, 1, 5])
    candidates = paired(shares, clients, places, few)
    labels = [int(shares[c].y[p]) for c, p in zip(candidates.clients, candidates.places, strict=True)]
    assert labels == candidates.strangers.y.tolist()
    assert sorted(labels) == [0, 1, 1, 2]
    with pytest.raises(DataError, match="no test example is of the class"):
        paired(shares, clients, places, Examples(few.x, few.y + CLASSES))


# --- scores ----------------------------------------------------------------------------------------------------------


def test_confidence_is_the_log_odds_of_the_class() -> None:
    module, x = TinyNet(), torch.randn(5, FEATURES)
    y = torch.arange(5) % CLASSES
    model = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    p = module(x).double().softmax(dim=1)[torch.arange(5), y]
    expected = torch.log(p / (1 - p)).detach().numpy()
    np.testing.assert_allclose(confidences(TinyNet, model, Examples(x, y)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [32, 128])
def test_ratios_are_those_of_the_distributions_that_shadows_come_from(count: int) -> None:
    """Normal ones, 2 apart: the ratio is linear in what is seen, and the best attack has a known area."""
    rng = np.random.default_rng(0)
    examples = 2000
    inside = np.arange(count)[:, None] % 2 == rng.integers(0, 2, examples)
    own = rng.normal(0, 3, examples)  # how hard each example is
    shadows = own + 2.0 * inside + rng.normal(0, 1, (count, examples))
    member = rng.random(examples) < 0.5
    ratios = log_ratios(own + 2.0 * member + rng.normal(0, 1, examples), shadows, inside)
    wins = (ratios[member][:, None] > ratios[~member]).mean()
    assert wins == pytest.approx(0.921, abs=0.03)  # Phi(2 / sqrt 2)


def test_a_model_without_a_choice_gives_finite_ratios() -> None:
    shadows = np.zeros((4, 3))
    inside = np.arange(4)[:, None] % 2 == np.zeros(3, int)
    assert np.isfinite(log_ratios(np.zeros(3), shadows, inside)).all()
