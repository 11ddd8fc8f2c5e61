"""Learning-rate schedules: pure functions of the round."""

import pytest
import torch

from fedrp import RunConfig
from fedrp.config.schedule import LR_SCHEDULES, lr_scale
from fedrp.errors import ConfigError


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_cosine_is_that_of_torch(rounds: int) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, rounds)
    for round_ in range(1, rounds + 1):
        assert lr_scale("cosine", round_, rounds) == pytest.approx(optimiser.param_groups[0]["lr"])
        optimiser.step()
        reference.step()


def test_warm_up_takes_a_tenth_of_the_rounds() -> None:
    """Four of forty, then the cosine of those that are left."""
    scales = [lr_scale("warmup-cosine", round_, 40) for round_ in range(1, 41)]
    assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales[4:] == [lr_scale("cosine", round_, 36) for round_ in range(1, 37)]


@pytest.mark.parametrize("name", LR_SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 2, 9, 10, 11, 1000])
def test_no_round_stands_still_or_goes_beyond_the_learning_rate(name: str, rounds: int) -> None:
    scales = [lr_scale(name, round_, rounds) for round_ in range(1, rounds + 1)]
    assert min(scales) > 0
    assert max(scales) <= 1


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown lr_schedule 'cosin', did you mean 'cosine'"):
        RunConfig(lr_schedule="cosin")
