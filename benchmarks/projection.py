"""Measure the projections and write the tables and the figure of docs/performance.md.

Everything is measured in one run on one machine: a plain copy and a plain matrix product, this library, scikit-learn
and a dense torch matrix. About five minutes on two cores; needs 6 GB of memory and the `bench` extra.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import page
import torch
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection

from fedrp.benchmarking.projection import projection_benchmark
from fedrp.crypto.secret import SecretKey
from fedrp.projection.families import FAMILIES, make_projection

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FIGURE = page.FIGURES / "projection_cost.svg"

VGG16, LENET = 134_301_514, 61_706
STACK = 100
LARGEST_DENSE = 250_000_000  # entries of a matrix that the others may hold; scikit-learn draws them as float64 first
LARGEST_STREAMED = 1_000_000_000

FloatArray = npt.NDArray[np.float32]
Apply = Callable[[FloatArray], object]


def fedrp_maker(family: str) -> Callable[[int, int], Apply]:
    def make(columns: int, rows: int) -> Apply:
        return make_projection(family, SecretKey(os.urandom(32)), columns, rows).forward

    return make


def sklearn_maker(kind: type) -> Callable[[int, int], Apply]:
    def make(columns: int, rows: int) -> Apply:
        shape_only = np.broadcast_to(np.float32(0), (1, columns))
        transform: Apply = kind(n_components=rows).fit(shape_only).transform
        return lambda vectors: transform(vectors)

    return make


def torch_maker(columns: int, rows: int) -> Apply:
    matrix = torch.randn(rows, columns).div_(rows**0.5)
    return lambda vectors: torch.from_numpy(vectors) @ matrix.T


MAKERS: dict[str, Callable[[int, int], Apply]] = {
    **{f"fedrp {family}": fedrp_maker(family) for family in FAMILIES},
    "scikit-learn Gaussian": sklearn_maker(GaussianRandomProjection),
    "scikit-learn Sparse": sklearn_maker(SparseRandomProjection),
    "torch dense": torch_maker,
}


def best(action: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    return page.table(header, [[number(cell) if isinstance(cell, float) else cell for cell in line] for line in lines])


def isolated(family: str, columns: int, rows: int) -> dict[str, float]:
    """The library's own benchmark in a fresh process, so that its memory peak is its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(projection_benchmark, (family, columns, rows))


def targets() -> str:
    sign, mixed = isolated("sign", VGG16, 10_000), isolated("hadamard", VGG16, 10_000)
    kept, streamed = isolated("gaussian", LENET, 1000), isolated("gaussian", VGG16, 10)
    rate = kept["sgemm_gflops"]
    lines = [
        ("`sign` forward, n = 134,301,514, m = 10,000", "copies", 6, sign["forward_copies"]),
        ("`sign` adjoint", "copies", 6, sign["adjoint_copies"]),
        ("`sign` extra memory", "vectors", 0.5, sign["extra_memory_ratio"]),
        ("`hadamard` forward, same size", "copies", 25, mixed["forward_copies"]),
        ("`hadamard` adjoint", "copies", 25, mixed["adjoint_copies"]),
        ("`hadamard` extra memory", "vectors", "-", mixed["extra_memory_ratio"]),
        ("`gaussian` generation, n = 61,706, m = 1,000", "million/s", 150, kept["values_per_second"] / 1e6),
        ("`gaussian` forward of 100 vectors", "of sgemm", 0.6, kept["stacked_forward_gflops"] / rate),
        ("`gaussian` adjoint of 100 vectors", "of sgemm", 0.6, kept["stacked_adjoint_gflops"] / rate),
        ("`gaussian` streamed, n = 134,301,514, m = 10: forward", "seconds", "-", streamed["forward_seconds"]),
        ("`gaussian` streamed: adjoint", "seconds", "-", streamed["adjoint_seconds"]),
        ("`gaussian` streamed: extra memory", "vectors", "bounded", streamed["extra_memory_ratio"]),
    ]
    note = (
        f"A copy of the 537 MB vector took {sign['copy_seconds'] * 1e3:.0f} ms, a product of square matrices ran at "
        f"{rate:.0f} Gflop/s. Peaks of the whole process: `sign` {sign['peak_rss_mb']:.0f} MB, "
        f"`hadamard` {mixed['peak_rss_mb']:.0f} MB, `gaussian` streamed {streamed['peak_rss_mb']:.0f} MB."
    )
    return table(["what", "unit", "target", "measured"], lines) + "\n\n" + page.filled(note)


