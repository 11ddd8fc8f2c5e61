"""FedAvg: send the model, get the mean (McMahan et al. 2017). And FWC, which never talks: the floor.

With server momentum beta (Hsu et al. 2019), v <- beta v + mean - w and w <- w + v, which is mean + beta (w - w before).
The server does not know the model that all start from, so the first step carried on is that of the second round.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedrp.algorithms.base import (
    EXCHANGE_SETTINGS,
    NOTHING,
    Algorithm,
    ClientState,
    Local,
    Participant,
    Reach,
    Upload,
    full_vector,
    nothing_carried,
    stacked,
    stated_range,
    within_range,
)
from fedrp.config import RunConfig, settled
from fedrp.learning.training import PLAIN
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, NothingReleased, Unsupported
from fedrp.privacy.ledger import Release
from fedrp.types import Vector

_SETTLED_AFTER = 10_000  # rounds after which momentum adds nothing more


def _resolve(config: RunConfig, _parameters: int) -> RunConfig:
    return without_momentum(config)


def without_momentum(config: RunConfig) -> RunConfig:
    """The config with no server momentum, unless it was asked for."""
    return config if config.server_momentum is not None else dataclasses.replace(config, server_momentum=0.0)


def _start(_config: RunConfig, initial: Vector) -> ClientState:
    return ClientState(initial)


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    return client.state if latest is None else ClientState(latest)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    trained = local.train(stacked([_finish(local, client).model for client in clients]), PLAIN)
    return [Upload(ClientState(model), model) for model in trained]


def _mean(_config: RunConfig, _previous: Vector | None, mean: Vector, _weight: float) -> Vector:
    return mean


def momentum(config: RunConfig, past: Sequence[Vector]) -> Vector | None:
    """The step, times beta, from the aggregate before the last to the last one."""
    beta = np.float32(settled(config.server_momentum))
    return beta * (past[0] - past[1]) if beta and len(past) > 1 else None


def _reach(config: RunConfig, round_: int, size: int) -> Reach:
    """a_t = mean_t + beta (a_{t-1} - a_{t-2}), from 0: the range times the sum of |impulse response| so far."""
    beta = settled(config.server_momentum)
    last, before, total = 1.0, 0.0, 1.0
    for _ in range(min(round_ - 1, _SETTLED_AFTER)):
        last, before = beta * (last - before), last
        total += abs(last)
    return Reach(within_range(config, round_, size).number * total)


def _releases(config: RunConfig) -> list[Release]:
    seen: Event = NonPrivate("the server receives every client's vector in the clear")
    if config.secure_aggregation:
        seen = Unsupported("the server learns sums of the clients' vectors only, but those without noise")
    return [Release(Adversary.SERVER, Adjacency.CLIENT_ADD_REMOVE, seen), *averages_released()]


def averages_released() -> list[Release]:
    """What averages without noise tell the other clients and whoever gets the model: nothing is claimed."""
    plain = Unsupported("averages are released without noise")
    return [
        Release(adversary, Adjacency.CLIENT_ADD_REMOVE, plain)
        for adversary in (Adversary.CLIENTS, Adversary.MODEL_HOLDER)
    ]


FEDAVG = Algorithm(
    summary="send the model, get the mean",
    secret=False,
    exchanges=True,
    settings=EXCHANGE_SETTINGS | {"server_momentum"},
    delivers="consensus",
    memory="aggregate",
    upload_size=full_vector,
    resolve=_resolve,
    client_init=_start,
    client_round=_round,
    client_finish=_finish,
    server_round=_mean,
    carried=momentum,
    scale=stated_range,
    reach=_reach,
    divisor=lambda _config: None,
    releases=_releases,
)


def _alone(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    trained = local.train(stacked([client.state.model for client in clients]), PLAIN)
    return [Upload(ClientState(model), NOTHING) for model in trained]


def _nothing_learned(_config: RunConfig) -> list[Release]:
    return [
        Release(Adversary.SERVER, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.CLIENTS, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_REPLACE, Unsupported("a model is released without noise")),
    ]


FWC = FEDAVG._replace(
    summary="federated without connection: every client alone, the floor",
    exchanges=False,
    settings=frozenset(),
    delivers="client",
    resolve=lambda config, _parameters: config,
    client_round=_alone,
    client_finish=lambda _local, client: client.state,
    carried=nothing_carried,
    reach=within_range,
    releases=_nothing_learned,
)
