"""FWC, "federated without connection": every client trains alone. The floor.

A baseline of the simulator (`fedrp.simulation.alone`): where nobody talks there is no protocol, and nothing to deploy.
"""

from fedrp.algorithms.base import Method
from fedrp.config.run import Resolved
from fedrp.privacy.events import Adjacency, Adversary, NothingReleased, Release, Unsupported


def _nothing_learned(_config: Resolved) -> list[Release]:
    return [
        Release(Adversary.SERVER, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.CLIENTS, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_REPLACE, Unsupported("a model is released without noise")),
    ]


FWC = Method(
    summary="federated without connection: every client alone, the floor (simulations only)",
    settings=frozenset(),
    delivers="client",
    releases=_nothing_learned,
)
