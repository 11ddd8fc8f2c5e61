"""What a run is (`RunConfig`) and how fast it may be computed (`Speed`), from options or a TOML file.

`RunConfig` decides the result; `Speed` cannot change it. A value of `None` means "choose a sensible default": it is
resolved once, into a new `RunConfig`, when the model and the data are known.
"""

import dataclasses
import difflib
import json
import numbers
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedrp.errors import ConfigError

WEIGHTINGS = ("uniform", "samples")
SAMPLINGS = ("fixed", "poisson")
DP_NOISES = ("shared", "local")
SEALINGS = ("x25519", "hybrid")
_SHARES = {"mean": 0.0, "median": 0.5}  # of a round's uploads, cut off at each end
_TRIMMED = "trimmed:"
_SMALLEST_SHARE = 1e-6
DEFAULT_QUORUM = 0.5
_LARGEST = 1e12  # far beyond any use, and its square is far from overflowing
_MOST_THREADS = 1024  # torch crashes on absurd numbers
Record = TypeVar("Record")
Value = TypeVar("Value")


def _setting(default: Any, text: str) -> Any:
    """A field with its help text; the command line makes an option of it.

    {names} stands for what is in the table that the setting chooses from.
    """
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the outcome of a run.

    Guarantees: a `RunConfig` that exists has passed the checks of types and ranges below; checks that need the model or
    the data (`dim` against the number of parameters, `clients` against the samples) are made when those are known.
    """

    algorithm: str = _setting("fedrp", "algorithm: {names}")
    dataset: str = _setting("mnist-mini", "data set: {names}, idx:FOLDER or npz:FILE")
    model: str = _setting("lenet5", "model: {names}")
    clients: int = _setting(10, "number of clients K")
    rounds: int = _setting(10, "number of rounds")
    local_epochs: int = _setting(1, "local epochs E per round")
    batch_size: int = _setting(64, "examples per local step")
    lr: float | None = _setting(None, "learning rate of local SGD; default by model and algorithm")
    momentum: float = _setting(0.9, "momentum of local SGD")
    grad_clip: float = _setting(1.0, "largest norm of a local gradient; 0 for no limit")
    rho: float | None = _setting(None, "ADMM penalty; default by algorithm")
    dim: int = _setting(1000, "projection dimension m: how many numbers a client sends")
    projection: str | None = _setting(None, "projection family: {names}; default by size")
    train_examples: int | None = _setting(None, "use only this many training examples, drawn at random; default all")
    partition: str = _setting("iid", "how examples are split: iid, dirichlet:ALPHA or shards:S")
    participation: float = _setting(1.0, "fraction of clients that take part in a round")
    sampling: str = _setting("fixed", "how participants are drawn: fixed (a set number) or poisson (each by a coin)")
    dropout: float = _setting(0.0, "probability that a participant drops out in the middle of a round")
    quorum: float | None = _setting(None, "share of participants that a round needs; default 0.5, with shared noise 1")
    weighting: str = _setting("uniform", "weights of the average: uniform or samples")
    aggregation: str = _setting("mean", "what the server makes of uploads: mean, median or trimmed:F (F from each end)")
    server_momentum: float | None = _setting(
        None, "momentum of the common model over rounds (fedavg, fedavg-dp: default 0; fedrp-subspace: by size)"
    )
    proximal: float = _setting(0.0, "pull towards the common model in local training (fedrp-subspace)")
    seed: int = _setting(0, "public run seed: split, batches; in simulations also who takes part")
    clip: float | None = _setting(None, "largest norm of a client's update, with noise; default 0.3")
    noise_multiplier: float | None = _setting(None, "noise on the sum of updates, in units of clip")
    dp_epsilon: float | None = _setting(None, "target epsilon, instead of a noise multiplier; fedavg-dp: default 10")
    dp_delta: float = _setting(1e-5, "delta of the privacy guarantee")
    dp_noise: str = _setting("shared", "who adds the noise: shared (each client a share) or local (each all of it)")
    clip_quantile: float | None = _setting(None, "adapt clip to this quantile of the clients' norms")
    ball: float | None = _setting(None, "keep every model within this distance of the common start (fedrp)")
    sensitivity: float | None = _setting(None, "assume that a record moves a model by at most this (fedrp)")
    norm_floor: float | None = _setting(
        None, "smallest norm of a model that is sent (fedrp); default by model and ball"
    )
    secure_aggregation: bool = _setting(False, "mask uploads, so that the server learns sums only")
    secure_range: float = _setting(64.0, "largest number of a masked upload without noise; larger ones are cut off")
    sealing: str = _setting("x25519", "how round keys are sealed: x25519 or hybrid (also safe from quantum computers)")

    def __post_init__(self) -> None:
        require_types(self)
        for group in GROUPS:
            group.check(self)

    @property
    def private(self) -> bool:
        """Whether clients clip and noise what they send."""
        return self.noise_multiplier is not None or self.dp_epsilon is not None

    @property
    def bounded(self) -> bool:
        """Whether something bounds how far one change of the data moves a model."""
        return self.ball is not None or self.sensitivity is not None

    @property
    def trimmed_share(self) -> float:
        """The share of uploads that the server cuts off at each end, per coordinate: 0 for mean, 0.5 for median."""
        return settled(_share_of(self.aggregation))

    @property
    def expected_participants(self) -> int:
        """How many clients take part in a round: exactly (fixed) or on average (poisson)."""
        return max(1, round(self.participation * self.clients))


@dataclass(frozen=True)
class Speed:
    """How a run is computed. Nothing here changes the result, except `device` in the last digits."""

    workers: int = _setting(1, "worker processes")
    threads: int = _setting(1, "torch threads of each worker; a change may move the last digits")
    device: str = _setting("cpu", "torch device of local training")
    projection_memory: int = _setting(4096, "MB that a gaussian matrix may take; a larger one is streamed")
    client_memory: int = _setting(2048, "MB that clients' states may take between rounds; the rest goes to disk")
    eval_every: int = _setting(1, "score the models every so many rounds; the last round always is")
    backend: str = _setting("processes", "what runs the clients: processes of this machine, or ray")
    address: str | None = _setting(None, "Ray cluster, e.g. auto or HOST:PORT; default: one on this machine")

    def __post_init__(self) -> None:
        require_types(self)
        least = {"workers": 1, "threads": 1, "eval_every": 1, "projection_memory": 0, "client_memory": 0}
        for name, bound in least.items():
            require(getattr(self, name) >= bound, name, getattr(self, name), f"a whole number of at least {bound}")
        require(self.threads <= _MOST_THREADS, "threads", self.threads, f"at most {_MOST_THREADS}")
        require_choice("backend", self.backend, ("processes", "ray"))


# --- groups ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Settings that belong together: a heading of `fedrp run --help`, and the check of their values.

    Groups exist in the code alone. The record, the command line, TOML and Flower's run config are flat.
    """

    heading: str
    settings: tuple[str, ...]
    check: Callable[[RunConfig], None]


