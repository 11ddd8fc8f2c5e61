"""Tasks: whatever the user brings is split without loss, or refused in one line that says what to do."""

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedrp import RunConfig, Task, simulate
from fedrp.errors import ConfigError, FedRPError
from fedrp.learning.task import examples, split_among_clients
from helpers import FEATURES, DropoutNet, TinyNet, blobs, tiny_config

# --- splitting -------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(30, 60),
    width=st.sampled_from([None, 1, 3]),
    whole=st.booleans(),
    spec=st.sampled_from(["iid", "dirichlet:5", "shards:1"]),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_used_exactly_once(count: int, width: int | None, whole: bool, spec: str, seed: int) -> None:
    """Whatever the shape and kind of targets; those that are no class labels are not split by class."""
    shape = (count,) if width is None else (count, width)
    targets = np.random.default_rng(seed).integers(0, 3, shape).astype(np.int64 if whole else np.float32)
    task = Task(TinyNet, (np.arange(count), targets), blobs(6))
    config = RunConfig(clients=3, partition=spec, seed=seed)
    if spec != "iid" and (width == 3 or not whole):
        with pytest.raises(ConfigError, match=f"partition '{spec}' splits by class, but targets are .*: use iid"):
            split_among_clients(task, config)
        return
    parts = split_among_clients(task, config)
    used = torch.cat([part.x for part in parts])
    assert sorted(used.tolist()) == list(range(count))
    for part in parts:
        assert np.array_equal(part.y.numpy(), targets[part.x.numpy()])


def test_a_column_of_labels_is_split_like_the_labels() -> None:
    x, y = blobs(90)
    config = tiny_config("fedavg", partition="shards:1", clients=3)
    flat, column = (split_among_clients(Task(TinyNet, (x, t), blobs(6)), config) for t in (y, y[:, None]))
    assert [part.x.tolist() for part in flat] == [part.x.tolist() for part in column]


# --- what train and test may be --------------------------------------------------------------------------------------

X, Y = blobs(40)


class Samples(Dataset[object]):
    """A map-style data set of whatever `make` gives."""

    def __init__(self, make: Callable[[int], object], count: int = len(Y)) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> object:
        return self.make(index)


class Stream(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X.double(), Y.to(torch.uint8)),
        (X.tolist(), Y.tolist()),
        TensorDataset(X, Y),
        Samples(lambda index: (X[index].numpy(), int(Y[index]))),
        Samples(lambda index: [X[index], Y[index]]),
    ],
    ids=["tensors", "arrays", "other types", "lists", "torch", "numpy and int", "pairs as lists"],
)
def test_examples_come_in_many_forms(source: object) -> None:
    x, y = examples(source, "the training set")
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        *[(kind, torch.float32) for kind in (torch.uint8, torch.bool, torch.int16, torch.float64)],
        *[(kind, torch.int64) for kind in (torch.int32, torch.int64)],
    ],
)
def test_only_indices_stay_whole_numbers(inputs: torch.dtype, kind: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 0]])
    x = examples((values.to(inputs), [0, 1]), "the training set").x
    assert x.dtype == kind
    assert torch.equal(x.long(), values)


def with_value(values: torch.Tensor, value: float) -> torch.Tensor:
    changed = values.clone().float()
    changed.view(-1)[5] = value
    return changed


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "is a NoneType: expected .inputs, targets., or a map-style torch data set"),
        (X, "is a Tensor of Tensors: expected"),
        (X.numpy(), "is a ndarray of ndarrays: expected"),
        ((X, Y, Y), "is a tuple of 3: expected"),
        (DataLoader(TensorDataset(X, Y)), "is a DataLoader: expected"),
        (Stream(), "is a Stream: expected"),
        (Samples(lambda index: {"x": X[index], "y": Y[index]}), "is a Samples of dicts: expected"),
        (Samples(lambda index: (X[index], Y[index], index)), "is a Samples of 3-tuples: expected"),
        (Samples(lambda index: (X[index][: 1 + index % 3], Y[index])), "cannot be made tensors"),
        ((X, ["a"] * len(Y)), "cannot be made tensors"),
        ((X, Y[:-1]), r"has inputs \(40, 6\) float32 but targets \(39,\) int64"),
        ((X[0], Y[0]), r"has inputs \(6,\) float32 but targets \(\) int64"),
        ((X[:0], Y[:0]), "has no examples"),
        (Samples(lambda index: (X[index], Y[index]), 0), "has no examples"),
        ((with_value(X, float("nan")), Y), "has inputs that are not finite"),
        ((with_value(X, float("inf")), Y), "has inputs that are not finite"),
        ((X, with_value(Y, float("nan"))), "has targets that are not finite"),
    ],
)
def test_what_is_no_set_of_examples_is_refused_by_kind_and_owner(source: object, told: str) -> None:
    config = tiny_config("fedavg", clients=2)
    for task, owner in [
        (Task(TinyNet, source, blobs(6)), "the training set"),
        (Task(TinyNet, [blobs(6), source], blobs(6)), "client 1"),
        (Task(TinyNet, blobs(6), source), "the test set"),
    ]:
        with pytest.raises(FedRPError, match=rf"^{owner} {told}"):
            simulate(config, task)


