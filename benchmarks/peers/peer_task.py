"""The task that all entrants train: FedAvg on LeNet-5. Needs torch alone, as it runs in the peers' environments.

An entrant calls `say` with one line of JSON: when its first round began, by the clock that all processes of a machine
share, and what each round took.
"""

import argparse
import functools
import json
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

CLASSES = 10
RESULT = "RESULT "  # before the line of JSON


class Size(NamedTuple):
    """How large the task is, and what computes it."""

    clients: int
    examples: int  # of each client
    rounds: int  # with the warm-up
    batch: int
    cores: int


class Clock:
    """When rounds began and ended."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def begin(self) -> None:
        self.began.append(time.monotonic())

    def end(self) -> None:
        self.ended.append(time.monotonic())

    def say(self) -> None:
        rounds = [end - start for start, end in zip(self.began, self.ended, strict=True)]
        say(self.began[0], rounds)


def say(first_round: float, rounds: list[float]) -> None:
    print(RESULT + json.dumps({"first_round": first_round, "rounds": rounds}), flush=True)


LEARNING_RATE, MOMENTUM = 0.01, 0.9


def size_of(arguments: list[str] | None = None) -> Size:
    parser = argparse.ArgumentParser()
    for name in Size._fields:
        parser.add_argument(f"--{name}", type=int, required=True)
    return Size(**vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments)))


def lenet5() -> nn.Module:
    """The module that `fedrp.learning.zoo.lenet5` builds for 28x28 images."""
    return nn.Sequential(
        *[nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)],
    )


@functools.cache
def data(clients: int, examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (clients, examples, 1, 28, 28) and labels: a pattern for each class under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 1, 28, 28, generator=generator)
    labels = torch.randint(CLASSES, (clients, examples), generator=generator)
    return patterns[labels] + torch.randn(clients, examples, 1, 28, 28, generator=generator), labels


def train(module: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> None:
    """An epoch, for peers that leave the loop to their users."""
    optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    module.train()
    for rows in torch.split(torch.randperm(len(y)), batch):
        optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
