"""Learning rates that follow the run: FedAvg's by local steps, the subspace mode's by how coarse the aggregate is.

And those of all by the schedule over rounds.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedrp import RunConfig, simulate
from fedrp.algorithms import fedavg, subspace
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import methods
from fedrp.errors import ConfigError
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import Examples, LocalSGD, Objective, Rows
from fedrp.learning.trainer import Trainer
from fedrp.rng import RunSeed
from helpers import TinyNet, blobs, tiny_config, tiny_task


@pytest.mark.parametrize(("steps", "rate"), [(1, 0.4), (10, 0.4), (20, 0.2), (40, 0.1), (500, 0.1)])
def test_fedavg_takes_longer_steps_where_a_round_has_few(steps: int, rate: float) -> None:
    assert fedavg.step_size(0.1, steps) == pytest.approx(rate)


def test_a_learning_rate_that_is_given_is_used_as_it_is() -> None:
    assert resolved(RunConfig(algorithm="fedavg"), 99).lr_rule == "steps"
    assert resolved(RunConfig(algorithm="fedavg", lr=0.1), 99).lr_rule == "fixed"
    assert resolved(RunConfig(algorithm="fedavg", lr=0.1, lr_rule="steps"), 99).lr_rule == "steps"


def test_the_rule_acts_as_the_longer_learning_rate_would() -> None:
    config = dataclasses.replace(tiny_config("fedavg"), lr=0.02, lr_rule="steps")
    longer = dataclasses.replace(config, lr=0.08, lr_rule="fixed")  # a few steps a round: four times as long
    np.testing.assert_array_equal(*(simulate(each, tiny_task()).model for each in (config, longer)))


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_rule"):
        RunConfig(algorithm="fedavg", lr_rule="cosine")


def test_few_bits_down_shorten_the_longest_steps_and_no_others() -> None:
    assert subspace.coarseness(32.0) == 1
    widths = [0.25, 0.5, 1.0, 2.0, 4.0, 32.0]
    factors = [subspace.coarseness(bits) for bits in widths]
    assert factors == sorted(factors, reverse=True)
    assert subspace.coarseness(1.0) == pytest.approx(1.383**1.5, rel=1e-3)
    short, long = 2.0, 8.0  # norms of A: far below the limit, and at it
    assert subspace.step_size(0.2, 0.9, short * subspace.coarseness(1.0), 10) == 0.2
    assert subspace.step_size(0.2, 0.9, long * subspace.coarseness(1.0), 10) == pytest.approx(0.2 / 1.6269, rel=1e-4)


# --- over rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods())
def test_every_method_follows_the_schedule(name: str) -> None:
    """In a run of one round the cosine is 1; in one of two the second round has half the learning rate."""
    for rounds in (1, 2):
        runs = [
            simulate(tiny_config(name, rounds=rounds, lr_schedule=schedule), tiny_task())
            for schedule in ("constant", "cosine")
        ]
        assert (runs[0].model.tobytes() == runs[1].model.tobytes()) == (rounds == 1)


def _halving(_variables: torch.Tensor, gradients: torch.Tensor, _rows: Rows) -> torch.Tensor:
    return gradients / 2


@pytest.mark.parametrize("rule", [None, lambda steps: 0.3 / steps])
def test_the_schedule_scales_the_rule_of_step_sizes(rule: Callable[[int], float] | None, trainer: Trainer) -> None:
    sgd, data = LocalSGD(0.05, 0.9, 8, 1), [Examples(*blobs(20))]
    start = public_initial(TinyNet, RunSeed(0))[None]
    shorter = None if rule is None else lambda steps: rule(steps) / 4
    scaled = trainer.train(start, data, [0], 1, sgd._replace(lr_scale=0.25), Objective(_halving, step_size=rule))
    as_much = trainer.train(start, data, [0], 1, sgd._replace(lr=0.0125), Objective(_halving, step_size=shorter))
    np.testing.assert_array_equal(scaled, as_much)
