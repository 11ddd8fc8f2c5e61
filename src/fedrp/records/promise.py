"""Record-level differential privacy, the same for every algorithm that offers it: what noise in local steps is worth.

The mechanism is in `fedrp.records.training`. Each site adds all of the noise itself, in every local step, so that what
it sends, and all that others make of it, is post-processing: the promise holds against everyone else together. Where a
round is one sum, sites may share the noise instead: a site takes one step with all of its records, and sends the sum of
their clipped gradients, which one record moves by at most C whatever the sites' sizes, plus its share of N(0, (zC)^2).
Shares are those of client-level noise; masks hide single uploads; the learning rate comes after the sum of all sites.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from fedrp.config.run import Resolved, RunConfig
from fedrp.config.schedule import lr_scale
from fedrp.errors import ConfigError
from fedrp.mechanisms.cohort import most_rounds
from fedrp.mechanisms.noise import ONE_CURIOUS, require_noise_above_grid, shares_added, sums_seen
from fedrp.privacy.events import Adjacency, Adversary, Release
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.privacy.pld import SMALLEST_DELTA
from fedrp.records.steps import SMALLEST_CLIP, LocalSteps, plan

RECORD_SETTINGS = frozenset({"dp_unit"})  # with dp_unit=record also those of noise
BOTH_SETTINGS = RECORD_SETTINGS | {"record_epsilon", "record_clip"}
DEFAULT_EPSILON = 3.0
DEFAULT_CLIP = 1.0

_ALONE = "the site's own noise is all that is counted: everyone else may work together"


def resolve_records(config: RunConfig, summable: bool = False) -> RunConfig:
    """The config with clip and target for records; as it is where they are not protected.

    `summable` says that the algorithm can make a round of one sum, of whose noise each client adds a share.

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
    if config.sums_records:
        _require_one_sum(config, summable)
    target = DEFAULT_EPSILON if config.noise_multiplier is None and config.dp_epsilon is None else config.dp_epsilon
    clip, who = config.clip or DEFAULT_CLIP, config.dp_noise or "local"
    return dataclasses.replace(config, dp_epsilon=target, clip=clip, dp_noise=who)


class Protection(NamedTuple):
    """How a site with so many records protects each of them."""

    steps: LocalSteps
    clip: float
    noise_multiplier: float
    quantile: float


def protection(config: Resolved, records: int) -> Protection:
    """The clip and the noise of a site's local steps: its own noise for the common target, or the noise that is given.

    A site takes part in `most_rounds` rounds at most, and refuses more; who is sampled is not assumed to be hidden.

    Raises:
        ConfigError: a round is to be one sum, and has no room for so many records.
    """
    if config.sums_records and records > config.batch_size:
        raise _not_shared(
            f"a site has {records} records, and batch_size={config.batch_size} would take several local steps: raise "
            "batch_size to the records of the largest site"
        )
    steps = LocalSteps(records, config.batch_size, config.local_epochs, most_rounds(config))
    both = config.dp_unit == "both"
    target, clip = (config.record_epsilon, config.record_clip) if both else (config.dp_epsilon, config.clip)
    noise = steps.noise_for(target, config.dp_delta) if target else config.noise_multiplier
    return Protection(steps, clip, noise, 0.0 if both else config.clip_quantile)


def record_releases(config: Resolved, sizes: Iterable[int]) -> list[Release]:
    """What local steps give away of a record, to whom, at the site of the given sizes where that is most."""
    if not config.record_private:
        return []
    if config.sums_records:
        return _sum_releases(config, sizes)

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


# --- shared noise, where a round is one sum --------------------------------------------------------------------------


def _require_one_sum(config: RunConfig, summable: bool) -> None:
    """Refuse shares of noise where a round is not one masked sum of clipped gradients that all count alike."""
    epochs, weighting = config.local_epochs, config.weighting
    if not summable:
        raise _not_shared(f"{config.algorithm} sends no sum of gradients, use fedrp-subspace or fedavg-dp")
    if epochs != 1:
        raise _not_shared(
            f"local_epochs={epochs} is several local steps, and a site's second would start from its own sum with a "
            "share of the noise only, give 1"
        )
    if not config.secure_aggregation:
        raise _not_shared(
            "without masks the server sees single uploads, each with a share of the noise only, add "
            "secure_aggregation=True"
        )
    if weighting != "uniform":
        raise _not_shared(f"weighting={weighting} counts records of some sites more, leave it out: a sum has all alike")
    if config.clip_quantile is not None:
        raise _not_shared(f"clip_quantile={config.clip_quantile:g} moves each site's clip by itself, give a fixed clip")


def _not_shared(reason: str) -> ConfigError:
    return ConfigError(
        f"dp_noise=shared does not go with dp_unit=record here: {reason}; or leave dp_noise out: then each site adds "
        "all of the noise"
    )


def resolve_sums(config: RunConfig) -> Resolved:
    """The config with quorum and noise multiplier, from what `resolve_records` made of it.

    Raises:
        ConfigError: there is too little noise to be rounded before masking.
    """
    noise = config.noise_multiplier
    if config.dp_epsilon is not None:
        noise = calibrate_noise_multiplier(config.dp_epsilon, config.dp_delta, most_rounds(config))
    quorum = config.quorum or 1.0
    resolved = Resolved.of(dataclasses.replace(config, noise_multiplier=noise, dp_epsilon=None, quorum=quorum))
    require_noise_above_grid(resolved)
    return resolved


def _sum_releases(config: Resolved, sizes: Iterable[int]) -> list[Release]:
    """What the sums of all rounds give away of a record, to whom: the same at sites of all sizes.

    Sums carry the shares of all. A client knows its own, which the others' make up for.
    """
    sites = [protection(config, size) for size in sizes]  # refuses one that is too large
    event, held = sites[0].steps.event(config.noise_multiplier), shares_added(config)
    masked = (*held, *sums_seen(config))
    assumed = {
        Adversary.SERVER: masked,
        Adversary.SERVER_AND_CLIENT: (*masked, ONE_CURIOUS),
        Adversary.CLIENTS: (*held, ONE_CURIOUS),
        Adversary.MODEL_HOLDER: held,
    }
    return [Release(adversary, Adjacency.RECORD_ADD_REMOVE, event, found) for adversary, found in assumed.items()]


def step_of(config: Resolved, lr: float, round_: int) -> float:
    """What the mean of a round's sums is multiplied by: the learning rate, by the records that a step has room for."""
    return -lr * lr_scale(config.lr_schedule, round_, config.rounds) / config.batch_size
