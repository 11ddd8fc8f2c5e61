"""Tasks: whatever the user brings is split without loss, or refused in one line that says what to do."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrp import RunConfig, Task
from fedrp.errors import ConfigError
from fedrp.task import split_among_clients
from helpers import TinyNet, blobs, tiny_config

# --- splitting -------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(30, 60),
    width=st.sampled_from([None, 1, 3]),
    whole=st.booleans(),
    spec=st.sampled_from(["iid", "dirichlet:5", "shards:1"]),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_used_exactly_once(count: int, width: int | None, whole: bool, spec: str, seed: int) -> None:
    """Whatever the shape and kind of targets; those that are no class labels are not split by class."""
    shape = (count,) if width is None else (count, width)
    targets = np.random.default_rng(seed).integers(0, 3, shape).astype(np.int64 if whole else np.float32)
    task = Task(TinyNet, (np.arange(count), targets), blobs(6))
    config = RunConfig(clients=3, partition=spec, seed=seed)
    if spec != "iid" and (width == 3 or not whole):
        with pytest.raises(ConfigError, match=f"partition '{spec}' splits by class, but targets are .*: use iid"):
            split_among_clients(task, config)
        return
    parts = split_among_clients(task, config)
    used = torch.cat([part.x for part in parts])
    assert sorted(used.tolist()) == list(range(count))
    for part in parts:
        assert np.array_equal(part.y.numpy(), targets[part.x.numpy()])


def test_a_column_of_labels_is_split_like_the_labels() -> None:
    x, y = blobs(90)
    config = tiny_config("fedavg", partition="shards:1", clients=3)
    flat, column = (split_among_clients(Task(TinyNet, (x, t), blobs(6)), config) for t in (y, y[:, None]))
    assert [part.x.tolist() for part in flat] == [part.x.tolist() for part in column]
