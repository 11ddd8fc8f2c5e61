"""Images stay bytes until a batch of them is taken, and are then the numbers that they always were."""

import numpy as np
import pytest
import torch

from fedrp import RunConfig, named_task
from fedrp.learning.data import Dataset, load_dataset
from fedrp.learning.holdings import Holdings
from fedrp.learning.objective import Examples
from fedrp.learning.pixels import Pixels, Scale, floats
from fedrp.learning.task import examples, split_among_clients
from fedrp.learning.trainer import batch_input
from fedrp.simulation.runfolder import Fingerprint

CPU = torch.device("cpu")
LABELS = np.zeros(1, np.int64)


@pytest.mark.parametrize("shape", [(256, 1, 1, 1), (85, 3, 2, 2), (64, 4)])
def test_numbers_are_those_of_the_whole_set_normalised_at_once(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    mean, std = (tuple(generator.uniform(0.1, 0.9, shape[1]).tolist()) for _ in range(2))
    x = np.resize(np.arange(256, dtype=np.uint8), shape)
    expected = Dataset("some", x, LABELS, x, LABELS, mean, std, 10).normalised(x)
    pixels = Pixels(torch.from_numpy(x), Scale(mean, std))
    assert pixels.floats().numpy().tobytes() == expected.tobytes()
    chosen = torch.tensor([3, 60, 3])
    assert batch_input(pixels[chosen], CPU).contiguous().numpy().tobytes() == expected[chosen].tobytes()


def test_clients_of_a_named_task_hold_bytes_that_share_one_memory() -> None:
    config = RunConfig(clients=7, train_examples=300)
    parts = split_among_clients(named_task(config), config)
    raw = [part.x.raw for part in parts if isinstance(part.x, Pixels)]
    assert len(raw) == 7
    assert {tensor.dtype for tensor in raw} == {torch.uint8}
    assert len({tensor.untyped_storage().data_ptr() for tensor in raw}) == 1
    assert raw[0].untyped_storage().nbytes() == 300 * 28 * 28


def test_a_part_of_a_named_task_is_a_source_of_its_own() -> None:
    x, y = named_task(RunConfig()).train  # type: ignore[misc]
    data = load_dataset("mnist-mini")
    part = examples((x[:5], y[:5]), "the training set")
    assert floats(part.x).numpy().tobytes() == data.normalised(data.train_x[:5]).tobytes()


def test_workers_near_and_far_get_the_same_bytes() -> None:
    config = RunConfig(clients=4, train_examples=50)
    data = dict(enumerate(split_among_clients(named_task(config), config)))
    for share in (Holdings(data).near([1, 3]), Holdings(data).far([1, 3])):
        for client in (1, 3):
            assert isinstance(share[client].x, Pixels)
            assert torch.equal(floats(share[client].x), floats(data[client].x))
            assert torch.equal(share[client].y, data[client].y)


def test_run_folders_know_data_by_their_numbers_however_these_are_kept() -> None:
    """So a run that was begun when all numbers were made at once is resumed."""
    config = RunConfig(clients=2, train_examples=9000)
    parts = split_among_clients(named_task(config), config)
    as_numbers = [Examples(floats(part.x), part.y) for part in parts]
    layout = type("Layout", (), {"names": (), "shapes": ()})()
    assert Fingerprint.of(parts, parts[0], layout) == Fingerprint.of(as_numbers, as_numbers[0], layout)
