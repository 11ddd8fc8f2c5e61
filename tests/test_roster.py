"""Pinned identities: files that are refused unless they are exactly what they claim to be."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.cli import main
from fedrp.errors import ConfigError
from fedrp.roster import Member, Roster, entry_of, load_identity, merged, new_identity, write_roster
from fedrp.sealing import Identity
from fedrp.secret import SecretKey
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
    first, second, third = ROSTER.members
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


FIRST, SECOND = ROSTER.members[0], ROSTER.members[1]
BAD = {
    "a wrong fingerprint of a silo": (edited(f'"{FIRST.fingerprint}"', '"0000"'), "fingerprint of silo 'north'"),
    "a wrong fingerprint of all": (edited(f'"{ROSTER.fingerprint}"', '"0000"'), "not that of these silos"),
    "no fingerprint of all": (edited(f'fingerprint = "{ROSTER.fingerprint}"\n', ""), "no fingerprint of the whole"),
    "a swapped key": (edited(FIRST.keys.x25519.hex(), "09" * 32), "fingerprint of silo 'north'"),
    "a swapped signing key": (edited(FIRST.keys.ed25519.hex(), "09" * 32), "fingerprint of silo 'north'"),
    "an unknown field": (edited('name = "north"', 'name = "north"\nport = 5'), "unknown field 'port'"),
    "an unknown setting": ("server = 1\n" + TEXT, "unknown field 'server'"),
    "no name": (edited('name = "north"\n', ""), "a silo has no name"),
    "not hexadecimal": (edited(FIRST.keys.x25519.hex(), "zz"), "x25519 of silo 'north' is not hexadecimal"),
    "no silo": ('fingerprint = ""', "no .*silo.* entries"),
    "not TOML": ("[[[", "not valid TOML"),
    "nothing": ("", "no .*silo.* entries"),
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
    with pytest.raises(ConfigError, match=f"silos 'north' and '{twin.name}' have the same {field}"):
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
    with pytest.raises(ConfigError, match="silo 'north'"):
        Roster((Member("north", FIRST.keys._replace(**{field: key})),))


def test_unknown_names_and_foreign_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="no silo 'west' in the roster"):
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
    assert [member.name for member in roster.members] == NAMES
    for shown in [*NAMES, *(member.fingerprint for member in roster.members), roster.fingerprint]:
        assert shown in made
    with pytest.raises(SystemExit) as caught:
        main(["roster", "make", str(tmp_path / "again.toml"), *entries, entries[0]])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "fedrp: silos 'north' and 'north' have the same name: each needs its own\n"


def test_the_secret_is_on_no_command_line_and_in_no_output(tmp_path: Path) -> None:
    done = subprocess.run(
        command("keys", "new", tmp_path / "key", "--name", "north"), capture_output=True, env=environment(), check=True
    )
    secret = (tmp_path / "key").read_text().split('secret = "')[1][:64].encode()
    assert secret not in done.stdout + done.stderr
