"""The simulator of this package on the same task, a worker for each core. Runs where fedrp is installed."""

import time

import peer_task

from fedrp import RunConfig, Speed, Task
from fedrp.simulation.result import RoundRecord
from fedrp.simulation.simulate import simulate


def config_of(size: peer_task.Size) -> RunConfig:
    return RunConfig(
        algorithm="fedavg",
        clients=size.clients,
        rounds=size.rounds,
        batch_size=size.batch,
        lr=peer_task.LEARNING_RATE,
        momentum=peer_task.MOMENTUM,
        grad_clip=0.0,  # the peers have no limit either
    )


def task_of(size: peer_task.Size) -> Task:
    images, labels = peer_task.data(size.clients, size.examples)
    clients = list(zip(images, labels, strict=True))
    return Task(peer_task.lenet5, clients, (images[0], labels[0]), model_name="lenet5")


def main() -> None:
    size = peer_task.size_of()
    first: list[float] = []

    def on_round(record: RoundRecord, _model: object) -> None:
        if not first:  # evaluation and what follows it come after the round
            first.append(time.monotonic() - record.seconds - record.evaluation_seconds)

    result = simulate(config_of(size), task_of(size), Speed(workers=size.cores), on_round=on_round)
    peer_task.say(first[0], [record.seconds for record in result.records])


if __name__ == "__main__":
    main()
