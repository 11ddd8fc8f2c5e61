"""What users know, at FedRP's bytes: top-k, random-k, QSGD, a count-sketch, and FedAvg as the reference.

    python benchmarks/compression.py --dataset mnist --clients 100 --rounds 30 --budget 4000 --out FILE.json

All methods share the split, batches, initial model and local SGD of `fedrp run --algorithm fedavg` with the same seed.
They differ in how a client's update becomes bytes, and bytes a step of the common model; nothing else passes between
the two sides. `--budget` is the largest payload of an upload (fedrp-subspace: 4 bytes x --dim); the message header is
counted on top, as `fedrp run` does. Values are float32 and nothing is entropy-coded. The methods:

    topk           the largest entries of update plus memory; what is left is remembered (Stich et al. 2018)
    randomk        the same with entries that the public seed draws, so no positions are sent, either way
    qsgd:LEVELS    stochastic rounding (Alistarh et al. 2017) at a fixed rate: 1 (default) is ternary, the least it can
                   do, 7 is 4 bits; takes what it takes, whatever the budget
    qsgd-sparse    stochastic rounding sent without its zeros, with as many levels as the budget has room for
    sketch:ROWS:KEPT:MOMENTUM   a count-sketch with momentum and error on the server (FetchSGD, Rothchild et al. 2020);
                   KEPT entries make a step, 0: as many as fit the budget on the way back
    fedavg         the model itself
"""

import argparse
import bisect
import concurrent.futures
import functools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from origin import origin_of

from fedrp.algorithms.resolve import resolved
from fedrp.config import RunConfig, from_settings, require_choice
from fedrp.engines.choice import make_trainer
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.evaluate import score
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import LocalSGD
from fedrp.learning.task import Task, examples, named_task, split_among_clients
from fedrp.means import weighted_sum
from fedrp.protocol.wire import HEADER_BYTES
from fedrp.rng import RunSeed
from fedrp.simulation.population import grouped

Vector = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

SETTINGS = ("dataset", "model", "clients", "rounds", "local_epochs", "lr", "partition", "seed")
NO_MEMORY: Vector = np.zeros((), np.float32)  # what both sides start from: zero, of any shape
BUCKET = 512  # numbers that share a scale in `qsgd`

# --- numbers and bytes ---------------------------------------------------------------------------------------------


def per_word(base: int) -> int:
    """How many digits from 0 to below `base` fit in 8 bytes."""
    return int(64 / math.log2(base))


def pack(digits: Integers, base: int) -> bytes:
    """Digits in as few 8-byte words as hold them; the last is filled up with zeros."""
    count = per_word(base)
    words = np.pad(digits, (0, -len(digits) % count)).reshape(-1, count).astype(np.uint64)
    return (words @ np.uint64(base) ** np.arange(count, dtype=np.uint64)).tobytes()


