"""The folder of several runs that are compared: what they were asked for, so that it need not be asked again."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrp.config.run import RunConfig
from fedrp.errors import ConfigError
from fedrp.simulation.runfolder import CONFIG_FILE, RESUME, begin_folder, read_json
from fedrp.storage.begun import require_same_settings, settings_of

COMPARISON_FILE = "compare.json"


def begin_comparison(root: Path, algorithms: Sequence[str], shared: RunConfig, resume: bool) -> None:
    """Keep what a comparison was asked for, so that it can be resumed without asking again.

    Raises:
        ConfigError: there is one already, or a run of one of its algorithms, and `resume` was not asked for.
    """
    kept = [root / COMPARISON_FILE, *(root / name / CONFIG_FILE for name in algorithms)]
    if not resume and any(path.exists() for path in kept):
        raise ConfigError(f"{root} already holds a comparison: go on with resume=True, or give another folder, out=...")
    settings = {"algorithms": ",".join(algorithms), **settings_of(shared)}
    begin_folder(root, COMPARISON_FILE, json.dumps(settings, indent=2))


def begun_comparison(root: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and for the rest the settings of the comparison in `root`. Algorithms may be added to it.

    Raises:
        ConfigError: there is none, or it was started with other settings than were given.
    """
    if not (root / COMPARISON_FILE).exists():
        if any(root.glob(f"*/{CONFIG_FILE}")):  # of an earlier version, which kept those of the runs only
            return dict(given)
        raise ConfigError(f"{root} holds no comparison to go on with: correct out, or leave out resume")
    known = read_json(root / COMPARISON_FILE, "remove it and give all options again")
    compared = {name: value for name, value in given.items() if name in known and name != "algorithms"}
    require_same_settings(known, compared, str(root), RESUME)
    return {**known, **given}
