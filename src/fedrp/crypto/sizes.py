"""How long keys, envelopes and signatures are: what a party that holds no key may know of them."""

from fedrp.errors import ProtocolError
from fedrp.types import KEY_BYTES as KEY_BYTES

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
DIGEST_BYTES = 32
MLKEM_BYTES = 1184
HYBRID_KEY_BYTES = MLKEM_BYTES + PUBLIC_KEY_BYTES
_TAG_BYTES = 16

# Of an envelope: the encapsulated key, the sealed key, its authentication tag, the dealer's signature.
ENVELOPE_BYTES = {
    "x25519": 32 + KEY_BYTES + _TAG_BYTES + SIGNATURE_BYTES,
    "hybrid": 1088 + 32 + KEY_BYTES + _TAG_BYTES + SIGNATURE_BYTES,
}
# Of a mask key as it is sent: the public key and the identity's signature.
MASK_KEY_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
MASK_ENTRY_BYTES = 4 + MASK_KEY_BYTES  # with its owner's number before it


def split(data: bytes, size: int, count: int, what: str) -> list[bytes]:
    """`count` pieces of `size` bytes; anything else is refused."""
    if len(data) != size * count:
        raise ProtocolError(f"{what}: {len(data)} bytes, expected {count} x {size}")
    return [data[start : start + size] for start in range(0, len(data), size)]
