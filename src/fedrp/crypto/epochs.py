"""Epochs of round keys: from which dealt secret the key of a round comes, and what the server keeps of it.

Numbers and closed envelopes: nothing here opens one.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Dealt(NamedTuple):
    """The envelopes of the secret of an epoch of round keys, one per client, and who dealt them."""

    dealer: int
    envelopes: tuple[bytes, ...]


class Complaint(NamedTuple):
    """A client could not use a secret that another one dealt."""

    client: int
    dealer: int
    round: int  # that it was dealt for


def covering(dealt: Iterable[int], round_: int) -> int | None:
    """The first round of the epoch that a round belongs to, of the rounds that secrets were dealt for."""
    return max((first for first in dealt if first <= round_), default=None)


def expired(first: int, round_: int, key_epoch: int) -> bool:
    """Whether an epoch that began with `first` is over before `round_`. The set-up is no round of its own."""
    return round_ - max(first, 1) >= key_epoch
