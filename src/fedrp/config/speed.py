"""How a run is computed: `Speed`, which cannot change its result."""

import os
from dataclasses import dataclass

from fedrp.config.checks import require, require_choice, require_types, setting

ENGINES = ("auto", "sequential", "stacked", "stacked:1", "stacked:2", "stacked:4", "stacked:8")
_MOST_WORKERS = 8  # unless more are asked for: each takes some hundred MB
_LITTLE_WORK = 10**9  # a second or two of LeNet-5, as long as a worker takes to import torch
_MOST_THREADS = 1024  # torch crashes on absurd numbers


@dataclass(frozen=True)
class Speed:
    """How a run is computed. Nothing here changes the result, except `engine` and `device` in the last digits."""

    workers: int | None = setting(None, "worker processes; default by machine, clients and length of the run")
    threads: int = setting(1, "torch threads of each worker; a change may move the last digits")
    device: str = setting("cpu", "torch device of local training")
    engine: str = setting("auto", "how clients are trained: sequential, stacked (several as one) or auto (the faster)")
    projection_memory: int = setting(4096, "MB that a gaussian matrix may take; a larger one is streamed")
    microbatch: int = setting(32, "examples whose single gradients are in memory together, where records are protected")
    client_memory: int = setting(2048, "MB that clients' states may take between rounds; the rest goes to disk")
    eval_every: int = setting(1, "score the models every so many rounds; the last round always is")
    backend: str = setting("processes", "what runs the clients: processes of this machine, or ray")
    address: str | None = setting(None, "Ray cluster, e.g. auto or HOST:PORT; default: one on this machine")

    def __post_init__(self) -> None:
        require_types(self)
        least = {"workers": 1, "threads": 1, "eval_every": 1, "projection_memory": 0, "client_memory": 0}
        least |= {"microbatch": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            require(value is None or value >= bound, name, value, f"a whole number of at least {bound}")
        require_choice("engine", self.engine, ENGINES)
        require(self.threads <= _MOST_THREADS, "threads", self.threads, f"at most {_MOST_THREADS}")
        require_choice("backend", self.backend, ("processes", "ray"))


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_workers(speed: Speed) -> int:
    """How many workers a run may have: those that are asked for, else one per processor."""
    return speed.workers or max(1, min(_MOST_WORKERS, usable_cores() // speed.threads))


def chosen_workers(speed: Speed, work: int) -> int:
    """The same, but one where the run is over before others would have started.

    `work` is examples of all rounds times parameters of the model.
    """
    return most_workers(speed) if speed.workers or work >= _LITTLE_WORK else 1
