"""Client-level differential privacy, the same for every algorithm that offers it: what clip and noise are worth.

The mechanisms themselves are in `fedrp.mechanisms`: each client bounds its update to norm C and adds noise,
so that the sum over a round's participants carries N(0, (zC)^2) in each coordinate; z is the noise multiplier.
"""

import dataclasses
import math

from fedrp.config.run import DEFAULT_QUORUM, Resolved, RunConfig
from fedrp.errors import ConfigError
from fedrp.mechanisms.cohort import participation_rate, rarely_too_few
from fedrp.mechanisms.noise import (
    NEGLIGIBLE,
    ONE_CURIOUS,
    participation_hidden,
    require_noise_above_grid,
    shares_added,
    sums_seen,
    update_noise,
)
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    Event,
    GaussianRelease,
    PoissonSampled,
    Release,
    Unsupported,
)
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.privacy.numerics import binomial

PRIVACY_SETTINGS = frozenset({"clip", "noise_multiplier", "dp_epsilon", "dp_noise", "clip_quantile"})
DEFAULT_EPSILON = 10.0
DEFAULT_CLIP = 0.3  # what a client learns in a few local steps; with 1 the noise is louder than that (docs/results.md)


def resolve_privacy(config: RunConfig) -> Resolved:
    """The config with clip, quorum and noise multiplier; the latter from the target epsilon, if that was given."""
    if config.weighting != "uniform":
        raise ConfigError("weighting='samples' is not valid here: the privacy of a client rests on equal weights")
    quorum = config.quorum or (1.0 if config.dp_noise != "local" else DEFAULT_QUORUM)
    noise = config.noise_multiplier
    if noise is None:
        noise = calibrate_noise_multiplier(
            config.dp_epsilon or DEFAULT_EPSILON,
            config.dp_delta,
            config.rounds,
            participation_rate(config),
            participation_hidden=participation_hidden(dataclasses.replace(config, quorum=quorum)),
        )
    clip = config.clip or DEFAULT_CLIP
    chosen = dataclasses.replace(config, clip=clip, noise_multiplier=noise, dp_epsilon=None, quorum=quorum)
    resolved = Resolved.of(chosen)
    update_noise(resolved)  # refuses an adaptive clip that the noise does not allow
    if resolved.secure_aggregation:
        require_noise_above_grid(resolved)
    return resolved


def releases(config: Resolved) -> list[Release]:
    """What the mechanism of this file gives away, to whom."""
    client = Adjacency.CLIENT_ZEROED  # everyone but who gets the model sees how many take part
    seen = _seen(config)
    bound = f"norm {config.clip:g}" if not config.clip_quantile else "the round's C, which the noise grows with"
    clipped = f"every update is clipped to {bound}, so the sensitivity is enforced"
    if config.dp_noise == "local":
        own = (clipped, "every client adds all of the noise itself")
        return [Release(adversary, client, seen, own) for adversary in Adversary if adversary.real]
    shared = (clipped, *shares_added(config))
    alone = _seen_by_the_server(config, seen, shared)
    if participation_hidden(config):
        rarely = f"{rarely_too_few(config):.1g}"
        enough = f"coins choose enough participants in every round (they do not with probability {rarely})"
        return [
            *alone,
            Release(Adversary.CLIENTS, client, *_seen_by_a_participant(config, shared)),
            Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_ADD_REMOVE, _seen(config, hidden=True), (*shared, enough)),
        ]
    return [
        *alone,
        Release(Adversary.CLIENTS, client, seen, (*shared, ONE_CURIOUS)),
        Release(Adversary.MODEL_HOLDER, client, seen, shared),
    ]


def _seen(config: Resolved, own_share: float = 0.0, hidden: bool = False) -> Event:
    """The sums of all rounds, for whom a part of the variance of their noise is no noise."""
    noise = GaussianRelease(config.noise_multiplier * math.sqrt(1 - own_share))
    return Composed(PoissonSampled(noise, participation_rate(config), participation_hidden=hidden), config.rounds)


def _seen_by_a_participant(config: Resolved, shared: tuple[str, ...]) -> tuple[Event, tuple[str, ...]]:
    """The sums where the total noise does not depend on how many take part, so that a client knows a part of it."""
    fewest = int(binomial().ppf(NEGLIGIBLE * config.dp_delta / config.rounds, config.clients, config.participation))
    if fewest < 2:
        return Unsupported("a client knows its own share of the noise, which may be all of it"), ()
    often = f"at least {fewest} clients take part in every round, as they do but for a millionth of delta"
    return _seen(config, own_share=1 / fewest), (*shared, ONE_CURIOUS, often)


def _seen_by_the_server(config: Resolved, seen: Event, shared: tuple[str, ...]) -> list[Release]:
    """What single shares of noise are worth: nothing, unless the server sees sums only."""
    both, client = (Adversary.SERVER, Adversary.SERVER_AND_CLIENT), Adjacency.CLIENT_ZEROED
    if not config.secure_aggregation:
        single = Unsupported("a client adds only its share of the noise, and the server sees single uploads")
        return [Release(adversary, client, single) for adversary in both]
    assumed = (*shared, *sums_seen(config))
    if participation_hidden(config):
        own = _seen_by_a_participant(config, assumed)
        return [Release(both[0], client, seen, assumed), Release(both[1], client, *own)]
    return [Release(both[0], client, seen, assumed), Release(both[1], client, seen, (*assumed, ONE_CURIOUS))]
