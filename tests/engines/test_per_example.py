"""Per-example gradients: those of a loop over single examples, by every way and for every bundled model."""

import builtins
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from fedrp.engines.per_example import FUNC, LOOP, OPACUS, Block, per_example
from fedrp.errors import ConfigError
from fedrp.learning.layout import layout_of, replace_batchnorm
from fedrp.learning.objective import Loss
from fedrp.learning.pixels import Pixels, Scale
from fedrp.learning.trainer import LocalModel
from fedrp.learning.zoo import MODELS
from fedrp.testing.problems import CLASSES, FEATURES, TinyNet, blobs
from helpers import DropoutNet, FrozenNet

CPU = torch.device("cpu")
MNIST, CIFAR, SMALL = (1, 28, 28), (3, 32, 32), (3, 16, 16)
ZOO = [("lenet5", MNIST, 3), ("lenet5", CIFAR, 3), ("cnn", (1, 8, 8), 2), ("resnet18", (3, 8, 8), 2)]
HEAVY = [("cnn", CIFAR, 4), ("resnet18", CIFAR, 3), ("vgg16", SMALL, 1)]  # 1 GB a row


def local(
    module: nn.Module, loss: Loss = nn.functional.cross_entropy, dtype: torch.dtype = torch.float64
) -> LocalModel:
    """In float64, so that what is left of a difference is an error."""
    layout = layout_of(module)
    return LocalModel(module.to(dtype), loss, layout, CPU)


def weights_of(model: LocalModel) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.module.parameters() if p.requires_grad]).clone()


def rows(
    model: LocalModel, x: torch.Tensor, y: torch.Tensor, way: str = FUNC, microbatch: int = 2, seed: int = 0
) -> torch.Tensor:
    return in_order(per_example(model, way).gradients(weights_of(model), x, y, microbatch, seed))


def in_order(blocks: Iterable[Block]) -> torch.Tensor:
    return torch.cat([block.rows[: block.used].clone() for block in blocks][::-1])


