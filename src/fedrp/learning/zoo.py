"""The bundled models. To add one: a builder, and a line in `MODELS`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fedrp.errors import ConfigError

InputShape = tuple[int, ...]  # (channels, height, width), or (features,)


def lenet5(shape: InputShape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters for 28x28x1 (padded) or 32x32x1 images."""
    channels, height, _ = _image("lenet5", shape, smallest=28)
    padding = 2 if height == 28 else 0
    features = nn.Sequential(
        *[nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
    )
    flat = _flat_size(features, shape)
    head = [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*features, *head)


def cnn(shape: InputShape, classes: int) -> nn.Module:
    """The paper's GroupNorm network: 846,634 parameters for 32x32x3 images and 10 classes."""
    channels, _, _ = _image("cnn", shape, smallest=8)
    layers: list[nn.Module] = []
    for width, groups in ((32, 8), (64, 16), (128, 16)):
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(groups, width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    features = nn.Sequential(*layers, nn.Flatten())
    flat = _flat_size(features, shape)
    head = [nn.Linear(flat, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*features, *head)


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs), nn.ReLU()],
            *[nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs)],
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(shape: InputShape, classes: int) -> nn.Module:
    """ResNet-18 for small images (3x3 stem, no first pooling), GroupNorm instead of BatchNorm."""
    channels, _, _ = _image("resnet18", shape, smallest=8)
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_ResidualBlock(width, outputs, stride), _ResidualBlock(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def vgg16(shape: InputShape, classes: int) -> nn.Module:
    """VGG-16 with its 4096-wide head: 134,301,514 parameters for 3 channels and 10 classes."""
    channels, height, _ = _image("vgg16", shape, smallest=16)
    layers: list[nn.Module] = [nn.ZeroPad2d(max(0, (33 - height) // 2))]  # five poolings need 32 pixels
    for widths in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    layers += [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return _he_initialised(nn.Sequential(*layers, nn.Linear(4096, classes)))


def _he_initialised(module: nn.Module) -> nn.Module:
    # Without normalisation layers, torch's default gain makes 16 layers fade to nothing.
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return module


class ModelSpec(NamedTuple):
    """A row of the table."""

    build: Callable[[InputShape, int], nn.Module]
    learning_rate: float  # a default that learns on every bundled data set
    summary: str


MODELS: dict[str, ModelSpec] = {
    "lenet5": ModelSpec(lenet5, 0.1, "LeNet-5, 61,706 parameters for 28x28x1"),
    "cnn": ModelSpec(cnn, 0.025, "GroupNorm network of the paper, 846,634 parameters for 32x32x3"),
    "resnet18": ModelSpec(resnet18, 0.1, "ResNet-18 with GroupNorm, 11,173,962 parameters for 32x32x3"),
    "vgg16": ModelSpec(vgg16, 0.02, "VGG-16, 134,301,514 parameters for 32x32x3"),
}


def _image(model: str, shape: InputShape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model '{model}' takes images (channels, height, width) of at least {smallest} pixels, "
            f"but the data has shape {shape}: for a model of your own use fedrp.Task in Python"
        )
    return shape[0], shape[1], shape[2]


def _flat_size(features: nn.Module, shape: InputShape) -> int:
    with torch.no_grad():
        return int(features(torch.zeros(1, *shape)).shape[1])
