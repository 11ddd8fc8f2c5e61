"""FedAvg: send the model, get the mean (McMahan et al. 2017). And FWC, which never talks: the floor.

With server momentum beta (Hsu et al. 2019), v <- beta v + mean - w and w <- w + v, which is mean + beta (w - w before).
The server does not know the model that all start from, so the first step carried on is that of the second round.
"""

import dataclasses
from collections.abc import Sequence

from fedrp.algorithms import servers
from fedrp.algorithms.base import EXCHANGE_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.config import RunConfig
from fedrp.learning.training import PLAIN
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, Release, Unsupported
from fedrp.types import Vector


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


def vectors_released(config: RunConfig) -> list[Release]:
    """What full vectors, or under masks their sums, tell: nothing is claimed."""
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
    settings=EXCHANGE_SETTINGS | {"server_momentum"},
    delivers="consensus",
    resolve=_resolve,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDAVG,
    releases=vectors_released,
)