def unpack(data: bytes, base: int) -> Integers:
    """The digits of `pack`, and the zeros that fill the last word."""
    powers = np.uint64(base) ** np.arange(per_word(base), dtype=np.uint64)
    return (np.frombuffer(data, np.uint64)[:, None] // powers % np.uint64(base)).astype(np.int64).ravel()


def entries(length: int, size: int) -> int:
    """How many entries of a sparse vector of `size` numbers make up `length` bytes, or fit in them."""
    words, rest = divmod(length, 4 * per_word(size) + 8)
    return words * per_word(size) + max(0, rest - 8) // 4


def to_sparse(vector: Vector) -> bytes:
    """The entries that are not zero: values, then positions."""
    positions = np.flatnonzero(vector)
    return vector[positions].tobytes() + pack(positions, vector.size)


def from_sparse(data: bytes, size: int) -> Vector:
    """The inverse of `to_sparse`."""
    values = np.frombuffer(data, np.float32, entries(len(data), size))
    return scattered(values, unpack(data[values.nbytes :], size)[: values.size], size)


def scattered(values: Vector, positions: Integers, size: int) -> Vector:
    """A vector with these values at these positions, and zeros elsewhere."""
    vector = np.zeros(size, np.float32)
    vector[positions] = values
    return vector


def largest(vector: Vector, count: int) -> Vector:
    """The vector with all but its `count` largest entries set to zero."""
    positions = np.argpartition(np.abs(vector), -count)[-count:]
    return scattered(vector[positions], positions, vector.size)


def rounded(numbers: npt.NDArray[np.float64], rng: np.random.Generator) -> Integers:
    """Each number rounded to one of its neighbours at random, so that it is right on average."""
    below = np.floor(numbers)
    return (below + (rng.random(numbers.shape) < numbers - below)).astype(np.int64)


# --- methods -------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """How a client's update becomes bytes, and bytes a step of the model. Pure: memories go in and come out."""

    size: int  # n
    encode: Callable[[Vector, Vector, int, int], tuple[bytes, Vector]]  # update, memory, round, client
    decode: Callable[[bytes, int], Vector]  # payload, round
    step: Callable[[Vector, Vector], tuple[Vector, Vector]] = lambda mean, memory: (mean, memory)  # of what was decoded
    support: Callable[[int], Integers] | None = None  # the entries that a step of this round can have, if all know
    relative: bool = True  # False: what is encoded is the client's model, and the step is the new one

    def aggregate(self, payloads: Sequence[bytes], memory: Vector, round_: int) -> tuple[Vector, Vector]:
        """The step that follows from the clients' payloads, and the server's new memory."""
        vectors = [self.decode(payload, round_) for payload in payloads]
        return self.step(weighted_sum(vectors, [1.0] * len(vectors), len(vectors)), memory)

    def reply(self, step: Vector, round_: int) -> bytes:
        """The step as it is sent to every client: dense or sparse, whichever is shorter."""
        if self.support:
            return step[self.support(round_)].tobytes()
        return min(step.tobytes(), to_sparse(step), key=len)

    def read(self, reply: bytes, round_: int) -> Vector:
        """The inverse of `reply`."""
        if self.support:
            return scattered(np.frombuffer(reply, np.float32), self.support(round_), self.size)
        return _floats(reply) if len(reply) == 4 * self.size else from_sparse(reply, self.size)


def _floats(payload: bytes, _round: int = 0) -> Vector:
    return np.frombuffer(payload, np.float32)


def _fitting(count: int, size: int, budget: int) -> int:
    if count < 1:
        raise ConfigError(f"budget={budget} is too small for this method: allow more bytes")
    return min(count, size)


def fedavg(size: int, _budget: int, _seed: RunSeed) -> Method:
    return Method(size, lambda model, memory, _round, _client: (model.tobytes(), memory), _floats, relative=False)


def top_k(size: int, budget: int, _seed: RunSeed) -> Method:
    count = _fitting(entries(budget, size), size, budget)

    def encode(update: Vector, memory: Vector, _round: int, _client: int) -> tuple[bytes, Vector]:
        total = update + memory
        sent = largest(total, count)
        return to_sparse(sent), total - sent

    return Method(size, encode, lambda payload, _round: from_sparse(payload, size))


def random_k(size: int, budget: int, seed: RunSeed) -> Method:
    count = _fitting(budget // 4, size, budget)

    def support(round_: int) -> Integers:
        return seed.generator("random-k", round_).choice(size, count, replace=False)

    def decode(payload: bytes, round_: int) -> Vector:
        return scattered(_floats(payload), support(round_), size)

    def encode(update: Vector, memory: Vector, round_: int, _client: int) -> tuple[bytes, Vector]:
        total = update + memory
        payload = total[support(round_)].tobytes()
        return payload, total - decode(payload, round_)

    return Method(size, encode, decode, support=support)


def qsgd(size: int, _budget: int, seed: RunSeed, levels: int = 1) -> Method:
    """Multiples of 1/levels of the largest number in each bucket, as in the paper's experiments."""
    buckets, base = -(-size // BUCKET), 2 * levels + 1

    def encode(update: Vector, memory: Vector, round_: int, client: int) -> tuple[bytes, Vector]:
        rows = np.pad(update, (0, -size % BUCKET)).reshape(buckets, BUCKET)
        scales = np.maximum(np.abs(rows).max(axis=1), np.finfo(np.float32).tiny)
        steps = rounded(levels * (rows / scales[:, None].astype(np.float64)), seed.generator("qsgd", round_, client))
        return scales.tobytes() + pack(steps.ravel()[:size] + levels, base), memory

    def decode(payload: bytes, _round: int) -> Vector:
        scales = np.frombuffer(payload, np.float32, buckets)
        steps = unpack(payload[scales.nbytes :], base)[:size] - levels
        return (steps * (np.repeat(scales, BUCKET)[:size] / levels)).astype(np.float32)

    return Method(size, encode, decode)


def qsgd_sparse(size: int, budget: int, seed: RunSeed) -> Method:
    """Multiples of norm/levels: both, and a code for each that is not zero (at most levels sqrt(n) on average)."""
    header, most_levels = 5, 255

    def encode(update: Vector, memory: Vector, round_: int, client: int) -> tuple[bytes, Vector]:
        norm = np.nextafter(np.float32(np.linalg.norm(update.astype(np.float64))), np.float32(np.inf))
        parts = update / np.float64(norm)

        def length(levels: int) -> int:
            expected = float(np.minimum(1, levels * np.abs(parts)).sum())
            return header + 8 * math.ceil((expected + 4 * math.sqrt(expected)) / per_word(size * (2 * levels + 1)))

        rng = seed.generator("qsgd", round_, client)
        for levels in range(bisect.bisect(range(1, most_levels + 1), budget, key=length), 0, -1):
            steps = rounded(levels * parts, rng)
            positions, base = np.flatnonzero(steps), 2 * levels + 1
            payload = norm.tobytes() + bytes([levels]) + pack(steps[positions] % base * size + positions, size * base)
            if len(payload) <= budget:  # at once, but for one draw in 30,000
                return payload, memory
        raise ConfigError(f"budget={budget} is too small for qsgd-sparse: allow more bytes")

    def decode(payload: bytes, _round: int) -> Vector:
        norm, levels = np.frombuffer(payload, np.float32, 1), payload[4]
        base = 2 * levels + 1
        digits, positions = np.divmod(unpack(payload[header:], size * base), size)
        sent = digits != 0  # the others fill the last word
        steps = (digits[sent] + levels) % base - levels
        return scattered((steps * (norm / levels)).astype(np.float32), positions[sent], size)

    return Method(size, encode, decode)


def sketch(size: int, budget: int, seed: RunSeed, rows: int = 5, kept: int = 0, momentum: float = 0.9) -> Method:
    """FetchSGD. As in its authors' code, cells that a step was read from are cleared from momentum and error."""
    columns = _fitting(budget // (4 * rows), size, budget)
    count = min(kept or entries(budget, size), size)
    signs = seed.generator("sketch-signs").choice(np.array([-1, 1], np.float32), (rows, size))
    cells = seed.generator("sketch-cells").integers(columns, size=(rows, size)) + columns * np.arange(rows)[:, None]

    def sketched(vector: Vector) -> Vector:
        return np.bincount(cells.ravel(), (signs * vector).ravel(), minlength=rows * columns).astype(np.float32)

    def encode(update: Vector, memory: Vector, _round: int, _client: int) -> tuple[bytes, Vector]:
        return sketched(update).tobytes(), memory

    def step(mean: Vector, memory: Vector) -> tuple[Vector, Vector]:
        velocity, error = np.broadcast_to(memory, (2, rows * columns))
        velocity = np.float32(momentum) * velocity + mean
        error = error + velocity
        found = largest(np.median(signs * error[cells], axis=0), count)
        return found, np.stack([velocity, error]) * (sketched(found) == 0)

    return Method(size, encode, _floats, step)


METHODS: dict[str, Callable[..., Method]] = {
    "topk": top_k,
    "randomk": random_k,
    "qsgd": qsgd,
    "qsgd-sparse": qsgd_sparse,
    "sketch": sketch,
    "fedavg": fedavg,
}


def make_method(spec: str, size: int, budget: int, seed: RunSeed) -> Method:
    """The method that `spec` names, e.g. `qsgd:7`."""
    name, *numbers = spec.split(":")
    require_choice("method", name, METHODS)
    return METHODS[name](size, budget, seed, *map(json.loads, numbers))


# --- runs ----------------------------------------------------------------------------------------------------------


def run(spec: str, budget: int, config: RunConfig, task: Task) -> Iterator[tuple[Vector, dict[str, float]]]:
    """The model after each round, and what was measured; bytes are of one client's messages, mean and most."""
    seed, test = RunSeed(config.seed), examples(task.test, "the test set")
    model = public_initial(task.model, seed)
    method, config = make_method(spec, model.size, budget, seed), resolved(config, model.size)
    data = split_among_clients(task, config)
    trainer = make_trainer(task.model, task.loss, torch.device("cpu"), seed)
    sgd = LocalSGD(config.lr or 0.0, config.momentum, config.batch_size, config.local_epochs, config.grad_clip)
    memories, server_memory = [NO_MEMORY] * config.clients, NO_MEMORY
    for round_ in range(1, config.rounds + 1):
        base = model if method.relative else np.zeros_like(model)
        payloads = []
        for group in grouped(config.clients, model.size).values():
            start = np.broadcast_to(model, (len(group), model.size))
            trained = trainer.train(start, [data[client] for client in group], group, round_, sgd)
            for client, weights in zip(group, trained, strict=True):
                payload, memories[client] = method.encode(weights - base, memories[client], round_, client)
                payloads.append(payload)
        step, server_memory = method.aggregate(payloads, server_memory, round_)
        reply = method.reply(step, round_)
        model = base + method.read(reply, round_)
        up = [HEADER_BYTES + len(payload) for payload in payloads]
        traffic = {"bytes_up": sum(up) / len(up), "bytes_up_most": max(up), "bytes_down": HEADER_BYTES + len(reply)}
        yield model, {"round": round_, **score(trainer.model, model, test, task.metrics).named(), **traffic}


def measure(spec: str, budget: int, config: RunConfig, threads: int) -> dict[str, Any]:
    """What a run came to; one that diverges is told up to there."""
    torch.set_num_threads(threads)
    began, history, diverged = time.monotonic(), [], None
    try:
        for _, record in run(spec, budget, config, named_task(config)):
            history.append(record)
            print(f"{spec}: round {record['round']}: {record['accuracy']:.2f} %", file=sys.stderr, flush=True)
    except DivergenceError as error:
        diverged = str(error)
    means = {key: sum(r[key] for r in history) / max(1, len(history)) for key in ("bytes_up", "bytes_down")}
    outcome = {"accuracy": history[-1]["accuracy"] if history else None, **means, "diverged": diverged}
    return {**outcome, "seconds": time.monotonic() - began, "history": history}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETTINGS:
        default = getattr(RunConfig, name)
        kind = float if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help="as of 'fedrp run'")
    parser.add_argument("--budget", type=int, default=4000, help="largest payload of an upload, in bytes")
    parser.add_argument("--methods", default="topk,randomk,qsgd,qsgd:7,qsgd-sparse,sketch,fedavg", help="by commas")
    parser.add_argument("--workers", type=int, default=1, help="methods that run at the same time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each; more may move the last digits")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, a line of JSON")
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    config = from_settings(RunConfig, {**settings, "algorithm": "fedavg"})
    specs = arguments.methods.split(",")
    for spec in specs:
        require_choice("method", spec.split(":")[0], METHODS)
    origin = origin_of(" ".join(["python benchmarks/compression.py", *sys.argv[1:]]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    measured = functools.partial(measure, budget=arguments.budget, config=config, threads=arguments.threads)
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        methods = dict(zip(specs, pool.map(measured, specs), strict=True))
    result = {"origin": origin, **settings, "budget": arguments.budget, "header": HEADER_BYTES, "methods": methods}
    arguments.out.write_text(json.dumps(result) + "\n")  # at the end: a file that is there is whole


if __name__ == "__main__":
    main()