def _check_data(config: RunConfig) -> None:
    _require_whole(config, "train_examples")


def _check_federation(config: RunConfig) -> None:
    _require_whole(config, "clients", "rounds")
    for name in ("participation", "quorum"):
        value = getattr(config, name)
        require(value is None or 0 < value <= 1, name, value, "a fraction above 0 and at most 1")
    _require_below_one(config, "dropout", "server_momentum")
    require_choice("sampling", config.sampling, SAMPLINGS)
    require_choice("weighting", config.weighting, WEIGHTINGS)
    expected = f"mean, median or trimmed:F with F from {_SMALLEST_SHARE:g} to below 0.5"
    require(_share_of(config.aggregation) is not None, "aggregation", config.aggregation, expected)
    require(0 <= config.seed < 2**63, "seed", config.seed, "a whole number from 0 to 2^63 - 1")


def _check_local_training(config: RunConfig) -> None:
    _require_whole(config, "local_epochs", "batch_size")
    _require_positive(config, "lr", "rho")
    _require_below_one(config, "momentum")
    _require_not_negative(config, "grad_clip", "proximal")


def _check_projection(config: RunConfig) -> None:
    _require_whole(config, "dim")


def _check_privacy(config: RunConfig) -> None:
    _require_positive(config, "clip", "dp_epsilon", "ball", "sensitivity", "norm_floor")
    require((config.clip or 1) <= _LARGEST, "clip", config.clip, f"a number up to {_LARGEST:g}")
    require(1e-6 <= (config.dp_epsilon or 1) <= 1e6, "dp_epsilon", config.dp_epsilon, "a number from 1e-6 to 1e6")
    _require_not_negative(config, "noise_multiplier")
    require(1e-100 <= config.dp_delta < 1, "dp_delta", config.dp_delta, "a probability from 1e-100 to below 1")
    quantile = config.clip_quantile
    require(quantile is None or 0 < quantile < 1, "clip_quantile", quantile, "a number between 0 and 1")
    require_choice("dp_noise", config.dp_noise, DP_NOISES)
    if config.noise_multiplier is not None and config.dp_epsilon is not None:
        raise ConfigError("give either dp_epsilon or noise_multiplier, not both: one follows from the other")
    if config.ball is not None and config.sensitivity is not None:
        raise ConfigError("give either ball or sensitivity, not both: a ball of radius R enforces 2 R")
    if config.norm_floor is not None and not config.bounded:
        raise ConfigError(f"norm_floor={config.norm_floor:g} alone bounds nothing: give ball or sensitivity as well")


