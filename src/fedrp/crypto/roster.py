"""Who takes part: every client's public keys, pinned in one file that all of them have; and a client's own key file.

A roster is made once and compared once, out of band, by its fingerprint. From then on nothing that a server says can
add a client or change a key. An entry, as `fedrp keys new` prints it, is a roster of one. It proves that its maker
holds the keys in it, so nobody can enter another's key under a name of their own.
"""

import functools
import hashlib
import os
import re
import struct
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedrp.crypto.sealing import Identity, PublicKeys, parts, proves, require_usable
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.errors import ConfigError
from fedrp.files import PRIVATE, read_private, write_new

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHOWN_BYTES = 20  # of a digest: too many for anyone to find another roster with the same
_KEY_NOTE = "# The private key of a client. Whoever has it can pass for the client: keep it here, mode 0600.\n"


class Entry(NamedTuple):
    """A client as the others know it."""

    name: str
    keys: PublicKeys
    proof: bytes = b""  # that who chose the name holds the keys; a simulation needs none

    @classmethod
    def of(cls, identity: Identity) -> "Entry":
        """The client that an identity belongs to."""
        unproved = cls(identity.name, identity.public, b"")
        return unproved._replace(proof=identity.prove(unproved.digest))

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for the name and all keys."""
        parts = (self.name.encode(), *self.keys)
        return hashlib.sha256(b"fedrp silo v1|" + b"".join(struct.pack("<I", len(p)) + p for p in parts)).digest()

    @property
    def fingerprint(self) -> str:
        """The digest, for people."""
        return _shown(self.digest)


@dataclass(frozen=True)
class Roster:
    """All clients in their order: client i of a run is `entries[i]`.

    Guarantees: names and keys are all different, canonical and usable; in a roster that was read from files each client
    has proved that it holds its keys (but for ML-KEM); equal digests mean equal names and keys.
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ConfigError("a roster needs at least one client")
        for entry in self.entries:
            if not _NAME.fullmatch(entry.name):
                raise ConfigError(f"client name '{entry.name}' is not valid: up to 64 letters, digits, '.', '_', '-'")
            try:
                require_usable(entry.keys)
            except ConfigError as error:
                raise ConfigError(f"client '{entry.name}': {error}") from None
        _require_different("name", ((entry.name, entry.name) for entry in self.entries))
        _require_different("key", ((entry.name, key) for entry in self.entries for key in parts(entry.keys)))

    @classmethod
    def load(cls, path: Path) -> "Roster":
        """Read a roster file; every stored fingerprint and proof must be that of what it stands for."""
        content = _read(path)
        try:
            return _roster(content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all clients and their order."""
        return hashlib.sha256(b"fedrp roster v1|" + b"".join(entry.digest for entry in self.entries)).digest()

    @property
    def fingerprint(self) -> str:
        """The digest, for people to compare by phone."""
        return _shown(self.digest)

    @property
    def keys(self) -> tuple[PublicKeys, ...]:
        """Everyone's public keys, in order."""
        return tuple(entry.keys for entry in self.entries)

    def index(self, name: str) -> int:
        """The number of a client in runs with this roster."""
        for number, entry in enumerate(self.entries):
            if entry.name == name:
                return number
        known = ", ".join(entry.name for entry in self.entries[:10])
        raise ConfigError(f"no client '{name}' in the roster {self.fingerprint}: it has {known}")

    def place_of(self, identity: Identity) -> int:
        """The number of the client that this identity belongs to; refused if the roster has other keys for it."""
        number = self.index(identity.name)
        if self.entries[number].keys[:2] != identity.public[:2]:
            raise ConfigError(f"the roster {self.fingerprint} has other keys for '{identity.name}' than your key file")
        return number

    def to_toml(self) -> str:
        """The roster as the text of its file, fingerprints included."""
        lines = [f'fingerprint = "{self.fingerprint}"']
        for entry in self.entries:
            fields = {"name": entry.name, "fingerprint": entry.fingerprint}
            fields |= {name: key.hex() for name, key in entry.keys._asdict().items() if key}
            fields["proof"] = entry.proof.hex()
            lines += ["", "[[client]]", *(f'{name} = "{value}"' for name, value in fields.items())]
        return "\n".join(lines) + "\n"


def merged(rosters: Iterable[Roster]) -> Roster:
    """One roster of the clients of several, in order."""
    return Roster(tuple(entry for roster in rosters for entry in roster.entries))


def entry_of(identity: Identity) -> Roster:
    """The roster of one that a client hands to the others."""
    return Roster((Entry.of(identity),))


def new_identity(path: Path, name: str) -> Identity:
    """Draw a client's secret from the operating system and write it to a new file that only its owner can read."""
    identity = Identity(secret := SecretKey(os.urandom(KEY_BYTES)), name)
    entry_of(identity)  # refuses a bad name before there is a file
    _write_new(path, f'{_KEY_NOTE}name = "{name}"\nsecret = "{secret.reveal().hex()}"\n', PRIVATE)
    return identity


def load_identity(path: Path) -> Identity:
    """The identity in a key file. Refuses a file that others on this machine may read; never shows what is in it."""
    try:
        text = read_private(path).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"{path} is not valid TOML") from None  # nothing of a secret is quoted
    name, secret = content.pop("name", None), content.pop("secret", None)
    whole = isinstance(secret, str) and re.fullmatch(r"[0-9a-f]{64}", secret)
    if content or not whole or not isinstance(name, str):
        raise ConfigError(f"{path} is not a key file: make one with 'fedrp keys new'")
    return Identity(SecretKey(bytes.fromhex(str(secret))), name)


