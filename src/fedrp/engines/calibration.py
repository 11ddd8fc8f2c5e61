"""Choice of the engine of a run, by trying: which is faster depends on the model and on the machine.

It is made once, before workers start, and is part of what the run is from then on: engines differ in the last digits.
"""

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import platformdirs
import torch

from fedrp.engines.choice import AUTO, SEQUENTIAL, STACKED, refused, stacked_clients, trainer_of
from fedrp.engines.memory import keep_freed_memory
from fedrp.files import SHARED, replace_file
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, LocalSGD, Loss
from fedrp.learning.pixels import floats
from fedrp.learning.trainer import LocalModel, Trainer, make_local_model
from fedrp.rng import RunSeed
from fedrp.stacking.rewrite import require_same, rewritten
from fedrp.stacking.values import NotStackableError

_log = logging.getLogger(__name__)

_CACHE_FILE = "engines.json"
_CHUNKS = (4, 2, 8, 1)  # clients computed as one, the first preferred
_REPEATS = 2  # of a measurement, after one to warm up
_PROBE = 2  # examples that tell how long a step takes, about
_SMALLEST = 8  # examples of a batch that still tell which engine is faster
_TICK = 1e-6  # seconds, at least: a clock may stand still
LONG = 1000  # client-steps of a run in which it pays to try; shorter ones are over before
_SECONDS = 1.0  # that trying may take, at least
_SHARE = 0.01  # of the run's time that it may take
_CLEAR = 0.9  # of the preferred engine's time, that another must be below: near ties must not be left to chance
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
    if asked == SEQUENTIAL or (asked == AUTO and work.steps < LONG):
        return SEQUENTIAL
    keep_freed_memory()
    model = make_local_model(factory, loss, device, RunSeed(0))
    try:
        if len({part.x.shape[1:] for part in work.data}) > 1:
            raise NotStackableError("clients have inputs of different shapes")
        require_same(rewritten(model.module), model.module, floats(work.data[0].x[:8].to(device)))
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
    fastest = preferred(engines)
    if asked == AUTO and engines[fastest] > _GAIN * engines[SEQUENTIAL]:
        fastest = SEQUENTIAL
    _log.info("engine %s: %s", fastest, ", ".join(f"{n} {1e3 * s:.1f} ms a step" for n, s in seconds.items()))
    return fastest


def preferred(seconds: Mapping[str, float]) -> str:
    """The first stacked engine in the order of preference, unless others are clearly faster: then the fastest."""
    stacked = [name for chunk in _CHUNKS if (name := f"{STACKED}:{chunk}") in seconds] or list(seconds)
    fastest = min(stacked, key=lambda name: seconds[name])
    return fastest if seconds[fastest] < _CLEAR * seconds[stacked[0]] else stacked[0]


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
    """Seconds of a client's step by engine; of `sequential` alone where steps are too long to try others.

    Batches are smaller than the run's where that is needed to be done in time.
    """
    sequential = trainer_of(model, RunSeed(0), SEQUENTIAL)
    _step_seconds(sequential, 1, _PROBE, work)  # to warm up
    probe = _step_seconds(sequential, 1, _PROBE, work)
    chunks = [chunk for chunk in _CHUNKS if chunk <= len(work.data)]
    allowed = max(_SECONDS, _SHARE * work.steps * work.batch_size * probe / _PROBE)
    batch = min(work.batch_size, int(allowed * _PROBE / probe / (_REPEATS + 1) / (1 + sum(chunks))))
    if batch < min(_SMALLEST, work.batch_size):
        return {SEQUENTIAL: probe}
    engines = {SEQUENTIAL: 1} | {f"{STACKED}:{chunk}": chunk for chunk in chunks}
    trainers = {engine: trainer_of(model, RunSeed(0), engine) for engine in engines}
    seconds = dict.fromkeys(engines, math.inf)
    for _ in range(_REPEATS + 1):  # in turns: what slows the machine for a while touches all
        for engine, clients in engines.items():
            seconds[engine] = min(seconds[engine], _step_seconds(trainers[engine], clients, batch, work))
    return seconds


def _step_seconds(trainer: Trainer, clients: int, size: int, work: Workload) -> float:
    """Seconds of a step of one client."""
    source, model = work.data[0], trainer.model
    index = torch.arange(size) % len(source.y)
    batch = Examples(source.x[index], source.y[index])
    start = np.repeat(model.layout.flatten(model.module)[None], clients, axis=0)
    still = LocalSGD(lr=0.0, momentum=0.9, batch_size=size, epochs=1, grad_clip=1.0, log_divergence=True)
    # One thread's own time does not show what else the machine does.
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    began = clock()
    trainer.train(start, [batch] * clients, range(clients), 1, still)
    return max((clock() - began) / clients, _TICK)
