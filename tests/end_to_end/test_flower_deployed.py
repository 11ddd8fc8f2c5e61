"""The real thing: SuperLink and SuperNodes as processes of their own, TLS, node authentication."""

import hashlib
import json
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedrp import RunConfig, simulate
from fedrp.flower.environment import quiet_environment
from fedrp.learning.initial import secret_initial
from fedrp.learning.layout import layout_of
from fedrp.projection.families import make_projection
from fedrp.simulation.measures import delivering_client
from fedrp.testing.loopback import Loopback
from helpers import ROOT, TinyNet, round_keys, tiny_config, tiny_task

APP = ROOT / "tests" / "end_to_end" / "flower_app"
SITES = ["amsterdam", "bergen", "coimbra"]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes must find this source and the tests' helpers."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests/support'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def model_of(federation: Loopback, name: str) -> np.ndarray:
    tensors = load_file(federation.status(name)["model"])
    return np.concatenate([tensors[part].ravel() for part in layout_of(TinyNet()).names])


def run_app(federation: Loopback, **settings: object) -> str:
    """The log of a run."""
    store = {"store": str(federation.root / "store")}
    with federation.running({**store, **{k.replace("_", "-"): v for k, v in settings.items()}}) as lines:
        return "\n".join(lines)


def config_of(**changes: object) -> RunConfig:
    return tiny_config("fedrp-subspace", clients=3, rounds=2, projection="sign", **changes)


class Search:
    """Looks for bytes in the memory of the server's process, once that holds still."""

    def __init__(self, store: Path, wanted: dict[str, bytes]) -> None:
        self._store, self._wanted = store, wanted
        self.found: set[str] = set()
        self.searched = 0
        self.thread = threading.Thread(target=self._wait_and_search, daemon=True)
        self.thread.start()

    def _wait_and_search(self) -> None:
        end = time.monotonic() + 300
        while not (self._store / "pid").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.2)
        self._search(int((self._store / "pid").read_text()))
        (self._store / "searched").touch()

    def _search(self, process: int) -> None:
        regions = re.findall(r"^(\w+)-(\w+) rw", Path(f"/proc/{process}/maps").read_text(), re.MULTILINE)
        with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
            for first, last in ((int(a, 16), int(b, 16)) for a, b in regions):
                try:
                    memory.seek(first)
                    data = memory.read(last - first)
                except (OSError, ValueError, OverflowError):
                    continue  # a region of the kernel
                self.searched += len(data)
                self.found |= {name for name, value in self._wanted.items() if value in data}


def test_three_sites_over_tls_end_with_the_simulators_model_and_the_server_with_nothing(tmp_path: Path) -> None:
    config = config_of()
    result = simulate(config, tiny_task())
    keys = round_keys(config)
    units = np.eye(config.dim, dtype=np.float32)
    secrets = {f"key {number}": key.reveal() for number, key in enumerate(keys)}
    secrets |= {
        f"matrix {n}": make_projection("sign", k, 83, 12).adjoint(units)[0].tobytes() for n, k in enumerate(keys)
    }
    secrets |= {"initial model": secret_initial(TinyNet, keys[0]).tobytes(), "model": result.model.tobytes()}
    secrets |= {"part of the model": result.model[10:16].tobytes()}
    with Loopback(tmp_path, SITES, APP) as federation:
        identities = [federation.site_key(name).read_text().split('secret = "')[1][:64] for name in SITES]
        secrets |= {f"identity {n}": bytes.fromhex(text) for n, text in enumerate(identities)}
        secrets |= {f"identity {n} as text": text.encode() for n, text in enumerate(identities)}
        public = {"store": str(tmp_path / "store").encode(), "marker": hashlib.sha256(b"marker").digest()}
        search = Search(tmp_path / "store", {**secrets, **public})
        log = run_app(federation, app_search=True)
        search.thread.join(timeout=60)
        assert "finished after 2 rounds; 3 sites have the model" in log, log
        for name in SITES:
            assert np.array_equal(model_of(federation, name), result.model)
            assert federation.status(name)["accuracy"] == pytest.approx(result.accuracy, abs=1e-3)
        up, down = federation.transport_bytes()
        pids = federation.processes()
    assert search.searched > 100_000_000
    assert search.found == set(public)  # what it must know is found, so the search does find things
    held = json.loads((tmp_path / "store" / "held.json").read_text())
    assert held.pop("searched") > 10_000
    assert set(held.values()) == {0}, held
    rounds = [json.loads(line) for line in (tmp_path / "store" / "log.jsonl").read_text().splitlines()]
    payload = sum(line["bytes_up"] for line in rounds if line["event"] == "round")
    assert 0 < payload < up
    assert down > 0
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


