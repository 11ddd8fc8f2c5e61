"""Estimated sensitivity: distances that are known where training is known, and always labelled as an estimate."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from fedrp import Task
from fedrp.auditing.sensitivity import estimate_sensitivity
from fedrp.cli import main
from fedrp.errors import ConfigError
from fedrp.privacy.sensitivity import Basis
from helpers import tiny_config, tiny_task

STEP = {"rounds": 1, "momentum": 0.0, "batch_size": 1000, "lr": 0.1, "clients": 2}


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)


def mean_output(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()  # its gradient is the mean of the inputs


def two_kinds(size: int) -> Task:
    """All records of client 0 are (3, 0), all of client 1 are (0, 4): an exchanged record is at distance 5."""
    parts = [(np.tile(row, (size, 1)).astype(np.float32), np.zeros(size, np.float32)) for row in ([3, 0], [0, 4])]
    return Task(Slope, parts, parts[0], loss=mean_output)


@pytest.mark.parametrize("size", [4, 10])
def test_where_a_step_is_known_so_is_the_distance(size: int) -> None:
    """One step of 0.1 along the mean of `size` records, of which one moves by 5: the model moves by 0.5 / size."""
    estimate = estimate_sensitivity(tiny_config("fwc", **STEP), two_kinds(size), neighbours=3)
    assert estimate.sensitivity.bound == pytest.approx(0.5 / size, rel=1e-5)
    (spread,) = estimate.rounds
    assert spread.smallest == pytest.approx(spread.largest, rel=1e-4)
    assert spread.deviation == pytest.approx(0.0, abs=1e-6)
    assert estimate.sensitivity.basis is Basis.ESTIMATED


def test_distances_add_up_over_rounds_of_a_linear_loss() -> None:
    config = tiny_config("fwc", **{**STEP, "rounds": 3})
    means = [spread.mean for spread in estimate_sensitivity(config, two_kinds(5), neighbours=2).rounds]
    assert means == pytest.approx([0.1, 0.2, 0.3], rel=1e-4)


def test_it_is_a_function_of_its_arguments_and_has_a_spread() -> None:
    config = tiny_config("fedrp", rounds=2)
    one, again = (estimate_sensitivity(config, tiny_task(), neighbours=5) for _ in range(2))
    assert one == again
    last = one.rounds[-1]
    assert 0 < last.smallest < last.mean < last.largest == one.sensitivity.bound
    assert last.deviation > 0
    assert one.norm_floor is not None
    assert one.norm_floor.basis is Basis.ESTIMATED
    assert one.as_json()["alpha"] == one.sensitivity.bound / one.norm_floor.bound


def test_the_number_of_workers_changes_nothing() -> None:
    config = tiny_config("fedrp", rounds=1)
    one, two = (estimate_sensitivity(config, tiny_task(), neighbours=9, workers=workers) for workers in (1, 2))
    assert one == two


def test_a_record_can_be_removed() -> None:
    estimate = estimate_sensitivity(tiny_config("fwc", **STEP), two_kinds(4), neighbours=2, change="remove")
    assert estimate.sensitivity.bound == pytest.approx(0.0, abs=1e-6)  # the mean of the rest is the same
    assert "removed" in estimate.sensitivity.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"change": "swap"}, "unknown change 'swap'"),
        ({"neighbours": 0}, "neighbours=0"),
        ({"client": 7}, "client=7"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_sensitivity(tiny_config("fedrp"), tiny_task(), **changes)


def test_the_command_line_says_that_it_is_an_estimate(images: object, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["sensitivity", f"--dataset=npz:{images}", "--clients=2", "--rounds=2", "--workers=1"]
    main([*options, "--neighbours=2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["basis"] == Basis.ESTIMATED.value
    assert len(told["rounds"]) == 2
    main([*options, "--neighbours=2"])
    printed = capsys.readouterr().out
    assert "ESTIMATED" in printed
    assert "an estimate is no bound" in printed


@pytest.mark.parametrize("option", ["--device=cpu", "--out=here", "--resume", "--threads=3", "--dim=5", "--ball=1"])
def test_the_command_takes_no_option_that_it_would_ignore(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sensitivity", option])
    assert caught.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


def test_plain_training_is_estimated_whatever_the_algorithm() -> None:
    estimates = [estimate_sensitivity(tiny_config(name), tiny_task(), neighbours=2) for name in ("fwc", "fedrp")]
    assert estimates[0] == estimates[1]
