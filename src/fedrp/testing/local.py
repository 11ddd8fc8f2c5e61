"""A Flower grid in one process: the real ServerApp and ClientApps, no network, no Ray. For tests and load."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedrp.flower.settings import Values

_SERVER_NODE = 1

Answer = Callable[[int, Message], Message | None]  # what a node replies to a message; None: it does not


class LocalGrid(Grid):
    """Nodes that answer at once, each by a function call; tests give answers that lose, spoil or repeat messages."""

    def __init__(self, answer: Answer, nodes: Callable[[], Iterable[int]]) -> None:
        self._answer, self._nodes = answer, nodes
        self._replies: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run: Run) -> None:
        """Not needed: there is one run."""

    @property
    def run(self) -> Run:
        """Not known here."""
        raise NotImplementedError("a local grid belongs to no run of a SuperLink")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message, as its constructor makes it."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are online."""
        return list(self._nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages and keep the replies."""
        pushed = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"message {self._count}"
            reply = self._answer(message.metadata.dst_node_id, message)
            if reply is not None:
                self._replies[message.metadata.message_id] = reply
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there; each is given once."""
        return [self._replies.pop(message_id) for message_id in list(message_ids) if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
        """Deliver messages and return the replies."""
        return self.pull_messages(self.push_messages(messages))


@contextmanager
def local_run() -> Iterator[None]:
    """Let messages be built outside a SuperLink's run."""
    before = TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, 1, _SERVER_NODE
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before


def answering(app: ClientApp, node_configs: Mapping[int, Values], run_config: Values) -> Answer:
    """The answers of one ClientApp at several nodes, each with its own node config."""

    def answer(node: int, message: Message) -> Message | None:
        context = Context(1, node, dict(node_configs[node]), RecordDict(), dict(run_config))
        return app(message, context)

    return answer


def run_locally(app: ServerApp, grid: Grid, run_config: Values) -> None:
    """Run a ServerApp on a grid to its end."""
    with local_run():
        app(grid, Context(1, _SERVER_NODE, {}, RecordDict(), dict(run_config)))
