"""FedAvg with client-level differential privacy (McMahan et al. 2018): clipped, noised updates in all n dimensions.

The server returns the running sum of the averaged updates, so that a client which missed rounds needs only the latest.
With server momentum beta, v <- beta v + averaged update is what it sums, as in FedRP-Subspace. Both are made of noised
sums only, so they cost no privacy.
"""

from collections.abc import Sequence

import numpy as np

from fedrp.algorithms import servers
from fedrp.algorithms.base import AVERAGING_SETTINGS, Algorithm
from fedrp.algorithms.client_dp import PRIVACY_SETTINGS, releases, resolve_privacy
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.shared import vectors_released, with_server_momentum
from fedrp.config.run import Resolved, RunConfig
from fedrp.config.schedule import CONSTANT
from fedrp.errors import ConfigError
from fedrp.learning.objective import PLAIN
from fedrp.privacy.events import Release
from fedrp.records.promise import BOTH_SETTINGS, resolve_records, resolve_sums, step_of
from fedrp.types import Vector


def _resolve(config: RunConfig, _parameters: int) -> Resolved:
    config = resolve_records(with_server_momentum(config), summable=True)
    if config.sums_records:
        if config.lr_schedule != CONSTANT:  # the server adds up sums of all rounds
            raise ConfigError(
                f"lr_schedule={config.lr_schedule} does not go with dp_unit=record and dp_noise=shared in fedavg-dp, "
                "whose server adds up the sums of all rounds: leave it out, or use fedrp-subspace"
            )
        return resolve_sums(config)
    return Resolved.of(config) if config.dp_unit == "record" else resolve_privacy(config)


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial, initial)  # the carry keeps w^0, which the running sum is added to


def _finish(local: Local, client: Participant) -> ClientState:
    _, latest, round_ = client.history[-1]
    initial = client.state.carry
    if latest is not None and local.config.sums_records:
        latest = np.float32(step_of(local.config, local.config.lr, round_)) * latest
    return client.state if latest is None else ClientState(initial + latest, initial)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    states = [_finish(local, client) for client in clients]
    models = stacked([state.model for state in states])
    if local.config.sums_records:
        sums = local.sums(models, PLAIN)
        return [Upload(client.state, vector) for client, vector in zip(clients, sums, strict=True)]
    trained = local.train(models, PLAIN)
    pairs = zip(clients, states, trained, strict=True)  # a state is what all have in common: it stays
    return [Upload(client.state, model - state.model) for client, state, model in pairs]


def _releases(config: Resolved) -> list[Release]:
    return releases(config) if config.private else vectors_released(config)


FEDAVG_DP = Algorithm(
    summary="FedAvg with clipped updates and Gaussian noise: client-level differential privacy",
    settings=(AVERAGING_SETTINGS | PRIVACY_SETTINGS | BOTH_SETTINGS) - {"weighting", "secure_range", "aggregation"},
    delivers="consensus",
    resolve=_resolve,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDAVG_DP,
    releases=_releases,
)
