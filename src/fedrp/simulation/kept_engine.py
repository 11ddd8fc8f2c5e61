"""The engine that a run began with, kept in its folder: engines round differently, so that a run stays with its own."""

import json

from fedrp.engines.choice import AUTO, SEQUENTIAL
from fedrp.errors import ConfigError
from fedrp.files import SHARED, replace_file, writing
from fedrp.simulation.runfolder import RESUME, RunFolder, read_json, way_out

_ENGINE_FILE = "engine.json"


def kept_engine(folder: RunFolder, asked: str) -> str | None:
    """The engine that the run began with; None for a new run.

    Raises:
        ConfigError: another engine was asked for.
    """
    path = folder.root / _ENGINE_FILE
    if not path.exists():  # or one of before there was a choice
        return None if folder.checkpoint() is None else SEQUENTIAL
    begun = str(read_json(path, way_out(folder.root)).get("engine"))
    if asked not in (AUTO, begun, begun.partition(":")[0]):
        raise ConfigError(f"{folder.root} was started with engine '{begun}', not '{asked}': {RESUME}")
    return begun


def keep_engine(folder: RunFolder, engine: str) -> None:
    """Write down which engine computes the run."""
    with writing(folder.root):
        replace_file(folder.root / _ENGINE_FILE, json.dumps({"engine": engine}).encode(), SHARED)
