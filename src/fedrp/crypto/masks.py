"""Secure aggregation, the secret part: the masks that two clients share.

The argument is in `fedrp.crypto.secure_aggregation`.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedrp.crypto.roster import Roster
from fedrp.crypto.sealing import MaskKey, mask_key_of
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort, digest
from fedrp.crypto.sizes import MASK_ENTRY_BYTES
from fedrp.errors import ProtocolError
from fedrp.types import Vector, Words

PeerKeys = npt.NDArray[np.uint8]  # (clients, 32): public mask keys; zeros where one is not known

NO_PEERS: PeerKeys = np.zeros((0, 32), np.uint8)
_CHUNK = 1 << 18  # numbers; the mask of one pair need never be held whole


@functools.lru_cache(maxsize=2)  # simulated clients share one array
def peer_keys(payload: bytes, roster: Roster, run: bytes) -> PeerKeys:
    """The mask keys of a list of clients' numbers and signed keys, all of them signed by their owners for this run."""
    keys = np.zeros((len(roster.entries), 32), np.uint8)
    if len(payload) % MASK_ENTRY_BYTES:
        raise ProtocolError(f"mask keys come in {MASK_ENTRY_BYTES} bytes each, got {len(payload)}")
    for start in range(0, len(payload), MASK_ENTRY_BYTES):
        (client,) = struct.unpack_from("<I", payload, start)
        if client >= len(roster.entries):
            raise ProtocolError(f"a mask key of client {client}, who is not in the roster")
        if keys[client].any():
            raise ProtocolError(f"two mask keys of client {client} in one packet: refused")
        signed = payload[start + 4 : start + MASK_ENTRY_BYTES]
        public = mask_key_of(signed, roster.entries[client].keys.ed25519, run, roster.digest, client)
        keys[client] = np.frombuffer(public, np.uint8)
    keys.flags.writeable = False
    return keys


def merged_keys(client: int, known: PeerKeys, told: PeerKeys) -> PeerKeys:
    """All mask keys that `client` knows once it was told some more: none is replaced.

    Raises:
        ProtocolError: one of them is another than is known.
    """
    if not known.size:
        return told
    have, new = np.asarray(known.any(axis=1)), np.asarray(told.any(axis=1))
    if (known[have & new] != told[have & new]).any():
        raise ProtocolError(f"client {client} was sent another mask key of a client than it has: refused")
    return np.where(have[:, None], known, told)


def extended(transcript: bytes, applied_in: int, past: int, aggregate: Vector | None, key: SecretKey | None) -> bytes:
    """The transcript digest after one more step: the aggregate and the key of round `past`, applied in `applied_in`.

    A client extends it by what goes into its state, and by nothing else: what a server merely says of rounds that the
    client sat out vouches for nothing. Round 0, the set-up, has no aggregate.
    """
    mark = key.derive("transcript").reveal() if key else bytes(32)
    told = bytes(32) if aggregate is None else digest(aggregate)
    step = struct.pack("<II", applied_in, past) + told + mark
    return hashlib.sha256(b"fedrp transcript v1|" + struct.pack("<I", len(transcript)) + transcript + step).digest()


@dataclass(frozen=True)
class Masker:
    """One client in one round.

    Guarantees: two clients that have the same run, round, roster, cohort and transcript share masks that cancel; any
    difference makes them unrelated. The round key, where there is one, is mixed in: with hybrid sealing nobody who
    breaks X25519 later can take the masks off.
    """

    key: MaskKey
    peers: PeerKeys
    roster: bytes  # its digest
    client: int
    run: bytes
    round: int
    cohort: Cohort
    transcript: bytes  # digest of all that its state is made of, but for its data
    round_key: SecretKey | None

    def masked(self, words: Words) -> Words:
        """An encoded upload under this client's masks towards all other clients of the cohort."""
        return self._added(words.copy(), self.cohort.clients, b"upload")

    def correction(self, left_out: tuple[int, ...], size: int) -> Words:
        """The sum of this client's masks towards those left out, under fresh masks towards the others."""
        summed = [client for client in self.cohort.clients if client not in left_out]
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
        ends = sorted([(self.client, self.key.public), (other, self.peers[other].tobytes())])
        pair = b"".join(struct.pack("<I", client) + public for client, public in ends)
        scene = hashlib.sha256(
            struct.pack("<16sI32s", self.run, self.round, self.roster)
            + pair
            + hashlib.sha256(self.cohort.payload().tobytes()).digest()
            + hashlib.sha256(self.transcript).digest()
            + purpose
        ).digest()
        salt = self.round_key.derive("masks") if self.round_key else None
        return self.key.agree(self.peers[other].tobytes(), b"mask|" + scene, salt)
