"""Backends by name: what runs simulated clients."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedrp.config import Speed
from fedrp.simulation.processes import ProcessBackend
from fedrp.simulation.workers import Backend


@contextmanager
def open_backend(speed: Speed) -> Iterator[Backend]:
    """The backend that the settings name; its workers end with it.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """
    backend = _made(speed)
    try:
        yield backend
    finally:
        backend.stop()


def _made(speed: Speed) -> Backend:
    if speed.backend == "processes":
        return ProcessBackend()
    from fedrp.simulation.cluster import connected

    return connected(speed)
