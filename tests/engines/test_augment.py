"""Augmentation: images as cut and mirrored by hand, drawn per image, the same whoever computes them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from fedrp import RunConfig, RunResult, Speed, Task, simulate
from fedrp.engines.augment import taken
from fedrp.engines.choice import make_trainer
from fedrp.engines.descent import batches
from fedrp.errors import ConfigError
from fedrp.learning.objective import Examples, LocalSGD
from fedrp.learning.pixels import Pixels, Scale
from fedrp.rng import RunSeed
from fedrp.simulation.result import RoundRecord
from helpers import tiny_config, tiny_task

AUGMENT = "flip-crop"
VERSIONS = 2 * 9 * 9
SCALE = Scale((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
PLAIN = LocalSGD(0.05, 0.9, 8, 2)
MOVED = PLAIN._replace(augment=AUGMENT)


def raw(count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(1, 256, (count, 3, 8, 10), dtype=np.uint8))


def examples(count: int, seed: int = 0) -> Examples:
    return Examples(Pixels(raw(count, seed), SCALE), torch.arange(count) % 3)


class Net(nn.Sequential):
    """A convolution that sees where things are."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 8, 3))


def cut_by_hand(image: np.ndarray, mirrored: int, top: int, left: int) -> np.ndarray:
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    cut = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return cut[:, :, ::-1] if mirrored else cut


@pytest.mark.parametrize("as_bytes", [True, False])
def test_every_version_is_a_cut_of_the_padded_image(as_bytes: bool) -> None:
    """All 162 versions, each of another image, mixed."""
    count = 5
    images = raw(count)
    data = Examples(Pixels(images, SCALE) if as_bytes else images.float(), torch.arange(count))
    order = torch.from_numpy(np.random.default_rng(1).permutation(VERSIONS))
    index = order % count
    batch = taken(data, order * count + index, AUGMENT)
    assert torch.equal(batch.y, index)
    seen = batch.x.raw if isinstance(batch.x, Pixels) else batch.x
    assert seen.dtype == (torch.uint8 if as_bytes else torch.float32)
    for version, own, found in zip(order.tolist(), index.tolist(), seen.numpy(), strict=True):
        expected = cut_by_hand(images[own].numpy(), version % 2, version // 2 % 9, version // 18)
        np.testing.assert_array_equal(found, expected)


def test_the_middle_version_is_the_image_itself() -> None:
    data = examples(4)
    middle = 2 * (4 * 9 + 4)  # four pixels of padding skipped each way, not mirrored
    batch = taken(data, torch.arange(4) + 4 * middle, AUGMENT)
    assert torch.equal(batch.x.floats(), data.x.floats())


def test_bytes_become_the_numbers_of_their_black_border() -> None:
    """A corner that comes from the padding is black, not the mean colour."""
    corner = taken(examples(1), torch.tensor([0]), AUGMENT).x.floats()[0, :, 0, 0]
    torch.testing.assert_close(corner, -torch.tensor(SCALE.mean) / torch.tensor(SCALE.std))


def test_versions_are_drawn_evenly_anew_each_round_and_epoch_and_orders_stay() -> None:
    data, seed = examples(4000), RunSeed(3)
    plain, moved, later = (
        torch.cat(batches(seed, [data], [7], round_, sgd)[0]) for round_, sgd in ((2, PLAIN), (2, MOVED), (3, MOVED))
    )
    assert torch.equal(moved % 4000, plain)
    first, second = (moved // 4000).split(4000)
    counts = torch.bincount(moved // 4000, minlength=VERSIONS)
    assert len(counts) == VERSIONS
    assert 1e-3 < chisquare(counts.numpy()).pvalue < 1 - 1e-3
    again = torch.empty(4000, dtype=torch.long)
    again[plain[4000:]] = second  # by image
    by_image = torch.empty(4000, dtype=torch.long)
    by_image[plain[:4000]] = first
    assert 5 < (again == by_image).sum() < 60  # 4000 / 162 = 24.7, deviation 5
    assert not torch.equal(moved, later)


def test_both_engines_see_the_same_images() -> None:
    data = [examples(size, seed) for seed, size in enumerate((20, 33, 8, 5))]
    reached = []
    for engine in ("sequential", "stacked:4"):
        trainer = make_trainer(Net, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0), engine)
        start = np.tile(trainer.model.layout.flatten(trainer.model.module), (4, 1))
        reached.append(trainer.train(start, data, [5, 0, 2, 9], 3, MOVED))
        unmoved = trainer.train(start, data, [5, 0, 2, 9], 3, PLAIN)
        assert np.abs(reached[-1] - unmoved).max() > 1e-3
    np.testing.assert_allclose(*reached, atol=2e-6)


# --- runs ------------------------------------------------------------------------------------------------------------


def image_task() -> Task:
    parts = [(Pixels(raw(count, seed), SCALE), torch.arange(count) % 3) for seed, count in enumerate((48, 30))]
    return Task(Net, *parts)


def config(algorithm: str = "fedavg", **changes: object) -> RunConfig:
    return dataclasses.replace(tiny_config(algorithm), augment=AUGMENT, lr_schedule="cosine", **changes)


def outcome(result: RunResult) -> tuple[bytes, list[object]]:
    return result.model.tobytes(), [line["accuracy"] for line in result.history]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrp-subspace", "fwc"])
def test_a_run_is_the_same_with_any_workers_and_after_it_was_stopped(algorithm: str, tmp_path: Path) -> None:
    task, whole = image_task(), config(algorithm)
    expected = outcome(simulate(whole, task))
    assert outcome(simulate(whole, task, Speed(workers=2))) == expected

    def stop(record: RoundRecord, _model: object) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(whole, task, out=tmp_path / "run", on_round=stop)
    assert outcome(simulate(whole, task, out=tmp_path / "run", resume=True)) == expected
    assert outcome(simulate(dataclasses.replace(whole, augment="none"), task)) != expected


def test_what_is_no_image_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^augment='flip-crop' is for images .* are \(20, 6\) float32: use .*none'$"):
        simulate(config(), tiny_task())
    parts = [(x, torch.zeros(8)) for x in (raw(8), torch.ones(8, 1, 4, 4, dtype=torch.long))]
    with pytest.raises(ConfigError, match=r"client 1 are \(8, 1, 4, 4\) int64"):
        simulate(config(clients=2), Task(Net, parts, parts[0]))


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown augment 'flip', .*known: none, flip-crop"):
        RunConfig(augment="flip")
