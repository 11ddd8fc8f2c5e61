"""The consensus certificate of a round: made of uploads alone, and true of the models that the clients then hold."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from fedrp import Task, simulate
from fedrp.privacy.certificate import CERTIFICATE_CONFIDENCE
from fedrp.reporting.report import result_details
from helpers import Federation, tiny_config, tiny_task


def rounds(clients: int, seed: int, count: int) -> list[tuple[float, float]]:
    """(certified, true) largest distance of two clients' models, round by round."""
    config = tiny_config("fedrp", projection="gaussian", clients=clients, rounds=count, seed=seed, batch_size=40)
    federation = Federation(config, tiny_task(4 * clients))
    found = []
    for _ in range(count):
        bound = federation.round().consensus_bound
        models = np.stack([client_state.state.model for client_state in federation.clients.values()]).astype(np.float64)
        found.append((bound, float(pdist(models).max())))
    return found


def test_two_clients_are_certified_as_often_as_stated_no_more_and_no_less() -> None:
    """One pair: the failure probability is exactly 0.05. 400 rounds with keys of their own, 4 deviations."""
    found = [pair for seed in range(50) for pair in rounds(2, seed, 8)]
    missed = np.mean([bound < truth for bound, truth in found])
    failure = 1 - CERTIFICATE_CONFIDENCE
    assert abs(missed - failure) < 4 * math.sqrt(failure * CERTIFICATE_CONFIDENCE / len(found))
    shortened = np.mean([0.7 * bound < truth for bound, truth in found])
    assert shortened > failure + 4 * math.sqrt(failure * CERTIFICATE_CONFIDENCE / len(found))


def test_all_pairs_of_five_clients_are_covered_by_a_bound_that_is_not_vacuous() -> None:
    found = [pair for seed in range(20) for pair in rounds(5, seed, 5)]
    assert np.mean([bound >= truth for bound, truth in found]) >= CERTIFICATE_CONFIDENCE
    assert np.median([bound / truth for bound, truth in found]) < 4  # at m = 12


def test_every_round_of_a_run_reports_its_certificate(task: Task, tmp_path: Path) -> None:
    result = simulate(tiny_config("fedrp", projection="gaussian"), task, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["consensus_bound"] > 0 for line in lines)
    assert result.as_json()["consensus_bound"] == lines[-1]["consensus_bound"]
    (told,) = [line for line in result_details(result.as_json()) if "models are within" in line]
    assert f"{lines[-1]['consensus_bound']:.3g}" in told
    assert "95%" in told


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("fedrp", projection="sign"),
        tiny_config("fedrp", projection="gaussian", secure_aggregation=True),
        tiny_config("fedrp-subspace", projection="gaussian"),
        tiny_config("fwc"),
    ],
    ids=lambda config: f"{config.algorithm}-{config.projection}-{config.secure_aggregation}",
)
def test_nothing_is_certified_without_the_theorem(config: object, task: Task) -> None:
    result = simulate(config, task).as_json()
    assert all(line["consensus_bound"] is None for line in result["history"])
    assert not [line for line in result_details(result) if "models are within" in line]
