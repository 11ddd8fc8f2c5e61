"""The Flower demo: a SuperLink with TLS and node authentication and three sites on this machine, trained together.

All that it makes is below one folder, all that it starts listens on 127.0.0.1 and is ended,
also after Ctrl-C or a failure.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from fedrp.errors import FedRPError
from fedrp.testing.loopback import Loopback

ROOT = Path(__file__).parents[1]
SITES = ["amsterdam", "bergen", "coimbra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", default="fedrp-subspace")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo-flower")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _ended)
    try:
        demo(arguments.out, arguments.algorithm, arguments.rounds)
    except KeyboardInterrupt:
        sys.exit("stopped; every process has been ended")
    except FedRPError as error:
        sys.exit(f"fedrp: {error}")


def _ended(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt  # so that the federation is ended like after Ctrl-C


def demo(out: Path, algorithm: str, rounds: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    store = out / "server"
    began = time.monotonic()
    print("starting a SuperLink (TLS, node authentication) and three sites on 127.0.0.1", flush=True)
    with Loopback(out, SITES, ROOT / "examples" / "flower-app") as federation:
        print(f"up after {time.monotonic() - began:.0f} s; submitting the app", flush=True)
        settings = {"algorithm": algorithm, "rounds": rounds, "store": str(store)}
        with federation.running(settings) as lines:
            for line in lines:
                if "fedrp:" in line:
                    print(f"{time.monotonic() - began:6.0f} s  {line.split('fedrp:')[1].strip()}", flush=True)
        transport = federation.transport_bytes()
    report(out, store, rounds, transport)
    print(f"all processes ended; {time.monotonic() - began:.0f} s in all; everything is below {out}")


def report(out: Path, store: Path, rounds: int, transport: tuple[int, int]) -> None:
    """Print what came of it: from the sites' own status files, since the server sees no model and no score."""
    from fedrp.storage.status import statuses

    log = [json.loads(line) for line in (store / "log.jsonl").read_text().splitlines()]
    done = [line for line in log if line["event"] == "round"]
    if len(done) < rounds:
        raise FedRPError(f"only {len(done)} of {rounds} rounds were completed: see {out / 'logs'}")
    for name in SITES:
        with contextlib.suppress(FedRPError):
            site = statuses(out / "sites" / name)[-1]
            print(f"{name:<10} {site['accuracy']:.2f} % of its test images right, by its own count")
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in done)
    per_client = sum(line["bytes_up"] for line in done) / rounds / len(SITES)
    print(f"payload: {sent:,} bytes in {rounds} rounds, of which each site sent {per_client:,.0f} a round")
    up, down = transport
    print(f"transport: {up:,} bytes up, {down:,} down, with TLS and HTTP, the app itself, polling and heartbeats")


if __name__ == "__main__":
    main()
