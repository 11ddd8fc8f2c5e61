"""How packets travel in Flower messages: one flat string of bytes each way, or the name of a refusal.

A site says its name, the one in the roster, with its hello and with refusals: for people who read the server's log.

Message types: `query` asks a node who it is, `train` carries a packet of a round, `evaluate` the last packet.
"""

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedrp.errors import WireError
from fedrp.protocol.wire import RUN_ID_BYTES

HELLO, ROUND, FINISH = MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE
LIFETIME = 12 * 3600.0  # seconds; far above any deadline, since it is measured with the clocks of two machines

_RECORD, _PACKET, _REFUSED, _SITE = "fedrp", "packet", "refused", "site"
_LONGEST_NAME = 60  # that is shown


class RefusedError(Exception):
    """A client could not answer. Carries a bare code: what went wrong in detail stays at the site."""


class LostError(RefusedError):
    """The way to a client failed, not the client: it can be asked again."""


def question(packet: bytes, node: int, kind: str, run: bytes, round_: int) -> Message:
    """A message from the server to a node. The run is named outside the packet, which may be empty.

    So is the round, for those who read Flower's own logs.
    """
    content = RecordDict({_RECORD: ConfigRecord({_PACKET: packet})})
    return Message(content, node, kind, group_id=f"{run.hex()}/{round_}", ttl=LIFETIME)


def run_of(question: Message) -> bytes:
    """The run that a question is about.

    Raises:
        WireError: it does not say.
    """
    named, _, _ = question.metadata.group_id.partition("/")
    try:
        run = bytes.fromhex(named)
    except ValueError:
        raise WireError("a message that names no run") from None
    if len(run) != RUN_ID_BYTES:
        raise WireError("a message with a run id of the wrong length")
    return run


def answer(packet: bytes, question: Message, site: str = "") -> Message:
    """A node's reply."""
    return Message(RecordDict({_RECORD: ConfigRecord({_PACKET: packet, _SITE: site})}), reply_to=question)


def refusal(code: str, question: Message, site: str = "") -> Message:
    """A node's reply if it cannot do what it was asked."""
    return Message(RecordDict({_RECORD: ConfigRecord({_REFUSED: code, _SITE: site})}), reply_to=question)


def site_of(message: Message) -> str:
    """What the sender of a reply says that it is called; not proved, and empty where it says nothing."""
    if message.has_error():
        return ""
    name = message.content.config_records.get(_RECORD, ConfigRecord()).get(_SITE, "")
    return name[:_LONGEST_NAME] if isinstance(name, str) and name.isprintable() else ""


def packet_of(message: Message) -> bytes:
    """The packet in a message.

    Raises:
        LostError: Flower could not deliver the question or the reply.
        RefusedError: there is none; the text is a short code.
    """
    if message.has_error():
        raise LostError(f"flower error {message.error.code}")
    record = message.content.config_records.get(_RECORD, ConfigRecord())
    packet = record.get(_PACKET)
    if not isinstance(packet, bytes):
        code = record.get(_REFUSED)
        raise RefusedError(code[:40] if isinstance(code, str) and code.isidentifier() else "no packet")
    return packet
