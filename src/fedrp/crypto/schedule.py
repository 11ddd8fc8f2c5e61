"""The key schedule: round keys from secrets that are dealt once per epoch of rounds.

The secret of the set-up, dealt for round 0, also covers the first epoch. A later epoch has a secret of its own, dealt
for its first round, and mixes it with that of the set-up: its keys stay secret as long as one of the two is, so one
dealer with bad randomness spoils nothing. Each round key is derived for its round: it tells nothing of another one, and
no two rounds have the same, also if a dealer deals one secret twice.

Deliberately no hash chain whose past is erased: clients that sat rounds out replay them, and the identity opens the
envelopes of all epochs anyway, so there would be nothing to win.
"""

import functools
from collections.abc import Callable, Collection

from fedrp.crypto.epochs import covering, expired
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ProtocolError

KeyRing = Callable[[int], SecretKey | None]  # the key of a round


def round_key(set_up: SecretKey, first: int, dealt: SecretKey, round_: int) -> SecretKey:
    """The key of a round of the epoch that begins with round `first`, whose secret is `dealt` (for 0: the set-up's)."""
    epoch = dealt.mixed(set_up.derive("epochs"), f"epoch/{first}") if first else set_up
    return epoch.derive(f"round-key/{round_}")


def key_ring(client: int, firsts: Collection[int], opened: Callable[[int], SecretKey], key_epoch: int) -> KeyRing:
    """The round keys of a client that has the secrets dealt for these rounds, each of which is opened once."""
    opened = functools.cache(opened)

    def key(round_: int) -> SecretKey:
        first = covering(firsts, round_)
        if first is None or 0 not in firsts or expired(first, round_, key_epoch):
            raise ProtocolError(f"client {client} has no sealed key for round {round_}")
        return round_key(opened(0), first, opened(first), round_)

    return key
