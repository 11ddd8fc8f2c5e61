"""How a setting is declared and checked: a wrong value is refused in one line that says what is expected."""

import dataclasses
import difflib
import numbers
import types
import typing
from typing import Any

from fedrp.errors import ConfigError

LARGEST = 1e12  # far beyond any use, and its square is far from overflowing


def setting(default: Any, text: str) -> Any:
    """A field with its help text; the command line makes an option of it.

    {names} stands for what is in the table that the setting chooses from, or else for the algorithms that use it.
    """
    return dataclasses.field(default=default, metadata={"help": text})


def require_types(record: object) -> None:
    """Refuse fields of a frozen record that are not of the type it says. For use in `__post_init__`.

    Numbers become Python's own: where a float is meant a whole number will do, and numpy's will do anywhere.
    """
    for name, hint in typing.get_type_hints(type(record)).items():
        object.__setattr__(record, name, _typed(name, getattr(record, name), hint))


def _typed(name: str, value: object, hint: Any) -> object:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (typing.get_origin(hint) or hint,)
    if not isinstance(value, bool):  # which counts as a whole number, but is not meant as one
        if int in kinds and isinstance(value, numbers.Integral):
            return int(value)
        if float in kinds and isinstance(value, numbers.Real):
            return float(value)
    plain = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if isinstance(value, bool) != (bool in kinds) or not isinstance(value, plain):
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ConfigError(f"{name}={value!r} is not valid: expected {expected}")
    return value


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Refuse a value in one line that names it and says what is expected."""
    if not holds:
        raise ConfigError(f"{name}={value} is not valid: expected {expected}")


def require_choice(name: str, value: str, choices: typing.Iterable[str]) -> None:
    """Refuse a name that is not in a table, and suggest the nearest."""
    known = list(choices)
    if value not in known:
        raise ConfigError(f"unknown {name} '{value}'{suggestion(value, known)}; known: {', '.join(known)}")


def require_whole(config: object, *names: str) -> None:
    """Refuse values of some settings that are given and no whole numbers of at least 1."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= 1, name, value, "a whole number of at least 1")


def require_positive(config: object, *names: str) -> None:
    """Refuse values that are given and not above 0, or not finite."""
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 < value < float("inf"), name, value, "a number above 0")


def require_not_negative(config: object, *names: str) -> None:
    """Refuse values that are given and below 0, or absurdly large."""
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 <= value <= LARGEST, name, value, f"a number from 0 to {LARGEST:g}")


def require_below_one(config: object, *names: str) -> None:
    """Refuse values that are given and not a share below 1."""
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 <= value < 1, name, value, "a number from 0 to below 1")


def suggestion(value: str, known: list[str]) -> str:
    """The nearest known name, as the end of an error message; nothing if none is near."""
    near = difflib.get_close_matches(value, known, n=1)
    return f", did you mean '{near[0]}'?" if near else ""
