"""Contracts for algorithms and projections of one's own; a Flower grid in one process, a deployment on loopback."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedrp.testing.contracts import check_algorithm
    from fedrp.testing.projection_contracts import check_projection

__all__ = ["check_algorithm", "check_projection"]

_HOMES = {"check_algorithm": "fedrp.testing.contracts", "check_projection": "fedrp.testing.projection_contracts"}


def __getattr__(name: str) -> object:
    """A check, imported when it is first used: a grid for tests needs none of their keys."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedrp.testing' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
