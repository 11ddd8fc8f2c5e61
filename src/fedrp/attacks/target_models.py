"""The network of the gradient-inversion literature, which is kinder to the attacker than those that one trains."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedrp.config.checks import require_choice
from fedrp.errors import ConfigError
from fedrp.learning.zoo import MODELS, InputShape

SMOOTH = "lenet-sigmoid"
_RANGE = 0.5  # weights start uniform in +-0.5, as in Zhu et al. 2019


def smooth_lenet(shape: InputShape, classes: int) -> nn.Module:
    """LeNet as in "Deep leakage from gradients": sigmoids and strides, so that gradients are smooth in the image."""
    if len(shape) != 3:
        raise ConfigError(f"model '{SMOOTH}' takes images (channels, height, width), but the data has shape {shape}")
    channels, height, width = shape
    flat = 12 * math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2)
    convolutions = [nn.Conv2d(channels, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 1, 2)]
    layers: list[nn.Module] = [layer for convolution in convolutions for layer in (convolution, nn.Sigmoid())]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, classes))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-_RANGE, _RANGE)
    return module


def target_models() -> dict[str, Callable[[InputShape, int], nn.Module]]:
    """What can be attacked: the smooth network, and the models that runs can train."""
    return {SMOOTH: smooth_lenet, **{name: spec.build for name, spec in MODELS.items()}}


@dataclass(frozen=True)
class TargetModel:
    """Builds the attacked model; a class, so that it can be compared and sent to other processes."""

    name: str
    shape: InputShape
    classes: int

    def __post_init__(self) -> None:
        require_choice("model", self.name, target_models())

    def __call__(self) -> nn.Module:
        """A new model."""
        return target_models()[self.name](self.shape, self.classes)