def one_by_one(model: LocalModel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Plain autograd, and nothing of what is tested."""
    found = []
    for example in range(len(y)):
        model.module.zero_grad(set_to_none=True)
        model.loss(model.module(x[example : example + 1]), y[example : example + 1]).backward()
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        found.append(
            torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        )
    model.module.zero_grad(set_to_none=True)
    return torch.stack(found)


def require_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    for own, other in zip(found, expected, strict=True):
        assert float((own - other).norm() / other.norm()) < 1e-6


def without_dropout(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


def tiny_examples(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = blobs(count, 3)
    return x.double(), y


# --- the bundled models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "count"), [*ZOO, *(pytest.param(*heavy, marks=pytest.mark.slow) for heavy in HEAVY)]
)
@pytest.mark.parametrize("way", [FUNC, OPACUS])
def test_rows_are_the_gradients_of_single_examples(name: str, shape: tuple[int, ...], count: int, way: str) -> None:
    model = local(without_dropout(MODELS[name].build(shape, 10)))
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(count) * 3 % 10
    expected = one_by_one(model, x, y)
    require_equal(rows(model, x, y, way), expected)
    require_equal(expected.mean(dim=0)[None], batch_gradient(model, x, y)[None])


def batch_gradient(model: LocalModel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.module.zero_grad(set_to_none=True)
    model.loss(model.module(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.module.parameters()])


def test_every_model_is_tried() -> None:
    assert {name for name, *_ in [*ZOO, *HEAVY]} == set(MODELS)


def test_layers_of_the_largest_model_are_tried_quickly() -> None:
    """The kinds of layers of vgg16, and in their order, without its 134 million parameters."""
    small = nn.Sequential(
        *[nn.ZeroPad2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3)],
        *[nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 10)],
    )
    with torch.device("meta"):
        kinds = {type(layer) for layer in MODELS["vgg16"].build(CIFAR, 10).modules()}
    assert kinds == {type(layer) for layer in small.modules()}
    model = local(without_dropout(small))
    x, y = torch.randn(3, 3, 6, 6, dtype=torch.float64), torch.tensor([1, 0, 7])
    for way in (FUNC, OPACUS, LOOP):
        require_equal(rows(model, x, y, way), one_by_one(model, x, y))


# --- microbatches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [FUNC, OPACUS, LOOP])
@pytest.mark.parametrize("microbatch", [1, 2, 5, 100])
def test_microbatches_change_nothing(way: str, microbatch: int) -> None:
    model, (x, y) = local(TinyNet()), tiny_examples()
    blocks = list(per_example(model, way).gradients(weights_of(model), x, y, microbatch, 0))
    assert [block.used for block in blocks][::-1] == [len(part) for part in y.split(microbatch)]
    assert {len(block.rows) for block in blocks} == {microbatch}
    require_equal(rows(model, x, y, way, microbatch), one_by_one(model, x, y))


def test_rows_are_written_over_by_those_after_them() -> None:
    model, (x, y) = local(TinyNet()), tiny_examples(4)
    first, second = per_example(model).gradients(weights_of(model), x, y, 2, 0)
    assert first.rows.data_ptr() == second.rows.data_ptr()


def test_no_examples_give_no_rows() -> None:
    """As happens where each example is drawn for itself."""
    model, (x, y) = local(TinyNet()), tiny_examples()
    assert not list(per_example(model).gradients(weights_of(model), x[:0], y[:0], 4, 0))


@pytest.mark.parametrize("way", [FUNC, OPACUS, LOOP])
def test_rows_are_those_of_the_weights_that_are_given(way: str) -> None:
    model, (x, y) = local(TinyNet()), tiny_examples()
    given = per_example(model, way)
    before, other = weights_of(model), weights_of(model).mul_(2.0)
    first = in_order(given.gradients(before, x, y, 3, 0))
    kept = other.clone()
    second = in_order(given.gradients(other, x, y, 3, 0))
    assert torch.equal(other, kept)
    model.layout.bind(model.module, before)
    require_equal(first, one_by_one(model, x, y))
    model.layout.bind(model.module, other)
    require_equal(second, one_by_one(model, x, y))


def test_images_as_bytes_are_taken_as_training_takes_them() -> None:
    model = local(MODELS["lenet5"].build(MNIST, 10), dtype=torch.float32)
    pixels = Pixels(torch.arange(2 * 784).reshape(2, *MNIST).to(torch.uint8), Scale((0.1,), (0.3,)))
    found = per_example(model).gradients(weights_of(model), pixels, torch.tensor([1, 2]), 2, 0)
    require_equal(next(found).rows, one_by_one(model, pixels.floats(), torch.tensor([1, 2])))


# --- models and losses of other kinds --------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one matrix, and one layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.output = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.second(torch.tanh(self.first(self.first(x))))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.output, self.unused = nn.Linear(6, 6), nn.Linear(6, CLASSES), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.middle(torch.tanh(self.middle(x)))))


class Scaled(TinyNet):
    """A parameter that no layer of torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((FEATURES,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@pytest.mark.parametrize("way", [FUNC, LOOP])
@pytest.mark.parametrize("build", [FrozenNet, Tied, Twice, Scaled])
def test_frozen_tied_and_unused_parameters(build: Callable[[], nn.Module], way: str) -> None:
    model, (x, y) = local(build()), tiny_examples()
    require_equal(rows(model, x, y, way), one_by_one(model, x, y))


@pytest.mark.parametrize("build", [FrozenNet, Tied, Twice])
def test_the_model_is_left_as_it_was(build: Callable[[], nn.Module]) -> None:
    model, (x, y) = local(build()), tiny_examples()
    before = dict(model.module.named_parameters(remove_duplicate=False))
    rows(model, x, y)
    after = dict(model.module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_opacus_takes_a_layer_that_is_used_twice_and_one_without_use() -> None:
    model, (x, y) = local(Twice()), tiny_examples()
    require_equal(rows(model, x, y, OPACUS), one_by_one(model, x, y))


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double())
LOSSES: Mapping[str, Loss] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "weighted": WEIGHTED,  # whose mean over a batch is not that of the examples' own losses
    "squares": lambda output, target: (output.softmax(dim=1)[:, 0] - target).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", [FUNC, OPACUS])
def test_an_example_counts_as_a_batch_of_its_own_whatever_the_reduction(name: str, way: str) -> None:
    model, (x, y) = local(TinyNet(), LOSSES[name]), tiny_examples()
    require_equal(rows(model, x, y, way), one_by_one(model, x, y))


@pytest.mark.parametrize("way", [FUNC, OPACUS, LOOP])
def test_no_example_reaches_the_row_of_another(way: str) -> None:
    model, (x, y) = local(MODELS["cnn"].build((1, 8, 8), 10)), (torch.randn(3, 1, 8, 8).double(), torch.arange(3))
    before = rows(model, x, y, way, 3)
    x[1] = 100.0
    after = rows(model, x, y, way, 3)
    assert torch.allclose(before[[0, 2]], after[[0, 2]], rtol=1e-10)
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("way", [FUNC, OPACUS, LOOP])
def test_what_layers_draw_comes_from_the_seed_and_from_no_generator_of_others(way: str) -> None:
    model, (x, y) = local(DropoutNet()), tiny_examples()
    state = torch.random.get_rng_state()
    first, again, other = (rows(model, x, y, way, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    same = x[:1].repeat(4, 1), y[:1].repeat(4)
    drawn = rows(model, *same, way=way)
    assert len({tuple(row.tolist()) for row in drawn}) > 1  # each example its own


# --- refusals --------------------------------------------------------------------------------------------------------


class Chooses(TinyNet):
    """Looks at its numbers to decide what to compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("way", [FUNC, OPACUS, LOOP])
def test_layers_that_mix_examples_are_refused(way: str) -> None:
    def build() -> nn.Module:
        middle = nn.BatchNorm1d(4, track_running_stats=False)  # which no layout refuses
        return nn.Sequential(nn.Linear(FEATURES, 4), middle, nn.Linear(4, CLASSES))

    with pytest.raises(ConfigError, match=r"layer '1' \(BatchNorm1d\) mixes the examples of a batch"):
        per_example(local(build()), way)
    model, (x, y) = local(replace_batchnorm(build(), groups=2)), tiny_examples()
    require_equal(rows(model, x, y, way), one_by_one(model, x, y))


@pytest.mark.parametrize(
    ("build", "told"),
    [(Scaled, r"does not know layer '' \(Scaled\)"), (Tied, "'second' shares its"), (FrozenNet, "'again' shares its")],
)
def test_opacus_refuses_what_it_could_get_wrong(build: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        per_example(local(build()), OPACUS)


def test_a_layer_that_is_not_called_as_a_layer_is_not_missed_by_opacus() -> None:
    class Hidden(TinyNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(torch.tanh(self.hidden(x)), self.output.weight)

    model, (x, y) = local(Hidden()), tiny_examples()
    with pytest.raises(ConfigError, match=r"no gradient of 'output\.weight' for each example"):
        rows(model, x, y, OPACUS)
    require_equal(rows(model, x, y), one_by_one(model, x, y))


def test_a_model_that_looks_at_its_numbers_is_left_to_the_loop() -> None:
    model, (x, y) = local(Chooses()), tiny_examples()
    with pytest.raises(
        ConfigError, match=r"^per-example gradients .* even for an example of zeros: .*'loop' takes any model$"
    ):
        rows(model, x, y)
    require_equal(rows(model, x, y, LOOP), one_by_one(model, x, y))


def test_without_opacus_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object) -> object:
        if name.split(".")[0] == "opacus":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    model, (x, y) = local(TinyNet()), tiny_examples()
    with pytest.raises(ConfigError, match=r"opacus is not installed: pip install 'fedrp\[records\]'"):
        per_example(model, OPACUS)
    require_equal(rows(model, x, y), one_by_one(model, x, y))


def test_mistakes_are_named() -> None:
    model, (x, y) = local(TinyNet()), tiny_examples()
    with pytest.raises(ConfigError, match="unknown way 'funk', did you mean 'func'"):
        per_example(model, "funk")
    with pytest.raises(ConfigError, match="microbatch=0 is not valid"):
        next(per_example(model).gradients(weights_of(model), x, y, 0, 0))
