"""What every entry of MODELS promises: its size, the shapes it takes, gradients that live."""

import pytest
import torch
from torch import nn

from fedrp.errors import ConfigError
from fedrp.learning.layout import layout_of
from fedrp.learning.zoo import MODELS

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
HUGE = "vgg16"  # takes 2 GB to train: looked at without memory, but for one slow test
COUNTS = {
    ("lenet5", MNIST): 61_706,
    ("cnn", CIFAR): 846_634,
    ("resnet18", CIFAR): 11_173_962,
    ("vgg16", CIFAR): 134_301_514,
}


def without_memory(name: str, shape: tuple[int, ...]) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name].build(shape, 10)


@pytest.mark.parametrize(("name", "shape"), COUNTS)
def test_parameter_counts(name: str, shape: tuple[int, ...]) -> None:
    assert layout_of(without_memory(name, shape)).size == COUNTS[name, shape]
    assert f"{COUNTS[name, shape]:,}" in MODELS[name].summary


def test_every_model_has_its_count_checked() -> None:
    assert {name for name, _ in COUNTS} == set(MODELS)


@pytest.mark.parametrize("shape", [MNIST, CIFAR])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_every_bundled_shape(name: str, shape: tuple[int, ...]) -> None:
    module = without_memory(name, shape)
    assert module(torch.zeros(2, *shape, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in MODELS if name != HUGE for shape in (MNIST, CIFAR)]
    + [pytest.param(HUGE, CIFAR, marks=pytest.mark.slow)],
)
def test_loss_and_gradient_are_finite_and_alive(name: str, shape: tuple[int, ...]) -> None:
    module = MODELS[name].build(shape, 10).eval()
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(module(images), torch.tensor([3, 7]))
    loss.backward()
    assert 0.5 < loss.item() < 10
    for parameter in module.parameters():
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(6,), (1, 4, 4)])
def test_data_of_the_wrong_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' takes images.*\({shape[0]},"):
        MODELS[name].build(shape, 10)


@pytest.mark.parametrize(("name", "shape"), COUNTS)
def test_no_model_of_the_table_has_a_single_number(name: str, shape: tuple[int, ...]) -> None:
    """So that the law of single numbers has changed no initial model of theirs."""
    assert min(parameter.numel() for parameter in without_memory(name, shape).parameters()) > 1
