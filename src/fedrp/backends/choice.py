"""Backends by name: what runs simulated clients."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedrp.backends.processes import ProcessBackend
from fedrp.backends.workers import Backend
from fedrp.config.speed import Speed
from fedrp.errors import ConfigError


@contextmanager
def open_backend(speed: Speed) -> Iterator[Backend]:
    """The backend that the settings name; its workers end with it.

    Raises:
        ConfigError: Ray is not installed, the cluster cannot be reached, or one is given that is not used.
    """
    backend = _made(speed)
    try:
        yield backend
    finally:
        backend.stop()


def _made(speed: Speed) -> Backend:
    if speed.backend == "processes":
        if speed.address is not None:
            raise ConfigError(f"address={speed.address} is of a Ray cluster: add backend='ray'")
        return ProcessBackend()
    from fedrp.backends.cluster import connected

    return connected(speed)
