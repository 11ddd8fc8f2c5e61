"""The client's side of an algorithm: explicit state, and pure functions that make an upload of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fedrp.config.run import Resolved
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ProtocolError
from fedrp.learning.objective import Objective, Stack
from fedrp.mechanisms.base import Normals, OwnWords, Purpose
from fedrp.projection.families import Projection
from fedrp.projection.rotation import Rotation
from fedrp.types import NO_FINGERPRINT, Precise, Vector, Words

NOTHING: Vector = np.zeros(0, np.float32)
_CPU = torch.device("cpu")


class ClientState(NamedTuple):
    """What a client keeps from round to round."""

    model: Vector  # (n,) w_i
    carry: Vector = NOTHING  # what else the algorithm remembers: the dual variable, the initial model


class Step(NamedTuple):
    """A past round, as a client learns of it: the key that its projection came from, and its aggregate."""

    key: SecretKey | None
    aggregate: Vector | None  # None for round 0, the set-up
    round: int = 0


class Participant(NamedTuple):
    """A client that is asked to take part in a round."""

    state: ClientState
    history: Sequence[Step]  # from the last round it took part in (0: the set-up) to the one before this


def _no_sums(_start: Stack, _objective: Objective) -> Precise:
    raise ProtocolError("no records are summed here")


class Local(NamedTuple):
    """What a group of clients has at hand in one round."""

    config: Resolved
    key: SecretKey | None  # of this round
    project: Callable[[SecretKey], Projection]
    rotate: Callable[[SecretKey], Rotation]
    train: Callable[[Stack, Objective], Stack]  # the clients of this call, in order
    device: torch.device = _CPU  # that trains, and that the objective's tensors are on
    sums: Callable[[Stack, Objective], Precise] = _no_sums  # of single records' clipped gradients, a row per client


class Upload(NamedTuple):
    """A client's new state and its update, which mechanisms make the upload of."""

    state: ClientState
    vector: Vector | Precise  # precise where it must be exact until noise is added
    fingerprint: bytes = NO_FINGERPRINT  # of the common model, where all clients must hold the same


@dataclass(frozen=True)
class ClientSide:
    """An algorithm as a client knows it. No function changes its inputs."""

    init: Callable[[Resolved, Vector], ClientState]  # from the initial model
    round: Callable[[Local, Sequence[Participant]], list[Upload]]
    finish: Callable[[Local, Participant], ClientState]  # what is delivered after the last round


def own_normals(noise: Callable[[], SecretKey]) -> Normals:
    """A client's own normals of one round, from its secret of that round."""

    def normals(purpose: Purpose, count: int, start: int) -> Precise:
        key = noise().derive("update") if purpose == "update" else noise().derive("vote")
        return key.fine_normals(count, start)

    return normals


def own_words(noise: Callable[[], SecretKey]) -> OwnWords:
    """A client's own uniform words of one round, from its secret of that round."""

    def words(count: int, start: int) -> Words:
        return noise().derive("rounding").keystream(4 * count, 4 * start).view("<u4")

    return words


def stacked(vectors: Sequence[Vector]) -> Stack:
    """Rows for training; a single vector is not copied (it may have 134 million numbers)."""
    return vectors[0][None] if len(vectors) == 1 else np.stack(vectors)
