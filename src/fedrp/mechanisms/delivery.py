"""The exchange after the last round, where models are averaged: what it is run with. The server may load this.

It is a round like any other, with settings of its own: every client sends its model, all get the mean.
"""

import dataclasses
import functools

from fedrp.compression.coding import FULL
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secure_aggregation import MIN_SUMMED
from fedrp.errors import ConfigError
from fedrp.mechanisms.cohort import least_uploads
from fedrp.types import MAX_ROUNDS

# Masks are agreed on by every two clients, and each adds one of n numbers for every other: beyond so many clients that
# is not done unless it is asked for.
_MOST = 200


def averages(config: RunConfig) -> bool:
    """Whether the clients' models are averaged after the last round."""
    return config.deliver == "average"


def by_default(config: RunConfig) -> str:
    """What is delivered where clients keep models of their own and nothing is said.

    The mean, unless an epsilon is stated that would not cover it, or the server would have to see single models.
    """
    hidden = not config.trimmed_share and MIN_SUMMED <= config.clients <= _MOST
    return "average" if hidden and not config.bounded and config.rounds < MAX_ROUNDS else "client"


def require_averageable(config: RunConfig) -> None:
    """Refuse an average of models that would tell each of them, or that is none.

    Raises:
        ConfigError: there are too few clients, or rounds to number.
    """
    if not averages(config):
        return
    least = least_uploads(config.trimmed_share) if config.trimmed_share else MIN_SUMMED
    if config.clients < least:
        raise ConfigError(
            f"deliver=average is not valid for clients={config.clients}: {least} are needed, add clients or use "
            "deliver=client"
        )
    if config.rounds >= MAX_ROUNDS:
        raise ConfigError(
            f"deliver=average is not valid for rounds={config.rounds}: it takes one more, use {MAX_ROUNDS - 1}"
        )


@functools.lru_cache(maxsize=8)
def delivery(config: Resolved) -> Resolved:
    """The settings of the exchange: everyone is asked, all count alike, and the mean is taken under masks.

    Also where the rounds have none: what clients sent there were no models, or no final ones. A median or trimmed mean
    needs single models, so there are no masks then.
    """
    return dataclasses.replace(
        config,
        before=config,
        rounds=config.rounds + 1,
        participation=1.0,
        sampling="fixed",
        weighting="uniform",
        bits=FULL,
        bits_down=FULL,
        secure_aggregation=not config.trimmed_share,
    )


def stage(config: Resolved, round_: int) -> Resolved:
    """The settings of a round: after the last one, where models are averaged, those of that exchange."""
    rounds = config.before or config
    return delivery(rounds) if averages(rounds) and round_ > rounds.rounds else rounds


def masked_at_all(config: Resolved) -> bool:
    """Whether anything is sent under masks, in the rounds or after them."""
    return config.secure_aggregation or stage(config, config.rounds + 1).secure_aggregation
