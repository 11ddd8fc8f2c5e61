"""How round keys travel: a dealer draws 32 bytes and seals them to every client; the server relays what it can't open.

HPKE (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305. Each envelope is bound to run, round, dealer, recipient
and projection, so that it opens nowhere else.
"""

import os
import struct
from collections.abc import Sequence
from typing import NoReturn, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from fedrp.errors import ProtocolError
from fedrp.secret import KEY_BYTES, SecretKey

PUBLIC_KEY_BYTES = 32
ENVELOPE_BYTES = 32 + KEY_BYTES + 16  # ephemeral key, sealed key, authentication tag

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class Entropy(Protocol):
    """Where a client's secrets come from."""

    def secret(self, purpose: str, *indices: int) -> SecretKey:
        """A fresh secret. Sources that repeat (simulation) give the same one for the same name."""


class SystemEntropy:
    """The operating system's generator: the only source that a deployment accepts."""

    def secret(self, purpose: str, *indices: int) -> SecretKey:  # noqa: ARG002 - every draw is new, whatever its name
        """32 new random bytes."""
        return SecretKey(os.urandom(KEY_BYTES))


class Identity:
    """A client's private sealing key. Shows nothing of itself; cannot be pickled."""

    __slots__ = ("_private",)

    def __init__(self, secret: SecretKey) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secret.derive("identity/x25519").reveal())

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def open(self, envelope: bytes, binding: bytes) -> SecretKey:
        """The key in an envelope that was sealed to this identity under the same binding.

        Raises:
            ProtocolError: wrong recipient, round, run or dealer, or altered; which of them is not told.
        """
        try:
            return SecretKey(_SUITE.decrypt(envelope, self._private, binding))
        except (InvalidTag, ValueError):
            raise ProtocolError("a sealed round key does not open: wrong recipient, round, run, or altered") from None

    def __repr__(self) -> str:
        return "Identity(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity cannot be pickled or copied")


def binding(run: bytes, round_: int, dealer: int, recipient: int, projection: int) -> bytes:
    """What an envelope is tied to."""
    return b"fedrp round key v1" + struct.pack("<16sIIIH", run, round_, dealer, recipient, projection)


def seal_to_all(
    key: SecretKey, roster: Sequence[bytes], run: bytes, round_: int, dealer: int, projection: int
) -> bytes:
    """One envelope per client of the roster, in order, the dealer included."""
    return b"".join(
        _SUITE.encrypt(
            key.reveal(), X25519PublicKey.from_public_bytes(public), binding(run, round_, dealer, recipient, projection)
        )
        for recipient, public in enumerate(roster)
    )


def split(data: bytes, size: int, count: int, what: str) -> list[bytes]:
    """`count` pieces of `size` bytes; anything else is refused."""
    if len(data) != size * count:
        raise ProtocolError(f"{what}: {len(data)} bytes, expected {count} x {size}")
    return [data[start : start + size] for start in range(0, len(data), size)]
