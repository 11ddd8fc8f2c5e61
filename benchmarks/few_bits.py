"""What rotation, quantisation and packing cost in a round, next to the training of its clients.

    python benchmarks/few_bits.py                 # measures, keeps, writes the table of docs/performance.md
    python benchmarks/few_bits.py --render        # the table from what is kept

For each m: the uploads of all clients are turned, coded, decoded and summed, the mean is coded, decoded and turned
back, on one thread. The reference is the training of the same clients by the stacked engine, also on one thread, in
turn with it. Data are random: the cost does not depend on them.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import kept
import numpy as np
import torch
from origin import origin_of
from page import came_from, placed, spread, table

from fedrp.compression.coding import aggregate_coding_of, place_of, upload_coding_of
from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.learning.objective import Examples, LocalSGD
from fedrp.learning.zoo import MODELS
from fedrp.projection import kernels
from fedrp.projection.rotation import make_rotation
from fedrp.rng import RunSeed

TABLE = "few-bits-cost"
CLIENTS, EXAMPLES, SHAPE = 100, 600, (1, 28, 28)
CASES = (
    (1000, "haar"),
    (4064, "haar"),
    (16384, "haar"),
    (16384, "hadamard"),
    (20000, "haar"),
    (32736, "hadamard"),
)


def training() -> Callable[[], Any]:
    """A round of local training of all clients, four of them as one."""
    factory = functools.partial(MODELS["lenet5"].build, SHAPE, 10)
    trainer = make_trainer(factory, torch.nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0), "stacked:4")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(EXAMPLES, *SHAPE, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)
    start = np.repeat(trainer.model.layout.flatten(trainer.model.module)[None], CLIENTS, axis=0)
    sgd = LocalSGD(0.01, 0.9, 64, 1, 0.0, False)
    return functools.partial(trainer.train, start, [Examples(x, y)] * CLIENTS, range(CLIENTS), 1, sgd)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stages(size: int, kind: str) -> dict[str, float]:
    """Seconds of each stage of a round, for one bit a number each way."""
    rotation, run = make_rotation(kind, SecretKey(bytes(32)), size), bytes(16)
    coding, downwards = upload_coding_of(size, 1.0), aggregate_coding_of(size, 1.0)
    uploads = np.random.default_rng(0).standard_normal((CLIENTS, size), np.float32)
    found: dict[str, Any] = {}

    def turn() -> None:
        found["turned"] = rotation.forward(uploads)

    def encode() -> None:
        found["sent"] = [coding.encode(row, place_of(run, 1, client)) for client, row in enumerate(found["turned"])]

    def decode() -> None:
        decoded = [coding.decode(sent, place_of(run, 1, client)) for client, sent in enumerate(found["sent"])]
        found["mean"] = np.mean(decoded, axis=0, dtype=np.float32)

    def back() -> None:
        payload = downwards.encode(found["mean"], place_of(run, 1, CLIENTS))
        rotation.adjoint(downwards.decode(payload, place_of(run, 1, CLIENTS)))

    return {"rotate": seconds(turn), "encode": seconds(encode), "decode": seconds(decode), "back": seconds(back)}


def measure(repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    kernels.set_threads(1)
    train = training()
    train()  # to warm up
    rows = []
    for size, kind in CASES:
        stages(size, kind)  # likewise
        costs = [(stages(size, kind), seconds(train)) for _ in range(repeats)]
        shares = [sum(stage.values()) / trained for stage, trained in costs]
        medians = {name: statistics.median(stage[name] for stage, _ in costs) for name in costs[0][0]}
        shown = {"share": statistics.median(shares), "share_range": [min(shares), max(shares)]}
        rows.append({"m": size, "rotation": kind, **medians, **shown})
    return rows


def rendered(result: dict[str, Any]) -> str:
    lines = [
        (
            f"{row['m']:,}",
            row["rotation"],
            *(f"{row[name]:.3f}" for name in ("rotate", "encode", "decode", "back")),
            spread(row["share"], row["share_range"]),
        )
        for row in result["rows"]
    ]
    header = [
        "m",
        "rotation",
        "rotate, s",
        "code, s",
        "decode, s",
        "mean back, s",
        "of the training",
    ]
    return table(header, lines) + "\n\n" + came_from([result["origin"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        command = " ".join(["python benchmarks/few_bits.py", *sys.argv[1:]])
        result = {"origin": origin_of(command), "rows": measure(arguments.repeats)}
        kept.keep(TABLE, {"few_bits": result})
        print(json.dumps(result))
    (result,) = kept.read(TABLE).values()
    placed(TABLE, rendered(result))


if __name__ == "__main__":
    main()
