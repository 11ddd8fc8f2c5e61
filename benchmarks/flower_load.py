"""Load of the Flower deployment: many clients in one process, and real SuperNodes over TLS. Prints one JSON line each.

python benchmarks/flower_load.py local --clients 100        # the ServerApp and ClientApp, no network
python benchmarks/flower_load.py processes --clients 8      # SuperLink and SuperNodes on this machine
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from fedrp.crypto.roster import entry_of, merged, new_identity, write_roster
from fedrp.flower import ClientContext, LocalTask, client_app, server_app
from fedrp.testing.local import LocalGrid, answering, run_locally
from fedrp.testing.loopback import Loopback

ROOT = Path(__file__).parents[1]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))  # 50,890 parameters


def load(site: ClientContext) -> LocalTask:
    noise = torch.Generator().manual_seed(site.index)
    x = torch.randn(64, 784, generator=noise)
    return LocalTask(model, (x, x[:, :10].argmax(dim=1)))


def rounds_of(store: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (store / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "round"]


def local(root: Path, clients: int, rounds: int) -> dict[str, object]:
    nodes = {}
    entries = []
    for client in range(clients):
        key = root / f"{client}.key"
        entries.append(entry_of(new_identity(key, f"site-{client}")))
        paths = {"key": key, "roster": root / "roster.toml", "state": root / f"site-{client}"}
        nodes[1000 + client] = {name: str(path) for name, path in paths.items()}
    write_roster(root / "roster.toml", merged(entries))
    settings: dict[str, bool | float | int | str] = {
        **{"algorithm": "fedrp-subspace", "clients": clients, "rounds": rounds, "dim": 1000, "projection": "sign"},
        **{"store": str(root / "store"), "poll": 0.01},
    }
    grid = LocalGrid(answering(client_app(load), nodes, settings), lambda: list(nodes))
    run_locally(server_app(model), grid, settings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"kind": "local", "clients": clients, **_latency(root / "store"), "peak_rss_mb": round(peak)}


def processes(root: Path, clients: int, rounds: int) -> dict[str, object]:
    began = time.monotonic()
    with Loopback(root, [f"site-{client}" for client in range(clients)], ROOT / "examples/flower-app") as federation:
        up_after = time.monotonic() - began
        settings = {"clients": clients, "rounds": rounds, "projection": "sign", "store": str(root / "store")}
        settings["round-timeout"] = 900
        most = 0.0
        with federation.running(settings) as lines:
            for line in lines:
                print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)
                most = max(most, _resident(federation))
        up, down = federation.transport_bytes()
    times = {"start_seconds": round(up_after), "seconds": round(time.monotonic() - began)}
    return {
        **{"kind": "processes", "clients": clients, **times, **_latency(root / "store")},
        **{"resident_mb": round(most), "transport_up": up, "transport_down": down},
    }


def _resident(federation: Loopback) -> float:
    """Memory of all processes of the federation, in MB; shared pages are counted in each."""
    total = 0
    for pid in federation.processes().values():
        try:
            first = psutil.Process(pid)
            total += sum(member.memory_info().rss for member in [first, *first.children(recursive=True)])
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def _latency(store: Path) -> dict[str, object]:
    done = rounds_of(store)
    times = [line["seconds"] for line in done]
    payload = sum(line["bytes_up"] + line["bytes_down"] for line in done) / len(done)
    return {
        "rounds": len(done),
        "round_seconds": round(statistics.median(times), 2),
        "payload_bytes_per_round": round(payload),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["local", "processes"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedrp-load-") as folder:
        measure = {"local": local, "processes": processes}[arguments.kind]
        print(json.dumps(measure(Path(folder), arguments.clients, arguments.rounds)))


if __name__ == "__main__":
    main()
