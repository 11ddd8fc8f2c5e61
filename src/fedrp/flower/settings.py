"""Settings of a deployed run: Flower's flat run config and node config, checked and typed.

The run config holds the fields of `RunConfig` and `Pacing`, with '-' or '_'; "auto" asks for the default. Keys that
begin with "app-" are the app's own. Unless it says otherwise, uploads are masked (`secure_aggregation`).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrp.algorithms.table import BASELINES
from fedrp.config.checks import require_choice, require_types
from fedrp.config.run import RunConfig
from fedrp.config.toml import from_settings, read_toml
from fedrp.errors import ConfigError
from fedrp.records.defaults import training_defaults
from fedrp.storage.ledger import CAPS

Values = Mapping[str, bool | float | int | str]

_OWN = "app-"
_AUTO = "auto"
# How a model is trained and averages are used. Promises of privacy rest on what comes between the two: clips, noise,
# masks, matrices. An assumed `sensitivity` is about training: then nothing is free.
_FREE = frozenset(
    {"local_epochs", "batch_size", "lr", "lr_schedule", "momentum", "grad_clip", "augment", "rho", "server_momentum"}
    | {"proximal", "seed"}
)


@dataclass(frozen=True)
class Pacing:
    """How the server waits, and where it keeps its state. Nothing here changes what a round computes."""

    store: str = ""  # folder of the server's state, on the server
    round_timeout: float = 600.0  # seconds that a round waits for stragglers
    start_timeout: float = 3600.0  # seconds to wait for enough sites, at the start and after a failed round
    min_clients: int = 0  # sites that must be there before the run starts; 0 for all
    attempts: int = 10  # at a round that misses its quorum, before the run is given up (it can be resumed)
    poll: float = 0.25  # seconds between two looks for replies

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("round_timeout", "start_timeout", "poll"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} is not valid: expected a number of seconds above 0")
        if self.min_clients < 0 or self.attempts < 1:
            raise ConfigError(f"min_clients={self.min_clients}, attempts={self.attempts}: expected at least 0 and 1")


def run_settings(run_config: Values) -> tuple[RunConfig, Pacing]:
    """What the run config asks for.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or a setting that only the simulator has.
    """
    known = [field.name for record in (RunConfig, Pacing) for field in dataclasses.fields(record)]
    settings: dict[str, Any] = {}
    for key, value in run_config.items():
        name = key.replace("-", "_")
        if key.startswith(_OWN):
            continue
        if name not in known:
            require_choice(f"key in the run config (keys of your own begin with '{_OWN}')", name, known)
        if value != _AUTO:
            settings[name] = value
    config = from_settings(RunConfig, settings)
    if config.algorithm in BASELINES:
        raise ConfigError(
            f"algorithm '{config.algorithm}' is for the simulator only, its clients talk to nobody: choose another"
        )
    if "secure_aggregation" not in settings:
        config = dataclasses.replace(config, secure_aggregation=True)
    if config.dropout:
        raise ConfigError(f"dropout={config.dropout} is for the simulator only: leave it out")
    return config, from_settings(Pacing, settings)


def require_agreed(agreed: Path, run_config: Values) -> None:
    """Refuse a run whose settings are not those that the site agreed to, in a TOML file on its premises.

    What the file does not list must have its default, but for the settings that no promise of privacy depends on. Keys
    of the app's own have no default that a site knows, and may choose its data: all of them must be listed. What all
    runs may cost together is in the same file, see `fedrp.storage.ledger.read_caps`.

    Raises:
        ConfigError: a setting of the run has another value.
    """
    asked, _ = run_settings(run_config)
    own = {key.replace("-", "_"): value for key, value in run_config.items() if key.startswith(_OWN)}
    listed = read_toml(agreed, [*(field.name for field in dataclasses.fields(RunConfig)), *CAPS, *own])
    for name, value in own.items():
        if name not in listed:
            raise ConfigError(f"the run has {name}={value}, which {agreed} does not list: list it there to agree to it")
        if listed[name] != value:
            raise ConfigError(f"the run has {name}={value}, this site agreed to {listed[name]} in {agreed}")
    expected, _ = run_settings({name: value for name, value in listed.items() if name not in (*CAPS, *own)})
    free = frozenset[str]() if asked.sensitivity is not None else _FREE
    if asked.record_private:  # what a record is promised depends on how often it is drawn
        free -= {"local_epochs", "batch_size"}
    settled = training_defaults(expected)  # who writes a default down asks for nothing else
    given = dataclasses.asdict(training_defaults(asked))
    for name, value in sorted(given.items(), key=lambda item: item[0] != "dp_unit"):  # it decides on other defaults
        wanted = getattr(settled, name)
        if value == wanted or (name in free and name not in listed):
            continue
        if name in listed:
            raise ConfigError(f"the run has {name}={_shown(value)}, this site agreed to {_shown(wanted)} in {agreed}")
        raise ConfigError(
            f"the run has {name}={_shown(value)}, which {agreed} does not list: "
            f"this site expects the default, {_shown(wanted)}; list it there to agree to another"
        )


def _shown(value: object) -> object:
    return _AUTO if value is None else value
