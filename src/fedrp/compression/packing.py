"""Whole numbers of a few bits, packed tightly into bytes: number i takes bits [i b, (i + 1) b), lowest bit first."""

import numpy as np
import numpy.typing as npt

from fedrp.errors import WireError
from fedrp.types import Words

Bytes = npt.NDArray[np.uint8]
MOST_BITS = 32
_CHUNK = 1 << 17  # numbers, a multiple of 8: every chunk fills whole bytes


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes so many numbers take."""
    return -(-count * bits // 8)


def pack(numbers: npt.NDArray[np.unsignedinteger], bits: int) -> Bytes:
    """The lowest `bits` bits of each number; what is left over of the last byte is 0."""
    out = np.empty(packed_bytes(numbers.size, bits), np.uint8)
    for start in range(0, numbers.size, _CHUNK):
        part = numbers[start : start + _CHUNK]
        if bits == 1:
            each = (part & 1).astype(np.uint8)
        else:
            each = np.unpackbits(
                part.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, count=bits, bitorder="little"
            )
        packed = np.packbits(each.reshape(-1), bitorder="little")
        first = start * bits // 8
        out[first : first + packed.size] = packed
    return out


def unpack(data: Bytes, bits: int, count: int) -> Words:
    """`count` numbers of `bits` bits each.

    Raises:
        WireError: there are more or fewer bytes than that, or bits after the last number that are not 0.
    """
    if data.size != packed_bytes(count, bits):
        raise WireError(f"{data.size} bytes of packed numbers, expected {packed_bytes(count, bits)}")
    used = count * bits % 8
    if used and data[-1] >> used:
        raise WireError("packed numbers end with bits that belong to none")
    out = np.zeros(count, np.uint32)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        part = data[start * bits // 8 : packed_bytes(stop, bits)]
        each = np.unpackbits(part, count=(stop - start) * bits, bitorder="little")
        if bits == 1:
            out[start:stop] = each
            continue
        words = np.zeros((stop - start, MOST_BITS), np.uint8)
        words[:, :bits] = each.reshape(-1, bits)
        out[start:stop] = np.packbits(words, axis=1, bitorder="little").view("<u4").reshape(-1)
    return out
