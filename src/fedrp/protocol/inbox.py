"""What a client accepts of a packet: keys and mask keys, each once it is checked, or a complaint."""

import dataclasses
import functools
import hashlib
import logging
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.crypto.masks import PeerKeys
from fedrp.crypto.roster import Roster
from fedrp.crypto.sealing import mask_key_of, verify
from fedrp.errors import ProtocolError
from fedrp.protocol import wire
from fedrp.protocol.client_state import Client, Envelope, Site, Workbench, place_of
from fedrp.protocol.limits import MASK_ENTRY_BYTES
from fedrp.protocol.wire import Kind, Message

_log = logging.getLogger(__name__)


class Inbox(NamedTuple):
    """A packet, read once."""

    messages: list[Message]
    digest: bytes  # of its bytes

    def of(self, kind: Kind) -> list[Message]:
        """The messages of a kind."""
        return wire.messages_of(self.messages, kind)

    @property
    def call(self) -> Message | None:
        """What asks for a round."""
        found = self.of(Kind.ROUND)
        return found[-1] if found else None


def read_packet(bench: Workbench, packet: bytes) -> Inbox:
    """A packet of the server, decoded within the limits of this run."""
    messages = _accepted(bench, wire.decode(packet, bench.limits))
    return Inbox(messages, hashlib.sha256(packet).digest())


def _accepted(bench: Workbench, messages: list[Message]) -> list[Message]:
    """The messages, once all of them are known to belong to this run and this projection."""
    for message in messages:
        if message.run != bench.run:
            raise ProtocolError(f"{message.kind.name} of round {message.round} belongs to another run")
        if message.projection != bench.tag:
            raise ProtocolError(
                f"{message.kind.name} of round {message.round} was made for another projection: "
                "use the same fedrp version and --projection everywhere"
            )
    return messages


def noted(bench: Workbench, client: Client, site: Site, inbox: Inbox) -> tuple[Client, Message | None]:
    """The client with the keys that it was given, each once it is checked; or what it complains about."""
    client = _with_mask_keys(bench, _restarted(bench, client, inbox), inbox)
    envelopes = dict(client.envelopes)
    for message in inbox.of(Kind.SEALED):
        envelope = Envelope(message.sender, message.payload.tobytes())
        known = envelopes.get(message.round)
        if message.round < client.since or envelope == known:
            continue
        if known is not None:
            raise ProtocolError(
                f"client {client.index} was sent another key for round {message.round} than it has: refused"
            )
        if envelope.dealer >= len(bench.roster.members):
            raise ProtocolError(
                f"the key of round {message.round} was dealt by client {envelope.dealer}, who is not in the roster"
            )
        place = place_of(bench, message.round, envelope.dealer, client.index)
        try:
            verify(envelope.sealed, bench.roster.members[envelope.dealer].keys, place)
            site.identity.open(envelope.sealed, place)
        except ProtocolError as error:  # the dealer's fault or the server's: either way another key is needed
            _log.warning("client %d complains about the key of round %d: %s", client.index, message.round, error)
            fields = (bench.run, message.round, client.index, wire.EMPTY, envelope.dealer, bench.tag)
            return client, Message(Kind.COMPLAINT, *fields)
        envelopes[message.round] = envelope
    return dataclasses.replace(client, envelopes=envelopes), None


def _restarted(bench: Workbench, client: Client, inbox: Inbox) -> Client:
    """The client, set back to the start if it is told to rebuild its state, or if no round has had an outcome yet."""
    call = inbox.call
    if call is not None and call.round <= client.round:  # it has done that for this round before
        return client
    if bench.algorithm.server.memory == "history":
        anew = bool(inbox.of(Kind.REBUILD))
    else:  # elsewhere a client's own past would be lost, and a server could choose whose
        void = {message.round for message in inbox.of(Kind.VOID)}
        anew = call is not None and client.since > 0 and void.issuperset(range(1, call.round))
    if anew:
        return dataclasses.replace(client, since=0, state=None, envelopes={}, transcript=b"", last=None)
    return client


def _with_mask_keys(bench: Workbench, client: Client, inbox: Inbox) -> Client:
    """The client with the mask keys that it was given; each is checked once and never replaced."""
    for message in inbox.of(Kind.MASK_KEYS):
        told = _peer_keys(message.payload.tobytes(), bench.roster, bench.run)
        if not client.mask_keys.size:
            client = dataclasses.replace(client, mask_keys=told)  # simulated clients share one array
            continue
        known, new = _given(client.mask_keys), _given(told)
        if (client.mask_keys[known & new] != told[known & new]).any():
            raise ProtocolError(f"client {client.index} was sent another mask key of a client than it has: refused")
        client = dataclasses.replace(client, mask_keys=np.where(known[:, None], client.mask_keys, told))
    return client


def _given(keys: PeerKeys) -> npt.NDArray[np.bool_]:
    return np.asarray(keys.any(axis=1))


@functools.lru_cache(maxsize=2)
def _peer_keys(payload: bytes, roster: Roster, run: bytes) -> PeerKeys:
    """The mask keys of a MASK_KEYS message, all of them signed by their owners for this run."""
    keys = np.zeros((len(roster.members), 32), np.uint8)
    if len(payload) % MASK_ENTRY_BYTES:
        raise ProtocolError(f"mask keys come in {MASK_ENTRY_BYTES} bytes each, got {len(payload)}")
    for start in range(0, len(payload), MASK_ENTRY_BYTES):
        (client,) = struct.unpack_from("<I", payload, start)
        if client >= len(roster.members):
            raise ProtocolError(f"a mask key of client {client}, who is not in the roster")
        if keys[client].any():
            raise ProtocolError(f"two mask keys of client {client} in one packet: refused")
        signed = payload[start + 4 : start + MASK_ENTRY_BYTES]
        public = mask_key_of(signed, roster.members[client].keys.ed25519, run, roster.digest, client)
        keys[client] = np.frombuffer(public, np.uint8)
    keys.flags.writeable = False
    return keys
