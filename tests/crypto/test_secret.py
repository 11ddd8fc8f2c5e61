"""A key that cannot leak by accident, and a stream that is what it says."""

import copy
import hashlib
import hmac
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from fedrp.crypto.secret import SecretKey

RAW = bytes(range(100, 132))
KEY = SecretKey(RAW)


@dataclass
class Holder:
    name: str
    key: SecretKey


@pytest.mark.parametrize(
    "show", [repr, str, "{}".format, "{!r}".format, lambda key: f"{Holder('round', key)} {[key]} { {1: key} }"]
)
def test_no_text_shows_the_bytes(show):
    text = show(KEY)
    assert "hidden" in text
    for form in (RAW.hex(), repr(RAW), RAW.decode("latin1"), repr(list(RAW))):
        assert form not in text
        assert form[:8] not in text


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy, json.dumps, bytes, vars, iter])
def test_no_generic_operation_takes_the_bytes_out(leak):
    with pytest.raises(TypeError):
        leak(KEY)


@pytest.mark.parametrize("leak", [pickle.dumps, copy.deepcopy])
def test_nor_does_one_on_what_holds_the_key(leak):
    with pytest.raises(TypeError):
        leak(Holder("round", KEY))


def test_equality_is_between_keys_alone():
    assert SecretKey(RAW) == KEY
    assert hash(SecretKey(RAW)) == hash(KEY)
    assert SecretKey(RAW[::-1]) != KEY
    assert KEY != RAW
    assert RAW != KEY
    assert RAW.hex() != KEY
    assert KEY.reveal() == RAW


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_a_key_has_32_bytes(size):
    with pytest.raises(ValueError, match=f"32 bytes, got {size}"):
        SecretKey(bytes(size))


def test_derivation_is_hkdf_expand():
    expected = hmac.digest(RAW, b"fedrp/" + b"projection" + b"\x01", hashlib.sha256)
    assert KEY.derive("projection").reveal() == expected


def test_derived_keys_are_unrelated():
    labels = ["projection", "projection/", "masks", "model", "", "PROJECTION"]
    raws = [KEY.derive(label).reveal() for label in labels]
    assert len({*raws, RAW}) == len(labels) + 1
    bits = np.unpackbits(np.frombuffer(b"".join(raws), np.uint8)).reshape(len(labels), -1)
    for i in range(len(labels)):
        for j in range(i):
            assert 80 < (bits[i] != bits[j]).sum() < 176  # 128 +- 6 standard deviations


def test_stream_is_aes_256_ctr():
    """NIST SP 800-38A, F.5.5: the output block is the stream."""
    key = SecretKey(bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"))
    counter = 0xF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF
    assert key.keystream(32, 16 * counter).tobytes().hex() == (
        "0bdf7df1591716335e9a8b15c860c502" + "5a6e699d536119065433863c8f657b94"
    )


@pytest.mark.parametrize("offset", [0, 16, 4096, 65_536, 2**40])
@pytest.mark.parametrize("count", [0, 1, 15, 65_535, 65_537, 200_000])
def test_any_part_of_the_stream_can_be_had_on_its_own(count, offset):
    whole = KEY.keystream(count + 4096 * 16, offset)
    np.testing.assert_array_equal(KEY.keystream(count, offset), whole[:count])
    np.testing.assert_array_equal(KEY.keystream(count, offset + 4096 * 16), whole[4096 * 16 :])


def test_stream_fills_arrays_in_place():
    buffer = np.empty((3, 50_000), np.uint32)
    KEY.keystream_into(buffer, 160)
    np.testing.assert_array_equal(buffer.reshape(-1).view(np.uint8), KEY.keystream(buffer.nbytes, 160))


@pytest.mark.parametrize("offset", [-16, 1, 8, 17])
def test_stream_starts_at_whole_blocks(offset):
    with pytest.raises(ValueError, match=f"offset={offset}"):
        KEY.keystream(16, offset)


def test_stream_refuses_what_it_could_only_copy():
    with pytest.raises(ValueError, match="contiguous"):
        KEY.keystream_into(np.empty((4, 4))[:, :2])


def test_stream_looks_random():
    counts = np.bincount(KEY.keystream(1 << 20), minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    assert stats.chisquare(np.bincount(np.arange(1 << 20) % 255, minlength=256)).pvalue < 1e-4


def test_one_key_bit_changes_the_stream():
    reference = np.unpackbits(KEY.keystream(1 << 14))
    for bit in (0, 100, 255):
        raw = bytearray(RAW)
        raw[bit // 8] ^= 1 << bit % 8
        changed = np.unpackbits(SecretKey(bytes(raw)).keystream(1 << 14)) != reference
        assert abs(changed.mean() - 0.5) < 6 * 0.5 / np.sqrt(changed.size)


def test_normals_are_normal():
    values = KEY.normals(20_000)
    np.testing.assert_array_equal(KEY.normals(10), values[:10])
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(1.05 * values, "norm").pvalue < 1e-3


def test_fine_normals_are_normal_and_any_part_can_be_had_on_its_own():
    values = KEY.fine_normals(20_000)
    np.testing.assert_array_equal(KEY.fine_normals(10, 400), values[400:410])
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(1.1 * values, "norm").pvalue < 1e-3
    assert np.mean(values.astype(np.float32) == values) < 0.01  # finer than float32


@pytest.mark.parametrize("byte", [0, 255])
def test_the_most_extreme_words_give_finite_normals(byte, monkeypatch):
    monkeypatch.setattr(SecretKey, "keystream", lambda _key, count, _offset=0: np.full(count, byte, np.uint8))
    assert np.isfinite(KEY.normals(4)).all()
    assert np.isfinite(KEY.fine_normals(4)).all()
    assert np.abs(KEY.normals(4)).max() > 8
