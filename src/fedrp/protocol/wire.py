"""The wire: versioned messages, to bytes and back. Nothing else crosses between clients and server.

A *packet* is what one party sends to another in one exchange: messages, one after the other; how many of which kind and
size a receiver takes is in `fedrp.protocol.limits`. Layout of a message (little endian), 28 bytes of header and then
the payload:

    version B | kind B | dtype B | context 4s | round H | sender 3s | weight I | count I | fingerprint 4s | crc32 I |
    payload (count items)

The dtype is that of an item, or 128 + b where the payload is bytes that hold packed numbers of b bits.

Header fields catch accidents. What holds against liars is bound to the whole run id: envelopes, masks, transcripts.
"""

import enum
import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.compression.coding import Coding, Numbers, place_of
from fedrp.errors import WireError
from fedrp.types import FINGERPRINT_BYTES, MAX_CLIENTS, MAX_COUNT, NO_FINGERPRINT

VERSION = 7
SERVER = MAX_CLIENTS + 1  # the sender field of messages from the server
RUN_ID_BYTES = 16
CONTEXT_BYTES = 4

_FAMILY = 0xF0  # high bits of a message's first byte; the low ones are the version
_OLD_MAGIC = b"FRP"  # which messages up to version 4 begin with, before the version
_HEADER = struct.Struct("<BBB4sH3sII4sI")
HEADER_BYTES = _HEADER.size
_CRC_AT = HEADER_BYTES - 4
_DTYPES: dict[int, np.dtype[np.generic]] = {0: np.dtype("u1"), 1: np.dtype("<f4"), 2: np.dtype("<u4")}
_PACKED, _MOST_WIDTH = 0x80, 32
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}

Payload = npt.NDArray[np.generic]


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1  # client -> server: the digest of my roster; the weight field is my weight in averages.
    # With secure aggregation also the client's signed mask key of this run.
    DEAL_REQUEST = 3  # server -> client: draw the key of this round and seal it to everyone
    DEAL = 4  # dealer -> server: one envelope per client
    SEALED = 5  # server -> client: your envelope; the sender field names the dealer
    UPLOAD = 6  # client -> server: the client's vector of this round; whole numbers if masked
    AGGREGATE = 7  # server -> client: what the server made of a round's uploads
    ROUND = 8  # server -> client: take part in this round; the weight field says how many take part.
    # With secure aggregation the payload lists them, and then their weights.
    FINISH = 9  # server -> client: the run is over
    REBUILD = 10  # server -> client: your copy of the common model differs; start again from the log in this packet
    RECOVER = 11  # server -> client: these clients are left out of the sum, help to take their masks off
    CORRECTION = 12  # client -> server: the answer to it
    VOID = 13  # server -> client: this round was given up; it has no aggregate
    MASK_KEYS = 14  # server -> client: other clients' signed mask keys (secure aggregation only)
    COMPLAINT = (
        15  # client -> server: the key of this round that I was sent is not usable; the weight field is its dealer
    )


@dataclass(frozen=True, eq=False)
class Message:
    """One message.

    Guarantees: `decode(encode([message]))` gives an equal message; payloads are read-only, one-dimensional and finite.
    """

    kind: Kind
    context: bytes  # see `context_of`
    round: int
    sender: int
    payload: Payload
    weight: int = 0
    fingerprint: bytes = NO_FINGERPRINT
    width: int = 0  # bits of the numbers that are packed into a payload of bytes; 0 where it has items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._fields() == other._fields()

    def _fields(self) -> tuple[object, ...]:
        payload = (self.payload.dtype, self.payload.tobytes())
        header = (self.kind, self.context, self.round, self.sender, self.weight, self.fingerprint, self.width)
        return header + payload


EMPTY: Payload = np.zeros(0, np.uint8)


def context_of(run: bytes, projection: int) -> bytes:
    """What stands for a run and a projection in all messages; `projection` is its code and version, 0 for none."""
    return hashlib.sha256(b"fedrp context v1|" + run + struct.pack("<H", projection)).digest()[:CONTEXT_BYTES]


def raw(data: bytes) -> Payload:
    """Bytes as a payload."""
    return np.frombuffer(data, np.uint8)


def encode(messages: Iterable[Message]) -> bytes:
    """A packet of the given messages.

    Raises:
        WireError: a payload is not finite, not one-dimensional, or of a type that is not carried.
    """
    parts: list[bytes | memoryview] = []
    for message in messages:
        payload = np.ascontiguousarray(message.payload)
        if payload.ndim != 1 or payload.dtype not in _DTYPE_CODES or payload.size >= MAX_COUNT:
            raise WireError(f"cannot send a {payload.dtype} array of shape {payload.shape}")
        if len(message.context) != CONTEXT_BYTES or len(message.fingerprint) != FINGERPRINT_BYTES:
            raise WireError(f"context and fingerprint have {CONTEXT_BYTES} and {FINGERPRINT_BYTES} bytes")
        _require_finite(payload)
        body = payload.view(np.uint8).data
        code = _DTYPE_CODES[payload.dtype]
        if message.width:
            if payload.dtype != np.uint8 or not 0 < message.width <= _MOST_WIDTH:
                raise WireError(f"cannot send packed numbers of {message.width} bits as {payload.dtype}")
            code = _PACKED | message.width
        try:
            sender = message.sender.to_bytes(3, "little")
            fields = (message.kind, code, message.context, message.round, sender, message.weight, payload.size)
            header = _HEADER.pack(_FAMILY | VERSION, *fields, message.fingerprint, 0)[:_CRC_AT]
        except (struct.error, OverflowError) as error:
            raise WireError(f"a header field is out of range: {error}") from None
        parts += [header, struct.pack("<I", zlib.crc32(body, zlib.crc32(header))), body]
    return b"".join(parts)


