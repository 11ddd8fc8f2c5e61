"""Settings from TOML files, to JSON and to a digest, and records from settings."""

import dataclasses
import hashlib
import json
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

from fedrp.config.checks import suggestion
from fedrp.config.run import RunConfig
from fedrp.errors import ConfigError

Record = TypeVar("Record")


def read_toml(path: Path, allowed: typing.Iterable[str] | None = None, table: str = "") -> dict[str, Any]:
    """The settings of a TOML file, keys with '-' or '_' alike; an unknown key is an error with a suggestion.

    `allowed` are the known keys; None: any. They may also stand in a table of this name.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {_reason(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    known = None if allowed is None else list(allowed)
    settings: dict[str, Any] = {}
    inner = raw.pop(table) if isinstance(raw.get(table), dict) else {}
    for key, value in (*raw.items(), *inner.items()):
        name = key.replace("-", "_")
        if name in settings:
            raise ConfigError(f"{path}: '{key}' is there twice: leave one out")
        if known is not None and name not in known:
            raise ConfigError(f"{path}: unknown key '{key}'{suggestion(name, known)}")
        settings[name] = value
    return settings


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def from_settings(record: type[Record], settings: dict[str, Any]) -> Record:
    """Build a config record from the settings that belong to it; the record checks them."""
    return record(**{name: settings[name] for name in typing.get_type_hints(record) if name in settings})


def to_json(config: RunConfig) -> str:
    """The config as JSON, as it is kept in a run folder."""
    return json.dumps(dataclasses.asdict(config.stored), indent=2)


def settings_digest(config: RunConfig) -> bytes:
    """32 bytes that stand for all settings: equal where two parties train, clip and mask alike.

    Fractions count with six digits: defaults that machines compute for themselves may differ in the last one.
    """
    values = dataclasses.asdict(config.stored).items()
    told = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"fedrp settings v1|" + text.encode()).digest()
