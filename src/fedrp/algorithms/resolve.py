"""Resolved settings: every default that an algorithm uses filled in, every setting that it cannot use refused."""

import dataclasses

from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.table import ALGORITHMS, method_of, require_used
from fedrp.compression.coding import FULL, Size, within_budget
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secure_aggregation import MIN_SUMMED
from fedrp.errors import ConfigError
from fedrp.learning.zoo import MODELS
from fedrp.mechanisms.cohort import least_uploads
from fedrp.mechanisms.delivery import require_averageable
from fedrp.records.defaults import LR_FACTOR, training_defaults

_DEFAULT_LR = 0.1  # for models that are not in the table


def resolved(config: RunConfig, parameters: int) -> Resolved:
    """The config with every default that its algorithm uses filled in; refuses settings it does not use."""
    lr, lr_rule = learning_rate(config), _lr_rule(config)
    config = dataclasses.replace(training_defaults(config.stored), lr=lr, lr_rule=lr_rule)
    if config.trimmed_share:
        _require_trimmable(config)
    if config.secure_aggregation:
        _require_summable(config)
    config = _sized(config, parameters)
    found = method_of(config).resolve(config, parameters)
    if not isinstance(found, Resolved):  # it may be someone else's code, written before there was such a type
        raise ConfigError(f"algorithm '{config.algorithm}' resolves to a {type(found).__name__}: use Resolved.of(...)")
    require_averageable(found)
    if found.clip_quantile and min(found.bits, found.bits_down) < FULL:
        raise ConfigError("clip_quantile tells one exact number a round, for which few bits do not do: use 32 of them")
    return found


def _sized(config: RunConfig, parameters: int) -> RunConfig:
    """The config with a dimension and bits: what is given, what its bytes buy, or else the algorithm's own."""
    default = method_of(config).default_size
    if default is None:
        return config
    given = Size(config.dim, config.bits, config.bits_down)
    if config.bytes is not None:
        own = _within_bytes(config, config.bytes, parameters, given)
    else:
        own = default(config, parameters) if config.dim is None else Size(config.dim, FULL, FULL)
    return dataclasses.replace(
        config,
        dim=config.dim or own.numbers,
        bits=config.bits or own.bits,
        bits_down=config.bits_down or (own.bits_down if config.dim or config.bytes else config.bits or own.bits_down),
    )


def _within_bytes(config: RunConfig, nbytes: int, parameters: int, given: Size) -> Size:
    """The dimension and the bits that a budget of bytes buys; masks and noise decide that, too."""
    algorithm = ALGORITHMS[config.algorithm]
    known = algorithm.resolve(dataclasses.replace(config, dim=parameters), parameters)

    def up(dim: int, bits: float) -> int:
        pipeline = Pipeline.of(dataclasses.replace(known, dim=dim, bits=bits), algorithm.server)
        return pipeline.upload_coding(pipeline.upload_size(parameters)).nbytes

    def down(dim: int, bits: float) -> int:
        pipeline = Pipeline.of(dataclasses.replace(known, dim=dim, bits_down=bits), algorithm.server)
        return pipeline.aggregate_coding(pipeline.aggregate_size(parameters)).nbytes

    return within_budget(nbytes, parameters, given, up, down)


def learning_rate(config: RunConfig) -> float:
    """The learning rate that is given, or else that of the model and the algorithm; refuses settings not used."""
    require_used(config.stored)
    if config.lr is not None:
        return config.lr
    lr = MODELS[config.model].learning_rate if config.model in MODELS else _DEFAULT_LR
    return lr * (LR_FACTOR if config.record_private else method_of(config).lr_factor)


def _lr_rule(config: RunConfig) -> str | None:
    """Whether the learning rate follows the number of steps: where there is such a rule, and none is given."""
    if "lr_rule" not in method_of(config).settings or config.lr_rule is not None:
        return config.lr_rule
    return "fixed" if config.record_private or config.stored.lr is not None else "steps"


def _require_summable(config: RunConfig) -> None:
    if (config.bits or FULL) < 1:
        raise ConfigError(f"bits={config.bits:g} is not valid for masked uploads: use 1, and a smaller dim")
    if config.weighting != "uniform" and ((config.bits or FULL) < FULL or config.bytes is not None):
        raise ConfigError(
            f"weighting='{config.weighting}' is not valid for masked uploads of few bits: weights would take as many "
            "again; leave it out, or leave out bits and bytes"
        )
    count = config.clients if config.sampling == "poisson" else config.expected_participants
    if count < MIN_SUMMED:
        raise ConfigError(
            f"{count} participants a round are too few for secure aggregation: {MIN_SUMMED} are needed, because of two "
            "each finds the other's vector in the average; add clients, or do without masks: --no-secure-aggregation "
            "(secure-aggregation = false in a Flower run config), where the server sees single uploads"
        )
    if ALGORITHMS[config.algorithm].server.memory == "own" and (config.participation < 1 or config.sampling != "fixed"):
        raise ConfigError(
            f"participation={config.participation:g} is not valid for masked {config.algorithm}: its clients keep "
            "state of their own, and only those who took part in the same rounds are summed; use participation=1"
        )


def _require_trimmable(config: RunConfig) -> None:
    """Refuse a median or trimmed mean where the server lacks the numbers for it, or a promise rests on sums."""
    given = f"aggregation={config.aggregation}"
    if config.secure_aggregation:
        raise ConfigError(
            f"{given} needs the single uploads, which secure aggregation hides from the server: leave it out, or use "
            "secure_aggregation=False (secure-aggregation = false in a Flower run config, where masks are the default)"
        )
    if config.private:
        raise ConfigError(
            f"{given} does not go with noise, which is calibrated to how far one client moves a sum: leave out one "
            "of them"
        )
    if config.weighting != "uniform":
        raise ConfigError(
            f"{given} counts every client once, as each states its own number of examples: leave it out, "
            "or use weighting='uniform'"
        )
    count = config.clients if config.sampling == "poisson" else config.expected_participants
    least = least_uploads(config.trimmed_share)
    if count < least:
        raise ConfigError(
            f"{given} cuts nothing off {count} uploads a round, {least} are needed: use a larger fraction or more "
            "clients, or leave it out"
        )