def test_every_process_is_started_with_the_switches_that_keep_it_quiet(tmp_path: Path) -> None:
    environment = quiet_environment(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_HOME"] == str(tmp_path)
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = path.read_text()
        assert "flower-super" not in text, f"{path.name} starts Flower by itself: use fedrp.testing.loopback"


# --- slow: faults of real processes ----------------------------------------------------------------------------------


def wait_for(condition: object, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def rounds_done(federation: Loopback) -> int:
    try:
        return int(json.loads((federation.root / "store" / "status.json").read_text())["round"])
    except (OSError, ValueError, KeyError):
        return 0


def in_background(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


@pytest.mark.slow
def test_a_site_that_is_killed_and_one_whose_cable_is_cut_come_back(tmp_path: Path) -> None:
    """One power cut in the middle of a round, one cut link; quorum 1, so that the run must wait for both."""
    logs: list[str] = []
    with Loopback(tmp_path, SITES, APP) as federation:
        settings = {"quorum": 1.0, "rounds": 4, "app_slow": 3.0, "round_timeout": 60.0}
        run = in_background(lambda: logs.append(run_app(federation, **settings)))
        wait_for(lambda: rounds_done(federation) >= 1)
        federation.kill("bergen")
        federation.cables["coimbra"].cut()
        time.sleep(20)
        federation.cables["coimbra"].mend()
        end = time.monotonic() + 200
        while run.is_alive() and time.monotonic() < end:  # Flower refuses the node until it has noticed that it died
            if not federation.alive("bergen"):
                federation.start_site("bergen")
            time.sleep(5)
        run.join(timeout=400)
        assert "finished after 4 rounds; 3 sites have the model" in logs[0], logs[0]
        result = simulate(tiny_config("fedrp-subspace", clients=3, rounds=4, projection="sign"), tiny_task())
        for name in SITES:
            assert np.array_equal(model_of(federation, name), result.model)


@pytest.mark.slow
def test_a_server_that_is_killed_is_run_again_with_the_same_store(tmp_path: Path) -> None:
    with Loopback(tmp_path, SITES, APP) as federation:
        first = in_background(lambda: run_app(federation, rounds=4, app_slow=3.0))
        wait_for(lambda: rounds_done(federation) >= 1)
        federation.kill("superlink")
        first.join(timeout=60)
        federation.start_superlink()
        for name in SITES:  # as a service manager would
            if not federation.alive(name):
                federation.start_site(name)
        log = run_app(federation, rounds=4)
        assert re.search(r"going on after round [123]", log), log
        assert "finished after 4 rounds; 3 sites have the model" in log
        result = simulate(tiny_config("fedrp-subspace", clients=3, rounds=4, projection="sign"), tiny_task())
        assert np.array_equal(model_of(federation, SITES[delivering_client(result.config)]), result.model)


@pytest.mark.slow
def test_a_node_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    from fedrp.testing.loopback import make_node_key

    with Loopback(tmp_path, SITES[:1], APP) as federation:
        federation.kill(SITES[0])
        make_node_key(federation.root / f"node-{SITES[0]}")  # another key than the one that was registered
        federation.start_site(SITES[0])
        wait_for(lambda: not federation.alive(SITES[0]), 60)
        assert "Exit Code: 305" in federation.log_file(SITES[0]).read_text()
