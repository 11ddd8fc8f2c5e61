"""How short the secret initial model can be: a floor that anyone can compute, because it follows from the model alone.

`secret_initial` draws each tensor as mean + spread * normals, mean and spread being those of a public template, or
keeps it as the model gives it. Its squared norm is a constant and a sum of scaled (noncentral) chi-squares, so its
lower tail is known without the key.
"""

import dataclasses
import math

import numpy as np
from scipy.special import gammaincinv

from fedrp.config.run import RunConfig
from fedrp.learning.initial import initial_laws
from fedrp.learning.layout import ModelFactory

_FAILURE = 1e-9  # with this probability a start is shorter, and clients refuse it
_ROUNDING = 1e-5  # of float32 arithmetic, generously


def initial_norm_floor(factory: ModelFactory, failure: float = _FAILURE) -> float:
    """A norm that the secret initial model of this network has at least, but for the given probability.

    A tensor of k numbers has a squared norm of at least spread^2 x, x the (failure / tensors)-quantile of chi-square
    with k degrees of freedom (a mean that is not zero only adds); tensors that are given count in full.
    """
    template, laws = initial_laws(factory)
    squared = 0.0
    for part, _, spread in laws:
        given = template[part].astype(np.float64)
        quantile = 2 * float(gammaincinv(given.size / 2, failure / len(laws)))
        squared += float(spread) ** 2 * quantile if spread > 0 else float(given @ given)
    return math.sqrt(squared) * (1 - _ROUNDING)


def with_norm_floor(config: RunConfig, factory: ModelFactory) -> RunConfig:
    """The config with the floor that its ball leaves, where none was given; none if the ball may reach the origin."""
    if config.ball is None or config.norm_floor is not None:
        return config
    floor = float(np.float32(initial_norm_floor(factory) - config.ball))
    return dataclasses.replace(config, norm_floor=floor) if floor > 0 else config
