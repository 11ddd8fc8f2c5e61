"""Algorithms, projection families, models and data sets from outside the package, by the name that settings call them.

    fedrp.register("my-fedprox", FEDPROX)

before the run; worker processes are told of it. An installed package can name an `Algorithm` in the entry point group
`fedrp.algorithms` instead; then the command line knows it too.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.table import ALGORITHMS, add_algorithm, methods
from fedrp.config.checks import require
from fedrp.errors import ConfigError
from fedrp.learning.data import DATASETS, Entry
from fedrp.learning.zoo import MODELS, ModelSpec
from fedrp.projection.families import FAMILIES, Family
from fedrp.projection.tags import TAGS, Tag

Kind = TypeVar("Kind")

_MOST = 255  # of the codes and versions that messages have room for


class Registered(NamedTuple):
    """What was added from outside the package."""

    name: str
    entry: Algorithm | Family | ModelSpec | Entry
    tag: Tag | None = None


_registered: dict[tuple[type, str], Registered] = {}  # by kind and name


def register(name: str, entry: Algorithm | Family | ModelSpec | Entry, tag: Tag | None = None) -> None:
    """Add an entry to its table. The same entry may be added again.

    Args:
        name: what settings call it.
        entry: an algorithm, a projection family, a model or a data set.
        tag: of a projection family, its code on the wire and its version; those of bundled families count from 1.

    Raises:
        ConfigError: the name or the tag's code is taken, or a tag is missing or given where there is none.
    """
    if isinstance(entry, Family) != (tag is not None):
        raise ConfigError(f"'{name}': a projection family needs a tag, e.g. Tag(code=100, version=1), and nothing else")
    if isinstance(entry, Algorithm):
        _require_free("algorithm", name, methods(), entry)
    elif isinstance(entry, Family):
        _require_free("projection", name, FAMILIES, entry)
    elif isinstance(entry, ModelSpec):
        _require_free("model", name, MODELS, entry)
    elif isinstance(entry, Entry):
        _require_free("data set", name, DATASETS, entry)
    else:
        raise ConfigError(f"'{name}' is a {type(entry).__name__}: register an Algorithm, Family, ModelSpec or Entry")
    if tag is not None:
        _require_tag(name, tag)
    take_over([Registered(name, entry, tag)])


def registered() -> tuple[Registered, ...]:
    """All that was added in this process and is in the tables, for its workers to know."""
    tables = (ALGORITHMS, FAMILIES, MODELS, DATASETS)
    return tuple(item for item in _registered.values() if any(table.get(item.name) is item.entry for table in tables))


def take_over(added: Iterable[Registered]) -> None:
    """Add what was checked already, here or in the process that this one works for."""
    for item in added:
        name, entry, tag = item
        _registered[type(entry), name] = item
        if isinstance(entry, Algorithm):
            add_algorithm(name, entry)
        elif isinstance(entry, ModelSpec):
            MODELS[name] = entry
        elif isinstance(entry, Entry):
            DATASETS[name] = entry
        elif tag is not None:
            FAMILIES[name], TAGS[name] = entry, tag


def _require_free(kind: str, name: str, table: dict[str, Kind], entry: Kind) -> None:
    if table.get(name, entry) != entry:
        raise ConfigError(f"there is another {kind} called '{name}': choose another name")


def _require_tag(name: str, tag: Tag) -> None:
    for part, value in tag._asdict().items():
        require(1 <= value <= _MOST, part, value, f"a whole number from 1 to {_MOST}")
    taken = next((other for other, known in TAGS.items() if known.code == tag.code and other != name), None)
    if taken is not None:
        raise ConfigError(f"code={tag.code} is that of projection '{taken}': choose another up to {_MOST}")
