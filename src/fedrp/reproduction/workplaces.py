"""Where runs are made: one after the other by all workers, or several side by side, in a process of its own each.

Both tell of every run what happens to it: `Told` and `Warned` as it goes on, `Finished` or `Failed` at its end. A run
that fails, or whose process is killed, takes no other with it.
"""

import contextlib
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fedrp.backends.choice import open_backend
from fedrp.backends.processes import started
from fedrp.backends.workers import Backend, ending
from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed
from fedrp.errors import FedRPError
from fedrp.learning.task import Task, named_task
from fedrp.reporting.runs import Line
from fedrp.reproduction.plan import speed_of
from fedrp.simulation.runfolder import CONFIG_FILE
from fedrp.simulation.simulate import simulate

_PATIENCE = 10.0  # seconds that a stopped process may take to clean up


class Job(NamedTuple):
    """A run to be made, or to be gone on with."""

    config: RunConfig
    folder: Path
    data_dir: Path | None


class Told(NamedTuple):
    """A round is over."""

    line: Line


class Warned(NamedTuple):
    """The run has something to say."""

    text: str


class Finished(NamedTuple):
    """The run is over."""

    result: dict[str, Any]


class Failed(NamedTuple):
    """The run was given up."""

    why: str


Event = Told | Warned | Finished | Failed
Hear = Callable[[str, Event], None]  # (name of the run, what happened)


def one_after_another(
    jobs: Mapping[str, Job], tasks: Callable[[RunConfig], Task], workers: int | None, hear: Hear
) -> None:
    """Make all runs in turn; the clients of each are spread over the workers."""
    with open_backend(Speed(workers=workers)) as backend:
        for name, job in jobs.items():

            def tell(event: Event, name: str = name) -> None:
                hear(name, event)

            try:
                _perform(job, tasks(job.config), workers, tell, backend)
            except FedRPError as error:
                tell(Failed(str(error)))


def side_by_side(jobs: Mapping[str, Job], count: int, hear: Hear) -> None:
    """Make so many runs at a time, each by one worker. What stops this stops all of them."""
    waiting = deque(jobs.items())
    working: dict[Connection, tuple[str, BaseProcess]] = {}
    try:
        while waiting or working:
            while waiting and len(working) < count:
                name, job = waiting.popleft()
                process, pipe = started(_work, job)
                working[pipe] = name, process
            ready = wait(list(working))
            for pipe in [pipe for pipe in working if pipe in ready]:
                name, process = working[pipe]
                event = _received(pipe, process)
                if isinstance(event, Finished | Failed):
                    del working[pipe]
                    pipe.close()
                    process.join()
                hear(name, event)
    finally:
        _stop([process for _, process in working.values()])


def _received(pipe: Connection, process: BaseProcess) -> Event:
    """What a process says; of one that has gone without a word, how it ended."""
    try:
        event: Event = pipe.recv()
    except (EOFError, OSError):  # also in the middle of a message
        process.join()
        return Failed(f"its process {ending(process.exitcode)}; completed rounds are kept")
    return event


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_PATIENCE)
        process.kill()
        process.join()


def _work(pipe: Connection, job: Job) -> None:
    """In a process of its own: make the run and tell of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(BrokenPipeError):  # whoever asked for the run is gone
        try:
            _perform(job, named_task(job.config, job.data_dir), 1, pipe.send)
        except FedRPError as error:
            pipe.send(Failed(str(error)))


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End in order, so that what lies on disk between rounds is removed."""
    sys.exit(1)


def _perform(
    job: Job, task: Task, workers: int | None, tell: Callable[[Event], None], backend: Backend | None = None
) -> None:
    def show(_run: str, line: Line) -> None:
        tell(Told(line))

    resume = (job.folder / CONFIG_FILE).exists()
    with _warnings_told(tell):
        made = simulate(
            job.config, task, speed_of(job.config, workers), job.folder, resume, backend=backend, progress=show
        )
    tell(Finished(made.as_json()))


@contextmanager
def _warnings_told(tell: Callable[[Event], None]) -> Iterator[None]:
    """Warnings of the package are told as such, so that they can be shown with the name of the run."""
    handler = _Handler(tell)
    logger = logging.getLogger("fedrp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[Event], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(Warned(record.getMessage()))
