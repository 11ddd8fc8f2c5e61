"""Ray actors as workers: the same shards on any number of machines, the same bytes, the same results.

A node that is lost takes its actors along. Each is made again elsewhere, with its clients' states as of the last
completed round, which this process keeps, and what its clients were asked since then is asked again.
"""

import contextlib
import importlib.util
import logging
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedrp.backends.workers import CHANGING, Answer, Make, Seat, Worker
from fedrp.config.speed import Speed, most_workers
from fedrp.errors import ConfigError, FedRPError, first_line

_log = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds, for a cluster to answer
_MOST_LOSSES = 5  # of one worker, in one round


class _Call(NamedTuple):
    """A call, to be made again where its answer is lost."""

    method: str
    arguments: tuple[object, ...]


class RayWorker:
    """A worker that is an actor, somewhere in a cluster."""

    def __init__(self, ray: Any, threads: int) -> None:
        self._ray, self._threads = ray, threads
        self.kept: Mapping[int, bytes] = {}
        self._setup: Any = None  # in Ray's object store: what the shard is made from
        self._done: list[_Call] = []  # calls since `keep` that changed the shard
        self._waiting: deque[tuple[_Call, Any]] = deque()  # not yet answered
        self._losses = 0
        self._begun: Any = None  # the actor's answer to `begin`
        self._actor = self._started(threads)

    def _started(self, processors: int) -> Any:
        actor = self._ray.remote(_Actor)
        return actor.options(num_cpus=processors, scheduling_strategy="SPREAD", max_concurrency=1).remote()

    def begin(self, make: Make) -> None:
        """Let go of what was held."""
        try:
            self._setup = self._ray.put(make)
        except TypeError as error:  # Ray adds lines of advice to what pickle says
            raise ConfigError(f"the task cannot be sent to Ray ({first_line(error)})") from None
        self.kept, self._losses = {}, 0
        self._done.clear()
        self._waiting.clear()
        self._begun = self._actor.begin.remote(self._setup)

    def send(self, method: str, *arguments: object) -> None:
        """Call a method of what is held."""
        self._ask(_Call(method, arguments))

    def _ask(self, call: _Call) -> None:
        self._waiting.append((call, self._actor.answer.remote(call.method, call.arguments)))

    def receive(self) -> Any:
        """The answer to the oldest call that is not yet answered."""
        while True:
            call, reference = self._waiting[0]
            try:
                answer: Answer = self._ray.get(reference)
                break
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
                self._replace(error)
            except self._ray.exceptions.RayError as error:
                raise FedRPError(f"a worker of the Ray cluster failed: {first_line(error)}") from None
        self._waiting.popleft()
        if call.method in CHANGING:
            self._done.append(call)
        if not answer.good:
            self._require_begun()
        return answer.get()

    def _require_begun(self) -> None:
        """Refuse a task that the actor could not read, before its calls fail for that."""
        try:
            self._ray.get(self._begun)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"the task cannot be read in the Ray cluster ({first_line(error)}): "
                "its modules and packages must be there, too"
            ) from None

    def _replace(self, error: Exception) -> None:
        """Another actor in the place of one that was lost, as far as that one had come."""
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            raise FedRPError(f"a worker was lost {self._losses} times in one round: {first_line(error)}") from None
        _log.warning("a worker was lost and is made again elsewhere: %s", first_line(error))
        with contextlib.suppress(Exception):  # it may be there, and only not be reached
            self._ray.kill(self._actor)
        self._actor = self._started(0)  # beside others, where no processor is free
        self._begun = self._actor.begin.remote(self._setup)
        if self.kept:
            self._actor.answer.remote("restore", (self.kept,))
        for call in self._done:
            self._actor.answer.remote(call.method, call.arguments)
        calls = [call for call, _ in self._waiting]
        self._waiting.clear()
        for call in calls:
            self._ask(call)

    def keep(self) -> None:
        """Bring the clients' states of this round here: a node that is lost takes its memory along."""
        self.send("changed")
        self.kept = {**self.kept, **self.receive()}
        self._done.clear()
        self._losses = 0

    def stop(self) -> None:
        """End the actor."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)


class _Actor:
    """What runs in a worker of the cluster."""

    def __init__(self) -> None:
        self._seat = Seat()

    def begin(self, make: Make) -> None:
        """Hold something else."""
        self._seat.begin(make)

    def answer(self, method: str, arguments: Sequence[object]) -> Answer:
        """Call a method of what is held."""
        return self._seat.answer(method, arguments)


class RayBackend:
    """Workers in a Ray cluster."""

    def __init__(self, ray: Any, threads: int) -> None:
        self._ray, self._threads = ray, threads
        self._started: list[RayWorker] = []

    def workers(self, count: int) -> Sequence[Worker]:
        """So many actors; those that are there already, and new ones.

        Raises:
            ConfigError: the cluster has too few processors.
        """
        processors = int(self._ray.cluster_resources().get("CPU", 0))
        if processors < count * self._threads:
            raise ConfigError(
                f"{count} workers with {self._threads} threads each need {count * self._threads} processors, the Ray "
                f"cluster has {processors}: use fewer workers"
            )
        while len(self._started) < count:
            self._started.append(RayWorker(self._ray, self._threads))
        return self._started[:count]

    def stop(self) -> None:
        """End the actors."""
        for worker in self._started:
            worker.stop()
        self._started.clear()


def connected(speed: Speed) -> RayBackend:
    """A backend in the cluster at the given address, or in a new one on this machine.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray is not installed: pip install 'fedrp[ray]', or use backend='processes'")
    _require_listener(speed.address)
    import ray

    if not ray.is_initialized():
        shape = {"address": speed.address} if speed.address else {"num_cpus": most_workers(speed) * speed.threads}
        try:
            dashboard = None if speed.address else False
            ray.init(**shape, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = f"at address={speed.address}" if speed.address else "on this machine"
            raise _no_cluster(where, error) from None
    return RayBackend(ray, speed.threads)


def _require_listener(address: str | None) -> None:
    """Refuse an address where nobody listens: Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(f"at address={address}", error) from None


def _no_cluster(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"no Ray cluster {where} ({first_line(error)}): start one with 'ray start'")
