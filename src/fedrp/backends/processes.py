"""Worker processes of this machine, forked from a server that has imported what they need.

The fork server only imports, and computes nothing: what is forked from it is as good as new. It starts once:
a command starts it before it imports torch itself, and both import side by side.

What a user's program or notebook defines is sent by value (cloudpickle), and workers never run the program itself: it
needs no guard, and may use functions without a name.
"""

import io
import multiprocessing
import signal
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, ClassVar

from fedrp.backends.workers import Answer, InlineWorker, LostWorkerError, Make, Seat, UnsentError, Worker
from fedrp.errors import first_line

_PRELOADED = ["fedrp.simulation.alone", "fedrp.simulation.clients"]


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


@contextmanager
def _without_program() -> Iterator[None]:
    """Processes started here do not run the user's program again to know what it defines."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def started(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """A new process that calls `target(pipe, *arguments)`, and our end of the pipe. It ends with this process at last.

    Ctrl-C does not reach it, and it does not run the user's program.
    """
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    pipe, other = context.Pipe()
    process = context.Process(target=target, args=(other, *arguments), daemon=True)
    with _uninterrupted(), _without_program():
        process.start()
    other.close()
    return process, pipe


def _packed(make: Make) -> memoryview:
    """Pickled with all that the program itself defines; tensors as shared memory.

    Raises:
        UnsentError: something in it is bound to this process.
    """
    import cloudpickle
    import torch.multiprocessing  # noqa: F401 - which is what shares the memory of tensors

    class SharingPickler(cloudpickle.Pickler):  # type: ignore[misc] # it comes without types
        # Of the class: a pickler reads its table when it is made. Else each view would come with a copy of all data.
        dispatch_table: ClassVar = ChainMap(
            ForkingPickler(io.BytesIO()).dispatch_table, cloudpickle.Pickler.dispatch_table
        )

    buffer = io.BytesIO()
    try:
        SharingPickler(buffer).dump(make)
    except Exception as error:  # model, loss and data are the user's, and so is how they are pickled
        raise UnsentError(f"model, loss or data cannot be sent to another process ({first_line(error)})") from None
    return buffer.getbuffer()


class ProcessWorker:
    """A worker in a process of its own, behind a pipe."""

    kept = None

    def __init__(self) -> None:
        self._process, self._pipe = started(_serve)

    def begin(self, make: Make) -> None:
        """Let go of what was held; `make` is pickled."""
        packed = _packed(make)
        with self._lost_if_closed():
            self._pipe.send_bytes(packed)

    def send(self, method: str, *arguments: object) -> None:
        """Call a method of what is held."""
        with self._lost_if_closed():
            self._pipe.send((method, arguments))

    @contextmanager
    def _lost_if_closed(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):  # also in the middle of a message
            raise self._lost() from None

    def receive(self) -> Any:
        """The answer to the oldest call that is not yet answered."""
        with self._lost_if_closed():
            answer: Answer = self._pipe.recv()
        return answer.get()

    def _lost(self) -> LostWorkerError:
        self._process.join(timeout=1)
        return LostWorkerError.of(self._process.pid, self._process.exitcode)

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
        """So many workers; processes that are there already, and new ones.

        Raises:
            UnsentError: this process may have none.
        """
        if count == 1:
            return [self._inline]
        if current_process().daemon:
            raise UnsentError("this process is a worker itself, of a pool, and may start no others")
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
        seat.begin(_Refused(f"model, loss or data cannot be read in another process ({first_line(error)})"))
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
        raise UnsentError(self._text)