# --- the preflight ---------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Says the next of seven words, at each of the places of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.output = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.table(x)).transpose(1, 2)


SHARED = TinyNet()
SENTENCES = torch.arange(7).repeat(20, 1)
NUMBERS = X[:, :1]


def out_of_range(values: torch.Tensor, value: int) -> torch.Tensor:
    """One wrong number, in the middle of the data of the last client."""
    changed = values.clone()
    changed.view(-1)[-5] = value
    return changed


def line() -> nn.Module:
    return nn.Linear(FEATURES, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": TinyNet()}, "the model is a TinyNet: give what builds it"),
        ({"model": None}, "the model is a NoneType: give what builds it"),
        ({"model": lambda: SHARED}, "the model is the same module in every call: .*copy.deepcopy"),
        ({"model": lambda: [1]}, "the model is built as a list"),
        ({"model": lambda: nn.Linear()}, "the model cannot be built: .*missing"),
        ({"model": lambda: nn.Sequential(nn.LazyLinear(3))}, "parameter '0.weight' is of a lazy layer"),
        (
            {"model": lambda: nn.Linear(FEATURES + 1, 3)},
            r"does not take the training data: .*; inputs \(2, 6\) float32",
        ),
        ({"model": lambda: nn.LSTM(FEATURES, 3)}, "does not take the training data"),
        (
            {"train": (X, out_of_range(Y, 3))},
            r"does not take the training data: Target 3 is out of bounds; .*targets \(2,\) int64",
        ),
        ({"train": (X, out_of_range(Y, -1))}, "does not take the training data: Target -1 is out of bounds"),
        ({"train": (X, Y.double())}, r"does not take the training data: .*targets \(2,\) float32"),
        ({"test": (X, out_of_range(Y, 3))}, "does not take the test data: Target 3 is out of bounds"),
        ({"test": (X[:, 1:], Y)}, r"does not take the test data: .*inputs \(2, 5\)"),
        ({"loss": nn.CrossEntropyLoss}, "is the class CrossEntropyLoss: give an instance"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss=...\) gave \(2,\) float32: expected one number"),
        ({"loss": lambda outputs, targets: 1.0}, "gave a float: expected one number"),
        (
            {"metrics": {"x": lambda outputs, targets: outputs}},
            r"metric 'x' gave \(40, 3\) float32 .*expected one number",
        ),
        ({"metrics": {"x": lambda outputs, targets: None}}, "metric 'x' gave a NoneType .*expected one number"),
        ({"metrics": {"x": lambda outputs: outputs}}, r"metric 'x' does not take the test set: .*argument.*\(40, 3\)"),
        (
            {"model": line, "loss": nn.functional.mse_loss, "train": (X, NUMBERS[:, 0]), "test": (X, NUMBERS[:, 0])},
            "does not take the training data: Using a target size",  # what would be broadcast
        ),
        (
            {"model": Words, "train": (out_of_range(SENTENCES, 7), SENTENCES), "test": (SENTENCES, SENTENCES)},
            "does not take the training data: index out of range",
        ),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused_before_it_runs(change: dict[str, object], told: str) -> None:
    task = Task(**{"model": TinyNet, "train": (X, Y), "test": (X, Y), **change})
    with pytest.raises(ConfigError, match=told) as caught:
        simulate(tiny_config("fedavg"), task, on_round=lambda record, model: pytest.fail("it ran"))
    assert "\n" not in str(caught.value)


def test_sequences_are_scored_by_the_share_of_right_places() -> None:
    task = Task(Words, (SENTENCES, SENTENCES), (SENTENCES, SENTENCES))
    result = simulate(tiny_config("fedavg", rounds=4, lr=0.5, local_epochs=5), task)
    assert 50 < result.accuracy <= 100


def test_a_preflight_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    simulate(tiny_config("fedavg", rounds=1), Task(DropoutNet, (X, Y), (X, Y)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_preflight_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    config, task = tiny_config("fedrp-subspace"), Task(DropoutNet, (X, Y), (X, Y))
    first = simulate(config, task)
    monkeypatch.setattr(sys.modules["fedrp.simulation.simulate"], "preflight", lambda *_: 1.0)
    assert np.array_equal(simulate(config, task).model, first.model)
