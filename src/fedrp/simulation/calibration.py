"""Choice of the engine of a run, by trying: which is faster depends on the model and on the machine.

It is made once, before workers start, and is part of what the run is from then on: engines differ in the last digits.
"""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import platformdirs
import torch

from fedrp.files import SHARED, replace_file
from fedrp.learning.engines import AUTO, SEQUENTIAL, STACKED, refused, stacked_clients, trainer_of
from fedrp.learning.layout import ModelFactory
from fedrp.learning.memory import keep_freed_memory
from fedrp.learning.objective import Examples, LocalSGD, Loss
from fedrp.learning.trainer import LocalModel, Trainer, make_local_model
from fedrp.rng import RunSeed
from fedrp.stacking.rewrite import require_same, rewritten
from fedrp.stacking.values import NotStackableError
from fedrp.types import Vector

_log = logging.getLogger(__name__)

_CACHE_FILE = "engines.json"
_CHUNKS = (4, 2, 8)  # clients computed as one; the likeliest first, as time may run out
_SHORT = 1000  # client-steps of a run that are over before trying would have paid
_SECONDS = 1.5  # that trying may take
_GAIN = 0.95  # of the sequential engine's time, that another must be below: a tie is no reason to change


class Workload(NamedTuple):
    """What an engine is chosen for."""

    data: Sequence[Examples]
    batch_size: int
    steps: int  # of all clients in the whole run


def choose_engine(asked: str, factory: ModelFactory, loss: Loss, device: torch.device, work: Workload) -> str:
    """The engine that a run computes with: the one asked for, or the one that is faster here.

    Guarantees: never `auto` or plain `stacked`; `sequential` for a model that cannot be stacked, and for short runs.

    Raises:
        ConfigError: `stacked` was asked for a model that cannot be stacked.
    """
    if asked == SEQUENTIAL or (asked == AUTO and work.steps < _SHORT):
        return SEQUENTIAL
    keep_freed_memory()
    model = make_local_model(factory, loss, device, RunSeed(0))
    try:
        require_same(rewritten(model.module), model.module, work.data[0].x[:8].to(device))
    except NotStackableError as error:
        if asked != AUTO:
            raise refused(asked, error) from None
        _log.info("clients are trained one after the other, as the model cannot be stacked: %s", error)
        return SEQUENTIAL
    if stacked_clients(asked) is not None:
        return asked
    seconds = _known_seconds(model, work)
    engines = {name: taken for name, taken in seconds.items() if asked == AUTO or name != SEQUENTIAL}
    if not engines:  # there was no time to try any
        return f"{STACKED}:{_CHUNKS[0]}"
    fastest = min(engines, key=lambda name: engines[name])
    if asked == AUTO and engines[fastest] > _GAIN * engines[SEQUENTIAL]:
        fastest = SEQUENTIAL
    _log.info("engine %s: %s", fastest, ", ".join(f"{n} {1e3 * s:.1f} ms a step" for n, s in seconds.items()))
    return fastest


# --- trying ----------------------------------------------------------------------------------------------------------


def _known_seconds(model: LocalModel, work: Workload) -> dict[str, float]:
    """Seconds of a client's step by engine, measured here or at an earlier time."""
    path = platformdirs.user_cache_path("fedrp") / _CACHE_FILE
    key = _key(model, work)
    known: dict[str, dict[str, float]] = {}
    with suppress(OSError, ValueError):
        known = dict(json.loads(path.read_text()))
    if isinstance(known.get(key), dict) and SEQUENTIAL in known[key]:
        return known[key]
    seconds = measured_seconds(model, work)
    with suppress(OSError):  # it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**known, key: seconds}, indent=1).encode(), SHARED)
    return seconds


def _key(model: LocalModel, work: Workload) -> str:
    """What decides the speed: structure and shapes, not weights."""
    data = work.data[0]
    parts = [str(model.module), model.layout, tuple(data.x.shape[1:]), data.x.dtype, work.batch_size, len(work.data)]
    parts += [torch.__version__, torch.get_num_threads(), model.device, platform.machine(), platform.node()]
    parts += [torch.backends.cpu.get_cpu_capability()]
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def measured_seconds(model: LocalModel, work: Workload) -> dict[str, float]:
    """Seconds of a client's step by engine, for those there was time to try; `sequential` is always one of them."""
    began = time.monotonic()
    seconds: dict[str, float] = {}
    start = model.layout.flatten(model.module)
    for engine in (SEQUENTIAL, *(f"{STACKED}:{chunk}" for chunk in _CHUNKS)):
        clients = stacked_clients(engine) or 1
        left = _SECONDS - (time.monotonic() - began)
        if clients > max(1, len(work.data)) or (seconds and 3 * clients * seconds[SEQUENTIAL] > left):
            continue
        seconds[engine] = _step_seconds(trainer_of(model, RunSeed(0), engine), start, clients, work)
    return seconds


def _step_seconds(trainer: Trainer, start: Vector, clients: int, work: Workload) -> float:
    """Seconds of a step of one client: the least of a few, after one to warm up."""
    size = work.batch_size
    source = work.data[0]
    index = torch.arange(size) % len(source.y)
    batch = Examples(source.x[index], source.y[index])
    stack = np.repeat(start[None], clients, axis=0)
    still = LocalSGD(lr=0.0, momentum=0.9, batch_size=size, epochs=1, grad_clip=1.0, log_divergence=True)
    least = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        trainer.train(stack, [batch] * clients, range(clients), 1, still)
        taken = (time.perf_counter() - began) / clients
        least = min(least, taken) if attempt else least
        if taken * clients > _SECONDS / 4:  # slow: the first is good enough
            return min(least, taken)
    return least
