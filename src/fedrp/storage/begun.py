"""The settings that a run began with, and the one answer to whether those that are given now are the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrp.config.run import Resolved, RunConfig
from fedrp.config.schedule import CONSTANT
from fedrp.config.toml import from_settings, to_json
from fedrp.errors import ConfigError

# What runs did before there was such a setting.
_BEFORE = {"deliver": "client"}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a run as JSON has them: as they are kept, and compared."""
    return dict(json.loads(to_json(config)))


def require_same_settings(begun: Mapping[str, object], given: Mapping[str, object], what: str, way_out: str) -> None:
    """Refuse to go on with `what` with other settings than it began with.

    Raises:
        ConfigError: one of the given settings differs.
    """
    for name, value in given.items():
        if name not in begun and value in (None, _BEFORE.get(name)):
            continue
        if begun.get(name) != value:
            raise ConfigError(f"{what} was started with {name}={begun.get(name)}, not {value}: {way_out}")


def more_rounds(begun: Mapping[str, object], given: Mapping[str, object]) -> dict[str, int]:
    """The number of rounds that is given, if it is more than a run was started with."""
    before, now = begun.get("rounds"), given.get("rounds")
    return {"rounds": now} if isinstance(before, int) and isinstance(now, int) and now > before else {}


def require_extensible(config: Resolved, rounds: int, what: str) -> None:
    """Refuse more rounds where something that was promised or agreed on depends on their number.

    Raises:
        ConfigError: an epsilon was stated for them, or masks or learning rates were bound to them.
    """
    if config.noise_multiplier or config.record_private or config.bounded:
        raise ConfigError(
            f"{what} was started with rounds={rounds}, and its epsilon holds for these alone, more would spend more: "
            "start a new run with more"
        )
    if config.secure_aggregation:
        raise ConfigError(
            f"{what} was started with rounds={rounds}, its masks are bound to all settings: start a new run with more"
        )
    if config.lr_schedule != CONSTANT:
        raise ConfigError(
            f"{what} was started with rounds={rounds}, which its lr_schedule={config.lr_schedule} ends with: "
            "start a new run with more"
        )


def begun_config(folder: Path) -> RunConfig:
    """The settings of the run in a folder.

    Raises:
        ConfigError: it holds none that can be read.
    """
    try:
        return from_settings(RunConfig, dict(json.loads((folder / "config.json").read_text())))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{folder} is not the folder of a run: it has no readable config.json") from None
