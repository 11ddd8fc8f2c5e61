"""What a run is: `RunConfig`, everything that decides its result, and `Resolved`, the same without a `None`.

A value of `None` means "choose a sensible default": it is resolved once, when the model and the data are known.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedrp.config.aggregation import SMALLEST_SHARE, share_of
from fedrp.config.checks import (
    LARGEST,
    require,
    require_below_one,
    require_choice,
    require_not_negative,
    require_positive,
    require_types,
    require_whole,
    setting,
)
from fedrp.config.schedule import CONSTANT, LR_SCHEDULES
from fedrp.errors import ConfigError
from fedrp.types import MAX_CLIENTS, MAX_ROUNDS

WEIGHTINGS = ("uniform", "samples")
LR_RULES = ("fixed", "steps")
AUGMENTS = ("none", "flip-crop")
SAMPLINGS = ("fixed", "poisson")
DP_NOISES = ("shared", "local")
DELIVERIES = ("client", "average")
DP_UNITS = ("client", "record", "both")
SEALINGS = ("x25519", "hybrid")
DEFAULT_QUORUM = 0.5
_BITS = (*range(1, 9), 16, 32)  # of a number; fewer than one: not all of them are sent


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the outcome of a run.

    Guarantees: a `RunConfig` that exists has passed the checks of types and ranges below; checks that need the model or
    the data (`dim` against the number of parameters, `clients` against the samples) are made when those are known.
    """

    algorithm: str = setting("fedrp-subspace", "algorithm: {names}")
    dataset: str = setting("mnist-mini", "data set: {names}, idx:FOLDER or npz:FILE")
    model: str = setting("lenet5", "model: {names}")
    clients: int = setting(10, "number of clients K")
    rounds: int = setting(10, "number of rounds")
    local_epochs: int = setting(1, "local epochs E per round")
    batch_size: int | None = setting(None, "examples per local step; default 64, to protect records 256")
    lr: float | None = setting(None, "learning rate of local SGD; default by model and algorithm")
    lr_rule: str | None = setting(
        None, "fixed, or steps: a longer step where a client takes few in a round ({names}); default steps without lr"
    )
    lr_schedule: str | None = setting(None, "learning rate over rounds: constant, cosine or warmup-cosine")
    momentum: float | None = setting(None, "momentum of local SGD; default 0.9, to protect records 0.5")
    grad_clip: float = setting(1.0, "largest norm of a local gradient; 0 for no limit")
    augment: str = setting("none", "what happens to an image when it is taken: none or flip-crop")
    rho: float | None = setting(None, "ADMM penalty ({names}); default by algorithm")
    dim: int | None = setting(None, "projection dimension m: how many numbers a client sends; default by algorithm")
    projection: str | None = setting(None, "projection family: {names}; default by size")
    rotation: str | None = setting(None, "secret rotation of what is sent: {names}; default by algorithm and size")
    bits: float | None = setting(
        None, "bits of a number that a client sends: 1 to 8, 16, 32, or a fraction below 1; default 32 or by bytes"
    )
    bits_down: float | None = setting(None, "bits of a number that the server sends ({names}); default likewise")
    bytes: int | None = setting(None, "bytes of numbers each way, which give dim and bits ({names})")
    relabel: bool = setting(False, "number the labels of npz: and idx: data anew from 0, in sorted order; also text")
    train_examples: int | None = setting(None, "use only this many training examples, drawn at random; default all")
    partition: str = setting("iid", "how examples are split: iid, dirichlet:ALPHA or shards:S")
    participation: float = setting(1.0, "fraction of clients that take part in a round")
    sampling: str = setting("fixed", "how participants are drawn: fixed (a set number) or poisson (each by a coin)")
    dropout: float = setting(0.0, "probability that a participant drops out in the middle of a round")
    quorum: float | None = setting(None, "share of participants that a round needs; default 0.5, with shared noise 1")
    weighting: str = setting("uniform", "weights of the average: uniform or samples")
    aggregation: str = setting("mean", "what the server makes of uploads: mean, median or trimmed:F (F from each end)")
    server_momentum: float | None = setting(None, "momentum of the common model ({names}); default by mode and size")
    deliver: str | None = setting(
        None, "the final model: client (that of one) or average (all send theirs once) ({names}); default by algorithm"
    )
    proximal: float = setting(0.0, "pull towards the common model in local training ({names})")
    seed: int = setting(0, "public run seed: split, batches; in simulations also who takes part")
    clip: float | None = setting(
        None, "largest norm of a client's update, with noise; default 0.3. Of a record's gradient; default 1"
    )
    noise_multiplier: float | None = setting(None, "noise on the sum of updates, in units of clip")
    dp_unit: str = setting("client", "whom noise protects: a whole client, each record of a client, or both ({names})")
    record_epsilon: float | None = setting(None, "with dp_unit=both, target epsilon of records ({names})")
    record_clip: float | None = setting(None, "with dp_unit=both, largest norm of a record's gradient; default 1")
    dp_epsilon: float | None = setting(
        None, "target epsilon, instead of a noise multiplier ({names}); fedavg-dp: default 10"
    )
    dp_delta: float = setting(1e-5, "delta of the privacy guarantee")
    dp_noise: str | None = setting(
        None, "who adds the noise: shared (each client a share; default) or local (all of it; default for records)"
    )
    clip_quantile: float | None = setting(None, "adapt clip to this quantile of the clients' norms")
    ball: float | None = setting(None, "keep every model within this distance of the common start ({names})")
    sensitivity: float | None = setting(None, "assume that a record moves a model by at most this ({names})")
    norm_floor: float | None = setting(
        None, "smallest norm of a model that is sent ({names}); default by model and ball"
    )
    secure_aggregation: bool = setting(False, "mask uploads, so that the server learns sums only")
    secure_range: float = setting(64.0, "largest number of a masked upload without noise; larger ones are cut off")
    key_epoch: int = setting(64, "rounds whose keys come from one dealt secret; 1 for a new one every round")
    sealing: str = setting("x25519", "how round keys are sealed: x25519 or hybrid (also safe from quantum computers)")

    def __post_init__(self) -> None:
        require_types(self)
        for group in GROUPS:
            group.check(self)

    @property
    def stored(self) -> "RunConfig":
        """The settings as files hold them: these, with `None` where there is no value."""
        return self

    @property
    def private(self) -> bool:
        """Whether clients clip and noise what they send."""
        return self.dp_unit != "record" and (self.noise_multiplier is not None or self.dp_epsilon is not None)

    @property
    def record_private(self) -> bool:
        """Whether clients clip and noise what each record does to a local step."""
        return self.dp_unit != "client"

    @property
    def sums_records(self) -> bool:
        """Whether a round is one sum of single records' clipped gradients, of whose noise each client adds a share."""
        return self.dp_unit == "record" and self.dp_noise == "shared"

    @property
    def tolerant(self) -> bool:
        """Whether training goes on where it diverges, because to stop would tell what noise or a ball must hide."""
        return self.private or self.record_private or bool(self.ball)

    @property
    def bounded(self) -> bool:
        """Whether something bounds how far one change of the data moves a model."""
        return self.ball is not None or self.sensitivity is not None

    @property
    def trimmed_share(self) -> float:
        """The share of uploads that the server cuts off at each end, per coordinate: 0 for mean, 0.5 for median."""
        return share_of(self.aggregation) or 0.0

    @property
    def expected_participants(self) -> int:
        """How many clients take part in a round: exactly (fixed) or on average (poisson)."""
        return max(1, round(self.participation * self.clients))


