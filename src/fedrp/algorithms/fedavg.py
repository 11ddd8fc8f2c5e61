"""FedAvg: send the model, get the mean (McMahan et al. 2017).

With server momentum beta (Hsu et al. 2019), v <- beta v + mean - w and w <- w + v, which is mean + beta (w - w before).
The server does not know the model that all start from, so the first step carried on is that of the second round.
"""

import functools
from collections.abc import Sequence

from fedrp.algorithms import servers
from fedrp.algorithms.base import AVERAGING_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.shared import vectors_released, with_server_momentum
from fedrp.config.run import Resolved, RunConfig
from fedrp.learning.objective import PLAIN
from fedrp.records.promise import RECORD_SETTINGS, resolve_records
from fedrp.types import Vector

# Where clients take few steps in a round, drift is no danger and longer steps learn more: with E = 1 and ten steps the
# best learning rate on MNIST is four times that with fifty (docs/results.md).
_LONGEST = 4.0
_MANY_STEPS = 40


def _resolve(config: RunConfig, _parameters: int) -> Resolved:
    return Resolved.of(resolve_records(with_server_momentum(config)))


def step_size(lr: float, steps: int) -> float:
    """The learning rate of a client that takes so many steps in a round: `lr` for forty and more, up to 4 `lr`."""
    return lr * min(_LONGEST, max(1.0, _MANY_STEPS / steps))


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial)


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    return client.state if latest is None else ClientState(latest)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    config = local.config
    by_steps = config.lr_rule == "steps"
    objective = PLAIN._replace(step_size=functools.partial(step_size, config.lr)) if by_steps else PLAIN
    trained = local.train(stacked([_finish(local, client).model for client in clients]), objective)
    # The model that was sent is not kept: the next round starts from the aggregate, before there is one from the start.
    return [Upload(client.state, model) for client, model in zip(clients, trained, strict=True)]


FEDAVG = Algorithm(
    summary="send the model, get the mean",
    settings=AVERAGING_SETTINGS | RECORD_SETTINGS | {"lr_rule"},
    delivers="consensus",
    resolve=_resolve,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDAVG,
    releases=vectors_released,
)