class Limit(NamedTuple):
    """How much of one kind of message a receiver takes in one packet."""

    messages: int
    size: int  # bytes of a payload


Limits = Mapping[Kind, Limit]


def decode(packet: bytes, limits: Limits | None = None) -> list[Message]:
    """The messages of a packet. Whoever reads what another party sent gives `limits`.

    Guarantees: payloads are views of the packet, nothing is copied. With limits, the first message that is one too many
    of its kind, too large, or of a kind and round that the packet already holds ends the work.

    Raises:
        WireError: the bytes are truncated, oversized, altered, of another version, or hold values that are not finite.
    """
    if limits is not None and len(packet) > largest(limits):
        raise WireError(f"a packet of {len(packet)} bytes, at most {largest(limits)} are taken here")
    view = memoryview(packet)
    messages: list[Message] = []
    seen: set[tuple[Kind, int]] = set()
    counts = dict.fromkeys(Kind, 0)
    start = 0
    while start < len(view):
        message, start = _decode_one(view, start)
        if limits is not None:
            counts[message.kind] += 1
            limit = limits.get(message.kind, _NONE)
            place = (message.kind, message.round)
            if counts[message.kind] > limit.messages or message.payload.nbytes > limit.size or place in seen:
                raise WireError(f"more {message.kind.name} messages, or larger ones, than are taken here")
            seen.add(place)
        messages.append(message)
    return messages


def largest(limits: Limits) -> int:
    """Bytes of the largest packet within limits."""
    return sum(limit.messages * (HEADER_BYTES + limit.size) for limit in limits.values())


_NONE = Limit(0, 0)


def _decode_one(packet: memoryview, start: int) -> tuple[Message, int]:
    """The message at `start`, and where the next one begins."""
    view = packet[start:]
    if len(view) < HEADER_BYTES:
        raise WireError(f"truncated message: {len(view)} bytes, a header has {HEADER_BYTES}")
    first, kind, dtype_code, context, round_, sender, weight, count, fingerprint, crc = _HEADER.unpack_from(view)
    if first != _FAMILY | VERSION:
        version = view[len(_OLD_MAGIC)] if view[: len(_OLD_MAGIC)] == _OLD_MAGIC else first ^ _FAMILY
        if version > 0xF or version == VERSION:
            raise WireError("not a fedrp message")
        raise WireError(f"message of version {version}, this is version {VERSION}: upgrade both sides")
    width = dtype_code ^ _PACKED if dtype_code & _PACKED else 0
    dtype_code = 0 if 0 < width <= _MOST_WIDTH else dtype_code
    if dtype_code not in _DTYPES or kind not in Kind.__members__.values() or count >= MAX_COUNT:
        raise WireError("message header is not valid")
    dtype = _DTYPES[dtype_code]
    end = HEADER_BYTES + count * dtype.itemsize
    if len(view) < end:
        raise WireError(f"truncated message: {len(view)} bytes of {end}")
    body = view[HEADER_BYTES:end]
    if zlib.crc32(body, zlib.crc32(view[:_CRC_AT])) != crc:
        raise WireError("message was altered on the way (checksum differs)")
    payload = np.frombuffer(body, dtype)
    _require_finite(payload)
    sent_by = int.from_bytes(sender, "little")
    return Message(Kind(kind), context, round_, sent_by, payload, weight, fingerprint, width), start + end


def _require_finite(payload: Payload) -> None:
    if payload.dtype.kind == "f" and not np.isfinite(payload).all():
        raise WireError("payload holds values that are not finite")


def messages_of(messages: Iterable[Message], kind: Kind) -> list[Message]:
    """The messages of one kind, in order."""
    return [message for message in messages if message.kind is kind]


def numbers(message: Message, coding: Coding, run: bytes) -> Numbers:
    """The numbers that the payload of a message stands for, refused unless it is of this code."""
    if message.width != coding.width:
        raise WireError(f"{message.kind.name} has numbers of {message.width} bits, expected {coding.width}")
    return coding.decode(message.payload, place_of(run, message.round, message.sender))


class Size(NamedTuple):
    """Encoded bytes of messages."""

    headers: int = 0
    payloads: int = 0


def sizes(packet: bytes) -> dict[Kind, Size]:
    """Encoded bytes of a valid packet, by kind of message."""
    counts: dict[Kind, Size] = {}
    start = 0
    while start < len(packet):
        _, kind, dtype_code, *_, count, _, _ = _HEADER.unpack_from(packet, start)
        size = count * (1 if dtype_code & _PACKED else _DTYPES[dtype_code].itemsize)
        headers, payloads = counts.get(Kind(kind), Size())
        counts[Kind(kind)] = Size(headers + HEADER_BYTES, payloads + size)
        start += HEADER_BYTES + size
    return counts