def measure(make: Callable[[int, int], Apply], rows: int, stack: FloatArray) -> tuple[float, float, float]:
    """Seconds to generate, to project one vector, and to project all."""
    generation = best(lambda: make(stack.shape[1], rows))
    apply = make(stack.shape[1], rows)
    return generation, best(lambda: apply(stack[:1])), best(lambda: apply(stack))


def side_by_side(columns: int, rows: int) -> str:
    stack = np.random.default_rng(0).standard_normal((STACK, columns), np.float32)
    results = {name: measure(make, rows, stack) for name, make in MAKERS.items()}
    reference = results["fedrp gaussian"][0] + results["fedrp gaussian"][2]
    lines = [(name, *(1e3 * t for t in times), (times[0] + times[2]) / reference) for name, times in results.items()]
    title = f"n = {columns:,}, m = {rows:,}, in ms; the last column is generation plus {STACK} vectors"
    header = ["", "generation", "one vector", f"{STACK} vectors", "times `fedrp gaussian`"]
    return f"**{title}.**\n\n{table(header, lines)}"


def cost(name: str, columns: int, rows: int) -> float | None:
    """Seconds from the key to the projection of one vector, or None where it would not fit."""
    limits = {"fedrp gaussian": LARGEST_STREAMED, "fedrp sign": 10**12, "fedrp hadamard": 10**12}
    if columns * rows > limits.get(name, LARGEST_DENSE):
        return None
    vector = np.ones((1, columns), np.float32)
    return best(lambda: MAKERS[name](columns, rows)(vector))


def figure() -> None:
    sizes, dims = [10**5, 10**6, 10**7, 10**8], [10, 100, 1000, 10_000]
    panels, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name in MAKERS:
        by_size = [cost(name, n, 10) for n in sizes]
        by_dim = [cost(name, 10**5, m) for m in dims]
        for axis, places, values in ((axes[0], sizes, by_size), (axes[1], dims, by_dim)):
            drawn = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
            style = "o-" if name.startswith("fedrp") else "s--"
            axis.loglog(*zip(*drawn, strict=True), style, label=name, markersize=4)
    source, target = np.ones(max(sizes), np.float32), np.ones(max(sizes), np.float32)
    copies = [best(lambda n=n: np.copyto(target[:n], source[:n])) for n in sizes]  # type: ignore[misc]
    axes[0].loglog(sizes, copies, "k:", label="copy of the vector")
    axes[0].set(xlabel="parameters n (m = 10)", ylabel="seconds: generate and project one vector")
    axes[1].set(xlabel="dimension m (n = 100,000)")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    FIGURE.parent.mkdir(exist_ok=True)
    panels.savefig(FIGURE, metadata={"Date": None})


def machine() -> str:
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":")[1].strip() for line in described.splitlines() if line.startswith("model name")]
    return (
        f"{models[0] if models else platform.machine()}, {os.cpu_count()} processors, "
        f"{torch.get_num_threads()} threads; Python {platform.python_version()}, NumPy {np.__version__}, "
        f"torch {torch.__version__}; load average at the start {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parts = [page.filled(f"Machine: {machine()}.")]
    for name, make in MAKERS.items():  # compile and import before anything is timed
        make(1000, 10)(np.ones((1, 1000), np.float32))
        print(f"ready: {name}")
    parts += [targets(), side_by_side(LENET, 1000), side_by_side(1_000_000, 100)]
    figure()
    page.placed("tables", "\n\n".join(parts))
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
