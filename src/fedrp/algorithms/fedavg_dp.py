"""FedAvg with client-level differential privacy: clipped updates and Gaussian noise (McMahan et al. 2018).

Each client bounds its update to norm C and adds its share of the noise, so that the sum of the K expected updates
carries N(0, (zC)^2 I), z being the noise multiplier:

    send  u_i = clip(w_i - w, C) + N(0, (zC)^2 / K)          the server returns the sum over rounds of  sum_i u_i / K

The running sum is sent and not the last step, so that a client which missed rounds needs only the latest.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedrp.aggregate import weighted_sum
from fedrp.algorithms.base import Algorithm, ClientState, Local, Participant, Upload, Vector, stacked
from fedrp.algorithms.fedavg import FEDAVG
from fedrp.config import RunConfig
from fedrp.errors import ConfigError
from fedrp.privacy import Event, GaussianRelease, calibrate_noise_multiplier, clip_to_norm
from fedrp.secret import SecretKey
from fedrp.training import PLAIN

DEFAULT_EPSILON = 10.0
DEFAULT_CLIP = 1.0


def resolve_privacy(config: RunConfig) -> RunConfig:
    """The config with clip and noise multiplier; the latter from the target epsilon, if that was given."""
    if config.weighting != "uniform":
        raise ConfigError("weighting='samples' is not valid here: the privacy of a client rests on equal weights")
    clip = config.clip or DEFAULT_CLIP
    if config.noise_multiplier is not None:
        return dataclasses.replace(config, clip=clip)
    target = config.dp_epsilon or DEFAULT_EPSILON
    noise = calibrate_noise_multiplier(target, config.dp_delta, config.rounds, config.participation)
    return dataclasses.replace(config, clip=clip, noise_multiplier=noise, dp_epsilon=None)


def expected_clients(config: RunConfig) -> int:
    """How many clients share the noise of a round."""
    return max(1, round(config.participation * config.clients))


def privatised(config: RunConfig, update: Vector, noise: SecretKey) -> Vector:
    """A client's update, clipped to the configured norm, plus its share of the noise.

    Guarantees: the norm before noise is at most `config.clip`; the noise is a function of the client's own secret.
    """
    clip = config.clip or 0.0
    share = (config.noise_multiplier or 0.0) * clip / np.sqrt(expected_clients(config))
    return (clip_to_norm(update, clip) + share * noise.normals(update.size)).astype(np.float32)


def _resolve(config: RunConfig, _parameters: int) -> RunConfig:
    return resolve_privacy(config)


def _start(_config: RunConfig, initial: Vector) -> ClientState:
    return ClientState(initial, initial)  # the carry keeps w^0, which the running sum is added to


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    initial = client.state.carry
    return client.state if latest is None else ClientState(initial + latest, initial)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    states = [_finish(local, client) for client in clients]
    trained = local.train(stacked([state.model for state in states]), PLAIN)
    return [
        Upload(state, privatised(local.config, model - state.model, client.noise))
        for state, model, client in zip(states, trained, clients, strict=True)
    ]


def _accumulate(config: RunConfig, previous: Vector | None, uploads: Sequence[Vector], _weights: Sequence[float]) -> Vector:
    step = weighted_sum(uploads, [1.0 / expected_clients(config)] * len(uploads))
    return step if previous is None else previous + step


def _releases(config: RunConfig) -> Event:
    return GaussianRelease(config.noise_multiplier or 0.0, config.rounds, config.participation)


FEDAVG_DP: Algorithm = FEDAVG._replace(
    summary="FedAvg with clipped updates and Gaussian noise, client-level differential privacy",
    resolve=_resolve,
    client_init=_start,
    client_round=_round,
    client_finish=_finish,
    server_round=_accumulate,
    releases=_releases,
)
