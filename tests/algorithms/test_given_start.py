"""A start that the server may know: what one upload then tells of the secret matrix, and what is refused for it."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedrp import Task, simulate
from fedrp.algorithms.given_start import given_share, require_hidden_start
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.flower.task import ClientContext, LocalTask
from fedrp.learning.zoo import MODELS
from fedrp.projection.families import FAMILIES, make_projection
from flower_helpers import FlowerFederation, tiny_load
from helpers import TinyNet, tiny_config, tiny_task

PRETRAINED = TinyNet()


def pretrained() -> nn.Module:
    return copy.deepcopy(PRETRAINED)


def given_task() -> Task:
    return dataclasses.replace(tiny_task(), model=pretrained)


# --- why -------------------------------------------------------------------------------------------------------------


def matched(sizes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each wanted size, the place of the nearest one."""
    order = np.argsort(sizes)
    right = np.clip(np.searchsorted(sizes[order], wanted), 1, len(sizes) - 1)
    left = right - 1
    nearer = np.abs(sizes[order][left] - wanted) < np.abs(sizes[order][right] - wanted)
    return order[np.where(nearer, left, right)]


def found_rows(start: np.ndarray, z: np.ndarray, ratio: int) -> np.ndarray:
    """The matrix as an attacker finds it: which coordinates, with which signs, have the sum that was sent."""
    m = z.size
    found = np.zeros((m, start.size))
    if ratio == 1:
        places = matched(np.abs(start), np.abs(z))
        found[np.arange(m), places] = np.sign(z) * np.sign(start[places])
        return found
    first, second = start[:m], start[m:]
    sums = np.stack([first[:, None] + second, first[:, None] - second]).ravel()
    places = matched(np.abs(sums), np.abs(z))
    turned = np.sign(z) * np.sign(sums[places])
    minus, pair = np.divmod(places, m * m)
    found[np.arange(m), pair // m] = turned
    found[np.arange(m), m + pair % m] = turned * np.where(minus, -1, 1)
    return found


@pytest.mark.parametrize(
    ("ratio", "moved", "at_least"), [(1, 0.0, 1.0), (2, 0.0, 0.99), (1, 1e-6, 0.95), (2, 1e-6, 0.8)]
)
def test_one_upload_of_a_known_start_tells_the_matrix_where_rows_are_short(
    ratio: int, moved: float, at_least: float
) -> None:
    """Such a run is refused: see below. `moved` is how far training went, relative to the norm of the start."""
    n, rng = 400, np.random.default_rng(0)
    projection = make_projection("sign", SecretKey(b"k" * 32), n, n // ratio)
    start = rng.normal(0, 0.1, n).astype(np.float32)
    direction = rng.normal(size=n)
    model = start + moved * np.linalg.norm(start) * direction / np.linalg.norm(direction)
    z = projection.forward(model.astype(np.float32)).astype(np.float64)
    truth = projection.adjoint(np.eye(n // ratio, dtype=np.float32))
    right = (found_rows(start.astype(np.float64), z, ratio) == truth).all(axis=1)
    assert right.mean() >= at_least


# --- what is refused -------------------------------------------------------------------------------------------------

WHY = r"projection='sign' with dim=12 is not safe for a model that starts from given .*\(100% .*n/m = 6.92 is below 24"


def test_a_run_whose_matrix_a_given_start_would_tell_is_refused_with_ways_out() -> None:
    config = tiny_config("fedrp", projection="sign")
    ways = "use projection='gaussian', or rotation='haar', or dim=3 at most"
    with pytest.raises(ConfigError, match=rf"^{WHY}; {ways}$"):
        simulate(config, given_task())
    for way_out in ({"projection": "gaussian"}, {"rotation": "haar"}, {"dim": 3}):
        assert simulate(dataclasses.replace(config, **way_out), given_task()).accuracy > 0


def test_a_site_that_is_to_start_from_given_weights_refuses_before_it_says_hello(tmp_path: Path) -> None:
    def load(context: ClientContext) -> LocalTask:
        task = tiny_load(context)
        return dataclasses.replace(task, model=pretrained) if context.index == 2 else task

    run = FlowerFederation(tmp_path, tiny_config("fedrp", projection="sign"), load, min_clients=3)
    run.run()
    failures = (tmp_path / "sites" / "site-2" / "failures.jsonl").read_text().splitlines()
    assert all(re.match(WHY, json.loads(line)["reason"]) for line in failures)
    assert failures
    assert run.store()["missing"] == [2]


def test_a_start_drawn_from_the_secret_needs_no_long_rows(task: Task) -> None:
    assert simulate(tiny_config("fedrp", projection="sign"), task).accuracy > 0


def test_steps_in_the_subspace_are_no_projected_models() -> None:
    assert simulate(tiny_config("fedrp-subspace", projection="sign"), given_task()).accuracy > 0


@pytest.mark.parametrize(("family", "least"), [("sign", 24), ("hadamard", 12)])
def test_the_limit_is_where_secret_signs_outnumber_the_bits_of_an_upload(family: str, least: int) -> None:
    signs = {"sign": 1, "hadamard": 2}[family]
    assert FAMILIES[family].hiding_ratio * signs == 24 == np.finfo(np.float32).nmant + 1
    parameters = 83
    for dim in range(1, parameters + 1):
        config = resolved(tiny_config("fedrp", projection=family, dim=dim), parameters)
        if signs * parameters < 24 * dim:
            with pytest.raises(ConfigError, match=f"is below {least}"):
                require_hidden_start(config, pretrained, parameters)
        else:
            require_hidden_start(config, pretrained, parameters)


# --- what is given ---------------------------------------------------------------------------------------------------


def test_what_does_not_depend_on_the_seed_is_given() -> None:
    def seeded() -> nn.Module:
        torch.random.manual_seed(5)
        return TinyNet()

    def new_head() -> nn.Module:
        net = pretrained()
        net.output = nn.Linear(8, 3)
        return net

    assert given_share(TinyNet) == 0
    assert given_share(pretrained) == given_share(seeded) == 1
    assert given_share(new_head) == pytest.approx(56 / 83)


@pytest.mark.parametrize("name", ["lenet5", "cnn", "resnet18"])
def test_models_of_the_table_start_secret(name: str) -> None:
    """Constant gains and biases of normalisation are a small part."""
    assert given_share(lambda: MODELS[name].build((3, 32, 32), 10)) < 0.01


def test_it_is_about_algorithms_whose_uploads_are_projected_models() -> None:
    assert [name for name, a in ALGORITHMS.items() if a.server.round_keys and a.delivers == "client"] == ["fedrp"]
