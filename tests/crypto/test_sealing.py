"""Sealed round keys open for their recipient, in their place, and nowhere else; and only a dealer can make them."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp.crypto.sealing import Identity, MaskKey, Place, SiteEntropy, seal_to_all, verify
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import ENVELOPE_BYTES, HYBRID_KEY_BYTES, PUBLIC_KEY_BYTES, SIGNATURE_BYTES, split
from fedrp.errors import ConfigError, ProtocolError
from fedrp.rng import RunSeed
from fedrp.simulation.identities import SimulatedEntropy

RUN = bytes(range(16))
KEY = SecretKey(b"round key".ljust(32))
CLIENTS = [Identity(SecretKey(bytes([number]) * 32)) for number in range(3)]
KEYS = [client.public for client in CLIENTS]
SEALINGS = ["x25519", "hybrid"]
DEALER, RECIPIENT = 2, 1
PLACE = Place(RUN, 4, DEALER, RECIPIENT, 257, b"digest of the roster".ljust(32), "x25519")


def envelopes(sealing: str = "x25519") -> list[bytes]:
    sealed = seal_to_all(KEY, CLIENTS[DEALER], KEYS, PLACE._replace(sealing=sealing))
    return split(sealed, ENVELOPE_BYTES[sealing], 3, "envelopes")


def accepted(envelope: bytes, place: Place, client: int = RECIPIENT) -> SecretKey:
    """What a client does with an envelope."""
    verify(envelope, KEYS[place.dealer], place)
    return CLIENTS[client].open(envelope, place)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_every_client_opens_its_envelope_the_dealer_too(sealing: str) -> None:
    for recipient, envelope in enumerate(envelopes(sealing)):
        assert accepted(envelope, PLACE._replace(recipient=recipient, sealing=sealing), recipient) == KEY


@pytest.mark.parametrize("sealing", SEALINGS)
def test_the_key_itself_is_not_in_the_envelopes(sealing: str) -> None:
    assert all(KEY.reveal() not in envelope for envelope in envelopes(sealing))


def test_the_same_key_is_never_sealed_to_the_same_bytes() -> None:
    first, again = envelopes(), envelopes()
    assert len({*first, *again}) == 6


CHANGES = [
    {"run": bytes(16)},
    {"run": RUN[:-1] + b"\xff"},
    {"round": 5},
    {"round": 0},
    {"dealer": 1},
    {"recipient": 0},
    {"recipient": 2},
    {"projection": 258},
    {"projection": 0},
    {"roster": bytes(32)},
]


@pytest.mark.parametrize("sealing", SEALINGS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_envelope_opens_and_verifies_only_in_its_place(change: dict[str, object], sealing: str) -> None:
    envelope, place = envelopes(sealing)[RECIPIENT], PLACE._replace(sealing=sealing)
    assert accepted(envelope, place) == KEY
    with pytest.raises(ProtocolError, match="does not open"):
        CLIENTS[RECIPIENT].open(envelope, place._replace(**change))
    with pytest.raises(ProtocolError, match="is not signed by client"):
        verify(envelope, KEYS[DEALER], place._replace(**change))


def test_an_envelope_of_one_suite_is_none_of_the_other() -> None:
    for sealing, other in (SEALINGS, SEALINGS[::-1]):
        with pytest.raises(ProtocolError, match="roster or sealing"):
            accepted(envelopes(sealing)[RECIPIENT], PLACE._replace(sealing=other))


def test_no_other_client_opens_it() -> None:
    for stranger in (0, 2):
        for recipient in range(3):
            with pytest.raises(ProtocolError):
                CLIENTS[stranger].open(envelopes()[RECIPIENT], PLACE._replace(recipient=recipient))


@pytest.mark.parametrize("sealing", SEALINGS)
def test_whoever_is_not_the_dealer_can_seal_but_not_sign(sealing: str) -> None:
    mallory = Identity(SecretKey(b"mallory".ljust(32)))
    place = PLACE._replace(sealing=sealing)
    own = split(seal_to_all(KEY, mallory, KEYS, place), ENVELOPE_BYTES[sealing], 3, "envelopes")[RECIPIENT]
    assert CLIENTS[RECIPIENT].open(own, place) == KEY  # so the seal alone would be no proof
    with pytest.raises(ProtocolError, match="is not signed by client 2"):
        verify(own, KEYS[DEALER], place)
    mixed = own[:-SIGNATURE_BYTES] + envelopes(sealing)[RECIPIENT][-SIGNATURE_BYTES:]
    with pytest.raises(ProtocolError, match="is not signed by client 2"):
        verify(mixed, KEYS[DEALER], place)


def test_truncated_envelopes_are_refused_at_every_length() -> None:
    envelope = envelopes()[RECIPIENT]
    for length in [*range(len(envelope)), len(envelope) + 1]:
        with pytest.raises(ProtocolError):
            accepted(envelope.ljust(length, b"x")[:length], PLACE)


@pytest.mark.parametrize(("sealing", "stride"), [("x25519", 1), ("hybrid", 41)])
def test_a_flipped_bit_anywhere_is_refused(sealing: str, stride: int) -> None:
    envelope, place = envelopes(sealing)[RECIPIENT], PLACE._replace(sealing=sealing)
    for bit in range(0, 8 * len(envelope), stride):
        altered = bytearray(envelope)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="is not signed"):
            accepted(bytes(altered), place)
        if bit // 8 < len(envelope) - SIGNATURE_BYTES:
            with pytest.raises(ProtocolError, match="does not open"):
                CLIENTS[RECIPIENT].open(bytes(altered), place)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        verify(noise, KEYS[DEALER], PLACE)
    with pytest.raises(ProtocolError):
        CLIENTS[RECIPIENT].open(noise, PLACE)


def test_a_roster_without_hybrid_keys_is_one_clear_error() -> None:
    keys = [KEYS[0], KEYS[1]._replace(hybrid=b"")]
    with pytest.raises(ConfigError, match="client 1 has no hybrid key in the roster"):
        seal_to_all(KEY, CLIENTS[DEALER], keys, PLACE._replace(sealing="hybrid"))


# --- keys that two clients share -------------------------------------------------------------------------------------


MASKS = [MaskKey(SecretKey(bytes([client]) * 32)) for client in range(3)]


def test_two_clients_agree_on_a_key_that_depends_on_everything() -> None:
    salt = SecretKey(b"salt".ljust(32))
    for context in (b"", b"round 1"):
        for extra in (None, salt):
            assert MASKS[0].agree(MASKS[1].public, context, extra) == MASKS[1].agree(MASKS[0].public, context, extra)
    different = [
        MASKS[0].agree(MASKS[1].public, b"round 1"),
        MASKS[0].agree(MASKS[1].public, b"round 2"),
        MASKS[0].agree(MASKS[1].public, b"round 1", salt),
        MASKS[0].agree(MASKS[2].public, b"round 1"),
        MASKS[1].agree(MASKS[2].public, b"round 1"),
    ]
    assert len(set(different)) == len(different)


def test_a_mask_key_that_gives_everyone_the_same_secret_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not usable"):
        MASKS[0].agree(bytes(32), b"")


def test_a_mask_key_shows_nothing_and_cannot_be_copied() -> None:
    assert repr(MASKS[0]) == str(MASKS[0]) == "MaskKey(hidden)"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            attempt(MASKS[0])


@pytest.mark.parametrize(("size", "count"), [(10, 3), (15, 2), (31, 1), (6, 5)])
def test_split_takes_only_whole_pieces(size: int, count: int) -> None:
    assert split(b"x" * 30, 10, 3, "things") == [b"x" * 10] * 3
    if size * count != 30:
        with pytest.raises(ProtocolError, match="things: 30 bytes"):
            split(b"x" * 30, size, count, "things")


# --- identities ----------------------------------------------------------------------------------------------------


def test_an_identity_shows_nothing_and_cannot_be_copied() -> None:
    assert repr(CLIENTS[0]) == str(CLIENTS[0]) == "Identity(hidden)"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            attempt(CLIENTS[0])


def test_public_keys_have_their_lengths_and_all_differ() -> None:
    sizes = {(len(keys.x25519), len(keys.ed25519), len(keys.hybrid)) for keys in KEYS}
    assert sizes == {(PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES, HYBRID_KEY_BYTES)}
    parts = [part for keys in KEYS for part in (keys.x25519, keys.ed25519, keys.hybrid, keys.hybrid[-32:])]
    assert len(set(parts)) == len(parts)
    assert Identity(SecretKey(bytes(32))).public == KEYS[0]  # all from the one secret


# --- where secrets come from ---------------------------------------------------------------------------------------


def test_the_operating_system_never_repeats_itself() -> None:
    source = SiteEntropy(CLIENTS[0])
    assert len({source.secret("round-key", 1) for _ in range(20)}) == 20


def test_simulated_entropy_repeats_and_differs_by_every_name() -> None:
    def draw(seed: int = 1, client: int = 2, purpose: str = "round-key", *indices: int) -> SecretKey:
        return SimulatedEntropy(RunSeed(seed), client).secret(purpose, *indices)

    assert draw(1, 2, "round-key", 3) == draw(1, 2, "round-key", 3)
    names = [
        (),
        (7,),
        (1, 7),
        (1, 2, "noise"),
        (1, 2, "round-key", 3),
        (1, 2, "round-key", 4),
        (12,),
        (1, 2, "noise", 3),
    ]
    assert len({draw(*name) for name in names}) == len(names)


def test_the_two_sources_cannot_be_mistaken_for_each_other() -> None:
    assert not issubclass(SimulatedEntropy, SiteEntropy)
    assert not issubclass(SiteEntropy, SimulatedEntropy)
    assert not isinstance(SimulatedEntropy(RunSeed(0), 0), SiteEntropy)