@dataclass(frozen=True)
class Resolved(RunConfig):
    """Settings with every default filled in. Where a run has none of something, 0 or the empty string says so.

    Guarantees: no setting is `None`; every value is neutral or one that a user could give.
    """

    batch_size: int = 64
    lr: float = 0.0
    lr_schedule: str = CONSTANT
    momentum: float = 0.9
    rho: float = 0.0
    lr_rule: str = ""
    projection: str = ""
    rotation: str = ""
    dim: int = 0  # where nothing is projected
    bits: float = 32.0
    bits_down: float = 32.0
    bytes: int = 0
    train_examples: int = 0  # 0: all
    quorum: float = DEFAULT_QUORUM
    server_momentum: float = 0.0
    deliver: str = ""  # where all clients have one model
    clip: float = 0.0  # above 0: clients clip what they send, and add noise unless its multiplier is 0
    noise_multiplier: float = 0.0
    record_epsilon: float = 0.0
    record_clip: float = 0.0
    dp_noise: str = "shared"
    dp_epsilon: float = 0.0
    clip_quantile: float = 0.0
    ball: float = 0.0
    sensitivity: float = 0.0
    norm_floor: float = 0.0
    unset: frozenset[str] = frozenset()  # what is stored as null: settings that this run has no value of
    before: "Resolved | None" = None  # the settings of the rounds, where these are of the exchange of models after them

    @classmethod
    def of(cls, config: RunConfig) -> "Resolved":
        """Settings as a user gives them or a file holds them, with the neutral value for each `None` that is left."""
        given = vars(config.stored)
        return cls(
            **{name: value for name, value in given.items() if value is not None},
            unset=frozenset(name for name, value in given.items() if value is None),
        )

    def __post_init__(self) -> None:
        require_types(self)
        require(self.lr > 0, "lr", self.lr, "a learning rate: resolve the config (fedrp.algorithms.resolve.resolved)")
        require(self.clip > 0 or not self.noise_multiplier, "clip", self.clip, "a number above 0, as there is noise")
        neutral = {name for name, value in _NEUTRAL.items() if getattr(self, name) == value}
        # What a neutral value may also be: one that was chosen.
        chosen = {"batch_size", "lr_schedule", "momentum", "server_momentum", "quorum", "bits", "bits_down", "dp_noise"}
        chosen = chosen - self.unset | ({"noise_multiplier"} if self.clip > 0 and not self.dp_epsilon else set())
        object.__setattr__(self, "unset", frozenset(neutral - chosen))
        _ = self.stored  # which is checked as a user's settings are

    @property
    def stored(self) -> RunConfig:
        """The same settings as files hold them, digests are made of them and users give them."""
        names = (field.name for field in dataclasses.fields(RunConfig))
        values: dict[str, Any] = {name: None if name in self.unset else getattr(self, name) for name in names}
        return RunConfig(**values)

    @property
    def private(self) -> bool:
        """Whether clients clip what they send, and add noise unless its multiplier is 0."""
        return self.clip > 0 and self.dp_unit != "record"

    @property
    def bounded(self) -> bool:
        """Whether something bounds how far one change of the data moves a model."""
        return self.ball > 0 or self.sensitivity > 0


