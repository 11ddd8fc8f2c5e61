"""Workers: each holds a shard of the clients of a run, in this process, in one of its own, or on another machine.

A *backend* starts workers of one kind and keeps them from run to run. Imports nothing heavy, so that a command can
start what takes long before it needs torch itself.
"""

import signal
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fedrp.errors import ConfigError, FedRPError

# Methods of a shard after which its clients are not as they were; the others can be asked again at any time.
CHANGING = frozenset({"respond", "train", "load", "restore"})


class UnsentError(ConfigError):
    """What is to be computed cannot be brought to other processes: this one has to do it alone."""


class LostWorkerError(FedRPError):
    """A worker process has ended in the middle of a run."""

    @classmethod
    def of(cls, process: int | None, code: int | None) -> "LostWorkerError":
        """The error for a process that ended with this exit code; below 0 it is that of a signal."""
        kept = "where the run has a folder, completed rounds are kept: go on with resume=True (--resume)"
        return cls(f"worker process {process} {ending(code)}; {kept}")


def ending(code: int | None) -> str:
    """How a process ended, by its exit code; below 0 it is that of a signal."""
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        how = f"was killed by signal {name}"
    if code == -signal.SIGKILL:
        how += ", as the system does where memory is short: fewer workers take less of it"
    return how


class Served(Protocol):
    """What a worker holds: anything with methods to be called by name, and an end."""

    def close(self) -> None:
        """Remove what it has on disk."""


Make = Callable[[], Served]


class Worker(Protocol):
    """Answers calls in the order in which they were sent."""

    @property
    def kept(self) -> Mapping[int, bytes] | None:
        """Clients' states after the last round that `keep` was told of, by group; None if it writes them itself."""

    def begin(self, make: Make) -> None:
        """Let go of what was held, and have something else made before the next call is answered."""

    def send(self, method: str, *arguments: object) -> None:
        """Call a method of what is held."""

    def receive(self) -> Any:
        """The answer to the oldest call that is not yet answered; an error in the worker is raised here."""

    def keep(self) -> None:
        """A round is over: whoever takes this worker's place goes on from here."""

    def stop(self) -> None:
        """End the worker."""


class Backend(Protocol):
    """What runs simulated clients."""

    def workers(self, count: int) -> Sequence[Worker]:
        """So many workers; those that are there already, and new ones."""

    def stop(self) -> None:
        """End all workers; others can be asked for again."""


class Answer(NamedTuple):
    """What came of a call."""

    good: bool
    value: Any  # an error if it is not good

    def get(self) -> Any:
        """The value.

        Raises:
            FedRPError: the call raised it.
            RuntimeError: the call raised anything else.
        """
        if not self.good:
            raise self.value
        return self.value


class Seat:
    """Where a worker holds its shard, whatever kind of worker it is."""

    def __init__(self) -> None:
        self._make: Make | None = None
        self._held: Served | None = None

    def begin(self, make: Make) -> None:
        """Let go of what is held; make something else when it is first called."""
        self.close()
        self._make = make

    def answer(self, method: str, arguments: Sequence[object]) -> Answer:
        """Call a method. Whatever goes wrong is an answer, for the process that asked to hear of."""
        try:
            return Answer(True, getattr(self._shard(), method)(*arguments))
        except FedRPError as error:
            return Answer(False, error)
        except Exception as error:
            return Answer(False, RuntimeError(f"{type(error).__name__} in a worker\n{traceback.format_exc()}"))

    def call(self, method: str, arguments: Sequence[object]) -> Any:
        """Call a method; errors are raised as they are."""
        return getattr(self._shard(), method)(*arguments)

    def close(self) -> None:
        """Let go of what is held."""
        if self._held:
            self._held.close()
        self._held = None

    def _shard(self) -> Served:
        if self._held is None:
            if self._make is None:
                raise FedRPError("a worker was called before it was given anything to do")
            self._held = self._make()
        return self._held


class InlineWorker:
    """A worker that is this process: what is sent to it is done at once."""

    kept = None

    def __init__(self) -> None:
        self._seat = Seat()
        self._answers: deque[Any] = deque()

    def begin(self, make: Make) -> None:
        """Let go of what was held."""
        self._answers.clear()
        self._seat.begin(make)

    def send(self, method: str, *arguments: object) -> None:
        """Do it."""
        self._answers.append(self._seat.call(method, arguments))

    def receive(self) -> Any:
        """The oldest answer."""
        return self._answers.popleft()

    def keep(self) -> None:
        """Nobody can take the place of this process."""

    def stop(self) -> None:
        """Let go of what is held."""
        self._seat.close()
