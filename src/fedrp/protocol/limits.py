"""How much a party takes in one packet: known from the configuration, before anything is read."""

from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.servers import server_side
from fedrp.config.run import Resolved
from fedrp.crypto.sizes import DIGEST_BYTES, ENVELOPE_BYTES, MASK_ENTRY_BYTES, MASK_KEY_BYTES
from fedrp.protocol.wire import Kind, Limit, Limits


def from_server(config: Resolved, aggregate_size: int) -> Limits:
    """What a client takes in a packet of the server's."""
    replayed = config.rounds if server_side(config).memory == "history" else 1
    aggregate = Pipeline.of(config, server_side(config)).aggregate_coding(aggregate_size).nbytes
    envelope = ENVELOPE_BYTES[config.sealing]
    return {
        Kind.ROUND: Limit(1, 8 * config.clients),
        Kind.FINISH: Limit(1, 0),
        Kind.REBUILD: Limit(1, 0),
        Kind.AGGREGATE: Limit(replayed, aggregate),
        Kind.VOID: Limit(config.rounds, 0),
        Kind.SEALED: Limit(replayed + 2, envelope),  # of the set-up, of the rounds replayed, of the next one
        Kind.DEAL_REQUEST: Limit(2, 0),
        Kind.RECOVER: Limit(1, 4 * config.clients),
        Kind.MASK_KEYS: Limit(1, MASK_ENTRY_BYTES * config.clients),
    }


def either(one: Limits, other: Limits) -> Limits:
    """What is taken where packets of both kinds may come."""
    return {kind: Limit(*map(max, limit, other[kind])) for kind, limit in one.items()}


def from_client(config: Resolved, upload_size: int) -> Limits:
    """What the server takes in a packet of a client's."""
    upload = Pipeline.of(config, server_side(config)).upload_coding(upload_size).nbytes
    return {
        Kind.HELLO: Limit(1, DIGEST_BYTES + MASK_KEY_BYTES),
        Kind.DEAL: Limit(2, config.clients * ENVELOPE_BYTES[config.sealing]),
        Kind.UPLOAD: Limit(1, upload),
        Kind.CORRECTION: Limit(1, upload),
        Kind.COMPLAINT: Limit(1, 0),
    }
