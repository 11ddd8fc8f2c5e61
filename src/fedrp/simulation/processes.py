"""Worker processes: a host behind a pipe."""

import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedrp.errors import ConfigError, FedRPError


class Worker:
    """A host in a process of its own, where `make` makes it. Calls are sent with `send` and answered by `receive`."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make), daemon=True)
        resource_tracker.ensure_running()  # starting it later would undo the next line
        # Ctrl-C reaches all processes of a terminal; it is for the main one, which then ends the others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except (AttributeError, pickle.PicklingError, TypeError) as error:
            raise ConfigError(
                f"the task cannot be sent to worker processes ({error}): "
                "define model, loss and data at the top level of a module, or use workers=1"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other.close()

    def send(self, method: str, *arguments: object) -> None:
        """Ask for a method of the host."""
        try:
            self._pipe.send((method, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise FedRPError("a worker process ended unexpectedly (out of memory?)") from None

    def receive(self) -> Any:
        """The answer to the oldest call that is not yet answered."""
        try:
            good, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise FedRPError("a worker process ended unexpectedly (out of memory?)") from None
        if not good:
            raise value
        return value

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _serve(pipe: Connection, make: Callable[[], object]) -> None:
    """Answer calls until the other end goes away."""
    host: object | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            host = host or make()
            answer: tuple[bool, object] = (True, getattr(host, method)(*arguments))
        except FedRPError as error:
            answer = (False, error)
        except Exception as error:  # whatever it is, the main process must hear of it
            answer = (False, RuntimeError(f"{type(error).__name__} in a worker process\n{traceback.format_exc()}"))
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
