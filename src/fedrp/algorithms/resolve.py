"""Resolved settings: every default that an algorithm uses filled in, every setting that it cannot use refused."""

import dataclasses

from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.table import ALGORITHMS, method_of, require_used
from fedrp.compression.coding import FULL, within_budget
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secure_aggregation import MIN_SUMMED
from fedrp.errors import ConfigError
from fedrp.learning.zoo import MODELS
from fedrp.mechanisms.cohort import least_uploads

_DEFAULT_LR = 0.1  # for models that are not in the table


def resolved(config: RunConfig, parameters: int) -> Resolved:
    """The config with every default that its algorithm uses filled in; refuses settings it does not use."""
    config = dataclasses.replace(config.stored, lr=learning_rate(config))
    if config.trimmed_share:
        _require_trimmable(config)
    if config.secure_aggregation:
        _require_summable(config)
    if config.clip_quantile is not None and _few_bits(config):
        raise ConfigError("clip_quantile tells one exact number a round, for which few bits do not do: use 32 of them")
    if config.bytes is not None:
        config = _within_bytes(config, parameters)
    found = method_of(config).resolve(config, parameters)
    if not isinstance(found, Resolved):  # it may be someone else's code, written before there was such a type
        raise ConfigError(f"algorithm '{config.algorithm}' resolves to a {type(found).__name__}: use Resolved.of(...)")
    return found


def _within_bytes(config: RunConfig, parameters: int) -> RunConfig:
    """The config with the dimension and the bits that its budget of bytes buys; masks and noise decide that, too."""
    algorithm = ALGORITHMS[config.algorithm]
    known = algorithm.resolve(dataclasses.replace(config, dim=parameters), parameters)

    def up(dim: int, bits: float) -> int:
        pipeline = Pipeline.of(dataclasses.replace(known, dim=dim, bits=bits), algorithm.server)
        return pipeline.upload_coding(pipeline.upload_size(parameters)).nbytes

    def down(dim: int, bits: float) -> int:
        pipeline = Pipeline.of(dataclasses.replace(known, dim=dim, bits_down=bits), algorithm.server)
        return pipeline.aggregate_coding(pipeline.aggregate_size(parameters)).nbytes

    dim, bits, bits_down = within_budget(config.bytes or 0, parameters, up, down)
    return dataclasses.replace(config, dim=dim, bits=bits, bits_down=bits_down)


def learning_rate(config: RunConfig) -> float:
    """The learning rate that is given, or else that of the model and the algorithm; refuses settings not used."""
    require_used(config.stored)
    if config.lr is not None:
        return config.lr
    lr = MODELS[config.model].learning_rate if config.model in MODELS else _DEFAULT_LR
    return lr * method_of(config).lr_factor


def _few_bits(config: RunConfig) -> bool:
    return min(config.bits, config.bits_down) < FULL or config.bytes is not None


def _require_summable(config: RunConfig) -> None:
    if config.bits < 1:
        raise ConfigError(f"bits={config.bits:g} is not valid for masked uploads: use 1, and a smaller dim")
    if config.weighting != "uniform" and (config.bits < FULL or config.bytes is not None):
        raise ConfigError(
            f"weighting='{config.weighting}' is not valid for masked uploads of few bits: weights would take as many "
            "again; leave it out, or leave out bits and bytes"
        )
    count = config.clients if config.sampling == "poisson" else config.expected_participants
    if count < MIN_SUMMED:
        raise ConfigError(
            f"{count} participants a round are too few for secure aggregation: {MIN_SUMMED} are needed, because of two "
            "each finds the other's vector in the average"
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
