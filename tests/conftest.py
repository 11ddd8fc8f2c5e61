"""Fixtures of all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fedrp import Task
from fedrp.engines.choice import make_trainer
from fedrp.learning.trainer import Trainer
from fedrp.rng import RunSeed
from helpers import TinyNet, image_file, mounted, tiny_task

# The same examples on every machine and in every run: a failure is the change's, not the day's.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests compute with one thread: problems are tiny, and the machine may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def task() -> Task:
    return tiny_task()


@pytest.fixture
def trainer() -> Trainer:
    return make_trainer(TinyNet, torch.nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_file(tmp_path_factory.mktemp("data") / "images.npz")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k") as disk:
        yield disk
