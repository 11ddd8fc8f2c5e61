"""Flower's simulation with Ray: its own FedAvg strategy, an actor for each core, one torch thread in each."""

import json
import os
from collections.abc import Iterable

import peer_task
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

# Actors import this file anew: what they must know comes with the environment.
SIZE = peer_task.Size(**json.loads(os.environ["PEER_SIZE"])) if "PEER_SIZE" in os.environ else peer_task.size_of()
CLOCK = peer_task.Clock()
client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    images, labels = peer_task.data(SIZE.clients, SIZE.examples)
    client = int(context.node_config["partition-id"])
    module = peer_task.lenet5()
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    peer_task.train(module, images[client], labels[client], SIZE.batch)
    metrics = MetricRecord({"num-examples": len(labels[client])})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg with a clock: a round goes from the choice of clients to the mean."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        CLOCK.begin()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrived = list(replies)
        if len(arrived) != SIZE.clients or any(reply.has_error() for reply in arrived):
            raise RuntimeError(f"{len(arrived)} replies of {SIZE.clients}, or some of them errors")
        result = super().aggregate_train(server_round, arrived)
        CLOCK.end()
        return result


@server_app.main()
def main(grid: Grid, _context: Context) -> None:
    strategy = TimedFedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=SIZE.clients)
    strategy.start(grid, ArrayRecord(peer_task.lenet5().state_dict()), num_rounds=SIZE.rounds)


if __name__ == "__main__":
    os.environ["PEER_SIZE"] = json.dumps(SIZE._asdict())
    backend: BackendConfig = {
        "init_args": {"num_cpus": SIZE.cores, "logging_level": "error"},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app, client_app, SIZE.clients, backend_config=backend)
    CLOCK.say()
