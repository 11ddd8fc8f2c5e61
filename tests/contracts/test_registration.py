"""What is added from outside the package works like what is bundled."""

import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedrp
from fedrp.algorithms.servers import SERVERS
from fedrp.algorithms.table import ALGORITHMS, BASELINES
from fedrp.errors import ConfigError
from fedrp.learning.data import DATASETS
from fedrp.learning.zoo import MODELS
from fedrp.projection.families import FAMILIES
from fedrp.projection.tags import TAGS, Tag
from fedrp.protocol import wire
from fedrp.testing import check_algorithm, check_projection
from helpers import ROOT, command, environment, tiny_config, tiny_task

FEDPROX = ROOT / "examples" / "your_own_algorithm.py"


@pytest.fixture(autouse=True)
def _tables_as_they_were() -> Iterator[None]:
    tables = [(table, dict(table)) for table in (ALGORITHMS, SERVERS, FAMILIES, TAGS, MODELS, DATASETS)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.fixture
def fedprox() -> ModuleType:
    spec = importlib.util.spec_from_file_location("your_own_algorithm", FEDPROX)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- an algorithm ----------------------------------------------------------------------------------------------------


def test_fedprox_without_a_pull_is_fedavg_to_the_bit(fedprox: ModuleType) -> None:
    models = [fedrp.simulate(tiny_config(name), tiny_task()).model for name in ("fedavg", "my-fedprox")]
    assert models[0].tobytes() == models[1].tobytes()


def test_the_pull_of_fedprox_keeps_clients_near_the_common_model(fedprox: ModuleType) -> None:
    """Told by how far one round moves it."""
    config = tiny_config("my-fedprox", rounds=1, local_epochs=5)
    still = fedrp.simulate(dataclasses.replace(config, lr=1e-30), tiny_task()).model
    moved = [
        np.linalg.norm(fedrp.simulate(dataclasses.replace(config, proximal=mu), tiny_task()).model - still)
        for mu in (0.0, 1.0, 5.0)
    ]
    assert moved[0] > 1.1 * moved[1] > 1.1**2 * moved[2] > 0


def test_an_algorithm_from_outside_is_masked_like_any_other(fedprox: ModuleType) -> None:
    plain, masked = (
        fedrp.simulate(tiny_config("my-fedprox", proximal=0.1, secure_aggregation=masks), tiny_task())
        for masks in (False, True)
    )
    np.testing.assert_allclose(masked.model, plain.model, atol=1e-5)


def test_an_algorithm_from_outside_keeps_the_contract(fedprox: ModuleType) -> None:
    check_algorithm("my-fedprox", {"proximal": 0.1})


def test_its_settings_are_refused_where_they_do_nothing_and_name_it(fedprox: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"proximal=0.1 does nothing with algorithm 'fedavg'.* my-fedprox$"):
        fedrp.simulate(tiny_config("fedavg", proximal=0.1), tiny_task())


def test_workers_know_what_a_program_registers_at_its_top_level(tmp_path: Path) -> None:
    text = FEDPROX.read_text()
    assert "fedrp.named_task(config))" in text
    program = tmp_path / "program.py"
    program.write_text(text.replace("fedrp.named_task(config))", "fedrp.named_task(config), fedrp.Speed(workers=2))"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment())
    alone = subprocess.run([sys.executable, FEDPROX], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == alone.stdout != ""


def installed(folder: Path, *points: str) -> dict[str, str]:
    """The environment of a program that finds the package `fedprox` in a folder, with these entry points."""
    (folder / "fedprox.py").write_text(FEDPROX.read_text().replace('fedrp.register("my-fedprox", FEDPROX)\n', ""))
    info = folder / "fedprox-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fedprox\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[fedrp.algorithms]", *points]))
    variables = environment()
    return variables | {"PYTHONPATH": f"{folder}:{variables.get('PYTHONPATH', '')}"}


