"""Worker processes of this machine, forked from a server that has imported what they need.

The fork server only imports, and computes nothing: what is forked from it is as good as new. It starts once:
a command starts it before it imports torch itself, and both import side by side.
"""

import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import current_process
from typing import Any

from fedrp.backends.workers import LOST, Answer, InlineWorker, Make, Seat, Worker
from fedrp.errors import ConfigError, FedRPError, first_line

_PRELOADED = ["fedrp.simulation.alone", "fedrp.simulation.clients"]
_GUARD = "put what starts the run under \"if __name__ == '__main__':\", or use workers=1"


def start_fork_server() -> None:
    """Start the process that workers are forked from, unless it is there; returns at once."""
    forkserver.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # before the mask, which it would undo
    with _uninterrupted():
        forkserver.ensure_running()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started here do not hear of Ctrl-C: it is for the main one, which then ends the others."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class ProcessWorker:
    """A worker in a process of its own, behind a pipe."""

    kept = None

    def __init__(self) -> None:
        if getattr(current_process(), "_inheriting", False):  # a worker is importing the user's script
            raise ConfigError(f"worker processes cannot start while a script is imported: {_GUARD}")
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        with _uninterrupted():
            self._process.start()
        other.close()
        self._answered = False

    def begin(self, make: Make) -> None:
        """Let go of what was held; `make` is pickled."""
        import torch.multiprocessing  # noqa: F401 - tensors then go as shared memory, not as copies

        try:
            self._send(make)
        except (AttributeError, pickle.PicklingError, TypeError) as error:
            raise ConfigError(
                f"the task cannot be sent to worker processes ({error}): "
                "define model, loss and data at the top level of a module, or use workers=1"
            ) from None

    def send(self, method: str, *arguments: object) -> None:
        """Call a method of what is held."""
        self._send((method, arguments))

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None

    def receive(self) -> Any:
        """The answer to the oldest call that is not yet answered."""
        try:
            answer: Answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost() from None
        self._answered = True
        return answer.get()

    def _lost(self) -> FedRPError:
        self._process.join(timeout=1)
        if self._process.exitcode == 1 and not self._answered:  # an error while it was importing the user's script
            return ConfigError(f"a worker process could not start, its error is above: {_GUARD}")
        return FedRPError(LOST)

    def keep(self) -> None:
        """A process that is lost is not replaced: nothing of this machine would be more reliable."""

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


class ProcessBackend:
    """Workers on this machine: this process if one will do, else so many processes of their own."""

    def __init__(self) -> None:
        self._inline = InlineWorker()
        self._started: list[ProcessWorker] = []

    def workers(self, count: int) -> Sequence[Worker]:
        """So many workers; processes that are there already, and new ones."""
        if count == 1:
            return [self._inline]
        try:
            while len(self._started) < count:
                self._started.append(ProcessWorker())
        except BaseException:  # also Ctrl-C: those that have started must not stay
            self.stop()
            raise
        return self._started[:count]

    def stop(self) -> None:
        """End the processes."""
        self._inline.stop()
        for worker in self._started:
            worker.stop()
        self._started.clear()


def _serve(pipe: Connection) -> None:
    """Answer calls until the other end goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where the fork server is not ours, its mask is not, either
    seat = Seat()
    try:
        while True:
            answer = _next(pipe, seat)
            if answer is not None:
                pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        seat.close()


def _next(pipe: Connection, seat: Seat) -> Answer | None:
    """Take one message: something to hold, which is not answered, or a call."""
    try:
        message = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise
    except Exception as error:  # reading it imports the user's code
        text = (
            f"the task cannot be read in a worker process ({first_line(error)}): "
            "define model, loss and data at the top level of a module, or use workers=1"
        )
        seat.begin(_Refused(text))
        return None
    if isinstance(message, tuple):
        return seat.answer(*message)
    seat.begin(message)
    return None


class _Refused:
    """Makes nothing, and says why."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self) -> Any:
        raise ConfigError(self._text)
