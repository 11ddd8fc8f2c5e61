"""Settings of the projection, for algorithms that send A w: which family, and that the model is large enough."""

import dataclasses

from fedrp.config import RunConfig, require_choice
from fedrp.errors import ConfigError
from fedrp.projection.families import FAMILIES

# Up to this many entries (1 GB) the paper's matrix is affordable; beyond it the default is the one of cost n.
_GAUSSIAN_ENTRIES = 2**28


def resolve_projection(config: RunConfig, parameters: int) -> RunConfig:
    """The config with a projection family; refuses an unknown one and a dimension that the model does not have."""
    if config.dim > parameters:
        raise ConfigError(f"dim={config.dim} is not valid: the model has {parameters} parameters, choose at most that")
    family = config.projection or ("gaussian" if config.dim * parameters <= _GAUSSIAN_ENTRIES else "sign")
    require_choice("projection", family, FAMILIES)
    return dataclasses.replace(config, projection=family)
