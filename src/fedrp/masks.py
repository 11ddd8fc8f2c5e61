"""Secure aggregation, the secret part: the masks that two clients share. The argument is in `fedrp.secure_sum`."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedrp.roster import Roster
from fedrp.sealing import Identity
from fedrp.secret import SecretKey
from fedrp.secure_sum import Call, Words

_CHUNK = 1 << 18  # numbers; the mask of one pair need never be held whole


@dataclass(frozen=True)
class Masker:
    """One client in one round.

    Guarantees: two clients that were told the same run, round, roster, participants and aggregates share masks that
    cancel; any difference makes them unrelated. The round key, where there is one, is mixed in: it is fresh in every
    run, and with hybrid sealing nobody who breaks X25519 later can take the masks off.
    """

    identity: Identity
    roster: Roster
    client: int
    run: bytes
    round: int
    call: Call
    heard: bytes  # digest of what it was told in earlier rounds
    round_key: SecretKey | None

    def masked(self, words: Words) -> Words:
        """An encoded upload under this client's masks towards all other participants."""
        return self._added(words.copy(), self.call.clients, b"upload")

    def correction(self, left_out: tuple[int, ...], size: int) -> Words:
        """The sum of this client's masks towards those left out, under fresh masks towards the others."""
        summed = [client for client in self.call.clients if client not in left_out]
        towards = self._added(np.zeros(size, np.uint32), left_out, b"upload")
        return self._added(towards, summed, b"recovery|" + struct.pack(f"<{len(left_out)}I", *left_out))

    def _added(self, words: Words, others: Iterable[int], purpose: bytes) -> Words:
        buffer = np.empty(min(_CHUNK, words.size), np.uint32)
        for other in others:
            if other == self.client:
                continue
            key = self._shared(other, purpose)
            for start in range(0, words.size, _CHUNK):
                part = words[start : start + _CHUNK]
                mask = buffer[: part.size]
                key.keystream_into(mask, 4 * start)
                if self.client < other:
                    part += mask
                else:
                    part -= mask
        return words

    def _shared(self, other: int, purpose: bytes) -> SecretKey:
        pair = sorted((self.client, other))
        scene = hashlib.sha256(
            struct.pack("<16sI32sII", self.run, self.round, self.roster.digest, *pair)
            + hashlib.sha256(self.call.payload().tobytes()).digest()
            + hashlib.sha256(self.heard).digest()
            + purpose
        ).digest()
        salt = self.round_key.derive("masks") if self.round_key else None
        return self.identity.agree(self.roster.members[other].keys, b"mask|" + scene, salt)
