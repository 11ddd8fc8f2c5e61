"""Keys of clients, and how round keys travel: a dealer draws 32 bytes, seals them to every client and signs.

HPKE (RFC 9180) with HKDF-SHA256 and ChaCha20-Poly1305; the key encapsulation is X25519, or the hybrid of ML-KEM-768 and
X25519 that also withstands quantum computers. Each envelope carries the dealer's Ed25519 signature. Seal and signature
are bound to the envelope's `Place`, so that it opens and verifies nowhere else.

Masks come from a second pair of X25519 keys, drawn for one run, signed by the identity, and erased when the run ends:
whoever steals the identity later cannot take the masks off what was recorded.
"""

import functools
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedrp.errors import ConfigError, ProtocolError
from fedrp.secret import KEY_BYTES, SecretKey

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
_MLKEM_BYTES = 1184
HYBRID_KEY_BYTES = _MLKEM_BYTES + PUBLIC_KEY_BYTES
_TAG_BYTES = 16

_KEMS = {"x25519": KEM.X25519, "hybrid": KEM.MLKEM768_X25519}
_NO_MLKEM = "sealing='hybrid' needs ML-KEM, which this machine's cryptography lacks: upgrade it"
# Of an envelope: the encapsulated key, the sealed key, its authentication tag, the dealer's signature.
ENVELOPE_BYTES = {
    "x25519": 32 + KEY_BYTES + _TAG_BYTES + SIGNATURE_BYTES,
    "hybrid": 1088 + 32 + KEY_BYTES + _TAG_BYTES + SIGNATURE_BYTES,
}


# Of a mask key as it is sent: the public key and the identity's signature.
MASK_KEY_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES


class Entropy(Protocol):
    """Where a client's secrets come from."""

    def secret(self, purpose: str, *indices: int) -> SecretKey:
        """A fresh secret. Sources that repeat (simulation) give the same one for the same name."""

    def noise(self, run: bytes, round_: int, packet: bytes) -> SecretKey:
        """The secret that the noise of a round comes from; `packet` is the digest of what asked for it."""


class PublicKeys(NamedTuple):
    """What others need of a client: to seal to it, to check its signatures."""

    x25519: bytes
    ed25519: bytes
    hybrid: bytes = b""  # ML-KEM-768, then X25519; empty if made on a machine without ML-KEM


class Place(NamedTuple):
    """Where an envelope belongs."""

    run: bytes
    round: int
    dealer: int
    recipient: int
    projection: int
    roster: bytes  # digest of the roster that the dealer sealed to
    sealing: str

    def encoded(self) -> bytes:
        """What the seal and the signature are bound to: no two places have the same."""
        numbers = struct.pack("<16sIIIH32s", *self[:-1])
        return b"fedrp round key v2|" + numbers + self.sealing.encode()


