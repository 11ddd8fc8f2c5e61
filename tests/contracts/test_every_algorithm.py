"""What every algorithm and every baseline promises; and that each promise, once broken, is found."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.base import Algorithm
from fedrp.algorithms.client_side import ClientState, Local, Participant, Upload
from fedrp.algorithms.fedavg import FEDAVG
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.servers import SERVERS
from fedrp.algorithms.table import ALGORITHMS, methods
from fedrp.config import Resolved
from fedrp.errors import ConfigError
from fedrp.testing.contracts import ALGORITHM_CONTRACTS, BASELINE_CONTRACTS, Contract, check_algorithm, contracts_of

WITHOUT_NOISE = {"noise_multiplier": 0.0, "clip": 1e6}


@pytest.mark.parametrize(
    ("name", "contract"),
    [(name, contract) for name in methods() for contract in contracts_of(name)],
    ids=lambda item: item if isinstance(item, str) else item.__name__,
)
def test_every_algorithm_keeps_the_contract(name: str, contract: Contract) -> None:
    noisy = resolved(RunConfig(algorithm=name, dim=12), 83).private
    contract(name, WITHOUT_NOISE if noisy else {})


def forgetful(change: str) -> Algorithm:
    """FedAvg with one promise broken."""
    client, server = FEDAVG.client, FEDAVG.server

    def writes(local: Local, clients: Sequence[Participant]) -> list[Upload]:
        uploads = client.round(local, clients)
        for one in clients:
            one.state.model[0] += 1
        return uploads

    def keeps(local: Local, clients: Sequence[Participant]) -> list[Upload]:
        return [upload._replace(state=ClientState(upload.vector)) for upload in client.round(local, clients)]

    def own(_local: Local, one: Participant) -> ClientState:
        return one.state

    def drifts(local: Local, clients: Sequence[Participant]) -> list[Upload]:
        fresh = np.float32(1e-3 * next(COUNTER))
        return [upload._replace(vector=upload.vector + fresh) for upload in client.round(local, clients)]

    shrinks = dataclasses.replace(server, aggregate=lambda _c, _past, mean, _w: np.float32(0.9) * mean)
    return {
        "inputs_are_not_changed": dataclasses.replace(FEDAVG, client=dataclasses.replace(client, round=writes)),
        "rounds_are_deterministic": dataclasses.replace(FEDAVG, client=dataclasses.replace(client, round=drifts)),
        "uploads_are_finite_float32_of_the_stated_size": dataclasses.replace(
            FEDAVG, server=dataclasses.replace(server, update_size=lambda _config, parameters: parameters + 1)
        ),
        "one_client_gets_what_its_training_gave": dataclasses.replace(FEDAVG, server=shrinks),
        "a_lone_client_gets_what_its_training_gave": dataclasses.replace(FEDAVG, server=shrinks),
        "a_consensus_is_the_same_bits_everywhere": dataclasses.replace(
            FEDAVG, client=dataclasses.replace(client, round=keeps, finish=own)
        ),
        "it_learns": dataclasses.replace(
            FEDAVG, server=dataclasses.replace(server, aggregate=lambda _c, _past, mean, _w: np.zeros_like(mean))
        ),
        "resolving_twice_changes_nothing": dataclasses.replace(
            FEDAVG, resolve=lambda config, _: Resolved.of(dataclasses.replace(config, seed=config.seed + 1))
        ),
        "it_says_who_learns_what": dataclasses.replace(FEDAVG, releases=lambda _config: []),
    }[change]


COUNTER = itertools.count()


@pytest.mark.parametrize(
    "contract",
    dict.fromkeys([*ALGORITHM_CONTRACTS, *BASELINE_CONTRACTS]),
    ids=lambda contract: contract.__name__,
)
def test_every_contract_can_be_broken(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = forgetful(contract.__name__)
    monkeypatch.setitem(ALGORITHMS, "broken", broken)
    monkeypatch.setitem(SERVERS, "broken", broken.server)
    with pytest.raises((AssertionError, ValueError)):  # numpy's, where something is written to
        contract("broken", {})
    with pytest.raises((AssertionError, ValueError)):
        check_algorithm("broken")


# Settings that not every algorithm uses: a value to try, and what it is given and compared with.
OPTIONAL: dict[str, tuple[object, dict[str, object]]] = {
    "rho": (0.01, {}),
    "projection": ("hadamard", {}),
    "rotation": ("hadamard", {}),
    "bits": (2.0, {}),
    "bits_down": (2.0, {}),
    "bytes": (16, {}),
    "server_momentum": (0.5, {}),
    "proximal": (3.0, {}),
    "clip": (0.05, {"noise_multiplier": 0.3}),
    "noise_multiplier": (0.3, {}),
    "dp_epsilon": (3.0, {}),
    "dp_unit": ("record", {}),
    "record_epsilon": (3.0, {"dp_unit": "both", "record_epsilon": 5.0, "dp_epsilon": 9.0}),
    "record_clip": (0.1, {"dp_unit": "both", "record_epsilon": 5.0, "dp_epsilon": 9.0}),
    "dp_noise": ("local", {"noise_multiplier": 0.3}),
    "clip_quantile": (0.5, {"noise_multiplier": 0.3}),
    "ball": (0.05, {}),
    "sensitivity": (0.1, {"sensitivity": 0.2, "norm_floor": 1.0}),
    "norm_floor": (1.5, {"sensitivity": 0.1}),
    "dropout": (0.4, {"quorum": 0.3}),
    "quorum": (1.0, {"quorum": 0.3, "dropout": 0.3}),
    "weighting": ("samples", {"partition": "dirichlet:0.5"}),
    "aggregation": ("median", {}),
    "secure_aggregation": (True, {}),
    "secure_range": (0.01, {"secure_aggregation": True}),
    "sealing": ("hybrid", {}),
    "key_epoch": (2, {}),
    "lr_rule": ("steps", {}),
    "deliver": ("average", {"deliver": "client"}),
}


def test_the_optional_settings_are_those_that_some_algorithm_uses() -> None:
    assert set(OPTIONAL) == set().union(*(method.settings for method in methods().values()))


@pytest.mark.parametrize("setting", OPTIONAL)
@pytest.mark.parametrize("name", methods())
def test_a_setting_acts_where_it_is_offered_and_is_refused_elsewhere(name: str, setting: str, task: Task) -> None:
    value, needs = OPTIONAL[setting]
    base = RunConfig(algorithm=name, clients=4, rounds=3, batch_size=8, dim=12, lr=0.05)
    without, given = (dataclasses.replace(base, **changes) for changes in (needs, {**needs, setting: value}))
    if setting not in methods()[name].settings:
        with pytest.raises(ConfigError, match=rf"=.* does nothing with algorithm '{name}': leave it out, or use \w+"):
            simulate(given, task)
        return
    before, after = (
        (result.model.tobytes(), result.privacy, [record.traffic for record in result.records])
        for result in (simulate(without, task), simulate(given, task))
    )
    assert before != after


# --- a convex problem whose optimum is a linear solve ----------------------------------------------------------------


def test_an_algorithm_that_leaves_its_settings_unresolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was written for an earlier version does."""
    monkeypatch.setitem(ALGORITHMS, "old", dataclasses.replace(FEDAVG, resolve=lambda config, _: config))
    with pytest.raises(ConfigError, match=r"algorithm 'old' resolves to a RunConfig: use Resolved\.of"):
        resolved(RunConfig(algorithm="old"), 83)
