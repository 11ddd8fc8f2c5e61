"""What a newcomer gives to `simulate` and `Task`: accepted, or refused in one line with owner and remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedrp import RunConfig, Speed, Task, simulate
from fedrp.errors import ConfigError, DataError, DivergenceError, FedRPError

X = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ALL = (X, Y)
NORTH, SOUTH = (X[:40], Y[:40]), (X[40:], Y[40:])
TWO = RunConfig(clients=2, rounds=1)
BINARY: dict[str, Any] = {
    "model": lambda: nn.Linear(6, 1),
    "loss": nn.functional.binary_cross_entropy_with_logits,
    "correct": lambda outputs, targets: ((outputs > 0) == (targets > 0)).float(),
}


def net() -> nn.Module:
    return nn.Linear(6, 2)


def task(train: object = ALL, test: object = ALL, **changes: Any) -> Task:
    return Task(**{"model": net, "train": train, "test": test, **changes})


def nan_for_several(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As of data that a few examples do not show."""
    return nn.functional.cross_entropy(outputs, targets) * (float("nan") if len(targets) > 2 else 1.0)


WRONG: dict[str, tuple[Task, type[FedRPError], str]] = {
    "features of one client": (
        task([NORTH, (X[40:, :5], Y[40:])]),
        ConfigError,
        r"take the data of client 1: .*; inputs \(2, 5\) float32, .* of the first client inputs \(2, 6\) float32",
    ),
    "features of one site": (
        task({"north": NORTH, "south": (X[40:, :5], Y[40:])}),
        ConfigError,
        r"does not take the data of site 'south': .* inputs \(2, 5\) float32",
    ),
    "target type of one client": (
        task([NORTH, (X[40:], Y[40:].float())]),
        ConfigError,
        r"the data of client 1: .* of the first client targets \(2,\) int64 \(class labels .*: give targets.long\(\)\)",
    ),
    "features as whole numbers": (
        task((X.long(), Y), (X.long(), Y)),
        ConfigError,
        r"inputs \(2, 6\) int64, .* \(whole numbers stay whole, .* give features as inputs.float\(\)\)",
    ),
    "text as labels": (
        task((X, np.where(Y, "cat", "dog"))),
        DataError,
        r"^the training set has targets that are text, e.g. '(cat|dog)': number them from 0, as numpy.unique\(",
    ),
    "text as labels of one site": (
        task({"north": NORTH, "south": (X[40:], ["cat"] * 40)}),
        DataError,
        "^site 'south' has targets that are text, e.g. 'cat'",
    ),
    "labels from 1": (
        task((X, Y + 1), (X, Y + 1)),
        ConfigError,
        r"Target 2 is out of bounds; .* \(labels 1 to 2: number classes from 0",
    ),
    "(N, 1) labels": (task((X, Y[:, None])), ConfigError, r"targets \(2, 1\) int64 .* give targets.squeeze\(1\)\)"),
    "(N, 1) fractions as labels": (
        task((X, Y[:, None].float())),
        ConfigError,
        r"targets \(2, 1\) float32 .* give targets.squeeze\(1\).long\(\)\)",
    ),
    "one-hot labels": (task((X, nn.functional.one_hot(Y))), ConfigError, r"targets.argmax\(1\), or targets.float\(\)"),
    "(N,) for one output": (task((X, Y.float()), (X, Y.float()), **BINARY), ConfigError, r"e.g. targets\[:, None\]"),
    "whole numbers for BCE": (
        task((X, Y[:, None]), (X, Y[:, None]), **BINARY),
        ConfigError,
        r"\(give targets.float\(\)\)$",
    ),
    "a tuple of two clients": (
        task((NORTH, SOUTH)),
        ConfigError,
        "^the training set is a tuple of 2 sets of examples: make it a list",
    ),
    "a tuple of three data sets": (task((TensorDataset(*NORTH),) * 3), ConfigError, "tuple of 3 sets of examples"),
    "a list of inputs and targets": (task([X, Y]), ConfigError, "train is a list, and client 0 in it one array: give"),
    "a dict of inputs and targets": (
        task({"x": X, "y": Y}),
        ConfigError,
        "train is a dict, and site 'x' in it one",
    ),
    "an empty list": (task([]), DataError, "^train is an empty list: expected the examples of each client"),
    "an empty dict": (task({}), DataError, "^train is an empty dict"),
    "a path": (task("data.npz"), ConfigError, r"^the training set is a str.*expected \(inputs, targets\)"),
    "a loader": (task(DataLoader(TensorDataset(*ALL))), ConfigError, "^the training set is a DataLoader: expected"),
    "three sites for two clients": (
        task({"a": NORTH, "b": SOUTH, "c": NORTH}),
        ConfigError,
        "^clients=2, but the task holds examples of 3 clients: use clients=3",
    ),
    "test data of another shape": (task(test=(X[:, :4], Y)), ConfigError, r"take the test data: .* \(2, 4\) float32"),
    "a loss that is always NaN": (
        task(loss=lambda outputs, _: outputs.sum() * float("nan")),
        ConfigError,
        r"^Task\(loss=...\) is nan for the training data before any training: .* no learning rate mends that$",
    ),
    "a loss that is NaN for one site": (
        task({"north": NORTH, "south": (X[40:] * 1e30, Y[40:])}, loss=lambda o, _: (o * o).sum() * 0),
        DivergenceError,
        "the loss of client 1 is nan before its first step",
    ),
    "a loss that turns out to be NaN": (
        task(loss=nan_for_several),
        DivergenceError,
        "^training diverged: the loss of client 0 is nan before its first step: look at its data",
    ),
    "a loss that is text": (task(loss="mse"), ConfigError, r"^Task\(loss='mse'\) is not valid: expected a function"),
    "a score that is a number": (task(correct=1), ConfigError, r"^Task\(correct=1\) is not valid: expected a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_task_is_one_line_with_owner_and_remedy(name: str) -> None:
    given, kind, told = WRONG[name]
    with pytest.raises(kind, match=told) as caught:
        simulate(TWO, given)
    assert "\n" not in str(caught.value)
    assert "lower" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: simulate(task(), TWO),
            r"^simulate was given the task before the config: use simulate",
        ),
        (lambda: simulate({"clients": 2}, task()), r"^config is a dict: use RunConfig\(\*\*config\)"),
        (lambda: simulate(RunConfig, task()), "^config is the class RunConfig: expected a RunConfig"),
        (lambda: simulate(TWO, net()), "^task is of type Linear: expected a Task"),
        (lambda: simulate(TWO, task(), 2), "^speed is of type int: expected a Speed"),
        (lambda: simulate(TWO, task(), Speed(), out=5), "^out=5 is not valid: expected the path of a folder"),
        (lambda: simulate(TWO, task(), resume=True), "^resume=True needs out"),
        (lambda: simulate(TWO, task(), on_round=3), "^on_round=3 is not valid: expected a function"),
        (lambda: simulate(TWO, task(), tap="wire"), "^tap='wire' is not valid: expected a function"),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_computed(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


def test_a_dict_of_sites_is_a_list_with_names() -> None:
    by_name = simulate(TWO, task({"north": NORTH, "south": SOUTH}))
    assert by_name.model.tobytes() == simulate(TWO, task([NORTH, SOUTH])).model.tobytes()


def test_clients_with_inputs_of_different_shapes_train_a_model_that_takes_them() -> None:
    class Pooled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mean(dim=1, keepdim=True))

    config = RunConfig(clients=2, rounds=2, batch_size=1, local_epochs=13)  # so many steps that engines are tried
    parts = [NORTH, (X[40:, :4], Y[40:])]
    assert simulate(config, task(parts, model=Pooled)).accuracy > 0
    with pytest.raises(ConfigError, match="clients have inputs of different shapes; use --engine auto"):
        simulate(config, task(parts, model=Pooled), Speed(engine="stacked"))


@pytest.mark.parametrize(("algorithm", "dim"), [("fedrp-subspace", 14), ("fedrp", 14)])
def test_a_small_model_needs_no_dimension(algorithm: str, dim: int) -> None:
    assert simulate(RunConfig(algorithm=algorithm, clients=2, rounds=1), task()).config.dim == dim
