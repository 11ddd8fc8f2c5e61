"""Record-level differential privacy, the same for every algorithm that offers it: what noise in local steps is worth.

The mechanism is in `fedrp.records.training`. Each site adds all of the noise itself, in every local step, so that what
it sends, and all that others make of it, is post-processing: the promise holds against everyone else together.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from fedrp.config.run import Resolved, RunConfig
from fedrp.errors import ConfigError
from fedrp.mechanisms.cohort import most_rounds
from fedrp.privacy.events import Adjacency, Adversary, Release
from fedrp.privacy.pld import SMALLEST_DELTA
from fedrp.records.steps import SMALLEST_CLIP, LocalSteps, plan

RECORD_SETTINGS = frozenset({"dp_unit"})  # with dp_unit=record also those of noise
BOTH_SETTINGS = RECORD_SETTINGS | {"record_epsilon", "record_clip"}
DEFAULT_EPSILON = 3.0
DEFAULT_CLIP = 1.0

_ALONE = "the site's own noise is all that is counted: everyone else may work together"


def resolve_records(config: RunConfig) -> RunConfig:
    """The config with clip and target for records; as it is where they are not protected.

    Raises:
        ConfigError: noise cannot be had as it is asked for.
    """
    if not config.record_private:
        return config
    if config.bounded:
        name = "ball" if config.ball is not None else "sensitivity"
        raise ConfigError(
            f"{name}={getattr(config, name):g} does not go with dp_unit={config.dp_unit}: a client refuses models that "
            "are too short, which would tell of its records: leave it out"
        )
    for name in ("clip", "record_clip"):
        clip = getattr(config, name)
        if clip is not None and clip < SMALLEST_CLIP:
            raise ConfigError(f"{name}={clip:g} is too small for records: give at least {SMALLEST_CLIP:g}")
    if config.dp_delta < SMALLEST_DELTA:
        raise ConfigError(f"dp_delta={config.dp_delta:g} is too small for records: give at least {SMALLEST_DELTA:g}")
    if config.dp_unit == "both":
        return dataclasses.replace(config, record_clip=config.record_clip or DEFAULT_CLIP)
    if config.dp_noise == "shared":
        raise ConfigError(
            "dp_noise=shared is not valid with dp_unit=record: the noise of others never enters a site's own local "
            "steps, so each adds all of it: leave it out"
        )
    target = DEFAULT_EPSILON if config.noise_multiplier is None and config.dp_epsilon is None else config.dp_epsilon
    return dataclasses.replace(config, dp_epsilon=target, clip=config.clip or DEFAULT_CLIP, dp_noise="local")


class Protection(NamedTuple):
    """How a site with so many records protects each of them."""

    steps: LocalSteps
    clip: float
    noise_multiplier: float
    quantile: float


def protection(config: Resolved, records: int) -> Protection:
    """The clip and the noise of a site's local steps: its own noise for the common target, or the noise that is given.

    A site takes part in `most_rounds` rounds at most, and refuses more; who is sampled is not assumed to be hidden.
    """
    steps = LocalSteps(records, config.batch_size, config.local_epochs, most_rounds(config))
    both = config.dp_unit == "both"
    target, clip = (config.record_epsilon, config.record_clip) if both else (config.dp_epsilon, config.clip)
    noise = steps.noise_for(target, config.dp_delta) if target else config.noise_multiplier
    return Protection(steps, clip, noise, 0.0 if both else config.clip_quantile)


def record_releases(config: Resolved, sizes: Iterable[int]) -> list[Release]:
    """What local steps give away of a record, to whom, at the site of the given sizes where that is most."""
    if not config.record_private:
        return []

    def epsilon(found: Protection) -> float:
        return found.steps.epsilon(found.noise_multiplier, config.dp_delta)

    worst = max((protection(config, size) for size in sorted(set(sizes))), key=epsilon)
    event = worst.steps.event(worst.noise_multiplier)
    return [
        Release(adversary, Adjacency.RECORD_ADD_REMOVE, event, (_ALONE,)) for adversary in Adversary if adversary.real
    ]


def site_plans(config: Resolved, sizes: Iterable[int]) -> list[dict[str, Any]]:
    """What each site promises its records, as JSON: a line per number of records, and how many sites have that."""
    if not config.record_private:
        return []
    counts = sorted(Counter(sizes).items())
    found = [(protection(config, size), count) for size, count in counts]
    return [{"sites": count, **plan(own.steps, config.dp_delta, None, own.noise_multiplier)} for own, count in found]


def worst_epsilon(plans: Iterable[dict[str, Any]]) -> float:
    """The largest of all sites."""
    return max((math.inf if item["epsilon"] is None else float(item["epsilon"]) for item in plans), default=0.0)
