"""Sealed round keys open for their recipient, in their place, and nowhere else."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp.errors import ProtocolError
from fedrp.host import SimulatedEntropy
from fedrp.rng import RunSeed
from fedrp.sealing import ENVELOPE_BYTES, PUBLIC_KEY_BYTES, Identity, SystemEntropy, binding, seal_to_all, split
from fedrp.secret import SecretKey

RUN = bytes(range(16))
KEY = SecretKey(b"round key".ljust(32))
CLIENTS = [Identity(SecretKey(bytes([number]) * 32)) for number in range(3)]
ROSTER = [client.public for client in CLIENTS]
PLACE = {"run": RUN, "round_": 4, "dealer": 2, "recipient": 1, "projection": 257}


def envelopes() -> list[bytes]:
    return split(seal_to_all(KEY, ROSTER, RUN, 4, 2, 257), ENVELOPE_BYTES, 3, "envelopes")


def test_every_client_opens_its_envelope_the_dealer_too() -> None:
    for recipient, (client, envelope) in enumerate(zip(CLIENTS, envelopes(), strict=True)):
        assert client.open(envelope, binding(RUN, 4, 2, recipient, 257)) == KEY


def test_the_key_itself_is_not_in_the_envelopes() -> None:
    assert all(KEY.reveal() not in envelope for envelope in envelopes())


def test_the_same_key_is_never_sealed_to_the_same_bytes() -> None:
    first, again = envelopes(), envelopes()
    assert len({*first, *again}) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"run": bytes(16)},
        {"run": RUN[:-1] + b"\xff"},
        {"round_": 5},
        {"round_": 0},
        {"dealer": 1},
        {"recipient": 0},
        {"recipient": 2},
        {"projection": 258},
        {"projection": 0},
    ],
)
def test_an_envelope_opens_only_in_its_place(change: dict[str, object]) -> None:
    envelope = envelopes()[1]
    assert CLIENTS[1].open(envelope, binding(**PLACE)) == KEY
    with pytest.raises(ProtocolError, match="does not open"):
        CLIENTS[1].open(envelope, binding(**{**PLACE, **change}))


def test_no_other_client_opens_it() -> None:
    for stranger in (0, 2):
        for recipient in range(3):
            with pytest.raises(ProtocolError):
                CLIENTS[stranger].open(envelopes()[1], binding(**{**PLACE, "recipient": recipient}))


def test_truncated_envelopes_are_refused_at_every_length() -> None:
    envelope = envelopes()[1]
    for length in [*range(len(envelope)), len(envelope) + 1]:
        with pytest.raises(ProtocolError):
            CLIENTS[1].open(envelope.ljust(length, b"x")[:length], binding(**PLACE))


def test_a_flipped_bit_anywhere_is_refused() -> None:
    envelope = envelopes()[1]
    for bit in range(8 * len(envelope)):
        altered = bytearray(envelope)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            CLIENTS[1].open(bytes(altered), binding(**PLACE))


@given(st.binary(max_size=120))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        CLIENTS[1].open(noise, binding(**PLACE))


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


def test_public_keys_are_32_bytes_and_differ() -> None:
    assert {len(public) for public in ROSTER} == {PUBLIC_KEY_BYTES}
    assert len(set(ROSTER)) == 3
    assert Identity(SecretKey(bytes(32))).public == ROSTER[0]


# --- where secrets come from ---------------------------------------------------------------------------------------


def test_the_operating_system_never_repeats_itself() -> None:
    source = SystemEntropy()
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
    assert not issubclass(SimulatedEntropy, SystemEntropy)
    assert not issubclass(SystemEntropy, SimulatedEntropy)
    assert not isinstance(SimulatedEntropy(RunSeed(0), 0), SystemEntropy)
