"""Record-level privacy with shared noise, where a round is one sum of single records' clipped gradients.

A site takes one step a round, with all of its records. What it sends is the sum of their clipped gradients, which one
record moves by at most C whatever the sites' sizes, plus its share of N(0, (zC)^2): mechanism and shares are those of
`fedrp.algorithms.client_dp`. Masks hide single uploads, and the learning rate comes after the sum of all sites.
"""

import dataclasses
from collections.abc import Iterable

from fedrp.config.run import Resolved, RunConfig
from fedrp.config.schedule import lr_scale
from fedrp.mechanisms.cohort import most_rounds
from fedrp.mechanisms.sharing import ONE_CURIOUS, require_noise_above_grid, shares_added, sums_seen
from fedrp.privacy.events import Adjacency, Adversary, Release
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.records.promise import protection


def resolve_sums(config: RunConfig) -> Resolved:
    """The config with quorum and noise multiplier, as `fedrp.records.promise.resolve_records` left it."""
    noise = config.noise_multiplier
    if config.dp_epsilon is not None:
        noise = calibrate_noise_multiplier(config.dp_epsilon, config.dp_delta, most_rounds(config))
    quorum = config.quorum or 1.0
    resolved = Resolved.of(dataclasses.replace(config, noise_multiplier=noise, dp_epsilon=None, quorum=quorum))
    require_noise_above_grid(resolved)
    return resolved


def sum_releases(config: Resolved, sizes: Iterable[int]) -> list[Release]:
    """What the sums of all rounds give away of a record, to whom; the same at sites of all sizes."""
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
