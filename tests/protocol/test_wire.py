"""The wire: what is sent arrives as it was, and whatever else arrives is refused by one error."""

import dataclasses
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedrp.compression.coding import Plain
from fedrp.errors import WireError
from fedrp.protocol import wire
from fedrp.protocol.wire import HEADER_BYTES, Kind, Message

CONTEXT = wire.context_of(bytes(range(16)), 257)

payloads = st.one_of(
    st.binary(max_size=60).map(wire.raw),
    arrays.arrays("<f4", st.integers(0, 20), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    arrays.arrays("<u4", st.integers(0, 20)),
)
messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    context=st.binary(min_size=4, max_size=4),
    round=st.integers(0, 2**16 - 1),
    sender=st.integers(0, 2**24 - 1),
    payload=payloads,
    weight=st.integers(0, 2**32 - 1),
    fingerprint=st.binary(min_size=4, max_size=4),
)


def upload(values: object = (1.0, -2.5, 3.0)) -> Message:
    return Message(Kind.UPLOAD, CONTEXT, 7, 3, np.array(values, np.float32), weight=1)


def tampered(message: Message, at: int, replacement: bytes, checksum: bool = True) -> bytes:
    """An encoded message with some bytes replaced, and a checksum that fits if asked for."""
    packet = bytearray(wire.encode([message]))
    packet[at : at + len(replacement)] = replacement
    if checksum:
        crc = zlib.crc32(packet[HEADER_BYTES:], zlib.crc32(packet[: HEADER_BYTES - 4]))
        packet[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", crc)
    return bytes(packet)


@given(st.lists(messages, max_size=4))
def test_what_is_sent_arrives_as_it_was(sent: list[Message]) -> None:
    assert wire.decode(wire.encode(sent)) == sent


@given(messages)
def test_encoding_is_canonical(message: Message) -> None:
    packet = wire.encode([message])
    assert wire.encode(wire.decode(packet)) == packet
    assert len(packet) == HEADER_BYTES + message.payload.nbytes


@given(messages, messages)
def test_equal_means_equal_in_every_field(one: Message, other: Message) -> None:
    assert (one == other) == (wire.encode([one]) == wire.encode([other]))


def test_arrived_payloads_cannot_be_written_to() -> None:
    (message,) = wire.decode(wire.encode([upload()]))
    with pytest.raises(ValueError, match="read-only"):
        message.payload[0] = 0


def test_a_payload_with_gaps_arrives_whole() -> None:
    gappy = np.arange(10, dtype=np.float32)[::3]
    (message,) = wire.decode(wire.encode([upload(gappy)]))
    assert message.payload.tolist() == [0, 3, 6, 9]


# --- what is refused -----------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=200) | st.binary(max_size=200).map(lambda tail: b"\xf6\x06" + tail))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(noise)


@given(st.lists(messages, min_size=1, max_size=3), st.binary(min_size=1, max_size=27))
def test_bytes_after_the_last_message_are_refused(sent: list[Message], tail: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(wire.encode(sent) + tail)


def test_truncation_at_every_length_is_refused() -> None:
    packet = wire.encode([upload(), upload(range(5))])
    whole = {0, len(wire.encode([upload()]))}
    for length in range(len(packet)):
        if length not in whole:
            with pytest.raises(WireError):
                wire.decode(packet[:length])


def test_any_single_flipped_bit_is_refused() -> None:
    packet = wire.encode([upload(range(4))])
    for bit in range(8 * len(packet)):
        flipped = bytearray(packet)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.decode(bytes(flipped))


@pytest.mark.parametrize("version", [0, 4, 5, 15])
def test_another_version_is_refused_and_says_so(version: int) -> None:
    with pytest.raises(WireError, match=rf"version {version}, this is version 7.*upgrade"):
        wire.decode(tampered(upload(), 0, bytes([0xF0 | version])))


def test_a_message_of_the_format_before_is_refused_as_one_of_its_version() -> None:
    """Up to version 4 a message began with FRP and its version, and had a header of 60 bytes."""
    with pytest.raises(WireError, match=r"version 4, this is version 7.*upgrade"):
        wire.decode(b"FRP\x04" + bytes(56))


@pytest.mark.parametrize("first", [b"\x00", b"\x05", b"\x75", b"F", b"FRP\x07", b"FRP\xff"])
def test_what_is_no_message_at_all_is_refused_as_such(first: bytes) -> None:
    with pytest.raises(WireError, match="not a fedrp message"):
        wire.decode(tampered(upload(), 0, first))


@pytest.mark.parametrize("count", [4, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_count_beyond_the_payload_is_refused(count: int) -> None:
    with pytest.raises(WireError):
        wire.decode(tampered(upload(), 16, struct.pack("<I", count)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_on_both_sides(value: float) -> None:
    with pytest.raises(WireError, match="not finite"):
        wire.encode([upload([1.0, value])])
    with pytest.raises(WireError, match="not finite"):
        wire.decode(tampered(upload([1.0, 2.0]), HEADER_BYTES + 4, struct.pack("<f", value)))


@pytest.mark.parametrize(
    ("field", "at", "value"), [("kind", 1, 0), ("kind", 1, 99), ("dtype", 2, 3), ("dtype", 2, 127)]
)
def test_an_unknown_kind_or_dtype_is_refused(field: str, at: int, value: int) -> None:
    with pytest.raises(WireError, match="header is not valid"):
        wire.decode(tampered(upload(), at, bytes([value])))


@pytest.mark.parametrize("dtype", ["f8", "f2", "i8", ">f4", "?", "c8", "O"])
def test_only_three_types_are_carried(dtype: str) -> None:
    with pytest.raises(WireError, match="cannot send"):
        wire.encode([dataclasses.replace(upload(), payload=np.zeros(3, dtype))])


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_only_flat_payloads_are_carried(shape: tuple[int, ...]) -> None:
    with pytest.raises(WireError, match="cannot send"):
        wire.encode([dataclasses.replace(upload(), payload=np.zeros(shape, np.float32))])


@pytest.mark.parametrize(
    "change",
    [
        *({"round": -1}, {"round": 2**16}, {"sender": -1}, {"sender": 2**24}),
        *({"weight": -1}, {"weight": 2**32}, {"weight": 1.5}),
    ],
)
def test_header_fields_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        wire.encode([dataclasses.replace(upload(), **change)])


@pytest.mark.parametrize("field", ["context", "fingerprint"])
@pytest.mark.parametrize("length", [0, 3, 5, 16])
def test_a_context_or_fingerprint_of_another_length_is_refused(field: str, length: int) -> None:
    with pytest.raises(WireError):
        wire.encode([dataclasses.replace(upload(), **{field: b"x" * length})])


def test_runs_and_projections_have_contexts_of_their_own() -> None:
    places = [(bytes(16), 0), (bytes(16), 1), (bytes(16), 256), (bytes(15) + b"x", 0), (b"x" + bytes(15), 0)]
    assert len({wire.context_of(*place) for place in places}) == len(places)


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_vector_must_have_the_expected_length_and_type() -> None:
    assert wire.numbers(upload(), Plain(3), bytes(16)).tolist() == [1.0, -2.5, 3.0]
    for message, length in [(upload(), 2), (upload(), 4), (dataclasses.replace(upload(), payload=wire.raw(b"abc")), 3)]:
        with pytest.raises(WireError, match="expected"):
            wire.numbers(message, Plain(length), bytes(16))


@given(st.lists(messages, max_size=5))
def test_sizes_add_up_by_kind(sent: list[Message]) -> None:
    sizes = wire.sizes(wire.encode(sent))
    assert sizes.keys() == {message.kind for message in sent}
    for kind, size in sizes.items():
        found = wire.messages_of(sent, kind)
        assert sum(size) == len(wire.encode(found))
        assert size.headers == 28 * len(found)
