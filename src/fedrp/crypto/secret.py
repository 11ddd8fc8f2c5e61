"""Secrets: 32 bytes that the server must never learn, expanded by a cryptographic stream.

A `SecretKey` is not a seed. It has no useful repr, cannot be pickled, copied into a checkpoint or compared with bytes,
and leaves the process only through `reveal()`, which exists for sealing it to another client.
"""

import hmac
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from scipy.special import ndtri

from fedrp.types import KEY_BYTES

_AES_BLOCK = 16
_CHUNK = 1 << 20
_BELOW_ONE = 1 - 2.0**-53
_ZEROS = memoryview(bytes(1 << 16))  # what AES-CTR encrypts to give its bare stream; small enough to stay in cache


class SecretKey:
    """32 secret bytes.

    Guarantees:
    - `repr`, `str` and `format` never show the bytes; pickling and copying raise `TypeError`.
    - Equality holds only between keys, in constant time; a key never equals `bytes`.
    - `derive(label)` is HKDF-Expand (SHA-256): keys of different labels are unrelated.
    - `keystream(count, offset)` is AES-256-CTR: any part of the stream can be had on its own.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) != KEY_BYTES:
            raise ValueError(f"a secret key has {KEY_BYTES} bytes, got {len(raw)}")
        self._raw = bytes(raw)

    def derive(self, label: str) -> "SecretKey":
        """The key for one purpose, e.g. `key.derive("projection")`."""
        return SecretKey(HKDFExpand(hashes.SHA256(), KEY_BYTES, b"fedrp/" + label.encode()).derive(self._raw))

    def mixed(self, other: "SecretKey", label: str) -> "SecretKey":
        """A key made of two (HKDF, the other one as salt): secret to whoever lacks one of them."""
        mixer = HKDF(hashes.SHA256(), KEY_BYTES, other._raw, b"fedrp/" + label.encode())
        return SecretKey(mixer.derive(self._raw))

    def keystream(self, count: int, offset: int = 0) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + count) of this key's stream. `offset` must be a multiple of 16."""
        stream = np.empty(count, np.uint8)
        self.keystream_into(stream, offset)
        return stream

    def keystream_into(self, buffer: npt.NDArray[Any], offset: int = 0) -> None:
        """Fill a contiguous array with the bytes of this key's stream from `offset`, a multiple of 16."""
        if offset < 0 or offset % _AES_BLOCK:
            raise ValueError(f"the stream starts at multiples of {_AES_BLOCK} bytes, got offset={offset}")
        if not buffer.flags.c_contiguous:
            raise ValueError(f"the stream fills contiguous arrays only, got strides={buffer.strides}")
        counter = (offset // _AES_BLOCK).to_bytes(_AES_BLOCK, "big")
        encryptor = Cipher(algorithms.AES256(self._raw), modes.CTR(counter)).encryptor()
        stream = buffer.reshape(-1).view(np.uint8).data
        for start in range(0, len(stream), len(_ZEROS)):
            part = stream[start : start + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: len(part)], part)

    def normals(self, count: int) -> npt.NDArray[np.float32]:
        """The first `count` standard normals of this key's stream (inverse distribution function of 53 bits)."""
        result = np.empty(count, np.float32)
        for start in range(0, count, _CHUNK):  # the intermediate values are five times as large
            part = result[start : start + _CHUNK]
            words = self.keystream(8 * part.size, 8 * start).view("<u8") >> np.uint64(11)
            part[:] = ndtri(np.minimum((words + 0.5) * 2.0**-53, _BELOW_ONE))
        return result

    def fine_normals(self, count: int, start: int = 0) -> npt.NDArray[np.float64]:
        """Standard normals in double precision: those from `start` (an even number) of this key's stream.

        A bit gives the sign and 63 bits the tail, so that both tails are equally fine, up to 9 deviations.
        """
        words = self.keystream(8 * count, 8 * start).view("<u8")
        tails: npt.NDArray[np.float64] = ndtri(((words >> np.uint64(1)) + 0.5) * 2.0**-64)
        return np.where(words & np.uint64(1), tails, -tails)

    def reveal(self) -> bytes:
        """The bytes themselves, for sealing to a peer. Never log, store or send what this returns in the clear."""
        return self._raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKey) and hmac.compare_digest(self._raw, other._raw)

    def __hash__(self) -> int:
        return hash((SecretKey, self._raw))

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretKey cannot be pickled or copied: seal it to its recipient instead")
