"""The examples run as they are, and the readable twin of FedRP is the library's FedRP."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from fedrp import RunConfig, load_vector, simulate
from fedrp.learning.initial import secret_initial
from fedrp.learning.layout import layout_of
from fedrp.learning.task import split_among_clients
from fedrp.projection.families import make_projection
from fedrp.simulation.measures import delivering_client
from helpers import ROOT, TinyNet, client_batches, environment, round_keys, tiny_config, tiny_task

LONGEST = {"fedrp_in_100_lines": 100, "your_own_algorithm": 46, "your_own_metric": 26, "your_own_model": 20}


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("twin", ROOT / "examples" / "fedrp_in_100_lines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradient(w: np.ndarray, batch: tuple[torch.Tensor, torch.Tensor]) -> np.ndarray:
    """Of the loss of TinyNet, in double precision."""
    inputs, targets = batch
    module = TinyNet()
    flat = torch.from_numpy(w).requires_grad_()
    layout = layout_of(module)
    names = [name for name, _ in module.named_parameters()]
    outputs = torch.func.functional_call(
        module.double(), dict(zip(names, layout.views(flat), strict=True)), (inputs.double(),)
    )
    nn.functional.cross_entropy(outputs, targets).backward()
    return flat.grad.numpy()


def twin_models(twin: ModuleType, config: RunConfig, resolved: RunConfig) -> list[list[np.ndarray]]:
    """All clients' models after each round, by the twin, from what the simulator's clients know."""
    keys = round_keys(config)
    initial = secret_initial(TinyNet, keys[0]).astype(np.float64)
    units = np.eye(config.dim, dtype=np.float32)
    projections = [make_projection(resolved.projection, key, initial.size, config.dim) for key in keys]
    matrices = [projection.adjoint(units).astype(np.float64) for projection in projections]
    parts = split_among_clients(tiny_task(), config)
    batches = [
        [
            [(part.x[batch], part.y[batch]) for batch in client_batches(config, round_, client, len(part.y))]
            for client, part in enumerate(parts)
        ]
        for round_ in range(1, config.rounds + 1)
    ]
    settings = twin.Settings(resolved.lr, resolved.momentum, resolved.rho)
    return list(twin.fedrp(initial, matrices, batches, gradient, settings))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("projection", ["gaussian", "sign", "hadamard"])
def test_the_twin_equals_the_library(projection: str, seed: int, twin: ModuleType) -> None:
    config = tiny_config("fedrp", projection=projection, seed=seed, local_epochs=2)
    result = simulate(config, tiny_task())
    models = twin_models(twin, config, result.config)
    np.testing.assert_allclose(result.model, models[-1][delivering_client(config)], rtol=0, atol=1e-6)
    x, y = tiny_task().test
    for record, after in zip(result.records, models, strict=True):
        module = load_vector(TinyNet(), np.mean(after, axis=0).astype(np.float32))
        assert record.evaluation.average.loss == pytest.approx(nn.functional.cross_entropy(module(x), y).item(), 1e-5)


def test_the_comparison_can_fail(twin: ModuleType) -> None:
    """Another penalty or another order of keys is noticed."""
    config = tiny_config("fedrp")
    result = simulate(config, tiny_task())
    client = delivering_client(config)
    for rho, seed in [(1.01 * result.config.rho, config.seed), (result.config.rho, 1)]:
        other = RunConfig(**{**vars(config), "seed": seed})
        models = twin_models(twin, other, dataclasses.replace(result.config, rho=rho))
        assert np.abs(models[-1][client] - result.model).max() > 1e-5


def run_example(name: str) -> str:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= LONGEST[name]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_fedrp_in_100_lines_learns() -> None:
    output = run_example("fedrp_in_100_lines")
    accuracies = [float(number) for number in re.findall(r"round \d: ([0-9.]+) %", output)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 85


def test_your_own_model_learns() -> None:
    output = run_example("your_own_model")
    assert float(re.search(r"off by ([0-9.]+) on", output).group(1)) < 0.5  # always answering 0 is off by 0.91


def test_your_own_metric_tells_more_than_accuracy() -> None:
    told = re.match(r"AUROC ([0-9.]+) after .* accuracy ([0-9.]+) %", run_example("your_own_metric"))
    area, accuracy = map(float, told.groups())
    assert area > 0.95
    assert accuracy > 95  # as it is if everyone is called healthy


def test_your_own_algorithm_learns() -> None:
    assert float(re.fullmatch(r"([0-9.]+) %\n", run_example("your_own_algorithm")).group(1)) > 60


def test_every_example_is_covered() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(LONGEST)


def test_the_flower_app_can_be_built(tmp_path: Path) -> None:
    from fedrp.flower.environment import quiet_environment

    flwr = Path(sys.executable).with_name("flwr")
    command = [flwr, "build", "--app", ROOT / "examples" / "flower-app"]
    done = subprocess.run(command, cwd=tmp_path, env=quiet_environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("fedrp.digits.*.fab"))) == 1


def test_the_flower_app_is_short_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app as it is, on a grid in this process."""
    from fedrp.crypto.roster import entry_of, merged, new_identity, write_roster
    from fedrp.storage.status import statuses
    from fedrp.testing.local import LocalGrid, answering, run_locally

    folder = ROOT / "examples" / "flower-app"
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("digits/*.py")) <= 45
    monkeypatch.syspath_prepend(str(folder))
    from digits.client_app import app as client
    from digits.server_app import app as server

    defaults = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings = {**defaults, "rounds": 1, "projection": "sign", "store": str(tmp_path / "store"), "poll": 0.01}
    nodes = {}
    entries = []
    for number, name in enumerate(("a", "b", "c")):
        entries.append(entry_of(new_identity(tmp_path / f"{name}.key", name)))
        paths = {"key": tmp_path / f"{name}.key", "roster": tmp_path / "roster.toml", "state": tmp_path / name}
        nodes[number + 10] = {key: str(path) for key, path in paths.items()}
    write_roster(tmp_path / "roster.toml", merged(entries))
    run_locally(server, LocalGrid(answering(client, nodes, settings), lambda: list(nodes)), settings)
    (status,) = statuses(tmp_path / "a")
    assert status["finished"]
    assert status["accuracy"] > 30  # of ten classes, after one round
