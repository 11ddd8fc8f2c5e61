"""FedAvg: send the model, get the mean (McMahan et al. 2017).

With server momentum beta (Hsu et al. 2019), v <- beta v + mean - w and w <- w + v, which is mean + beta (w - w before).
The server does not know the model that all start from, so the first step carried on is that of the second round.
"""

from collections.abc import Sequence

from fedrp.algorithms import servers
from fedrp.algorithms.base import AVERAGING_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.shared import vectors_released, without_momentum
from fedrp.config.run import Resolved, RunConfig
from fedrp.learning.objective import PLAIN
from fedrp.types import Vector


def _resolve(config: RunConfig, _parameters: int) -> Resolved:
    return Resolved.of(without_momentum(config))


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial)


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    return client.state if latest is None else ClientState(latest)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    trained = local.train(stacked([_finish(local, client).model for client in clients]), PLAIN)
    return [Upload(ClientState(model), model) for model in trained]


FEDAVG = Algorithm(
    summary="send the model, get the mean",
    settings=AVERAGING_SETTINGS,
    delivers="consensus",
    resolve=_resolve,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDAVG,
    releases=vectors_released,
)
