"""Initial models: from the public run seed, or from a secret that the clients share."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.layout import Layout, ModelFactory, built, layout_of, trainable
from fedrp.rng import RunSeed
from fedrp.types import Vector


class TensorLaw(NamedTuple):
    """The law that one tensor of a secret initial model is drawn from, entry by entry; spread 0: as in the template."""

    part: slice  # of the flat vector
    mean: np.float32
    spread: np.float32


def public_initial(factory: ModelFactory, seed: RunSeed) -> Vector:
    """The model's own initialisation, drawn from the public run seed."""
    module = _seeded(factory, seed)
    return layout_of(module).flatten(module)


def _seeded(factory: ModelFactory, seed: RunSeed) -> nn.Module:
    def draw() -> nn.Module:
        torch.random.manual_seed(seed.integer("initial-model"))
        return factory()

    return built(draw)


def secret_initial(factory: ModelFactory, key: SecretKey) -> Vector:
    """An initial model of which only holders of `key` know what the factory draws at random.

    Tensors that the factory draws at random are drawn anew from the key's stream with their own mean and standard
    deviation (a single number with those of two draws). A tensor that it gives alike under two seeds of torch was not
    drawn but given, and stays as it is: constants (zero biases, unit gains), pretrained weights, and all of a factory
    that seeds torch itself. Given tensors are known to whoever has them, perhaps the server too: docs/threat-model.md
    says what that costs. The template comes from a public seed, so every client computes the same vector.
    """
    return drawn_initial(*initial_laws(factory), key)


def drawn_initial(template: Vector, laws: Sequence[TensorLaw], key: SecretKey) -> Vector:
    """The secret initial model, for laws that are at hand."""
    normals = key.derive("initial-model").normals(template.size)
    result = np.empty_like(template)
    for part, mean, spread in laws:
        result[part] = mean + spread * normals[part] if spread > 0 else template[part]
    return result


def initial_laws(factory: ModelFactory) -> tuple[Vector, list[TensorLaw]]:
    """The public template of `secret_initial` and the law of each of its tensors.

    Raises:
        ConfigError: the factory builds models of different shapes, or hands out the same parameters again.
    """
    module = _seeded(factory, RunSeed(0))
    layout = layout_of(module)
    drawn_again = _drawn_again(factory, module, layout)
    template = layout.flatten(module)
    laws = []
    start = 0
    for shape, again in zip(layout.shapes, drawn_again, strict=True):
        part = slice(start, start + prod(shape))
        laws.append(TensorLaw(part, np.float32(0), np.float32(0)) if again is None else _law(part, template, again))
        start = part.stop
    return template, laws


def _drawn_again(factory: ModelFactory, module: nn.Module, layout: Layout) -> list[float | None]:
    """The first number of each tensor under another seed of torch; None if the tensor does not depend on the seed.

    The second model is gone when this returns.
    """
    other = _seeded(factory, RunSeed(1))
    if layout_of(other) != layout:
        raise ConfigError(
            f"the model factory builds other layers at each call ({layout.size} parameters, then "
            f"{layout_of(other).size}): let it build the same ones"
        )
    pairs = list(zip(trainable(module), trainable(other), strict=True))
    shared = next((name for name, (one, two) in zip(layout.names, pairs, strict=True) if one is two), None)
    if shared is not None:  # training would change what is taken for the start
        raise ConfigError(
            f"the model factory hands out the same parameter '{shared}' at every call: "
            "let it build a new model, e.g. copy.deepcopy(model)"
        )
    return [None if torch.equal(one, two) else float(two.detach().flatten()[0]) for one, two in pairs]


def _law(part: slice, template: Vector, again: float) -> TensorLaw:
    values = template[part].astype(np.float64)
    if values.size == 1:  # one number has no spread: two draws have
        values = np.append(values, again)
    # Rounded to float32 first: a sum in another order on another machine must not change a bit.
    return TensorLaw(part, np.float32(values.mean()), np.float32(values.std()))
