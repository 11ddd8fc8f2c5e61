"""Ray as a backend: what local workers find, bit for bit, also when a node is lost in the middle of a round."""

import importlib.util
import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from fedrp import Speed, simulate
from fedrp.backends.cluster import connected
from fedrp.errors import ConfigError
from fedrp.types import Packets
from helpers import tiny_config, tiny_task

NAMES = ("fedavg", "fedrp-subspace", "fedadmm", "fwc")


@pytest.fixture(autouse=True)
def _ray_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("USAGE_STATS_ENABLED", "0"),
        ("ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
        ("AUTH_MODE", "disabled"),
    ):
        monkeypatch.setenv(f"RAY_{name}", value)


@pytest.fixture
def end_ray() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"fedrp\[ray\]"):
        connected(Speed(backend="ray"))


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster at address=127.0.0.1:1 .*ray start"):
        connected(Speed(backend="ray", address="127.0.0.1:1"))


@pytest.mark.slow
@pytest.mark.usefixtures("end_ray")
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_ray_finds_what_local_workers_find() -> None:
    for name in NAMES:
        found = simulate(tiny_config(name), tiny_task(), Speed(workers=2, backend="ray"))
        np.testing.assert_array_equal(found.model, simulate(tiny_config(name), tiny_task()).model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray
@pytest.mark.parametrize(("name", "killing"), [("fedrp-subspace", 3), ("fedadmm", 2)])  # hellos and keys come first
def test_a_node_that_is_killed_in_a_round_changes_nothing(name: str, killing: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        raylet = second.all_processes["raylet"][0].process.pid
        exchanges: list[int] = []

        def tap(sent: Packets, replies: Packets) -> None:
            exchanges.append(len(sent))
            if len(exchanges) == killing:  # the server has these replies; the round is not over where actors work next
                lost = [psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)]
                assert any("_Actor" in " ".join(process.cmdline()) for process in lost[1:])
                for process in lost:
                    os.kill(process.pid, signal.SIGKILL)

        found = simulate(
            tiny_config(name), tiny_task(), Speed(workers=2, backend="ray", address=cluster.address), tap=tap
        )
        assert len(exchanges) > killing
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
    np.testing.assert_array_equal(found.model, simulate(tiny_config(name), tiny_task()).model)