def _check_security(config: RunConfig) -> None:
    _require_positive(config, "secure_range")
    require_choice("sealing", config.sealing, SEALINGS)


GROUPS = (
    Group("Data", ("dataset", "train_examples", "partition"), _check_data),
    Group(
        "Federation",
        (
            *("algorithm", "clients", "rounds", "participation", "sampling", "dropout", "quorum", "weighting"),
            *("aggregation", "server_momentum", "seed"),
        ),
        _check_federation,
    ),
    Group(
        "Local training",
        ("model", "local_epochs", "batch_size", "lr", "momentum", "grad_clip", "rho", "proximal"),
        _check_local_training,
    ),
    Group("Projection", ("dim", "projection"), _check_projection),
    Group(
        "Privacy",
        (
            *("dp_epsilon", "dp_delta", "noise_multiplier", "dp_noise", "clip", "clip_quantile"),
            *("ball", "sensitivity", "norm_floor"),
        ),
        _check_privacy,
    ),
    Group("Security", ("secure_aggregation", "secure_range", "sealing"), _check_security),
)


# --- checks ----------------------------------------------------------------------------------------------------------


def _require_whole(config: RunConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= 1, name, value, "a whole number of at least 1")


def _require_positive(config: RunConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 < value < float("inf"), name, value, "a number above 0")


def _require_not_negative(config: RunConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 <= value <= _LARGEST, name, value, f"a number from 0 to {_LARGEST:g}")


def _require_below_one(config: RunConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value is None or 0 <= value < 1, name, value, "a number from 0 to below 1")


def _share_of(aggregation: str) -> float | None:
    """What `RunConfig.trimmed_share` says, or None if it is no such setting."""
    if not aggregation.startswith(_TRIMMED):
        return _SHARES.get(aggregation)
    try:
        share = float(aggregation.removeprefix(_TRIMMED))
    except ValueError:
        return None
    return share if _SMALLEST_SHARE <= share < _SHARES["median"] else None


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


def settled(value: Value | None) -> Value:
    """A setting whose default has been chosen, as it is in every resolved config."""
    if value is None:
        raise ConfigError("a setting has no value yet: resolve the config first (fedrp.algorithms.resolve.resolved)")
    return value


def require_choice(name: str, value: str, choices: typing.Iterable[str]) -> None:
    """Refuse a name that is not in a table, and suggest the nearest."""
    known = list(choices)
    if value not in known:
        raise ConfigError(f"unknown {name} '{value}'{_suggestion(value, known)}; known: {', '.join(known)}")


def _suggestion(value: str, known: list[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    return f", did you mean '{near[0]}'?" if near else ""


def read_toml(path: Path, allowed: typing.Iterable[str] | None = None) -> dict[str, Any]:
    """The settings of a TOML file, keys with '-' or '_' alike; an unknown key is an error with a suggestion.

    `allowed` are the known keys; None: any.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {_reason(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    known = None if allowed is None else list(allowed)
    settings = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if known is not None and name not in known:
            raise ConfigError(f"{path}: unknown key '{key}'{_suggestion(name, known)}")
        settings[name] = value
    return settings


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def from_settings(record: type[Record], settings: dict[str, Any]) -> Record:
    """Build a config record from the settings that belong to it; the record checks them."""
    return record(**{name: settings[name] for name in typing.get_type_hints(record) if name in settings})


def to_json(config: RunConfig) -> str:
    """The config as JSON, as it is kept in a run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)