def test_an_installed_package_adds_its_algorithm_to_the_command_line(tmp_path: Path, images: Path) -> None:
    variables = installed(tmp_path, "my-fedprox = fedprox:FEDPROX")
    shown = subprocess.run(command("algorithms"), capture_output=True, text=True, env=variables)
    assert "my-fedprox       FedAvg with a pull towards the common model\n" in shown.stdout
    small = ["--clients=3", "--rounds=1", "--workers=2", f"--dataset=npz:{images}", f"--out={tmp_path / 'run'}"]
    done = subprocess.run(
        command("run", "--algorithm=my-fedprox", "--proximal=0.1", *small),
        capture_output=True,
        text=True,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    assert "my-fedprox" in done.stdout


def test_a_broken_package_is_named_and_harms_no_other_algorithm(tmp_path: Path) -> None:
    points = ["one = fedprox:NOTHING", "two = missing:FEDPROX", "three = fedprox:latest", "fedavg = fedprox:FEDPROX"]
    points.append("fwc = fedprox:FEDPROX")
    shown = subprocess.run(
        command("algorithms"),
        capture_output=True,
        text=True,
        env=installed(tmp_path, *points, "good = fedprox:FEDPROX"),
    )
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [*ALGORITHMS, "good", *BASELINES]
    assert sorted(shown.stderr.splitlines()) == [
        "algorithm 'fedavg' of fedprox:FEDPROX is left out: the name is taken",
        "algorithm 'fwc' of fedprox:FEDPROX is left out: the name is taken",
        "algorithm 'one' of fedprox:NOTHING cannot be loaded: module 'fedprox' has no attribute 'NOTHING'",
        "algorithm 'three' of fedprox:latest is left out: it is a function",
        "algorithm 'two' of missing:FEDPROX cannot be loaded: No module named 'missing'",
    ]


# --- projections, models, data sets ----------------------------------------------------------------------------------


def test_a_projection_family_from_outside_has_its_own_matrices_and_its_tag_on_the_wire() -> None:
    fedrp.register("signs-again", FAMILIES["sign"], Tag(100, 2))
    packets: list[bytes] = []
    config = tiny_config("fedrp", projection="signs-again")
    result = fedrp.simulate(config, tiny_task(), tap=lambda sent, _replies: packets.extend(sent.values()))
    begun = dataclasses.replace(result.config.stored, rounds=1)  # its id outlives a change of their number
    run = hashlib.sha256(f"fedrp-run|{begun}".encode()).digest()[: wire.RUN_ID_BYTES]
    tagged = wire.context_of(run, 100 << 8 | 2)
    assert {message.context for packet in packets for message in wire.decode(packet)} == {tagged}
    check_projection("signs-again")
    other = fedrp.simulate(dataclasses.replace(config, projection="sign"), tiny_task())
    assert result.model.tobytes() != other.model.tobytes()


def test_a_model_and_a_data_set_from_outside_are_named_by_settings(images: Path) -> None:
    fedrp.register("my-model", MODELS["lenet5"]._replace(learning_rate=0.01))
    fedrp.register("my-data", DATASETS["mnist-mini"]._replace(path=images, facts=None))
    config = fedrp.RunConfig(algorithm="fedavg", model="my-model", dataset="my-data", clients=2, rounds=1)
    result = fedrp.simulate(config, fedrp.named_task(config))
    assert result.config.lr == 0.01
    assert result.as_json()["dataset"] == "my-data"


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_the_same_entry_may_be_added_again_and_another_one_not(fedprox: ModuleType) -> None:
    fedrp.register("my-fedprox", fedprox.FEDPROX)
    with pytest.raises(ConfigError, match="there is another algorithm called 'fedavg': choose another name"):
        fedrp.register("fedavg", fedprox.FEDPROX)
    assert ALGORITHMS["fedavg"] is not fedprox.FEDPROX
    for name, entry in (("cnn", MODELS["lenet5"]), ("mnist", DATASETS["cifar10"])):
        with pytest.raises(ConfigError, match=f"called '{name}'"):
            fedrp.register(name, entry)
    with pytest.raises(ConfigError, match="projection called 'sign'"):
        fedrp.register("sign", FAMILIES["gaussian"], Tag(100, 1))


def test_a_family_needs_a_tag_of_its_own(fedprox: ModuleType) -> None:
    with pytest.raises(ConfigError, match="'again': a projection family needs a tag"):
        fedrp.register("again", FAMILIES["sign"])
    with pytest.raises(ConfigError, match=r"needs a tag.* and nothing else"):
        fedrp.register("again", fedprox.FEDPROX, Tag(100, 1))
    with pytest.raises(ConfigError, match="code=2 is that of projection 'sign'"):
        fedrp.register("again", FAMILIES["sign"], Tag(2, 1))
    for tag, told in ((Tag(256, 1), "code=256"), (Tag(100, 0), "version=0")):
        with pytest.raises(ConfigError, match=f"{told} is not valid: expected a whole number from 1 to 255"):
            fedrp.register("again", FAMILIES["sign"], tag)
    assert "again" not in {*FAMILIES, *TAGS}


def test_what_is_no_entry_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mine' is a type: register an Algorithm, Family, ModelSpec or Entry"):
        fedrp.register("mine", dict)
