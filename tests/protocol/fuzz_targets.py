"""What the fuzzer runs: bytes become packets and steps of the protocol, and rules that no bytes may break.

Plain functions of bytes, so that the kept corpus can be run without the fuzzer (`test_fuzz.py`). Three targets:

- `wire`: the bytes are a packet, as it comes from the network;
- `client`, `server`: the bytes are a *script*. Sealed keys differ in every process, so no packet can be kept as it is;
  a script says instead how honest packets are altered and what is done with them, see `Script`.

The rules: nothing but a `FedRPError` comes out, a refusal changes nothing, and memory stays within a multiple of the
largest packet that is taken.
"""

import contextlib
import dataclasses
import functools
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fedrp.errors import FedRPError, WireError
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.client import finished, hello, respond
from fedrp.protocol.client_state import Client
from fedrp.protocol.limits import from_client
from fedrp.protocol.server_state import Server, read
from fedrp.protocol.tally import outstanding, take_correction
from fedrp.protocol.wire import CONTEXT_BYTES, HEADER_BYTES, SERVER, Kind, Limits, Message
from fedrp.storage.server_state import packed_head, packed_rounds
from fedrp.types import FINGERPRINT_BYTES
from helpers import Federation, tallied, tiny_config, tiny_task
from views import contents, restarted, server_contents

CLIENTS, ROUNDS = 4, 4
MEMORY = 2**21  # bytes that any input may take beside what its packets do: honest work takes less


class BrokenRuleError(Exception):
    """A rule does not hold. Not a `FedRPError`: nothing may catch it on the way."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise BrokenRuleError(rule)


# --- packets ---------------------------------------------------------------------------------------------------------


def with_checksums(packet: bytes) -> bytes:
    """The packet with the right checksum in each of its messages, as far as it can be read: a fuzzer finds none."""
    mended, start = bytearray(packet), 0
    while start + HEADER_BYTES <= len(mended):
        (count,) = struct.unpack_from("<I", mended, start + 16)
        end = start + HEADER_BYTES + count * (4 if mended[start + 2] in (1, 2) else 1)
        if end > len(mended):
            break
        body = zlib.crc32(mended[start + HEADER_BYTES : end], zlib.crc32(mended[start : start + HEADER_BYTES - 4]))
        struct.pack_into("<I", mended, start + HEADER_BYTES - 4, body)
        start = end
    return bytes(mended)


def wire_target(data: bytes) -> None:
    """Whatever is read can be written again, and is the same; with limits nothing beyond them is read."""
    for packet in (data, with_checksums(data)):
        with contextlib.suppress(WireError):
            messages = wire.decode(packet)
            require(wire.encode(messages) == packet, "a packet that was read is written differently")
            require(sum(map(sum, wire.sizes(packet).values())) == len(packet), "sizes do not add up")
        for limits in all_limits():
            with contextlib.suppress(WireError):
                messages = wire.decode(packet, limits)
                for kind, limit in limits.items():
                    found = wire.messages_of(messages, kind)
                    require(len(found) <= limit.messages, f"{len(found)} messages of kind {kind.name}")
                    require(all(m.payload.nbytes <= limit.size for m in found), f"a large {kind.name}")


@functools.lru_cache(maxsize=1)
def all_limits() -> tuple[Limits, ...]:
    """What clients and servers of a masked run with round keys take in one packet."""
    run = next(run for run in runs() if run.config.algorithm == "fedrp-subspace" and run.config.secure_aggregation)
    return run.bench.limits, from_client(run.config, run.server.upload_size)


# --- scripts ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")
NUMBERS = (0, 1, 2, 3, 4, 5, 255, 2**16 - 1, 2**24 - 2, SERVER, 2**31, 2**32 - 1)
FIELDS = (("round", 2), ("sender", 3), ("weight", 4), ("context", CONTEXT_BYTES))  # and their bytes
FLOATS = (0.0, 1.0, -1.0, 1e-45, 1e-30, 100.0, 1e20, 3e38, -3e38)


class Script:
    """Reads choices from bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, bound: int) -> int:
        self._at += 1
        return self._data[self._at - 1] % bound if self._at <= len(self._data) else 0

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def bytes(self, size: int) -> bytes:
        return bytes(self.below(256) for _ in range(size))


