"""How a run is computed: `Speed`, which cannot change its result."""

from dataclasses import dataclass

from fedrp.config.checks import require, require_choice, require_types, setting

ENGINES = ("auto", "sequential", "stacked", "stacked:1", "stacked:2", "stacked:4", "stacked:8")
_MOST_THREADS = 1024  # torch crashes on absurd numbers


@dataclass(frozen=True)
class Speed:
    """How a run is computed. Nothing here changes the result, except `engine` and `device` in the last digits."""

    workers: int = setting(1, "worker processes")
    threads: int = setting(1, "torch threads of each worker; a change may move the last digits")
    device: str = setting("cpu", "torch device of local training")
    engine: str = setting("auto", "how clients are trained: sequential, stacked (several as one) or auto (the faster)")
    projection_memory: int = setting(4096, "MB that a gaussian matrix may take; a larger one is streamed")
    client_memory: int = setting(2048, "MB that clients' states may take between rounds; the rest goes to disk")
    eval_every: int = setting(1, "score the models every so many rounds; the last round always is")
    backend: str = setting("processes", "what runs the clients: processes of this machine, or ray")
    address: str | None = setting(None, "Ray cluster, e.g. auto or HOST:PORT; default: one on this machine")

    def __post_init__(self) -> None:
        require_types(self)
        least = {"workers": 1, "threads": 1, "eval_every": 1, "projection_memory": 0, "client_memory": 0}
        for name, bound in least.items():
            require(getattr(self, name) >= bound, name, getattr(self, name), f"a whole number of at least {bound}")
        require_choice("engine", self.engine, ENGINES)
        require(self.threads <= _MOST_THREADS, "threads", self.threads, f"at most {_MOST_THREADS}")
        require_choice("backend", self.backend, ("processes", "ray"))
