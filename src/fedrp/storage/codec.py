"""The codec of stored state, of clients and of the server: JSON and arrays in a safetensors file, with a sum over both.

A file tells its format and its run. One that was changed is not believed: its sum is wrong.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedrp.errors import SiteError, first_line

Arrays = Mapping[str, npt.NDArray[Any]]

_FORMAT = "fedrp state 3"


class OtherVersionError(SiteError):
    """A file that this version cannot read, and that no copy would put right."""

    @classmethod
    def of(cls, path: Path) -> "OtherVersionError":
        """The one line about it."""
        return cls(f"{path} is of another version of fedrp: finish its run with that one, or begin a new one")


# --- files -----------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What a file holds."""

    about: Mapping[str, Any]  # as JSON has it
    arrays: Arrays


def packed(run: bytes, stored: Stored) -> bytes:
    """A safetensors file."""
    arrays = {name: np.ascontiguousarray(array) for name, array in stored.arrays.items()}
    text = json.dumps({"format": _FORMAT, "run": run.hex(), **stored.about})
    return bytes(save(arrays, {"about": text, "sha256": _sum(text, arrays)}))


def read(path: Path, run: bytes) -> Stored:
    """The inverse of `packed`.

    Raises:
        OtherVersionError: the file is none of this version.
        SiteError: it is damaged or missing, or belongs to another run.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if not metadata.keys() & {"about", "sha256"}:
            raise OtherVersionError.of(path)
        if metadata["sha256"] != _sum(metadata["about"], arrays):
            raise SiteError(f"{path} is damaged (its sum is wrong)")
        about = json.loads(metadata["about"])
    except FileNotFoundError:
        raise SiteError(f"{path} is missing") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SiteError(f"{path} is damaged ({first_line(error)})") from None
    if about.get("format") != _FORMAT:
        raise OtherVersionError.of(path)
    if about["run"] != run.hex():
        raise SiteError(f"{path} belongs to another run")
    return Stored(about, arrays)


def _sum(text: str, arrays: Arrays) -> str:
    """The SHA-256 sum of what is in a file, in hex."""
    whole = hashlib.sha256(text.encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


# --- records ---------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """How an attribute of a record is written as JSON, and read."""

    key: str  # in files: it stays the same when the attribute is renamed
    pack: Callable[[Any], object]
    unpack: Callable[[Any], Any]


def number(key: str) -> Field:
    """A whole number."""
    return Field(key, int, int)


def numbers(key: str) -> Field:
    """A tuple of whole numbers."""
    return Field(key, list, tuple)


def hexadecimal(key: str) -> Field:
    """Some bytes."""
    return Field(key, bytes.hex, bytes.fromhex)


def to_record(value: object, fields: Mapping[str, Field]) -> dict[str, object]:
    """The attributes that `fields` names, as a JSON object."""
    return {field.key: field.pack(getattr(value, name)) for name, field in fields.items()}


def of_record(record: Mapping[str, Any], fields: Mapping[str, Field], path: Path) -> dict[str, Any]:
    """The inverse of `to_record`: values by attribute; `path` is the file that the record is from.

    Raises:
        OtherVersionError: the record has other keys.
    """
    if record.keys() != {field.key for field in fields.values()}:
        raise OtherVersionError.of(path)
    return {name: field.unpack(record[field.key]) for name, field in fields.items()}
