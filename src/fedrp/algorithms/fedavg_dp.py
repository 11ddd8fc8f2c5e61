"""FedAvg with client-level differential privacy (McMahan et al. 2018): clipped, noised updates in all n dimensions.

The server returns the running sum of the averaged updates, so that a client which missed rounds needs only the latest.
With server momentum beta, v <- beta v + averaged update is what it sums, as in FedRP-Subspace. Both are made of noised
sums only, so they cost no privacy.
"""

from collections.abc import Sequence

import numpy as np

from fedrp.algorithms.base import Algorithm, ClientState, Local, Participant, Reach, Upload, stacked
from fedrp.algorithms.client_dp import (
    PRIVACY_SETTINGS,
    averaged,
    expected_number,
    extra_numbers,
    noised_reach,
    noised_scale,
    privatised,
    releases,
    resolve_privacy,
)
from fedrp.algorithms.fedavg import FEDAVG, momentum, without_momentum
from fedrp.config import RunConfig, settled
from fedrp.learning.training import PLAIN
from fedrp.types import Vector


def _resolve(config: RunConfig, _parameters: int) -> RunConfig:
    return resolve_privacy(without_momentum(config))


def _start(_config: RunConfig, initial: Vector) -> ClientState:
    return ClientState(initial, initial)  # the carry keeps w^0, which the running sum is added to


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    initial = client.state.carry
    return client.state if latest is None else ClientState(initial + latest[: initial.size], initial)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    states = [_finish(local, client) for client in clients]
    trained = local.train(stacked([state.model for state in states]), PLAIN)
    return [
        Upload(state, privatised(local, client, model - state.model))
        for state, model, client in zip(states, trained, clients, strict=True)
    ]


def _running_sum(config: RunConfig, past: Sequence[Vector]) -> Vector | None:
    if not past:
        return None
    total = past[0].copy()
    carried_on = momentum(config, (*past, np.zeros_like(total)))
    if carried_on is not None:
        total += carried_on
    total[total.size - extra_numbers(config) :] = 0  # the bound C is not summed
    return total


def _reach(config: RunConfig, round_: int, size: int) -> Reach:
    """The running sum: every round adds at most what one round can, momentum carries it on."""
    number, norm = noised_reach(config, round_, size)
    times = round_ / (1 - settled(config.server_momentum))
    return Reach(times * number, times * norm)


FEDAVG_DP: Algorithm = FEDAVG._replace(
    summary="FedAvg with clipped updates and Gaussian noise: client-level differential privacy",
    # Sums with equal weights in a known range.
    settings=(FEDAVG.settings | PRIVACY_SETTINGS) - {"weighting", "aggregation", "secure_range"},
    upload_size=lambda config, parameters: parameters + extra_numbers(config),
    resolve=_resolve,
    client_init=_start,
    client_round=_round,
    client_finish=_finish,
    server_round=averaged,
    carried=_running_sum,
    scale=noised_scale,
    reach=_reach,
    divisor=expected_number,
    releases=releases,
)
