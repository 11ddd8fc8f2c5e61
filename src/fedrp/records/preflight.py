"""Finds before round 1 what cannot be taken record by record, without a look at one: a refusal would tell of it."""

import torch

from fedrp.engines.per_example import per_example
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, Loss
from fedrp.learning.pixels import Inputs, Pixels
from fedrp.learning.trainer import make_local_model
from fedrp.rng import RunSeed


def preflight_records(factory: ModelFactory, loss: Loss, like: Examples, device: torch.device) -> None:
    """Take the gradient of an example of zeros, of the shapes and types of `like`.

    Raises:
        ConfigError: the model mixes examples, or it or its loss fail whatever the example is.
    """
    model = make_local_model(factory, loss, device, RunSeed(0))
    weights = torch.from_numpy(model.layout.flatten(model.module)).to(device)
    for _ in per_example(model).gradients(weights, like.x[:0], like.y[:0].to(device), 1, 0):
        pass  # what fails has failed


def zeros_like(data: Examples) -> Examples:
    """Two examples of zeros, of the shapes and types of those that are given."""
    return Examples(_zeros(data.x), data.y.new_zeros(2, *data.y.shape[1:]))


def _zeros(x: Inputs) -> Inputs:
    if isinstance(x, Pixels):
        return Pixels(x.raw.new_zeros(2, *x.shape[1:]), x.scale)
    return x.new_zeros(2, *x.shape[1:])
