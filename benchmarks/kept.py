"""Kept measurements: a JSON-lines file for each table in benchmarks/results/, and an index of all of them.

A line holds the options that made it, their hash, and the result. Runs with the same options are the same run,
whichever table asks for them: `index.json` says in which table a hash is.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"
HASH_DIGITS = 16

Result = dict[str, Any]


def normal(options: str) -> str:
    """Options with single spaces."""
    return " ".join(options.split())


def options_hash(options: str) -> str:
    """What a run is found by."""
    return hashlib.sha256(normal(options).encode()).hexdigest()[:HASH_DIGITS]


def read(table: str, folder: Path = FOLDER) -> dict[str, Result]:
    """The results of a table by their options; nothing for one that was never measured."""
    path = _path(table, folder)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["options"]: line["result"] for line in lines}


def read_index(folder: Path = FOLDER) -> dict[str, str]:
    """The table of each hash."""
    path = _index(folder)
    return json.loads(path.read_text()) if path.exists() else {}


def is_kept(options: str, folder: Path = FOLDER) -> bool:
    """Whether there is a result of these options, in any table."""
    return options_hash(options) in read_index(folder)


def find(options: str, folder: Path = FOLDER) -> Result | None:
    """The result of these options, in whichever table it is."""
    table = read_index(folder).get(options_hash(options))
    return None if table is None else read(table, folder)[normal(options)]


def keep(table: str, results: Mapping[str, Result], folder: Path = FOLDER) -> None:
    """Add results to a table, by their options; one that another table has is replaced there."""
    index = read_index(folder)
    by_table: dict[str, dict[str, Result]] = {}
    for options, result in results.items():
        where = index.setdefault(options_hash(options), table)
        by_table.setdefault(where, {})[normal(options)] = result
    folder.mkdir(parents=True, exist_ok=True)
    for where, new in by_table.items():
        lines = [
            json.dumps({"hash": options_hash(options), "options": options, "result": result})
            for options, result in (read(where, folder) | new).items()
        ]
        _write(_path(where, folder), "".join(f"{line}\n" for line in lines))
    ordered = dict(sorted(index.items(), key=lambda item: (item[1], item[0])))
    _write(_index(folder), json.dumps(ordered, indent=0) + "\n")


def _write(path: Path, text: str) -> None:
    """All or nothing: hours of measurements are in these files."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _path(table: str, folder: Path) -> Path:
    return folder / f"{table}.jsonl"


def _index(folder: Path) -> Path:
    return folder / "index.json"
