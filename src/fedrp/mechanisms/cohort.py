"""How many clients a round is opened with, and how many uploads it needs: what a config says of cohorts."""

import math

import numpy as np
import numpy.typing as npt

from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secure_aggregation import MIN_SUMMED, Cohort
from fedrp.errors import ProtocolError
from fedrp.privacy.numerics import binomial

Coins = npt.NDArray[np.float64]  # per client, a number in [0, 1)

_TOO_OFTEN = 1e-6
_FEWEST_TRIMMED = 3  # uploads of which one at each end can be left out


def least_uploads(share: float) -> int:
    """From how many uploads on at least one is left out at each end; 1 where none is meant to be."""
    return max(_FEWEST_TRIMMED, math.ceil(1 / share - 1e-9)) if share else 1


def least_participants(config: RunConfig) -> int:
    """How many clients a round is opened with, at least: where coins choose fewer, some are added."""
    return MIN_SUMMED if config.secure_aggregation else least_uploads(config.trimmed_share)


def due(config: RunConfig, coins: Coins) -> int:
    """How many clients a round is to have, by the coins of those who can take part."""
    if config.sampling == "poisson":
        return max(least_participants(config), int((coins < config.participation).sum()))
    return config.expected_participants


def needed(config: Resolved, participants: int) -> int:
    """How many uploads a round must have, at least: of a cohort that is smaller than configured, no fewer."""
    cohort = participants if config.sampling == "poisson" else config.expected_participants
    quorum = max(least_uploads(config.trimmed_share), math.ceil(cohort * config.quorum))
    return max(quorum, MIN_SUMMED, cohort // 2 + 1) if config.secure_aggregation else quorum


def largest_cohort(config: RunConfig) -> int:
    """How many clients can take part in a round."""
    return config.clients if config.sampling == "poisson" else config.expected_participants


def asked(cohort: Cohort | None) -> Cohort:
    """Who is summed, where uploads are masked."""
    if cohort is None:
        raise ProtocolError("a masked upload needs a list of participants")
    return cohort


def participation_rate(config: RunConfig) -> float:
    """The probability with which a client takes part in a round, being added to too few included."""
    if config.sampling == "fixed":
        return config.expected_participants / config.clients
    few = _too_few(config)
    added = sum((len(few) - count) * probability for count, probability in enumerate(few))
    return min(1.0, config.participation + added / config.clients)


def most_rounds(config: RunConfig) -> int:
    """In how many rounds a client takes part at most: beyond this it refuses, whoever draws the coins.

    Honest coins ask for more with a probability of one in a million.
    """
    rate = participation_rate(config)
    return config.rounds if rate >= 1 else int(binomial().isf(_TOO_OFTEN, config.rounds, rate))


def rarely_too_few(config: RunConfig) -> float:
    """The probability, or more, that coins choose too few clients in any round."""
    return min(1.0, config.rounds * sum(_too_few(config)))


def _too_few(config: RunConfig) -> list[float]:
    """How likely coins choose 0, 1, ... clients, for each number that is too small, so that some are added."""
    counts = range(least_participants(config))
    return [float(binomial().pmf(count, config.clients, config.participation)) for count in counts]
