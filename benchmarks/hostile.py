"""What hostile packets cost a client, in units of an honest packet of the same size: time and peak memory.

    python benchmarks/hostile.py

The honest packet is that of a client which has missed every round of a masked `fedrp-subspace` run: the largest there
is. Each hostile one is as large, as far as the cap allows. Times are medians of interleaved repeats on this machine.
"""

import contextlib
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

from fedrp.errors import FedRPError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protocol"))

from helpers import Federation, tiny_config  # type: ignore[import-not-found]
from test_hostile import HOSTILE, catch_up  # type: ignore[import-not-found]

ROUNDS, REPEATS = 1000, 5


def answered(packet: bytes) -> tuple[float, float]:
    """Seconds, and peak MB of a second run."""
    costs = []
    for traced in (False, True):
        run = Federation(tiny_config("fedrp-subspace", clients=4, rounds=ROUNDS, secure_aggregation=True))
        if traced:
            tracemalloc.start()
        began = time.perf_counter()
        with contextlib.suppress(FedRPError):
            run.answer(1, packet)
        costs.append(tracemalloc.get_traced_memory()[1] / 2**20 if traced else time.perf_counter() - began)
        tracemalloc.stop()
    return costs[0], costs[1]


def main() -> None:
    run = Federation(tiny_config("fedrp-subspace", clients=4, rounds=ROUNDS, secure_aggregation=True))
    honest = catch_up(run, ROUNDS)
    packets = {"honest": honest} | {name: make(run, len(honest) // 200) for name, make in HOSTILE.items()}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in packets}
    for _ in range(REPEATS):
        for name, packet in packets.items():
            measured[name].append(answered(packet))
    times, sizes = ({n: statistics.median(m[i] for m in found) for n, found in measured.items()} for i in (0, 1))
    for name, packet in packets.items():
        ratio = times[name] / times["honest"], sizes[name] / sizes["honest"]
        print(f"{name:<32} {len(packet) / 2**10:8.0f} kB   time {ratio[0]:6.3f}   memory {ratio[1]:6.3f}")


if __name__ == "__main__":
    main()
