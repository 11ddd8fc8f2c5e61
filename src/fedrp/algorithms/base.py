"""What an algorithm is: explicit state and pure functions, the same under every carrier.

The two halves meet only in bytes (`fedrp.protocol.wire`): `client_round` makes an upload, `server_round` and `carried` make an
aggregate of the mean of the uploads and the aggregates before, and the next `client_round` finds it in the client's
history.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from fedrp.compression.grid import HEADROOM, Scale, finest
from fedrp.config import RunConfig
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Call
from fedrp.learning.training import Objective, Stack
from fedrp.privacy.ledger import Release
from fedrp.projection.families import Projection
from fedrp.types import NO_FINGERPRINT, Precise, Vector

NOTHING: Vector = np.zeros(0, np.float32)

# Settings of every algorithm in which clients send something.
EXCHANGE_SETTINGS = frozenset({"dropout", "quorum", "weighting", "aggregation", "secure_aggregation", "secure_range"})


class ClientState(NamedTuple):
    """What a client keeps from round to round."""

    model: Vector  # (n,) w_i
    carry: Vector = NOTHING  # what else the algorithm remembers: the dual variable, the initial model


class Step(NamedTuple):
    """A past round, as a client learns of it: the key that its projection came from, and its aggregate."""

    key: SecretKey | None
    aggregate: Vector | None  # None for round 0, the set-up


class Participant(NamedTuple):
    """A client that is asked to take part in a round."""

    state: ClientState
    history: Sequence[Step]  # from the last round it took part in (0: the set-up) to the one before this
    noise: SecretKey  # its own randomness of this round, known to nobody else
    previous: Vector | None  # the last aggregate, also if it was applied before; None before there is one


class Local(NamedTuple):
    """What a group of clients has at hand in one round."""

    config: RunConfig  # resolved
    key: SecretKey | None  # of this round
    participants: int  # how many clients take part, as the server announced
    project: Callable[[SecretKey], Projection]
    train: Callable[[Stack, Objective], Stack]  # the clients of this call, in order


class Upload(NamedTuple):
    """A client's new state and the vector that it sends."""

    state: ClientState
    vector: Vector | Precise  # double precision only where it is to be masked, which rounds it
    fingerprint: bytes = NO_FINGERPRINT  # of the common model, where all clients must hold the same


class Reach(NamedTuple):
    """How large an aggregate of honest clients can be: anything beyond was made by someone else."""

    number: float = math.inf  # no number is larger
    norm: float = math.inf


class Algorithm(NamedTuple):
    """An entry of the table.

    Guarantees, checked for every entry: `client_round`, `client_finish` and `server_round` change no input; with one
    client and no server momentum, the delivered model is what local training gives.
    """

    summary: str
    secret: bool  # clients share round keys that the server must not know
    exchanges: bool  # False: clients never talk
    settings: frozenset[str]  # of `RunConfig`, those that this algorithm uses and some other does not; but for `dim`
    delivers: Literal["consensus", "client"]  # one common model, or each client its own
    # What a client's next upload is made from, but for its data and noise: the last "aggregate"; the "history" of all
    # aggregates and round keys, which a returning client replays; or state of its "own", of the rounds it took part in.
    memory: Literal["aggregate", "history", "own"]
    upload_size: Callable[[RunConfig, int], int]
    resolve: Callable[[RunConfig, int], RunConfig]
    client_init: Callable[[RunConfig, Vector], ClientState]
    client_round: Callable[[Local, Sequence[Participant]], list[Upload]]
    client_finish: Callable[[Local, Participant], ClientState]
    server_round: Callable[[RunConfig, Vector | None, Vector, float], Vector]  # last aggregate, mean, total weight
    carried: Callable[[RunConfig, Sequence[Vector]], Vector | None]  # what earlier aggregates, latest first, add to it
    scale: Callable[[RunConfig, Vector | None, Call], Scale]  # of an upload to be masked, from the last aggregate
    reach: Callable[[RunConfig, int, int], Reach]  # of the aggregate of a round with so many numbers
    releases: Callable[[RunConfig], Sequence[Release]]  # who learns what, for a resolved config
    divisor: Callable[[RunConfig], float | None]  # of the sum of uploads; None: the weight of those that came
    lr_factor: float = 1.0  # the default learning rate, in units of the model's
    # From the uploads of a round, an upper bound on the distance of any two clients' models; None where there is none.
    certify: Callable[[RunConfig, Sequence[Vector]], float | None] = lambda _config, _uploads: None


def nothing_carried(_config: RunConfig, _past: Sequence[Vector]) -> Vector | None:
    """Aggregates of algorithms in which a round stands for itself."""
    return None


def full_vector(_config: RunConfig, parameters: int) -> int:
    """Upload size of algorithms that send the whole model."""
    return parameters


def stated_range(config: RunConfig, _previous: Vector | None, call: Call) -> Scale:
    """The scale of an upload that nothing but the config bounds."""
    return finest(config.secure_range, call, HEADROOM)


def within_range(config: RunConfig, _round: int, _size: int) -> Reach:
    """The mean of uploads that nothing but the range of masked numbers bounds."""
    return Reach(config.secure_range) if config.secure_aggregation else Reach()


def stacked(vectors: Sequence[Vector]) -> Stack:
    """Rows for training; a single vector is not copied (it may have 134 million numbers)."""
    return vectors[0][None] if len(vectors) == 1 else np.stack(vectors)
