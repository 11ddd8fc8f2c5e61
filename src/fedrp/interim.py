"""Interim."""

import math

from fedrp.projection import FAMILIES


def projection_tag(family: str) -> int:
    """The code of a family and its version on the wire: both sides must mean the same matrix."""
    return (list(FAMILIES).index(family) + 1) << 8 | FAMILIES[family].version


def norm_bound(family: str, columns: int, rows: int) -> float:
    """The bound on ||A|| that holds for every matrix of this family and shape."""
    if family == "gaussian":
        return 1 + math.sqrt(columns / rows) + 8 / math.sqrt(rows)
    return math.sqrt(-(-columns // rows))
