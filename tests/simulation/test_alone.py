"""Every client by itself: its own training and nothing else, however often it takes part."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.engines.choice import make_trainer
from fedrp.errors import DataError, DivergenceError
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import LocalSGD
from fedrp.learning.task import split_among_clients
from fedrp.mechanisms import cohort
from fedrp.protocol.client_state import Client
from fedrp.rng import RunSeed
from fedrp.simulation.identities import simulated_coins
from fedrp.simulation.measures import delivering_client
from fedrp.simulation.result import RoundRecord
from fedrp.storage.client_state import packed_clients
from fedrp.types import Vector
from helpers import TinyNet, tiny_config


def trained_alone(config: RunConfig, task: Task, client: int, rounds: int) -> Vector:
    """So many rounds of local training, without the simulator."""
    config = resolved(config, 83)
    trainer = make_trainer(TinyNet, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(config.seed))
    data, model = split_among_clients(task, config)[client], public_initial(TinyNet, RunSeed(config.seed))[None]
    sgd = LocalSGD(config.lr, config.momentum, config.batch_size, config.local_epochs, config.grad_clip)
    for round_ in range(1, rounds + 1):
        model = trainer.train(model, [data], [client], round_, sgd)
    return model[0]


def times_chosen(config: RunConfig, client: int) -> int:
    """In how many rounds a client takes part."""
    count = 0
    for round_ in range(1, config.rounds + 1):
        coins = simulated_coins(config, round_)
        count += client in np.argsort(coins)[: cohort.due(config, coins)]
    return count


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("seed", range(4))
def test_a_client_has_trained_as_often_as_it_took_part(seed: int, sampling: str, task: Task) -> None:
    """Also where others of its group have trained more or less often."""
    config = tiny_config("fwc", clients=5, rounds=6, participation=0.5, sampling=sampling, seed=seed)
    chosen = delivering_client(config)
    expected = trained_alone(config, task, chosen, times_chosen(config, chosen))
    assert simulate(config, task).model.tobytes() == expected.tobytes()


def test_the_delivered_model_does_not_depend_on_the_other_clients(task: Task) -> None:
    config = tiny_config("fwc")
    chosen = delivering_client(config)
    assert simulate(config, task).model.tobytes() == trained_alone(config, task, chosen, config.rounds).tobytes()


def test_a_model_that_diverges_is_one_clear_error(task: Task) -> None:
    with pytest.raises(DivergenceError, match=r"training diverged: .*client \d .* round \d"):
        simulate(tiny_config("fwc", lr=1e38), task)


def test_the_folder_of_a_run_keeps_clients_and_no_server(task: Task, tmp_path: Path) -> None:
    simulate(tiny_config("fwc"), task, out=tmp_path / "run")
    assert not (tmp_path / "run" / "rounds").exists()
    (checkpoint,) = (tmp_path / "run" / "checkpoint").iterdir()
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {"sums.json", "clients-0000.safetensors", "clients-0001.safetensors"}
    assert set(json.loads((checkpoint / "sums.json").read_text())["files"]) == names - {"sums.json"}


def stopped(task: Task, out: Path) -> Path:
    """The checkpoint of a run that was stopped after two rounds of three."""

    def stop(record: RoundRecord, _model: object) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tiny_config("fwc"), task, out=out, on_round=stop)
    (checkpoint,) = (out / "checkpoint").iterdir()
    return checkpoint


def test_a_damaged_state_is_not_gone_on_with(task: Task, tmp_path: Path) -> None:
    path = stopped(task, tmp_path / "run") / "clients-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"clients-0001.safetensors is damaged.*: remove .*run and start again"):
        simulate(tiny_config("fwc"), task, out=tmp_path / "run", resume=True)


def test_the_state_of_an_earlier_version_is_named(task: Task, tmp_path: Path) -> None:
    """There lone clients were clients of the protocol, who sent empty messages."""
    checkpoint = stopped(task, tmp_path / "run")
    sums = json.loads((checkpoint / "sums.json").read_text())
    for name in sums["files"]:
        with safe_open(checkpoint / name, framework="numpy") as file:
            run = bytes.fromhex(json.loads(file.metadata()["about"])["run"])
        data = packed_clients(run, [Client(0), Client(1)])
        (checkpoint / name).write_bytes(data)
        sums["files"][name] = hashlib.sha256(data).hexdigest()
    (checkpoint / "sums.json").write_text(json.dumps(sums))
    with pytest.raises(DataError, match=r"is of another version of fedrp"):
        simulate(tiny_config("fwc"), task, out=tmp_path / "run", resume=True)
