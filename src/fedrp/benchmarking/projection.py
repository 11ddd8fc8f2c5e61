"""What a projection costs on this machine, next to a plain copy and a plain matrix product measured in the same run."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.projection.families import DEFAULT_MEMORY, make_projection
from fedrp.rng import RunSeed

_STACK = 100  # clients projected together ...
_STACK_BYTES = 1 << 30  # ... as long as their vectors fit into this
_SQUARE = 3000  # rows of the matrices whose product gives the machine's rate


def projection_benchmark(
    family: str, columns: int, rows: int, memory_bytes: int = DEFAULT_MEMORY, repeats: int = 5
) -> dict[str, float]:
    """Measure one family at one size. Times are in seconds, the best of `repeats` after a first use.

    - `setup_seconds`: from the key to the operator; `forward_seconds`, `adjoint_seconds`: one vector
    - `copy_seconds`: one copy of the vector into existing memory; `forward_copies`, `adjoint_copies`: times over it
    - `values_per_second`: entries of A generated (`gaussian`), or coordinates projected (others)
    - `peak_rss_mb`: the process's peak; `extra_memory_ratio`: what setup, forward and adjoint added to the
      vector and the result, over the vector
    - `stacked_clients`, `stacked_forward_gflops`, `stacked_adjoint_gflops`, `sgemm_gflops` (`gaussian`, if a stack
      fits into 1 GiB): rates of the product with many vectors, and of a product of square matrices
    """
    key = SecretKey(bytes(KEY_BYTES))  # a benchmark has nothing to hide
    small = make_projection(family, key, 1000, 10)
    small.adjoint(small.forward(np.ones(1000, np.float32)))  # compile, or load what is compiled
    generator = RunSeed(0).generator("benchmark")
    vector = generator.standard_normal(columns, np.float32)
    coefficients = generator.standard_normal(rows, np.float32)
    projected, result = np.ones_like(coefficients), np.ones_like(vector)

    copy = _best(lambda: np.copyto(result, vector), repeats)
    before = _peak_bytes(reset=True)
    setup = _best(lambda: make_projection(family, key, columns, rows, memory_bytes), repeats)
    projection = make_projection(family, key, columns, rows, memory_bytes)
    forward = _best(lambda: projection.forward(vector, projected), repeats)
    adjoint = _best(lambda: projection.adjoint(coefficients, result), repeats)
    extra = _peak_bytes() - before
    kept = 4 * rows * columns <= memory_bytes
    values = (rows * columns / (setup if kept else forward)) if family == "gaussian" else columns / forward
    report = {
        "setup_seconds": setup,
        "forward_seconds": forward,
        "adjoint_seconds": adjoint,
        "copy_seconds": copy,
        "forward_copies": forward / copy,
        "adjoint_copies": adjoint / copy,
        "values_per_second": values,
        "extra_memory_ratio": extra / vector.nbytes,
    }
    clients = min(_STACK, _STACK_BYTES // vector.nbytes)
    if family == "gaussian" and clients > 1:
        stack = generator.standard_normal((clients, columns), np.float32)
        thetas = projection.forward(stack)
        square = torch.ones(_SQUARE, _SQUARE)
        product = torch.ones(_SQUARE, _SQUARE)
        work = 2e-9 * clients * rows * columns
        report["stacked_clients"] = clients
        report["sgemm_gflops"] = 2e-9 * _SQUARE**3 / _best(lambda: torch.mm(square, square, out=product), repeats)
        report["stacked_forward_gflops"] = work / _best(lambda: projection.forward(stack, thetas), repeats)
        report["stacked_adjoint_gflops"] = work / _best(lambda: projection.adjoint(thetas, stack), repeats)
    report["peak_rss_mb"] = max(before + extra, _peak_bytes()) / 2**20
    return report


def _best(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _peak_bytes(reset: bool = False) -> int:
    """The most memory this process has held at once, since the start or since the last reset.

    Where the system cannot say, what it holds now.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return int(psutil.Process().memory_info().rss)
