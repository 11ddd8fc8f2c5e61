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
    quorum = config.quorum or 1.0
    noise = config.noise_multiplier
    if noise is None:
        noise = calibrate_noise_multiplier(
            config.dp_epsilon or DEFAULT_EPSILON,
            config.dp_delta,
            config.rounds,
            _rate(config),
            participation_hidden=_participation_hidden(dataclasses.replace(config, quorum=quorum)),
        )
    clip = config.clip or DEFAULT_CLIP
    resolved = dataclasses.replace(config, clip=clip, noise_multiplier=noise, dp_epsilon=None, quorum=quorum)
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
    noise, client = GaussianRelease(settled(config.noise_multiplier)), Adjacency.CLIENT_ADD_REMOVE
    seen = Composed(PoissonSampled(noise, _rate(config)), config.rounds)
    clipped = f"every update is clipped to norm {config.clip:g}, so the sensitivity is enforced"
    if config.dp_noise == "local":
        own = (clipped, "every client adds all of the noise itself")
        return [Release(adversary, client, seen, own) for adversary in Adversary if adversary.real]
    single = Unsupported("a client adds only its share of the noise, and the server sees single uploads")
    alone = [Release(adversary, client, single) for adversary in (Adversary.SERVER, Adversary.SERVER_AND_CLIENT)]
    shared = (clipped, "the clients of the quorum add their shares of the noise")
    if _participation_hidden(config):
        empty = (1 - config.participation) ** config.clients * config.rounds
        hidden = Composed(PoissonSampled(noise, _rate(config), participation_hidden=True), config.rounds)
        known = Unsupported("a client knows its own share of the noise and how many take part: use --sampling fixed")
        return [
            *alone,
            Release(Adversary.CLIENTS, client, known),
            Release(Adversary.MODEL_HOLDER, client, hidden, (*shared, f"no round is empty (probability {empty:.1g})")),
        ]
    curious = (*shared, "at most one curious client, who knows its own share of the noise")
    return [
        *alone,
        Release(Adversary.CLIENTS, client, seen, curious),
        Release(Adversary.MODEL_HOLDER, client, seen, shared),
    ]


def _rate(config: RunConfig) -> float:
    """The probability with which a client takes part in a round."""
    return config.participation if config.sampling == "poisson" else config.expected_participants / config.clients


def _participation_hidden(config: RunConfig) -> bool:
    """Whether the model alone cannot tell how many took part: coins decide, and the noise does not depend on them."""
    return config.sampling == "poisson" and config.dp_noise == "shared" and config.quorum == 1.0


def _share(local: Local, deviation: float) -> float:
    """The noise that one client adds, so that the sum over the round has the given standard deviation at least."""
    config = local.config
    if config.dp_noise == "local":
        return deviation
    minimum = math.ceil(local.participants * settled(config.quorum))
    # A curious client knows the noise that it added itself: the others' must suffice. Not so where participation is
    # hidden: there the total must be the same whatever the number of participants.
    colluding = 0 if _participation_hidden(config) else min(1, minimum - 1)
    return noise_share(deviation, local.participants, minimum, colluding).per_client


def _bit_noise(config: RunConfig) -> float:
    return _BIT_NOISE_SHARE * config.expected_participants


def _update_noise(config: RunConfig) -> float:
    """The multiplier on the update itself: larger than z where a part of the budget goes into adapting C."""
    noise = settled(config.noise_multiplier)
    return noise if config.clip_quantile is None else update_noise_multiplier(noise, _bit_noise(config))
