"""The executor of a site: takes each task from the SuperNode and answers it with the site's own client app.

A SuperNode with `--isolation process` runs nothing itself. It offers tasks at a runtime API on 127.0.0.1, from where
Flower's own executor would start a process for each, which unpacks the submitted app (its FAB) and imports it. This one
takes the same steps but for those two: the bytes of the submitted app are never opened here, whatever the task's type.

All that a site uses of Flower's inner workings is in this file and in `supernode.py`, written for the range in
`fedrp.extras`. What this one replaces is `flwr/supercore/superexec/run_superexec.py` and
`flwr/supernode/runtime/run_clientapp.py`.
"""

import logging
import time
from collections.abc import Callable

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, message_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from fedrp.errors import SiteError

Answer = Callable[[Message, Context], Message]

_log = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two looks for a task
_PATIENCE = 30.0  # seconds until the message of a task must be there
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# A run says itself of which of the two types it is. A task that nobody takes would block the SuperNode for good.
_TYPES = (TaskType.CLIENT_APP, TaskType.AGENT_APP)


def work(address: str, secret: bytes, answer: Answer, watch: Callable[[], None]) -> None:
    """Answer tasks, one after the other, until something raises.

    Args:
        address: of the SuperNode's runtime API.
        secret: proves to the SuperNode that tasks may be given to this process.
        answer: the site's client app.
        watch: called often; raises if the SuperNode is gone.

    Raises:
        SiteError: the SuperNode does not do what it should. Start both again.
    """
    proof = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
    with _client(address, proof) as client:
        while True:
            watch()
            if token := _next_task(client):
                with _client(address, RuntimeTokenHttpInterceptor(token)) as task:
                    _work_on(task, answer)
            else:
                time.sleep(_POLL)


def _client(address: str, interceptor: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor) -> RuntimeHttpClient:
    # Without Flower's retries: those end the process with SIGINT when a task is gone.
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    return RuntimeHttpClient.from_server_address(address, True, None, [version, interceptor])


def _next_task(client: RuntimeHttpClient) -> str | None:
    """The token of the next task; None if there is none, or if the SuperNode is not up yet."""
    try:
        return client.AcquireTask(AcquireTaskRequest(supported_task_types=_TYPES)).token or None
    except httpx.HTTPStatusError as error:
        raise SiteError(f"the SuperNode gives no task (HTTP {error.response.status_code}): start both again") from None
    except httpx.TransportError:
        return None


def _work_on(client: RuntimeHttpClient, answer: Answer) -> None:
    """Answer one task. One that its SuperNode has given up meanwhile is let go."""
    heartbeat = HeartbeatSender(lambda: _beat(client))
    heartbeat.start()
    try:
        context, question, parts = _pull(client)
        reply, sub_status = _answered(client, answer, context, question, parts)
        push_message(client, reply, context)
        push_task_output(client, None, sub_status, "")
    except httpx.HTTPError as error:
        _log.warning("a task is gone, its reply is not sent: %s", error)
    finally:
        heartbeat.stop()


def _beat(client: RuntimeHttpClient) -> bool:
    """Tell the SuperNode that the task is being worked on; whether it still wants it shows when it is answered."""
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.HTTPError as error:
        _log.debug("no heartbeat: %s", error)
    return True


def _pull(client: RuntimeHttpClient) -> tuple[Context, Message, ObjectTree]:
    """The context of a task, its message without content, and the parts of the content.

    The app that came with them stays where it is.
    """
    given = client.PullTaskInput(PullTaskInputRequest())
    context = context_from_proto(given.context)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = given.task_id, context.run_id, context.node_id
    end = time.monotonic() + _PATIENCE
    while not (pulled := client.PullMessages(PullAppMessagesRequest())).messages_list:
        if time.monotonic() > end:  # the SuperNode makes a task just before it stores the message
            raise SiteError("the SuperNode has a task without a message: start both again")
        time.sleep(_POLL)
    return context, message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]


def _answered(
    client: RuntimeHttpClient, answer: Answer, context: Context, question: Message, parts: ObjectTree
) -> tuple[Message, str]:
    """The reply, and how the task ended. Whatever goes wrong, the server is not told why."""
    node = Node(node_id=context.node_id)
    try:
        message = pull_and_inflate_object_from_tree(
            parts,
            make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
            make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, context.run_id),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = parts.object_id  # which the message itself does not hold
        return answer(message, context), SubStatus.COMPLETED
    except httpx.HTTPError:
        raise
    except Exception:
        _log.exception("a message could not be answered")
        failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the message could not be answered")
        return Message(failure, reply_to=question), SubStatus.FAILED
