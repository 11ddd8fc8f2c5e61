"""What a record adds to a step is a function of that record alone, bit for bit, and errors over it show nowhere."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedrp.crypto.secret import SecretKey
from fedrp.engines.per_example import Block, PerExample, per_example
from fedrp.errors import ConfigError
from fedrp.learning.layout import layout_of
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Loss
from fedrp.learning.pixels import Inputs
from fedrp.learning.trainer import LocalModel
from fedrp.learning.zoo import MODELS
from fedrp.records.steps import LocalSteps
from fedrp.records.training import RecordNoise, SiteRound

CPU = torch.device("cpu")
KEY = SecretKey(bytes(range(32)))
CLASSES, PLACES, MOST = 5, 4, 9
ONE_STEP = LocalSGD(lr=1.0, momentum=0.0, batch_size=64, epochs=1)


class Attends(nn.Module):
    """A transformer layer, with dropout as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.layer(x).mean(dim=1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, CLASSES))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (1, 8, 8)),
    "lenet5": (lambda: MODELS["lenet5"].build((1, 28, 28), CLASSES), (1, 28, 28)),
    "cnn": (lambda: MODELS["cnn"].build((1, 8, 8), CLASSES), (1, 8, 8)),
    "transformer": (Attends, (6, 8)),
}


def local(module: nn.Module, loss: Loss = nn.functional.cross_entropy) -> LocalModel:
    return LocalModel(module, loss, layout_of(module), CPU)


def rows(model: LocalModel, data: Examples, places: int = PLACES, seed: int = 3) -> torch.Tensor:
    weights = torch.from_numpy(model.layout.flatten(model.module))
    blocks = per_example(model).gradients(weights, data.x, data.y, places, seed)
    return torch.cat([block.rows[: block.used].clone() for block in blocks][::-1])


def drawn(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(MOST, *shape, generator=rng) * scale, torch.randint(0, CLASSES, (MOST,), generator=rng))


# --- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_that_of_its_record_whatever_the_others_are(name: str) -> None:
    """Of the others those after it may be missing, those before it leave their places empty: zeros."""
    build, shape = KINDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(1)
        model = local(build())
    data = drawn(0, shape)
    expected = rows(model, data)

    @settings(max_examples=12, deadline=None)
    @given(st.integers(0, MOST - 1), st.lists(st.booleans(), min_size=MOST, max_size=MOST), st.integers(1, 99))
    def hold(own: int, there: list[bool], seed: int) -> None:
        others = drawn(seed, shape, scale=10.0)
        x, y = others.x, others.y
        x[~torch.tensor(there)], y[~torch.tensor(there)] = 0, 0
        x[own], y[own] = data.x[own], data.y[own]
        count = max(own + 1, *(place + 1 for place, is_there in enumerate(there) if is_there), 1)
        assert torch.equal(rows(model, Examples(x[:count], y[:count]))[own], expected[own])

    hold()


@dataclass(frozen=True)
class Unpadded:
    """Microbatches that are as large as there are records, as they once were."""

    own: PerExample

    def gradients(self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, _places: int, seed: int) -> Iterator[Block]:
        return self.own.gradients(weights, x, y, len(y), seed)


