"""A federation on a Flower grid in this process, whose messages can be watched, lost and spoiled."""

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from fedrp import RunConfig, simulate
from fedrp.crypto.roster import Roster, entry_of, merged, new_identity, write_roster
from fedrp.crypto.sealing import Identity
from fedrp.flower.client_app import make_client_app
from fedrp.flower.messages import RefusedError, answer, packet_of, refusal
from fedrp.flower.server_app import server_app
from fedrp.flower.task import ClientContext, Load, LocalTask
from fedrp.learning.layout import layout_of
from fedrp.learning.task import split_among_clients
from fedrp.rng import RunSeed
from fedrp.simulation.identities import SimulatedEntropy
from fedrp.simulation.result import RunResult
from fedrp.storage.status import read_status
from fedrp.testing.local import Answer, LocalGrid, answering, run_locally
from helpers import tiny_task

LOST = Error(8, "the process that worked on this message ended")  # as Flower says it
FIRST_NODE = 100


def simulated(context: ClientContext, _identity: Identity) -> SimulatedEntropy:
    """The secrets of the simulator's clients: for comparisons with it, in tests only."""
    return SimulatedEntropy(RunSeed(context.config.seed), context.index)


def tiny_load(context: ClientContext) -> LocalTask:
    task = tiny_task()
    share = split_among_clients(task, context.config)[context.index]
    return LocalTask(task.model, (share.x, share.y), task.test)


class FlowerFederation:
    """A server and clients below one folder. `run` can be called again after a failure, as a user would."""

    def __init__(self, root: Path, config: RunConfig, load: Load = tiny_load, **pacing: object) -> None:
        self.root, self.config = root, config
        self.names = [f"site-{client}" for client in range(config.clients)]
        rosters = [entry_of(new_identity(root / f"{name}.key", name)) for name in self.names]
        write_roster(root / "roster.toml", merged(rosters))
        settings = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
        defaults = {"store": str(root / "store"), "poll": 0.002, "round-timeout": 120.0, "start-timeout": 120.0}
        self.run_config = {**settings, **defaults, **{n.replace("_", "-"): v for n, v in pacing.items()}}
        self.node_configs = {FIRST_NODE + client: self.node_config(client) for client in range(config.clients)}
        self.app = make_client_app(load, simulated)
        self.sent: list[Message] = []  # by the server
        self.received: list[bytes] = []  # by the server

    def node_config(self, client: int) -> dict[str, Any]:
        name = self.names[client]
        paths = {"key": f"{name}.key", "roster": "roster.toml", "state": f"sites/{name}"}
        return {key: str(self.root / path) for key, path in paths.items()}

    def answer(self, client: int, message: Message, app: ClientApp | None = None) -> Message:
        """What a client replies."""
        return answering(app or self.app, self.node_configs, self.run_config)(FIRST_NODE + client, message)

    def run(
        self,
        answer: Callable[[int, Message], Message | None] | None = None,
        online: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """Run the server to its end. `answer` says how clients reply, `online` which of them are there."""
        reply = answer or self.answer
        everyone = range(self.config.clients)
        self.grid = LocalGrid(
            self._watched(reply), lambda: [FIRST_NODE + c for c in (online() if online else everyone)]
        )
        run_locally(server_app(tiny_task().model), self.grid, self.run_config)

    def _watched(self, reply: Callable[[int, Message], Message | None]) -> Answer:
        def watched(node: int, message: Message) -> Message | None:
            self.sent.append(message)
            given = reply(node - FIRST_NODE, message)
            if given is not None and given.has_content():
                self.received += [value for record in given.content.config_records.values() for value in record.values()
                                  if isinstance(value, bytes)]  # fmt: skip
            return given

        return watched

    def sent_to(self, client: int, kind: str) -> list[Message]:
        return [
            m for m in self.sent if m.metadata.dst_node_id == FIRST_NODE + client and m.metadata.message_type == kind
        ]

    def folder(self, client: int) -> Path:
        (run,) = (self.root / "sites" / self.names[client]).glob("*/")
        return run

    def status(self, client: int) -> dict[str, Any]:
        return read_status(self.folder(client))

    def store(self) -> dict[str, Any]:
        return read_status(self.root / "store")

    def model(self, client: int) -> np.ndarray:
        tensors = load_file(self.folder(client) / "model.safetensors")
        return np.concatenate([tensors[name].ravel() for name in layout_of(tiny_task().model()).names])

    def simulated(self) -> RunResult:
        """What the simulator makes of the same config."""
        return simulate(self.config, tiny_task())

    @property
    def roster(self) -> Roster:
        return Roster.load(self.root / "roster.toml")


def lost(message: Message) -> Message:
    """Flower's reply where the client's process ended."""
    return Message(LOST, reply_to=message)


def in_child(work: Callable[[], object]) -> tuple[int, Any]:
    """The status of a forked process that does `work`, and what it returned; None if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            result = pickle.dumps(work())
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(result)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, pickle.loads(data) if data else None  # noqa: S301 - written by our own child


def answer_in_child(
    federation: FlowerFederation, client: int, message: Message, fault: Callable[[], None] = lambda: None
) -> Message:
    """A client's reply, made in a process of its own as in a deployment; `fault` is prepared in that process."""

    def work() -> tuple[bool, Any]:
        fault()
        try:
            return True, packet_of(federation.answer(client, message))
        except RefusedError as error:
            return False, str(error)

    _, result = in_child(work)
    if result is None:
        return lost(message)
    good, value = result
    return answer(value, message) if good else refusal(value, message)
