"""What several algorithms share: settings, their defaults, and what vectors without noise tell."""

import dataclasses

from fedrp.compression.coding import FULL, Size
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved, RunConfig
from fedrp.errors import ConfigError
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, Release, Unsupported
from fedrp.projection.families import FAMILIES
from fedrp.projection.rotation import ROTATIONS
from fedrp.records.defaults import SERVER_MOMENTUM

# Up to this many entries (1 GB) the paper's matrix is affordable; beyond it the default is the one of cost n.
GAUSSIAN_ENTRIES = 2**28

_PAPERS_DIM = 1000


def papers_size(_config: RunConfig, parameters: int) -> Size:
    """What a client sends if nothing is said: the paper's number of dimensions, as float32."""
    return Size(min(_PAPERS_DIM, parameters), FULL, FULL)


def resolve_projection(config: RunConfig, parameters: int, family: str, rotation: str) -> RunConfig:
    """The config with a projection family and a rotation, these unless it names others.

    Raises:
        ConfigError: they are unknown, or the dimension is one that the model does not have.
    """
    if config.dim is None or config.dim > parameters:
        raise ConfigError(f"dim={config.dim} is not valid: the model has {parameters} parameters, choose at most that")
    family, rotation = config.projection or family, config.rotation or rotation
    require_choice("projection", family, FAMILIES)
    require_choice("rotation", rotation, ROTATIONS)
    return dataclasses.replace(config, projection=family, rotation=rotation)


def with_server_momentum(config: RunConfig) -> RunConfig:
    """The config with no server momentum unless it was asked for; under noise for records it steadies the mean."""
    default = SERVER_MOMENTUM if config.record_private else 0.0
    return config if config.server_momentum is not None else dataclasses.replace(config, server_momentum=default)


def vectors_released(config: Resolved) -> list[Release]:
    """What full vectors, or under masks their sums, tell: nothing is claimed."""
    seen: Event = NonPrivate("the server receives every client's vector in the clear")
    if config.secure_aggregation:
        seen = Unsupported("the server learns sums of the clients' vectors only, but those without noise")
    return [Release(Adversary.SERVER, Adjacency.CLIENT_ADD_REMOVE, seen), *averages_released()]


def mean_delivered(config: Resolved) -> list[Release]:
    """What is told where the clients' final models are averaged: nothing is claimed, whatever held before."""
    seen: Event = Unsupported("the server learns the mean of the clients' final models, which has no noise")
    if config.trimmed_share:
        seen = NonPrivate("the server receives every client's final model in the clear")
    return [Release(Adversary.SERVER, Adjacency.CLIENT_ADD_REMOVE, seen), *averages_released()]


def averages_released() -> list[Release]:
    """What averages without noise tell the other clients and whoever gets the model: nothing is claimed."""
    plain = Unsupported("averages are released without noise")
    return [
        Release(adversary, Adjacency.CLIENT_ADD_REMOVE, plain)
        for adversary in (Adversary.CLIENTS, Adversary.MODEL_HOLDER)
    ]