class Identity:
    """A client's private keys, all derived from one secret. Shows nothing of itself; cannot be pickled."""

    __slots__ = ("_hybrid", "_noise", "_sealing", "_signing", "name")

    def __init__(self, secret: SecretKey, name: str = "") -> None:
        self.name = name
        self._hybrid: tuple[MLKEM768PrivateKey, X25519PrivateKey] | None
        self._sealing = X25519PrivateKey.from_private_bytes(secret.derive("identity/x25519").reveal())
        self._signing = Ed25519PrivateKey.from_private_bytes(secret.derive("identity/ed25519").reveal())
        self._noise = secret.derive("identity/noise")
        seed = secret.derive("identity/ml-kem-768/d").reveal() + secret.derive("identity/ml-kem-768/z").reveal()
        other = secret.derive("identity/hybrid-x25519").reveal()
        try:
            self._hybrid = MLKEM768PrivateKey.from_seed_bytes(seed), X25519PrivateKey.from_private_bytes(other)
        except UnsupportedAlgorithm:  # an old OpenSSL: all but `--sealing hybrid` works
            self._hybrid = None

    @property
    def public(self) -> PublicKeys:
        """The public keys."""
        hybrid = b"".join(key.public_key().public_bytes_raw() for key in self._hybrid or ())
        sealing, signing = self._sealing.public_key(), self._signing.public_key()
        return PublicKeys(sealing.public_bytes_raw(), signing.public_bytes_raw(), hybrid)

    def sign(self, data: bytes) -> bytes:
        """An Ed25519 signature, 64 bytes."""
        return self._signing.sign(data)

    def open(self, envelope: bytes, place: Place) -> SecretKey:
        """The key in an envelope that was sealed to this identity for the same place. Says nothing about who sealed it.

        Raises:
            ProtocolError: wrong recipient, round, run or dealer, or altered; which of them is not told.
        """
        sealed = envelope[:-SIGNATURE_BYTES]
        try:
            if place.sealing == "x25519":
                return SecretKey(_suite("x25519").decrypt(sealed, self._sealing, place.encoded()))
            if self._hybrid is None:
                raise ConfigError(_NO_MLKEM)
            return SecretKey(_suite("hybrid").decrypt(sealed, MLKEM768X25519PrivateKey(*self._hybrid), place.encoded()))
        except (InvalidTag, ValueError):
            raise ProtocolError("a sealed round key does not open: wrong recipient, round, run, or altered") from None

    def noise_key(self, run: bytes, round_: int, packet: bytes) -> SecretKey:
        """The secret of a round's noise. The same packet always gets the same noise, whatever state was restored."""
        return self._noise.derive(f"noise/{run.hex()}/{round_}/{packet.hex()}")

    def __repr__(self) -> str:
        return "Identity(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity cannot be pickled or copied")


@dataclass(frozen=True)
class SiteEntropy:
    """Secrets of a deployed client: the operating system's generator, and noise from the identity.

    The only source that a deployment accepts.
    """

    identity: Identity

    def secret(self, purpose: str, *indices: int) -> SecretKey:  # noqa: ARG002 - every draw is new, whatever its name
        """32 new random bytes."""
        return SecretKey(os.urandom(KEY_BYTES))

    def noise(self, run: bytes, round_: int, packet: bytes) -> SecretKey:
        """See `Identity.noise_key`."""
        return self.identity.noise_key(run, round_, packet)


class MaskKey:
    """A client's key pair for the masks of one run. Shows nothing of itself; cannot be pickled."""

    __slots__ = ("_private", "public")

    def __init__(self, secret: SecretKey) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secret.derive("mask-key").reveal())
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, other: bytes, context: bytes, salt: SecretKey | None = None) -> SecretKey:
        """A key that the holders of two mask keys compute alike for a context, and nobody else can."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise ProtocolError("another client's mask key is not usable") from None
        extract = salt.reveal() if salt else None
        return SecretKey(HKDF(hashes.SHA256(), KEY_BYTES, extract, b"fedrp shared key v2|" + context).derive(shared))

    def __repr__(self) -> str:
        return "MaskKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MaskKey cannot be pickled or copied")


def signed_mask_key(key: MaskKey, identity: Identity, run: bytes, roster: bytes, client: int) -> bytes:
    """A mask key as it is sent: the public key, and the identity's signature over it, run, roster and client."""
    return key.public + identity.sign(_mask_key_claim(key.public, run, roster, client))