class Attack:
    """The start of a server that knows three of four records: two of them are within a rounding of many ReLUs' edges.

    A unit that one way of rounding activates and another does not has a gradient or none. Units that go the wrong way
    are switched off, as the server can see beforehand which do.
    """

    units, others = 400, 3

    def __init__(self, padded: bool) -> None:
        rng = torch.Generator().manual_seed(5)
        self.x = torch.randn(self.others + 1, 301, generator=rng)
        self.hidden, self.output = nn.Linear(301, 2 * self.units), nn.Linear(2 * self.units, 1, bias=False)
        model = local(nn.Sequential(self.hidden, nn.ReLU(), self.output), lambda outputs, _: 1e6 * outputs.mean())
        self.model, self.gradients = model, per_example(model) if padded else Unpadded(per_example(model))
        with torch.no_grad():
            self.hidden.weight.copy_(torch.randn(2 * self.units, 301, generator=rng))
            for record in (0, 1):  # each with units of its own, which are off at the other one
                own = slice(record * self.units, (record + 1) * self.units)
                ahead = self.hidden.weight[own] @ (self.x[record] - self.x[1 - record])
                self.hidden.weight[own] *= ahead.sign()[:, None]
                self.hidden.bias[own] = -(self.hidden.weight[own] @ self.x[record])
            self.output.weight.fill_(1.0)
            without, with_it = (self.rows(self.others + more)[:2, -2 * self.units :] != 0 for more in (0, 1))
            self.fitting = (without != with_it).any(dim=0)
            self.output.weight.copy_(self.fitting.float())

    def rows(self, count: int) -> torch.Tensor:
        (block,) = self.gradients.gradients(self.weights, self.x[:count], torch.zeros(count), self.others + 2, 0)
        return block.rows[:count]

    @property
    def weights(self) -> torch.Tensor:
        return torch.from_numpy(self.model.layout.flatten(self.model.module))

    def moved(self) -> float:
        """How far the fourth record moves the sum of a step, in units of the clip."""
        steps, sums = LocalSteps(self.others + 1, self.others + 1, 1, 1), []
        for count in (self.others, self.others + 1):
            data, own = Examples(self.x[:count], torch.zeros(count)), RecordNoise(steps, 1.0, 0.0, 0.0, KEY)
            site = SiteRound(self.gradients, 32, data, own, ONE_STEP, PLAIN, 0)
            mean, _ = site.noised_mean(self.weights, 0, 1.0, self.model.layout.size)
            sums.append(mean * steps.expected)
        return float(np.linalg.norm(sums[1] - sums[0]))


def test_no_start_lets_a_record_move_the_gradients_of_others() -> None:
    attack = Attack(padded=True)
    assert not attack.fitting.any()
    attack.output.weight.data.fill_(1.0)
    assert attack.moved() <= 1 + 1e-9


def test_the_attack_works_where_shapes_depend_on_the_number_of_records() -> None:
    attack = Attack(padded=False)
    if not attack.fitting.any():
        pytest.skip("this machine rounds microbatches of three and of four alike")
    assert attack.moved() > 1.5


# --- errors ----------------------------------------------------------------------------------------------------------


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that raises an error for a label beyond the classes."""
    return nn.functional.cross_entropy(outputs, targets)


def test_a_record_that_the_loss_raises_for_counts_as_zero_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    build, shape = KINDS["perceptron"]
    model, data = local(build(), picky), drawn(0, shape)
    expected = rows(model, data)
    assert not caplog.records
    wrong = data.y.clone()
    wrong[[1, 6]] = 77
    found = rows(model, Examples(data.x, wrong))
    expected[[1, 6]] = 0.0
    assert torch.equal(found, expected)
    assert re.search(r"raised \w+Error for some examples, which count as zero", caplog.text)
    assert "77" not in caplog.text


def test_a_record_that_the_loss_raises_for_moves_the_sum_as_one_that_is_not_there() -> None:
    build, shape = KINDS["perceptron"]
    model, data, steps = local(build(), picky), drawn(0, shape), LocalSteps(MOST, MOST, 1, 1)
    wrong = Examples(data.x, torch.cat([data.y[:-1], torch.tensor([77])]))
    sums = []
    for part in (wrong, Examples(data.x[:-1], data.y[:-1])):
        own = RecordNoise(steps, 1.0, 0.0, 0.0, KEY)
        site = SiteRound(per_example(model), PLACES, part, own, ONE_STEP, PLAIN, 0)
        mean, _ = site.noised_mean(torch.from_numpy(model.layout.flatten(model.module)), 0, 1.0, model.layout.size)
        sums.append(mean)
    assert np.array_equal(*sums)


def test_a_model_that_fails_for_whatever_example_is_refused_without_a_look_at_one() -> None:
    def never(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum() if float(outputs.sum()) > 0 else -outputs.sum()

    build, shape = KINDS["perceptron"]
    none = Examples(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64))
    for data in (none, drawn(0, shape)):
        with pytest.raises(ConfigError, match=r"fail by 'func', even for an example of zeros: .*'loop' takes any"):
            rows(local(build(), never), data)
