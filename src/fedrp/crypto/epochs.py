"""Epochs of round keys: from which dealt secret the key of a round comes. Numbers alone: the server knows them too."""

from collections.abc import Iterable


def covering(dealt: Iterable[int], round_: int) -> int | None:
    """The first round of the epoch that a round belongs to, of the rounds that secrets were dealt for."""
    return max((first for first in dealt if first <= round_), default=None)


def expired(first: int, round_: int, key_epoch: int) -> bool:
    """Whether an epoch that began with `first` is over before `round_`. The set-up is no round of its own."""
    return round_ - max(first, 1) >= key_epoch
