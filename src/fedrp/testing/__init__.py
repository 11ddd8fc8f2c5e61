"""Contracts for algorithms and projections of one's own; a Flower grid in one process, a deployment on loopback."""

from fedrp.testing.contracts import check_algorithm
from fedrp.testing.projection_contracts import check_projection

__all__ = ["check_algorithm", "check_projection"]
