"""Who plays in an audit: clients on whose premises the adversary decides what one of them, or its record, does."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrp.crypto.roster import Roster
from fedrp.learning.initial import initial_laws, public_initial
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective, Stack, on_device
from fedrp.learning.trainer import LocalModel, make_local_model
from fedrp.protocol.client_state import Site
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_roster, simulated_site
from fedrp.types import Vector

CANARY, CURIOUS = 0, 1  # the client whose data changes, and one that looks
PUSH = 1e3  # length of the canary's gradient: far beyond every clip and every ball


def stand_in(parameters: int) -> nn.Module:
    """A model of so many parameters: local training is replaced, so it only has to have them."""
    return nn.Linear(parameters, 1, bias=False)


@dataclass(frozen=True)
class CanaryTrainer:
    """A `Trainer` under the adversary's control: one step, of the canary only."""

    model: LocalModel
    inside: bool = True
    radial: bool = False  # along the model itself, or in a fixed direction

    def train(
        self,
        start: Stack,
        _data: Sequence[Examples],
        clients: Sequence[int],
        _round: int,
        _sgd: LocalSGD,
        objective: Objective = PLAIN,
    ) -> Stack:
        """Each client's variables after one step of the adversary's choice."""
        rows, variables = slice(None), on_device(start, self.model.device)
        weights = variables if objective.weights is None else objective.weights(variables, rows)
        gradients = torch.zeros_like(weights)
        for row, client in enumerate(clients):
            if client == CANARY and self.radial:
                gradients[row] = (-PUSH if self.inside else PUSH) * weights[row]
            elif client == CANARY and self.inside:
                gradients[row] = float(PUSH / np.sqrt(np.float32(weights.shape[1])))
        reached: Stack = (variables - objective.direction(variables, gradients, rows)).cpu().numpy()
        return reached


@functools.lru_cache(maxsize=4)
def prepared(parameters: int) -> tuple[Vector, list[Any], Vector, LocalModel]:
    """What the stand-in model starts from, in secret and in public, and the model for training."""
    factory = functools.partial(stand_in, parameters)
    model = make_local_model(factory, nn.functional.mse_loss, torch.device("cpu"), RunSeed(0))
    return *initial_laws(factory), public_initial(factory, RunSeed(0)), model


@functools.lru_cache(maxsize=1)
def roster(seed: int, clients: int) -> Roster:
    """Everyone who takes part."""
    return simulated_roster(RunSeed(seed), clients)


def site(seed: int, client: int, canary: bool, parameters: int) -> Site:
    """The premises of a client: a record without a gradient and, if it is there, one with a long gradient."""
    inputs = torch.cat([torch.zeros(1, parameters), torch.ones(int(canary), parameters)])
    return simulated_site(RunSeed(seed), client, Examples(inputs, torch.full((len(inputs), 1), -PUSH)))