_NULLABLE = frozenset(field.name for field in dataclasses.fields(RunConfig) if field.default is None)
_NEUTRAL = {field.name: field.default for field in dataclasses.fields(Resolved) if field.name in _NULLABLE}


# --- groups ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Settings that belong together: a heading of `fedrp run --help`, and the check of their values.

    Groups exist in the code alone. The record, the command line, TOML and Flower's run config are flat.
    """

    heading: str
    settings: tuple[str, ...]
    check: Callable[[RunConfig], None]


def _check_data(config: RunConfig) -> None:
    require_whole(config, "train_examples")


def _check_federation(config: RunConfig) -> None:
    for name, most in (("clients", MAX_CLIENTS), ("rounds", MAX_ROUNDS)):  # messages number no more of them
        value = getattr(config, name)
        require(1 <= value <= most, name, value, f"a whole number from 1 to {most:,}")
    for name in ("participation", "quorum"):
        value = getattr(config, name)
        require(value is None or 0 < value <= 1, name, value, "a fraction above 0 and at most 1")
    require_below_one(config, "dropout", "server_momentum")
    require_choice("sampling", config.sampling, SAMPLINGS)
    require_choice("weighting", config.weighting, WEIGHTINGS)
    require_choice("deliver", config.deliver or "client", DELIVERIES)
    expected = f"mean, median or trimmed:F with F from {SMALLEST_SHARE:g} to below 0.5"
    require(share_of(config.aggregation) is not None, "aggregation", config.aggregation, expected)
    require(0 <= config.seed < 2**63, "seed", config.seed, "a whole number from 0 to 2^63 - 1")


def _check_local_training(config: RunConfig) -> None:
    require_whole(config, "local_epochs", "batch_size")
    require_positive(config, "lr", "rho")
    require_choice("lr_rule", config.lr_rule or "fixed", LR_RULES)
    require_choice("lr_schedule", config.lr_schedule or CONSTANT, LR_SCHEDULES)
    require_choice("augment", config.augment, AUGMENTS)
    require_below_one(config, "momentum")
    require_not_negative(config, "grad_clip", "proximal")


def _check_projection(config: RunConfig) -> None:
    require_whole(config, "dim")
    for name in ("bits", "bits_down"):
        value = getattr(config, name)
        known = value is None or 0 < value < 1 or value in _BITS
        require(known, name, value, "1 to 8, 16, 32, or a fraction between 0 and 1")
    require_whole(config, "bytes")


def _check_privacy(config: RunConfig) -> None:
    require_positive(config, "clip", "dp_epsilon", "record_epsilon", "record_clip", "ball", "sensitivity", "norm_floor")
    for name in ("clip", "record_clip"):
        value = getattr(config, name)
        require(value is None or value <= LARGEST, name, value, f"a number up to {LARGEST:g}")
    for name, (least, most) in dict.fromkeys(("dp_epsilon", "record_epsilon"), (1e-6, 1e6)).items():
        value = getattr(config, name)
        require(value is None or least <= value <= most, name, value, f"a number from {least:g} to {most:g}")
    require_not_negative(config, "noise_multiplier")
    require(1e-100 <= config.dp_delta < 1, "dp_delta", config.dp_delta, "a probability from 1e-100 to below 1")
    quantile = config.clip_quantile
    require(quantile is None or 0 < quantile < 1, "clip_quantile", quantile, "a number between 0 and 1")
    require_choice("dp_noise", config.dp_noise or "shared", DP_NOISES)
    require_choice("dp_unit", config.dp_unit, DP_UNITS)
    if (config.dp_unit == "both") != (config.record_epsilon is not None):
        raise ConfigError("dp_unit=both and record_epsilon go together; for records alone: dp_unit=record, dp_epsilon")
    if config.record_clip is not None and config.dp_unit != "both":
        raise ConfigError(f"record_clip={config.record_clip:g} is for dp_unit=both: with dp_unit=record give clip")
    if config.noise_multiplier is not None and config.dp_epsilon is not None:
        raise ConfigError("give either dp_epsilon or noise_multiplier, not both: one follows from the other")
    if config.ball is not None and config.sensitivity is not None:
        raise ConfigError("give either ball or sensitivity, not both: a ball of radius R enforces 2 R")
    if config.norm_floor is not None and not config.bounded:
        raise ConfigError(f"norm_floor={config.norm_floor:g} alone bounds nothing: give ball or sensitivity as well")


def _check_security(config: RunConfig) -> None:
    require_positive(config, "secure_range")
    require_whole(config, "key_epoch")
    require_choice("sealing", config.sealing, SEALINGS)


GROUPS = (
    Group("Data", ("dataset", "relabel", "train_examples", "partition"), _check_data),
    Group(
        "Federation",
        (
            *("algorithm", "clients", "rounds", "participation", "sampling", "dropout", "quorum", "weighting"),
            *("aggregation", "server_momentum", "deliver", "seed"),
        ),
        _check_federation,
    ),
    Group(
        "Local training",
        (
            *("model", "local_epochs", "batch_size", "lr", "lr_rule", "lr_schedule", "momentum", "grad_clip"),
            *("augment", "rho", "proximal"),
        ),
        _check_local_training,
    ),
    Group("Size of messages", ("dim", "projection", "rotation", "bits", "bits_down", "bytes"), _check_projection),
    Group(
        "Privacy",
        (
            *("dp_unit", "dp_epsilon", "dp_delta", "noise_multiplier", "dp_noise", "clip", "clip_quantile"),
            *("record_epsilon", "record_clip"),
            *("ball", "sensitivity", "norm_floor"),
        ),
        _check_privacy,
    ),
    Group("Security", ("secure_aggregation", "secure_range", "key_epoch", "sealing"), _check_security),
)
