"""Record a real run: the simulator trains, and every packet that passes is kept."""

import functools

import torch

from fedrp.attacks.view import Packet, Public, Recording
from fedrp.config import RunConfig
from fedrp.host import Packets, simulated_identity
from fedrp.models import built, layout_of
from fedrp.rng import RunSeed
from fedrp.simulate import resolved, simulate
from fedrp.task import Task
from fedrp.training import Examples


def record(config: RunConfig, task: Task, data: list[Examples], low: float, high: float, classes: int) -> Recording:
    """Train `config.rounds` rounds with one entry of `data` per client, and keep the bytes."""
    packets: list[Packet] = []

    def tap(sent: Packets, replies: Packets) -> None:
        packets.extend(Packet(client, False, data) for client, data in sent.items())
        packets.extend(Packet(client, True, data) for client, data in replies.items())

    shape = tuple(data[0].x.shape[1:])
    few = Examples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))  # nobody asks how good the model is
    held = Task(task.model, [(part.x, part.y) for part in data], (few.x, few.y), task.loss, model_name=task.model_name)
    simulate(config, held, tap=tap)
    config = resolved(config, layout_of(built(task.model)).size)
    public = Public(config, task.model, task.loss, shape, classes, low, high)
    return Recording(public, tuple(packets), functools.partial(simulated_identity, RunSeed(config.seed)))
