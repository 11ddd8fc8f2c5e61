"""FedADMM: consensus ADMM on full vectors.

w_i  <- argmin f_i(w) + y_i'(w - zbar) + rho/2 ||w - zbar||^2       (local SGD, from the client's last w_i)
zbar <- mean(w_i + y_i / rho)                                       (server)
y_i  <- y_i + rho (w_i - zbar)                                      (when the client learns zbar)
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from fedrp.algorithms import servers
from fedrp.algorithms.base import EXCHANGE_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.shared import vectors_released
from fedrp.config.run import Resolved, RunConfig
from fedrp.learning.objective import Objective, Rows, on_device
from fedrp.types import Vector

# Weak enough that ten local steps get somewhere, strong enough that clients agree (docs/results.md).
DEFAULT_RHO = 0.1


def _resolve(config: RunConfig, _parameters: int) -> Resolved:
    return Resolved.of(config if config.rho is not None else dataclasses.replace(config, rho=DEFAULT_RHO))


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial, np.zeros_like(initial))


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    rho = np.float32(local.config.rho)
    consensus = [_consensus(client) for client in clients]
    duals = stacked(
        [client.state.carry + rho * (client.state.model - z) for client, z in zip(clients, consensus, strict=True)]
    )
    dual, anchor = on_device(duals, local.device), on_device(stacked(consensus), local.device)

    def gradient(weights: torch.Tensor, gradients: torch.Tensor, rows: Rows) -> torch.Tensor:
        return gradients + dual[rows] + float(rho) * (weights - anchor[rows])

    models = local.train(stacked([client.state.model for client in clients]), Objective(gradient))
    return [Upload(ClientState(model, dual), model + dual / rho) for model, dual in zip(models, duals, strict=True)]


def _consensus(client: Participant) -> Vector:
    latest = client.history[-1].aggregate
    return client.state.model if latest is None else latest  # at first, everyone's model is the consensus


def _finish(_local: Local, client: Participant) -> ClientState:
    return ClientState(_consensus(client), client.state.carry)


FEDADMM = Algorithm(
    summary="consensus ADMM on full vectors",
    settings=EXCHANGE_SETTINGS | {"rho"},
    delivers="consensus",
    resolve=_resolve,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDADMM,
    releases=vectors_released,
)
