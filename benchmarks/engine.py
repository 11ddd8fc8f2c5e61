"""Images per second of the engines against a plain PyTorch loop: one thread, interleaved.

    python benchmarks/engine.py --model lenet5 --objective fedavg

Prints the median of the rates and of the ratios to the plain loop, with the smallest and largest ratio. A ratio is of
measurements next to each other, so that other load on the machine touches both, and time is that of the processor. The
plain loop has a process of its own, because engines change how memory is kept (`fedrp.engines.memory`).
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import nn

from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective
from fedrp.learning.zoo import MODELS
from fedrp.projection import kernels
from fedrp.projection.families import make_projection
from fedrp.rng import RunSeed

SHAPES = {"lenet5": (1, 28, 28), "cnn": (3, 32, 32), "resnet18": (3, 32, 32)}
DIM, BATCH = 1000, 64


def objective(name: str, start: np.ndarray) -> Objective:
    """What `fedavg` minimises, or `fedrp-subspace` with this projection."""
    if name == "fedavg":
        return PLAIN
    matrix = make_projection(name, SecretKey(bytes(32)), start.shape[1], DIM).on(torch.device("cpu"))
    base = torch.from_numpy(start)
    return Objective(
        lambda _theta, gradients, _rows: matrix.forward(gradients),
        lambda theta, rows: matrix.adjoint(theta).add_(base[rows]),
        at_once=True,
    )


def plain_loop(build: Callable[[], nn.Module], data: list[Examples], epochs: int) -> None:
    """What everyone writes first: the clients' models one after the other, with torch's own SGD."""
    for x, y in data:
        module = build()
        optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(y)), BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()


def serve(pipe: "Connection[float, None]", run: Callable[[], None]) -> None:
    """Run whenever asked, and say how long it took."""
    while True:
        pipe.recv()
        pipe.send(timed(run))


def timed(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="lenet5")
    parser.add_argument("--objective", choices=("fedavg", "sign", "gaussian"), default="fedavg")
    parser.add_argument("--engines", default="sequential,stacked:1,stacked:2,stacked:4,stacked:8")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    kernels.set_threads(1)
    shape, clients = SHAPES[given.model], given.clients

    def build() -> nn.Module:
        return MODELS[given.model].build(shape, 10)

    data = [Examples(torch.randn(given.images, *shape), torch.randint(0, 10, (given.images,))) for _ in range(clients)]
    sgd = LocalSGD(lr=0.01, momentum=0.9, batch_size=BATCH, epochs=1, grad_clip=1.0)
    here, there = multiprocessing.Pipe()
    loop = multiprocessing.get_context("fork").Process(
        target=serve, args=(there, lambda: plain_loop(build, data, 1)), daemon=True
    )
    loop.start()
    runs: dict[str, Callable[[], object]] = {}
    for engine in given.engines.split(","):
        trainer = make_trainer(build, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0), engine)
        model = trainer.model.layout.flatten(trainer.model.module)
        goal = objective(given.objective, np.repeat(model[None], clients, axis=0))
        width = len(model) if goal.weights is None else DIM
        start = np.repeat(model[None], clients, axis=0) if goal.weights is None else np.zeros((clients, width), "f4")
        runs[engine] = lambda t=trainer, s=start, g=goal: t.train(s, data, range(clients), 1, sgd, g)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ("plain loop", *runs)}
    for repeat in range(given.repeats + 1):
        here.send(None)
        taken_by = {"plain loop": here.recv()} | {name: timed(run) for name, run in runs.items()}
        for name, own in taken_by.items() if repeat else ():  # the first warms up
            seconds[name].append(own)
    for name, taken in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["plain loop"], taken, strict=True)]
        rate = clients * given.images / statistics.median(taken)
        print(
            f"{name:12} {rate:8.0f} images/s   {statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
