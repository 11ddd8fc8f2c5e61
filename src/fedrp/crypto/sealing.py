"""Keys of clients, and how secrets travel: a dealer draws 32 bytes, seals them to every client and signs.

HPKE (RFC 9180) with HKDF-SHA256 and ChaCha20-Poly1305; the key encapsulation is X25519, or the hybrid of ML-KEM-768 and
X25519 that also withstands quantum computers. Each envelope carries the dealer's Ed25519 signature. Seal and signature
are bound to the envelope's `Place`, so that it opens and verifies nowhere else.

**Proof of possession.** An Ed25519 signature proves that its maker has the signing key. An X25519 key cannot sign, but
its curve is that of Ed25519 in other coordinates, u = (1 + y) / (1 - y): the X25519 key of a scalar has a *twin*, the
Ed25519 key of the same scalar. The twin signs one message ever, the owner's entry in a roster, and whoever verifies it
finds the twin's public key from u (up to the sign of x, so there are two to try). ML-KEM has nothing like it: those
keys are bound to the entry by the other signatures, and not proved.

Masks come from a second pair of X25519 keys, drawn for one run, signed by the identity, and erased when the run ends:
whoever steals the identity later cannot take the masks off what was recorded.
"""

import functools
import hashlib
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

from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import (
    ENVELOPE_BYTES,
    HYBRID_KEY_BYTES,
    KEY_BYTES,
    MLKEM_BYTES,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
)
from fedrp.errors import ConfigError, ProtocolError

_FIELD = 2**255 - 19  # of X25519 and of Ed25519: coordinates are numbers below it
_SIGN_BIT = 1 << 255  # of an Ed25519 key, beside the coordinate y
_PROOF_LABEL = b"fedrp proof of possession v1|"

_KEMS = {"x25519": KEM.X25519, "hybrid": KEM.MLKEM768_X25519}
_NO_MLKEM = "sealing='hybrid' needs ML-KEM, which this machine's cryptography lacks: upgrade it"


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
        return b"fedrp epoch secret v1|" + numbers + self.sealing.encode()


class Identity:
    """A client's private keys, all derived from one secret. Shows nothing of itself; cannot be pickled."""

    __slots__ = ("_hybrid", "_noise", "_sealing", "_signing", "_twin_seeds", "name")

    def __init__(self, secret: SecretKey, name: str = "") -> None:
        self.name = name
        self._hybrid: tuple[MLKEM768PrivateKey, X25519PrivateKey] | None
        self._signing = Ed25519PrivateKey.from_private_bytes(secret.derive("identity/ed25519").reveal())
        self._noise = secret.derive("identity/noise")
        own, other = secret.derive("identity/x25519"), secret.derive("identity/hybrid-x25519")
        self._sealing, self._twin_seeds = _x25519(own), [own]
        seed = secret.derive("identity/ml-kem-768/d").reveal() + secret.derive("identity/ml-kem-768/z").reveal()
        try:
            self._hybrid = MLKEM768PrivateKey.from_seed_bytes(seed), _x25519(other)
            self._twin_seeds.append(other)
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

    def prove(self, entry: bytes) -> bytes:
        """The proof that whoever wrote an entry with the public keys holds the private ones: a signature by each."""
        twins = [Ed25519PrivateKey.from_private_bytes(seed.reveal()) for seed in self._twin_seeds]
        return b"".join(key.sign(_PROOF_LABEL + entry) for key in (self._signing, *twins))

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


def _x25519(seed: SecretKey) -> X25519PrivateKey:
    """The X25519 key with the scalar of the Ed25519 key that has this seed, its twin (RFC 8032, section 5.1.5)."""
    return X25519PrivateKey.from_private_bytes(hashlib.sha512(seed.reveal()).digest()[:PUBLIC_KEY_BYTES])


