"""What a run is (`RunConfig`) and how fast it may be computed (`Speed`), from options or a TOML file."""

from fedrp.config.checks import require, require_choice, require_types
from fedrp.config.run import GROUPS, Resolved, RunConfig
from fedrp.config.speed import Speed
from fedrp.config.toml import from_settings, read_toml, to_json

__all__ = [
    "GROUPS",
    "Resolved",
    "RunConfig",
    "Speed",
    "from_settings",
    "read_toml",
    "require",
    "require_choice",
    "require_types",
    "to_json",
]
