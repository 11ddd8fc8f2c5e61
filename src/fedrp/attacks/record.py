"""Record a real run: the simulator trains, and every packet that passes is kept."""

import functools

from fedrp.attacks.view import Packet, Public, Recording
from fedrp.config.run import RunConfig
from fedrp.learning.task import Task
from fedrp.learning.zoo import InputShape
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_identity, simulated_run_id
from fedrp.simulation.simulate import simulate
from fedrp.types import Packets


def record(config: RunConfig, task: Task, shape: InputShape, classes: int, low: float, high: float) -> Recording:
    """Train the run and keep the bytes; the rest is what everybody knows of the images, see `Public`."""
    packets: list[Packet] = []

    def tap(sent: Packets, replies: Packets) -> None:
        packets.extend(Packet(client, data) for part in (sent, replies) for client, data in part.items())

    config = simulate(config, task, tap=tap).config
    public = Public(config, simulated_run_id(config), task.model, task.loss, shape, classes, low, high)
    return Recording(public, tuple(packets), functools.partial(simulated_identity, RunSeed(config.seed)))
