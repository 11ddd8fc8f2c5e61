"""Pinned identities: files that are refused unless they are exactly what they claim to be."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.cli import main
from fedrp.crypto import sealing
from fedrp.crypto.roster import Entry, Roster, entry_of, load_identity, merged, new_identity, write_roster
from fedrp.crypto.sealing import Identity, proves
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from helpers import command, environment

NAMES = ["north", "south", "east"]
IDENTITIES = [Identity(SecretKey(name.encode().ljust(32)), name) for name in NAMES]
ROSTER = merged(entry_of(identity) for identity in IDENTITIES)
TEXT = ROSTER.to_toml()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "roster.toml"
    write_roster(path, ROSTER)
    return path


# --- rosters ---------------------------------------------------------------------------------------------------------


def test_a_roster_survives_its_file(file: Path) -> None:
    loaded = Roster.load(file)
    assert loaded == ROSTER
    assert (loaded.digest, loaded.fingerprint) == (ROSTER.digest, ROSTER.fingerprint)
    assert [loaded.index(name) for name in NAMES] == [0, 1, 2]
    assert [loaded.place_of(identity) for identity in IDENTITIES] == [0, 1, 2]


def test_the_fingerprint_depends_on_every_key_name_and_the_order() -> None:
    first, second, third = ROSTER.entries
    others = [
        Roster((second, first, third)),
        Roster((first, second)),
        Roster((first._replace(name="nord"), second, third)),
        *(
            Roster((first._replace(keys=first.keys._replace(**{field: key})), second, third))
            for field, key in Identity(SecretKey(bytes(32))).public._asdict().items()
        ),
    ]
    assert len({roster.fingerprint for roster in [ROSTER, *others]}) == len(others) + 1


def edited(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


FIRST, SECOND = ROSTER.entries[0], ROSTER.entries[1]
BAD = {
    "a wrong fingerprint of a client": (edited(f'"{FIRST.fingerprint}"', '"0000"'), "fingerprint of client 'north'"),
    "a wrong fingerprint of all": (edited(f'"{ROSTER.fingerprint}"', '"0000"'), "not that of these clients"),
    "no fingerprint of all": (edited(f'fingerprint = "{ROSTER.fingerprint}"\n', ""), "no fingerprint of the whole"),
    "a swapped key": (edited(FIRST.keys.x25519.hex(), "09" * 32), "fingerprint of client 'north'"),
    "a swapped signing key": (edited(FIRST.keys.ed25519.hex(), "09" * 32), "fingerprint of client 'north'"),
    "an unknown field": (edited('name = "north"', 'name = "north"\nport = 5'), "unknown field 'port'"),
    "an unknown setting": ("server = 1\n" + TEXT, "unknown field 'server'"),
    "no name": (edited('name = "north"\n', ""), "a client has no name"),
    "not hexadecimal": (edited(FIRST.keys.x25519.hex(), "zz"), "x25519 of client 'north' is not hexadecimal"),
    "no client": ('fingerprint = ""', "no .*client.* entries"),
    "not TOML": ("[[[", "not valid TOML"),
    "nothing": ("", "no .*client.* entries"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_file_that_is_not_a_roster_is_one_clear_line(bad: str, tmp_path: Path) -> None:
    text, why = BAD[bad]
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        Roster.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.integers(0, len(TEXT.rstrip()) - 1))
def test_a_truncated_roster_is_refused_wherever_it_is_cut(tmp_path_factory: pytest.TempPathFactory, end: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "roster.toml"
    path.write_text(TEXT[:end])
    with pytest.raises(ConfigError):
        Roster.load(path)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml: No such file"):
        Roster.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("field", ["name", "x25519", "ed25519", "hybrid"])
def test_two_silos_with_the_same_name_or_key_are_refused(field: str) -> None:
    if field == "name":
        twin = SECOND._replace(name=FIRST.name)
    else:
        twin = SECOND._replace(keys=SECOND.keys._replace(**{field: getattr(FIRST.keys, field)}))
    what = "name" if field == "name" else "key"
    with pytest.raises(
        ConfigError, match=f"clients 'north' and '{twin.name}' have the same {what}: each needs its own"
    ):
        Roster((FIRST, twin))


@pytest.mark.parametrize("name", ["", "a b", 'a"', "-x", "x" * 65, "ä", "a\nb"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        Roster((FIRST._replace(name=name),))


@pytest.mark.parametrize(
    ("field", "key"),
    [("x25519", b"x"), ("x25519", bytes(32)), ("ed25519", b""), ("hybrid", b"x" * 100), ("hybrid", bytes(1216))],
)
def test_a_key_that_cannot_be_used_is_refused(field: str, key: bytes) -> None:
    with pytest.raises(ConfigError, match="client 'north'"):
        Roster((Entry("north", FIRST.keys._replace(**{field: key})),))


# --- odd keys, and whose they are ------------------------------------------------------------------------------------

FIELD = 2**255 - 19
KNOWN_ORDER_8 = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
SMALL_ORDER = {"order 1": 1, "order 2": FIELD - 1, "order 4": 0, "order 8": int.from_bytes(KNOWN_ORDER_8, "little")}


def refused(member: Entry, *others: Entry) -> str:
    with pytest.raises(ConfigError) as caught:
        Roster((member, *others))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def altered(member: Entry, field: str, key: bytes) -> Entry:
    return member._replace(keys=member.keys._replace(**{field: key}))


@pytest.mark.parametrize("field", ["x25519", "hybrid"])
def test_one_point_in_two_encodings_is_not_two_keys(field: str) -> None:
    """X25519 ignores the top bit: without it two clients would have one key, and a roster would not notice."""
    key = bytearray(getattr(FIRST.keys, field))
    key[-1] ^= 0x80
    told = refused(altered(SECOND, field, bytes(key)), FIRST)
    assert told == "client 'south': a public key is not in its canonical form: a coordinate is 2^255 - 19 or more"


@pytest.mark.parametrize("excess", [0, 1, 18])
@pytest.mark.parametrize("field", ["x25519", "ed25519"])
def test_a_coordinate_beyond_the_field_is_refused(field: str, excess: int) -> None:
    assert "not in its canonical form" in refused(altered(FIRST, field, (FIELD + excess).to_bytes(32, "little")))


@pytest.mark.parametrize("sign", [0, 1 << 255])
@pytest.mark.parametrize("order", SMALL_ORDER)
def test_a_signing_key_of_small_order_is_refused(order: str, sign: int) -> None:
    """Under 01 00..00 a signature that anyone can write down verifies for every message, for any of its owners."""
    key = (SMALL_ORDER[order] + sign).to_bytes(32, "little")
    assert refused(altered(FIRST, "ed25519", key)).startswith("client 'north': a public key is not a usable point")


def test_an_ml_kem_key_in_a_second_encoding_is_refused() -> None:
    key = b"\xff" * 3 + FIRST.keys.hybrid[3:]  # a coefficient of 4,095, where 3,328 is the largest
    assert "no ML-KEM key" in refused(altered(FIRST, "hybrid", key))


def test_a_part_of_anothers_hybrid_key_is_refused() -> None:
    mixed = FIRST.keys.hybrid[:1184] + SECOND.keys.hybrid[1184:]
    assert "clients 'north' and 'south' have the same key" in refused(FIRST, altered(SECOND, "hybrid", mixed))
    own = altered(SECOND, "hybrid", SECOND.keys.hybrid[:1184] + SECOND.keys.x25519)
    assert "clients 'south' and 'south' have the same key" in refused(FIRST, own)


def load(tmp_path: Path, *members: Entry) -> Roster:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
    path.write_text(Roster(members).to_toml())
    return Roster.load(path)


def test_each_key_of_an_entry_is_proved(tmp_path: Path) -> None:
    """Mallory, as "south", enters a key of the client "north" as her own, and signs with all that she has."""
    mallory = Identity(SecretKey(b"m" * 32), "south")
    honest = Entry.of(mallory)
    assert load(tmp_path, honest).entries == (honest,)
    x25519_of_north = mallory.public.hybrid[:1184] + FIRST.keys.hybrid[1184:]
    for field, key in [
        ("x25519", FIRST.keys.x25519),
        ("ed25519", FIRST.keys.ed25519),
        ("hybrid", x25519_of_north),
        ("x25519", FIRST.keys.hybrid[1184:]),
    ]:
        foreign = altered(honest, field, key)
        foreign = foreign._replace(proof=mallory.prove(foreign.digest))
        with pytest.raises(
            ConfigError, match=r"client 'south' does not prove that it holds the keys of its entry: get"
        ):
            load(tmp_path, foreign)


def test_a_proof_is_bound_to_the_name_and_to_all_keys(tmp_path: Path) -> None:
    other = Identity(SecretKey(bytes(32)), "north").public
    changed = [FIRST._replace(name="nord"), *(altered(FIRST, field, key) for field, key in other._asdict().items())]
    for member in [*changed, FIRST._replace(proof=FIRST.proof[:-1]), FIRST._replace(proof=b"")]:
        with pytest.raises(ConfigError, match="does not prove that it holds the keys"):
            load(tmp_path, member)


@pytest.mark.parametrize("position", [0, 40, 64, 100, 128, 191])
def test_a_proof_with_one_changed_bit_is_none(position: int, tmp_path: Path) -> None:
    proof = bytearray(FIRST.proof)
    proof[position] ^= 1
    with pytest.raises(ConfigError, match="client 'north' does not prove"):
        load(tmp_path, FIRST._replace(proof=bytes(proof)))


def test_a_signature_for_a_round_key_is_no_proof(tmp_path: Path) -> None:
    identity = IDENTITIES[0]
    signed = identity.sign(FIRST.digest)
    with pytest.raises(ConfigError, match="client 'north' does not prove"):
        load(tmp_path, FIRST._replace(proof=signed + FIRST.proof[64:]))


def test_a_roster_of_an_earlier_version_is_one_line_that_says_what_to_do(file: Path) -> None:
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith("proof")))
    with pytest.raises(
        ConfigError, match=r"client 'north' does not prove.*earlier versions.*'fedrp keys show'"
    ) as caught:
        Roster.load(file)
    assert "\n" not in str(caught.value)


def test_every_twin_signs_for_its_x25519_key() -> None:
    """Both signs of x occur among few identities: either twin must be found."""
    signs = set()
    for number in range(16):
        member = Entry.of(Identity(SecretKey(bytes([number]) * 32), "north"))
        assert proves(member.keys, member.digest, member.proof)
        either = sealing._twins_of(member.keys.x25519)
        data = sealing._PROOF_LABEL + member.digest
        signs |= {place for place, key in enumerate(either) if sealing._signed(key, member.proof[64:128], data)}
    assert signs == {0, 1}


def test_unknown_names_and_foreign_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="no client 'west' in the roster"):
        ROSTER.index("west")
    with pytest.raises(ConfigError, match="has other keys for 'north' than your key file"):
        ROSTER.place_of(Identity(SecretKey(bytes(32)), "north"))


# --- key files -------------------------------------------------------------------------------------------------------


def test_a_new_key_file_is_private_and_gives_the_same_identity_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = new_identity(path, "north")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = load_identity(path)
    assert (loaded.name, loaded.public) == ("north", made.public)
    assert entry_of(loaded).place_of(made) == 0
    assert new_identity(tmp_path / "other", "north").public != made.public
    assert sorted(os.listdir(tmp_path)) == ["key", "other"]


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_identity(path, "north")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        new_identity(path, "north")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o777])
def test_a_key_file_that_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_identity(path, "north")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others may read the key file .*mode {mode:o}.*chmod 600"):
        load_identity(path)


@pytest.mark.parametrize("damage", ["cut", "quote", "field", "short", "binary", "name"])
def test_a_damaged_key_file_is_one_line_without_the_secret(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_identity(path, "north")
    text = path.read_text()
    secret = text.split('secret = "')[1][:64]
    changed = {
        "cut": text[:-20],
        "quote": text.replace('"', "", 1),
        "field": text + f'{secret} = "x"\n'.replace(secret, "x" + secret[:4]),
        "short": text.replace(secret, secret[:-2]),
        "binary": "\x00" + text,
        "name": text.replace('"north"', "5"),
    }[damage]
    path.write_text(changed)
    with pytest.raises(ConfigError) as caught:
        load_identity(path)
    assert secret[:16] not in str(caught.value)
    assert "\n" not in str(caught.value)


# --- the command line ------------------------------------------------------------------------------------------------


def test_from_keys_to_a_roster_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        main(["keys", "new", str(tmp_path / f"{name}.key"), "--name", name])
        printed = capsys.readouterr().out
        main(["keys", "show", str(tmp_path / f"{name}.key")])
        assert capsys.readouterr().out == printed
        secret = (tmp_path / f"{name}.key").read_text().split('secret = "')[1][:64]
        assert secret not in printed
        (tmp_path / f"{name}.toml").write_text(printed)
    entries = [str(tmp_path / f"{name}.toml") for name in NAMES]
    main(["roster", "make", str(tmp_path / "roster.toml"), *entries])
    made = capsys.readouterr().out
    main(["roster", "show", str(tmp_path / "roster.toml")])
    assert capsys.readouterr().out == made
    roster = Roster.load(tmp_path / "roster.toml")
    assert [member.name for member in roster.entries] == NAMES
    for shown in [*NAMES, *(member.fingerprint for member in roster.entries), roster.fingerprint]:
        assert shown in made
    with pytest.raises(SystemExit) as caught:
        main(["roster", "make", str(tmp_path / "again.toml"), *entries, entries[0]])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "fedrp: clients 'north' and 'north' have the same name: each needs its own\n"


def test_the_secret_is_on_no_command_line_and_in_no_output(tmp_path: Path) -> None:
    done = subprocess.run(
        command("keys", "new", tmp_path / "key", "--name", "north"), capture_output=True, env=environment(), check=True
    )
    secret = (tmp_path / "key").read_text().split('secret = "')[1][:64].encode()
    assert secret not in done.stdout + done.stderr
