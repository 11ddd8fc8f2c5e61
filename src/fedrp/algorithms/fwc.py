"""FWC, "federated without connection": every client trains alone. The floor."""

from collections.abc import Sequence

from fedrp.algorithms import servers
from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.client_side import NOTHING, ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.config.run import Resolved
from fedrp.learning.objective import PLAIN
from fedrp.privacy.events import Adjacency, Adversary, NothingReleased, Release, Unsupported
from fedrp.types import Vector


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial)


def _alone(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    trained = local.train(stacked([client.state.model for client in clients]), PLAIN)
    return [Upload(ClientState(model), NOTHING) for model in trained]


def _nothing_learned(_config: Resolved) -> list[Release]:
    return [
        Release(Adversary.SERVER, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.CLIENTS, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_REPLACE, Unsupported("a model is released without noise")),
    ]


FWC = Algorithm(
    summary="federated without connection: every client alone, the floor",
    settings=frozenset(),
    delivers="client",
    client=ClientSide(_start, _alone, lambda _local, client: client.state),
    server=servers.FWC,
    releases=_nothing_learned,
)