@functools.lru_cache(maxsize=1 << 14)  # simulated clients of one process all check the same keys
def mask_key_of(signed: bytes, owner: bytes, run: bytes, roster: bytes, client: int) -> bytes:
    """The public mask key in `signed`, once the Ed25519 key `owner` is known to have signed it for this place.

    Raises:
        ProtocolError: it has not.
    """
    public, signature = signed[:PUBLIC_KEY_BYTES], signed[PUBLIC_KEY_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(owner).verify(signature, _mask_key_claim(public, run, roster, client))
        _probe().exchange(X25519PublicKey.from_public_bytes(public))
    except (InvalidSignature, ValueError):
        raise ProtocolError(f"the mask key of client {client} is not signed by it for this run: refused") from None
    return public


def _mask_key_claim(public: bytes, run: bytes, roster: bytes, client: int) -> bytes:
    return b"fedrp mask key v1|" + struct.pack("<16s32sI", run, roster, client) + public


def _probe() -> X25519PrivateKey:
    """A known key: an exchange with it fails for the points that make every shared secret the same."""
    return X25519PrivateKey.from_private_bytes(bytes(range(32)))


def _suite(sealing: str) -> Suite:
    return Suite(_KEMS[sealing], KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def require_usable(keys: PublicKeys) -> None:
    """Refuse public keys of the wrong length, and points that make every shared secret the same."""
    if len(keys.x25519) != PUBLIC_KEY_BYTES or len(keys.ed25519) != PUBLIC_KEY_BYTES:
        raise ConfigError(f"x25519 and ed25519 keys have {PUBLIC_KEY_BYTES} bytes")
    if len(keys.hybrid) not in (0, HYBRID_KEY_BYTES):
        raise ConfigError(f"a hybrid key has {HYBRID_KEY_BYTES} bytes, got {len(keys.hybrid)}")
    try:
        for point in (keys.x25519, *([keys.hybrid[_MLKEM_BYTES:]] if keys.hybrid else [])):
            _probe().exchange(X25519PublicKey.from_public_bytes(point))
        Ed25519PublicKey.from_public_bytes(keys.ed25519)
    except ValueError:
        raise ConfigError("a public key is not a usable point of its curve") from None


def seal_to_all(key: SecretKey, dealer: Identity, recipients: Iterable[PublicKeys], place: Place) -> bytes:
    """One signed envelope per recipient, in order; `place` is completed by the recipient's number."""
    envelopes = []
    for number, public in enumerate(recipients):
        bound = place._replace(recipient=number).encoded()
        sealed = _suite(place.sealing).encrypt(key.reveal(), _sealing_key(public, place.sealing, number), bound)
        envelopes.append(sealed + dealer.sign(bound + sealed))
    return b"".join(envelopes)


def verify(envelope: bytes, dealer: PublicKeys, place: Place) -> None:
    """Refuse an envelope that this dealer did not sign for this place."""
    sealed, signature = envelope[:-SIGNATURE_BYTES], envelope[-SIGNATURE_BYTES:]
    try:
        if len(envelope) != ENVELOPE_BYTES[place.sealing]:
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(dealer.ed25519).verify(signature, place.encoded() + sealed)
    except (InvalidSignature, ValueError):
        raise ProtocolError(
            f"the sealed key of round {place.round} is not signed by client {place.dealer} for this place: "
            "another recipient, round, run, roster or --sealing, or altered"
        ) from None


def _sealing_key(public: PublicKeys, sealing: str, number: int) -> X25519PublicKey | MLKEM768X25519PublicKey:
    if sealing == "x25519":
        return X25519PublicKey.from_public_bytes(public.x25519)
    if not public.hybrid:
        raise ConfigError(f"sealing='hybrid', but client {number} has no hybrid key in the roster: make its keys anew")
    lattice, point = public.hybrid[:_MLKEM_BYTES], public.hybrid[_MLKEM_BYTES:]
    try:
        first = MLKEM768PublicKey.from_public_bytes(lattice)
    except UnsupportedAlgorithm:
        raise ConfigError(_NO_MLKEM) from None
    return MLKEM768X25519PublicKey(first, X25519PublicKey.from_public_bytes(point))


def split(data: bytes, size: int, count: int, what: str) -> list[bytes]:
    """`count` pieces of `size` bytes; anything else is refused."""
    if len(data) != size * count:
        raise ProtocolError(f"{what}: {len(data)} bytes, expected {count} x {size}")
    return [data[start : start + size] for start in range(0, len(data), size)]
