"""FWC, "federated without connection": every client trains alone. The floor.

A baseline of the simulator (`fedrp.simulation.alone`): where nobody talks there is no protocol, and nothing to deploy.
With `deliver=average` clients talk once, after the last round. That is no floor any more, but an ensemble of strangers.
"""

import dataclasses

from fedrp.algorithms.base import Method
from fedrp.algorithms.shared import mean_delivered
from fedrp.config.run import Resolved, RunConfig
from fedrp.mechanisms.delivery import averages
from fedrp.privacy.events import Adjacency, Adversary, NothingReleased, Release, Unsupported


def _resolve(config: RunConfig, _parameters: int) -> Resolved:
    return Resolved.of(dataclasses.replace(config, deliver=config.deliver or "client"))


def _learned(config: Resolved) -> list[Release]:
    if averages(config):
        return mean_delivered(config)
    return [
        Release(Adversary.SERVER, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.CLIENTS, Adjacency.CLIENT_REPLACE, NothingReleased()),
        Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_REPLACE, Unsupported("a model is released without noise")),
    ]


FWC = Method(
    summary="federated without connection: every client alone, the floor (simulations only)",
    settings=frozenset({"deliver"}),
    delivers="client",
    resolve=_resolve,
    releases=_learned,
)