def altered(messages: Sequence[Message], script: Script, pool: Sequence[Message]) -> bytes:
    """A packet that was honest, with up to seven edits of a script's choice; `pool` has messages to put in."""
    told = list(messages)
    for _ in range(script.below(8)):
        edit = script.of(EDITS)
        edit(told, script, pool)
    try:
        packet = wire.encode(told)
    except WireError:  # a payload that no honest party can send
        return b""
    if script.below(4) == 3:
        packet = flipped(packet, script)
    return packet


def flipped(packet: bytes, script: Script) -> bytes:
    """The packet with a few bytes changed or cut off, and checksums that tell or do not."""
    changed = bytearray(packet)
    for _ in range(script.below(4)):
        if changed:
            place = int.from_bytes(script.bytes(2), "little") % len(changed)
            changed[place] = script.below(256)
    if script.below(4) == 3:
        del changed[int.from_bytes(script.bytes(2), "little") % (len(changed) + 1) :]
    return with_checksums(bytes(changed)) if script.below(4) else bytes(changed)


def _drop(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    if told:
        told.pop(script.below(len(told)))


def _double(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    if told:
        told.insert(script.below(len(told) + 1), script.of(told))


def _put_in(told: list[Message], script: Script, pool: Sequence[Message]) -> None:
    told.insert(script.below(len(told) + 1), script.of(pool))


def _set_field(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    if told:
        place, (field, size) = script.below(len(told)), script.of(FIELDS)
        value = script.of(NUMBERS) % 2 ** (8 * size)
        new = value.to_bytes(size, "little") if field == "context" else value
        told[place] = dataclasses.replace(told[place], **{field: new})


def _set_kind(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    if told:
        place = script.below(len(told))
        told[place] = dataclasses.replace(told[place], kind=script.of(tuple(Kind)))


def _set_mark(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    if told:
        place = script.below(len(told))
        told[place] = dataclasses.replace(told[place], fingerprint=script.bytes(1) * FINGERPRINT_BYTES)


def _set_payload(told: list[Message], script: Script, _pool: Sequence[Message]) -> None:
    """Another payload: of numbers that matter, or as it was but for its length or one item."""
    if not told:
        return
    place = script.below(len(told))
    old = told[place].payload
    count = script.of((0, 1, 2, 3, 4, 5, 8, 12, 13, 32, 83, 84, 100, 128, 144, old.size, old.size + 1))
    new: wire.Payload
    match script.below(5):
        case 0:
            new = np.array([script.of(FLOATS)] * count, np.float32)
        case 1:
            new = np.array([script.of(NUMBERS) for _ in range(min(count, 12))], np.uint32)
        case 2:
            new = np.frombuffer(script.bytes(1) * count, np.uint8)
        case 3:
            new = np.resize(old, count) if old.size else old
        case _:
            new = old.copy()
            if new.size:
                value = script.of(FLOATS if new.dtype.kind == "f" else NUMBERS)
                new[script.below(new.size)] = np.array(value).astype(new.dtype)
    told[place] = dataclasses.replace(told[place], payload=new)


EDITS = (_drop, _double, _put_in, _set_field, _set_kind, _set_mark, _set_payload)


# --- where scripts begin ---------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A run after some rounds, with the next one open. Shared by all scripts: nothing may change it in place."""

    run: Federation
    clients: dict[int, Client]
    server: Server
    packets: dict[int, bytes]  # of the open round
    replies: dict[int, bytes]
    after: dict[int, Client]  # the clients once they have replied


NAMES = ("fedavg-dp", "fedadmm", "fedrp-subspace", "fedrp", "fedavg")
FEW_BITS = ("fedavg-dp", "fedrp-subspace")  # where they are masked: with noise and without


@functools.lru_cache(maxsize=1)
def runs() -> tuple[Federation, ...]:
    """Runs of all kinds: each memory, masked and not, a clip that the server tells, and models averaged at the end.

    New ones come last: the corpus names stages by their number.
    """
    configs = [
        tiny_config(
            name,
            clients=CLIENTS,
            rounds=ROUNDS,
            quorum=0.6,
            secure_aggregation=masked,
            lr=0.01,
            bits=1.0 if masked and name in FEW_BITS else 32.0,
        )
        for name in NAMES
        for masked in (True, False)
    ]
    told = tiny_config("fedavg-dp", clients=CLIENTS, rounds=ROUNDS, clip_quantile=0.5, noise_multiplier=0.1)
    averaged = [
        tiny_config(
            "fedrp", clients=CLIENTS, rounds=2, quorum=0.75, secure_aggregation=masked, lr=0.01, deliver="average"
        )
        for masked in (True, False)
    ]
    return tuple(Federation(config, tiny_task(3 * CLIENTS)) for config in (*configs, told, *averaged))


@functools.lru_cache(maxsize=1)
def stages() -> tuple[Stage, ...]:
    return tuple(stage for run in runs() for stage in _stages(run))


def _stages(run: Federation) -> Iterator[Stage]:
    for _ in range(3):
        run.take_keys(run.deliver(server_side.request_key(run.server, 0)))  # for the exchange of models; else dealt
        packets, client_states = run.open(), dict(run.clients)
        server = run.server
        replies = run.deliver(packets)
        yield Stage(run, client_states, server, packets, replies, dict(run.clients))
        run.close(replies)


@functools.lru_cache(maxsize=64)
def pool_of(index: int, side: str) -> tuple[Message, ...]:
    """Messages of all stages of a run that may be put into a packet where they do not belong."""
    own = [stage for stage in stages() if stage.run is stages()[index].run]
    if side == "client":
        packets = [packet for stage in own for packet in stage.packets.values()]
        context = own[0].run.bench.context
        made = [
            Message(kind, context, round_, SERVER, payload)
            for kind, payload in (
                (Kind.RECOVER, np.array([2, 3], np.uint32)),
                (Kind.DEAL_REQUEST, wire.EMPTY),
                (Kind.VOID, wire.EMPTY),
                (Kind.REBUILD, wire.EMPTY),
                (Kind.FINISH, wire.EMPTY),
            )
            for round_ in (1, 2, 3, 4)
        ]
    else:
        packets = [packet for stage in own for packet in stage.replies.values()]
        packets += [hello(own[0].run.bench, client, site) for client, site in own[0].run.sites.items()]
        made = [Message(Kind.COMPLAINT, own[0].run.bench.context, 1, 0, wire.EMPTY)]
    return (*made, *(message for packet in packets for message in wire.decode(packet)))


# --- a client --------------------------------------------------------------------------------------------------------


def client_target(data: bytes) -> None:
    """A client that is sent altered packets, restarts, and is told the end: no bytes break it."""
    script = Script(data)
    index = script.below(len(stages()))
    stage, client, pool = stages()[index], script.below(CLIENTS), pool_of(index, "client")
    bench, site, client_state = stage.run.bench, stage.run.sites[client], stage.clients[client]
    uploads: dict[int, Message] = {}
    for _ in range(6):
        if not script:
            break
        kept, step = contents(client_state), script.below(8)
        honest = wire.decode(stage.packets[client])
        if step == 7:
            client_state = restarted(client_state)
            require(contents(client_state) == kept, "a client that was restarted has forgotten something")
            continue
        if step == 6:
            done = Message(Kind.FINISH, bench.context, stage.server.round, SERVER, wire.EMPTY)
            told = [message for message in honest if message.kind not in (Kind.ROUND, Kind.DEAL_REQUEST)]
            with contextlib.suppress(FedRPError):
                finished(bench, client_state, site, altered([*told, done], script, pool))
            require(contents(client_state) == kept, "the end changed a client in place")
            continue
        before = client_state
        with contextlib.suppress(FedRPError):
            ((client_state, reply),) = respond(bench, [before], [site], [altered(honest, script, pool)])
            for message in wire.decode(reply, from_client(bench.config, bench.upload_size)):
                if message.kind is Kind.UPLOAD:
                    require(uploads.setdefault(message.round, message) == message, "two uploads for one round")
            require(client_state.round >= before.round, "a client went back")
        require(contents(before) == kept, "a packet changed a client in place")


# --- the server ------------------------------------------------------------------------------------------------------


def server_target(data: bytes) -> None:
    """A server that gets altered replies of some clients goes on with the others, or says why not."""
    script = Script(data)
    index = script.below(len(stages()))
    stage, pool = stages()[index], pool_of(index, "server")
    server, client_states = stage.server, dict(stage.after)
    kept = server_contents(server)
    bad = {client for client in range(CLIENTS) if script.below(3) == 1}

    def spoiled(packets: dict[int, bytes]) -> dict[int, bytes]:
        return {c: altered(wire.decode(p), script, pool) if c in bad else p for c, p in packets.items()}

    with contextlib.suppress(FedRPError):
        if script.below(3) == 2:
            hellos = {c: hello(stage.run.bench, c, site) for c, site in stage.run.sites.items()}
            server = server_side.welcome(server, read(server, spoiled(hellos)))
        replies = spoiled(stage.replies)
        with contextlib.suppress(FedRPError):
            server = server_side.take_keys(server, read(server, replies))
        tally = tallied(server, replies)
        outstanding(server, tally)
        server, requests = server_side.recover(server, tally)
        corrections = {}
        for client, packet in requests.items():
            bench, site = stage.run.bench, stage.run.sites[client]
            ((client_states[client], corrections[client]),) = respond(bench, [client_states[client]], [site], [packet])
        for client, packet in spoiled(corrections).items():
            take_correction(server, tally, client, packet)
        server, _ = server_side.close_round(server, tally)
        written_and_read(server)
        _goes_on(stage, server, client_states, bad)
    require(server_contents(stage.server) == kept, "replies changed the server in place")


def written_and_read(server: Server) -> None:
    """What comes of a round can be stored."""
    packed_head(server)
    for _ in packed_rounds(server, 0):
        pass


def _goes_on(stage: Stage, server: Server, client_states: dict[int, Client], bad: set[int]) -> None:
    """Honest clients take what the server sends next, whatever the others sent."""
    run = stage.run
    honest = sorted(set(range(CLIENTS)) - bad)
    if server.round == server.config.rounds:
        for client, packet in server_side.finish(server, tuple(honest[:1])).items():
            with _refused_never(f"honest client {client} has no model after a last round with bad replies"):
                finished(run.bench, client_states[client], run.sites[client], packet)
        return
    for attempt in range(CLIENTS):
        for dealer, request in server_side.request_key(server, attempt).items():
            with contextlib.suppress(FedRPError):  # it has dealt a key for that round before
                ((client_states[dealer], deal),) = respond(
                    run.bench, [client_states[dealer]], [run.sites[dealer]], [request]
                )
                server = server_side.take_keys(server, read(server, {dealer: deal}))
    server, packets = server_side.open_round(server, np.linspace(0, 0.9, CLIENTS))
    for client in [client for client in honest if client in packets][:1]:
        with _refused_never(f"honest client {client} refuses what comes after a round with bad replies"):
            respond(run.bench, [client_states[client]], [run.sites[client]], [packets[client]])


@contextlib.contextmanager
def _refused_never(rule: str) -> Iterator[None]:
    try:
        yield
    except FedRPError as error:
        raise BrokenRuleError(f"{rule}: {error}") from None


TARGETS: dict[str, Callable[[bytes], None]] = {"wire": wire_target, "client": client_target, "server": server_target}


@functools.lru_cache(maxsize=1)
def ready() -> None:
    """Make everything that is made once; what comes after is what an input costs."""
    for target in TARGETS.values():
        for index in range(len(stages())):
            target(bytes([index]) + bytes(8))


def checked(target: Callable[[bytes], None], data: bytes) -> None:
    """Run a target, and say so if it took more memory than anything may."""
    require(tracemalloc.is_tracing(), "memory is not traced")
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    target(data)
    taken = tracemalloc.get_traced_memory()[1] - before
    require(taken <= MEMORY, f"{taken} bytes of memory for an input of {len(data)}")