def write_roster(path: Path, roster: Roster) -> None:
    """Write a new roster file; one that exists is not replaced."""
    _write_new(path, roster.to_toml(), 0o644)


def _shown(digest: bytes) -> str:
    text = digest[:_SHOWN_BYTES].hex().upper()
    return " ".join(text[start : start + 4] for start in range(0, len(text), 4))


def _read(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _require_fields(content: dict[str, Any], known: set[str]) -> None:
    for key in content:
        if key not in known:
            raise ConfigError(f"unknown field '{key}'; known: {', '.join(sorted(known))}")


def _roster(content: dict[str, Any]) -> Roster:
    _require_fields(content, {"fingerprint", "client"})
    tables = content.get("client")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("not a roster, it has no [[client]] entries")
    roster = Roster(tuple(_entry(table) for table in tables))
    for entry in roster.entries:
        if not proves(entry.keys, entry.digest, entry.proof):
            raise ConfigError(
                f"client '{entry.name}' does not prove that it holds the keys of its entry: get a new one"
            )
    if "fingerprint" not in content:
        raise ConfigError("no fingerprint of the whole: make it with 'fedrp roster make'")
    if content["fingerprint"] != roster.fingerprint:
        raise ConfigError("the fingerprint is not that of these clients: cut off or edited, get the file again")
    return roster


def _entry(table: dict[str, Any]) -> Entry:
    _require_fields(table, {"name", "fingerprint", "proof", *PublicKeys._fields})
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError("a client has no name")
    if "proof" not in table:
        raise ConfigError(
            f"client '{name}' does not prove that it holds its keys, as entries of earlier versions: have it print a "
            "new one with 'fedrp keys show', and make the roster again"
        )
    values = {}
    for field in (*PublicKeys._fields, "proof"):
        text = table.get(field, "")
        if not isinstance(text, str) or not re.fullmatch(r"([0-9a-f]{2})*", text):
            raise ConfigError(f"{field} of client '{name}' is not hexadecimal")
        values[field] = bytes.fromhex(text)
    proof = values.pop("proof")
    entry = Entry(name, PublicKeys(**values), proof)
    if table.get("fingerprint") != entry.fingerprint:
        raise ConfigError(f"the fingerprint of client '{name}' is not that of its keys: get its entry again")
    return entry


def _require_different(what: str, values: Iterable[tuple[str, object]]) -> None:
    """Refuse a value that occurs twice among pairs of a client's name and a value."""
    seen: dict[object, str] = {}
    for name, value in values:
        if value in seen:
            raise ConfigError(f"clients '{seen[value]}' and '{name}' have the same {what}: each needs its own")
        seen[value] = name


def _write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that must not exist yet; it appears complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # what a crash left, or someone planted
        try:
            write_new(partial, text.encode(), mode)
            os.link(partial, path)  # unlike a rename, refuses to replace
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} already exists: it is never overwritten, give another path") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
