"""Codes of the projection families on the wire: what a party that makes no matrix may know of them."""

from typing import NamedTuple


class Tag(NamedTuple):
    """A family's code, and the version of its map from key to matrix."""

    code: int
    version: int


TAGS = {"gaussian": Tag(1, 1), "sign": Tag(2, 1), "hadamard": Tag(3, 1)}


def projection_tag(family: str) -> int:
    """A family and its version as one number for messages: equal tags mean equal matrices for equal keys."""
    return TAGS[family].code << 8 | TAGS[family].version
