"""FedProx (Li et al. 2020) from outside the package: local training is pulled towards the common model w^t.

Each client minimises f_i(w) + mu/2 ||w - w^t||^2, and the server averages. mu is the setting `proximal`.
"""

from collections.abc import Sequence

import torch

import fedrp
from fedrp.algorithms.base import EXCHANGE_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.server_side import ServerSide, full_vector, mean_only
from fedrp.algorithms.shared import vectors_released
from fedrp.learning.objective import Objective, Rows, on_device


def latest(_local: Local, client: Participant) -> ClientState:
    aggregate = client.history[-1].aggregate
    return client.state if aggregate is None else ClientState(aggregate)


def train(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    common = stacked([latest(local, client).model for client in clients])
    anchor = on_device(common, local.device)

    def gradient(weights: torch.Tensor, gradients: torch.Tensor, rows: Rows) -> torch.Tensor:
        return gradients + local.config.proximal * (weights - anchor[rows])

    return [Upload(ClientState(model), model) for model in local.train(common, Objective(gradient))]


FEDPROX = Algorithm(
    summary="FedAvg with a pull towards the common model",
    settings=EXCHANGE_SETTINGS | {"proximal"},
    delivers="consensus",
    client=ClientSide(lambda _config, initial: ClientState(initial), train, latest),
    server=ServerSide("aggregate", full_vector, mean_only),
    releases=vectors_released,  # who learns what: full vectors, or under masks their sums
)
fedrp.register("my-fedprox", FEDPROX)

if __name__ == "__main__":
    config = fedrp.RunConfig(algorithm="my-fedprox", proximal=0.1, clients=5, rounds=3, partition="dirichlet:0.3")
    print(f"{fedrp.simulate(config, fedrp.named_task(config)).accuracy:.1f} %")
