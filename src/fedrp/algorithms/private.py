"""Client-level differential privacy, the same for every algorithm that offers it: clip, add noise, sum.

Each client bounds its update to norm C and adds noise, so that the sum over a round's participants carries N(0, (zC)^2)
in each coordinate; z is the noise multiplier. The sum is divided by the *expected* number of participants, which does
not depend on who came.

With `clip_quantile`, C follows the clients' norms (Andrew et al. 2021): a client also sends whether its norm was below
C, as one more number with noise of its own; the server answers with the next C as one more number.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fedrp.aggregate import weighted_sum
from fedrp.algorithms.base import Local, Participant, Vector
from fedrp.config import RunConfig, settled
from fedrp.errors import ConfigError
from fedrp.privacy.events import Adjacency, Adversary, Composed, GaussianRelease, PoissonSampled, Unsupported
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.privacy.ledger import Release
from fedrp.privacy.noise import noise_share, update_noise_multiplier
from fedrp.privacy.sensitivity import clip_to_norm

DEFAULT_EPSILON = 10.0
DEFAULT_CLIP = 1.0
_CLIP_RATE = 0.2  # eta_C of Andrew et al.
_BIT_NOISE_SHARE = 1 / 20  # noise on the count of clients below C, as a share of their number


def resolve_privacy(config: RunConfig) -> RunConfig:
    """The config with clip, quorum and noise multiplier; the latter from the target epsilon, if that was given."""
    if config.weighting != "uniform":
        raise ConfigError("weighting='samples' is not valid here: the privacy of a client rests on equal weights")
    noise = config.noise_multiplier
    if noise is None:
        noise = calibrate_noise_multiplier(
            config.dp_epsilon or DEFAULT_EPSILON,
            config.dp_delta,
            config.rounds,
            config.participation,
            participation_hidden=config.sampling == "poisson",
        )
    resolved = dataclasses.replace(
        config,
        clip=config.clip or DEFAULT_CLIP,
        noise_multiplier=noise,
        dp_epsilon=None,
        quorum=config.quorum or 1.0,
    )
    _update_noise(resolved)  # refuses an adaptive clip that the noise does not allow
    return resolved


def extra_numbers(config: RunConfig) -> int:
    """How many numbers privacy adds to an upload."""
    return 0 if config.clip_quantile is None else 1


def current_clip(config: RunConfig, client: Participant) -> float:
    """The bound C of this round."""
    latest = client.history[-1].aggregate
    return settled(config.clip) if config.clip_quantile is None or latest is None else float(latest[-1])


def privatised(local: Local, client: Participant, update: Vector) -> Vector:
    """A client's update, clipped, with its noise, and with its vote on C where that adapts.

    Guarantees: before noise the norm is at most C; the noise is a function of the client's own secret of this round;
    the noises of the quorum suffice for the configured multiplier.
    """
    config = local.config
    clip = current_clip(config, client)
    bounded = clip_to_norm(update, clip)
    share = _share(local, _update_noise(config) * clip)
    normals = client.noise.normals(update.size + 1)
    noised = bounded + share * normals[:-1]
    if config.clip_quantile is None:
        return noised.astype(np.float32)
    below = float(np.linalg.norm(update) <= clip)
    vote = below - 0.5 + _share(local, _bit_noise(config)) * normals[-1]
    return np.append(noised, vote).astype(np.float32)


def averaged(config: RunConfig, previous: Vector | None, uploads: Sequence[Vector]) -> Vector:
    """The sum of the uploads by the expected number of participants; the last number becomes the next C."""
    expected = config.expected_participants
    mean = weighted_sum(uploads, [1.0 / expected] * len(uploads))
    if config.clip_quantile is not None:
        clip = settled(config.clip) if previous is None else float(previous[-1])
        below = min(1.0, max(0.0, float(mean[-1]) + 0.5))
        mean[-1] = clip * math.exp(-_CLIP_RATE * (below - config.clip_quantile))
    return mean


def releases(config: RunConfig) -> list[Release]:
    """What the mechanism of this file gives away, to whom."""
    noise = GaussianRelease(settled(config.noise_multiplier))
    client = Adjacency.CLIENT_ADD_REMOVE
    clipped = (f"sensitivity enforced: every update is clipped to norm {config.clip:g}",)
    seen = Composed(PoissonSampled(noise, config.participation), config.rounds)
    hidden = Composed(PoissonSampled(noise, config.participation, participation_hidden=True), config.rounds)
    if config.dp_noise == "local":
        server = Release(Adversary.SERVER, client, seen, (*clipped, "every client adds all of the noise itself"))
        with_client = server._replace(adversary=Adversary.SERVER_AND_CLIENT)
    else:
        alone = Unsupported("a client adds only its share of the noise, and the server sees single uploads")
        server = Release(Adversary.SERVER, client, alone)
        with_client = Release(Adversary.SERVER_AND_CLIENT, client, alone)
    shared = (*clipped, "the clients of the quorum add their shares of the noise")
    unseen = (*shared, "who took part stays hidden") if config.sampling == "poisson" else shared
    return [
        server,
        with_client,
        Release(Adversary.CLIENTS, client, seen, shared),
        Release(Adversary.MODEL_HOLDER, client, hidden if config.sampling == "poisson" else seen, unseen),
    ]


def _share(local: Local, deviation: float) -> float:
    """The noise that one client adds, so that the sum over the round has the given standard deviation at least."""
    if local.config.dp_noise == "local":
        return deviation
    minimum = math.ceil(local.participants * settled(local.config.quorum))
    # A curious client knows the noise that it added itself: the others' must suffice.
    return noise_share(deviation, local.participants, minimum, colluding_clients=min(1, minimum - 1)).per_client


def _bit_noise(config: RunConfig) -> float:
    return _BIT_NOISE_SHARE * config.expected_participants


def _update_noise(config: RunConfig) -> float:
    """The multiplier on the update itself: larger than z where a part of the budget goes into adapting C."""
    noise = settled(config.noise_multiplier)
    return noise if config.clip_quantile is None else update_noise_multiplier(noise, _bit_noise(config))
