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

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("workers", "threads"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number of at least 1")
        require_choice("engine", self.engine, ENGINES)
        require(self.threads <= _MOST_THREADS, "threads", self.threads, f"at most {_MOST_THREADS}")
        require(self.projection_memory >= 0, "projection_memory", self.projection_memory, "at least 0")