def _points(keys: PublicKeys) -> list[bytes]:
    """The X25519 keys among a client's public keys."""
    return [keys.x25519, *([keys.hybrid[MLKEM_BYTES:]] if keys.hybrid else [])]


def parts(keys: PublicKeys) -> list[bytes]:
    """The public keys one by one, a hybrid one in its two parts: no two clients may have any of them in common."""
    return [keys.ed25519, *_points(keys), *([keys.hybrid[:MLKEM_BYTES]] if keys.hybrid else [])]


def require_usable(keys: PublicKeys) -> None:
    """Refuse public keys that have a second encoding, and points that make every shared secret the same.

    With two encodings of one key, two clients could have the same and not be found out.
    """
    if len(keys.x25519) != PUBLIC_KEY_BYTES or len(keys.ed25519) != PUBLIC_KEY_BYTES:
        raise ConfigError(f"x25519 and ed25519 keys have {PUBLIC_KEY_BYTES} bytes")
    if len(keys.hybrid) not in (0, HYBRID_KEY_BYTES):
        raise ConfigError(f"a hybrid key has {HYBRID_KEY_BYTES} bytes, got {len(keys.hybrid)}")
    y = _number(keys.ed25519) % _SIGN_BIT
    if y >= _FIELD or any(_number(point) >= _FIELD for point in _points(keys)):
        raise ConfigError("a public key is not in its canonical form: a coordinate is 2^255 - 19 or more")
    try:
        twin = (1 + y) * pow(1 - y, -1, _FIELD) % _FIELD
        for point in (_bytes(twin), *_points(keys)):
            _probe().exchange(X25519PublicKey.from_public_bytes(point))  # zero for points of small order
        if keys.hybrid:
            MLKEM768PublicKey.from_public_bytes(keys.hybrid[:MLKEM_BYTES])
    except UnsupportedAlgorithm:  # whoever seals to it will be told
        pass
    except ValueError:
        raise ConfigError("a public key is not a usable point of its curve, or no ML-KEM key") from None


def proves(keys: PublicKeys, entry: bytes, proof: bytes) -> bool:
    """Whether `Identity.prove` made a proof for an entry, with the private keys of `keys`, which must be usable."""
    candidates = [[keys.ed25519], *(_twins_of(point) for point in _points(keys))]
    signatures = [proof[start : start + SIGNATURE_BYTES] for start in range(0, len(proof), SIGNATURE_BYTES)]
    return len(signatures) == len(candidates) and all(
        any(_signed(key, signature, _PROOF_LABEL + entry) for key in either)
        for either, signature in zip(candidates, signatures, strict=True)
    )


def _twins_of(point: bytes) -> list[bytes]:
    """The two Ed25519 keys that an X25519 key may be the twin of."""
    u = _number(point)
    y = (u - 1) * pow(u + 1, -1, _FIELD) % _FIELD
    return [_bytes(y), _bytes(y + _SIGN_BIT)]


def _signed(key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _number(encoded: bytes) -> int:
    return int.from_bytes(encoded, "little")


def _bytes(number: int) -> bytes:
    return number.to_bytes(PUBLIC_KEY_BYTES, "little")


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
            "another recipient, round, run, roster or sealing, or altered"
        ) from None


def _sealing_key(public: PublicKeys, sealing: str, number: int) -> X25519PublicKey | MLKEM768X25519PublicKey:
    if sealing == "x25519":
        return X25519PublicKey.from_public_bytes(public.x25519)
    if not public.hybrid:
        raise ConfigError(f"sealing='hybrid', but client {number} has no hybrid key in the roster: make its keys anew")
    lattice, point = public.hybrid[:MLKEM_BYTES], public.hybrid[MLKEM_BYTES:]
    try:
        first = MLKEM768PublicKey.from_public_bytes(lattice)
    except UnsupportedAlgorithm:
        raise ConfigError(_NO_MLKEM) from None
    return MLKEM768X25519PublicKey(first, X25519PublicKey.from_public_bytes(point))
