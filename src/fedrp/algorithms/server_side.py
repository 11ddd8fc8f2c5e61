"""The server's side of an algorithm: what it makes of numbers that it cannot read.

NumPy and the config only. Nothing here, nor anything that it imports, can make a key, a model or a matrix.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedrp.compression.grid import HEADROOM, Scale, finest
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Call
from fedrp.types import Vector

# What a client's next upload is made from, but for its data and noise: the last "aggregate"; the "history" of all
# aggregates and round keys, which a returning client replays; or state of its "own", of the rounds it took part in.
Memory = Literal["aggregate", "history", "own"]


class Reach(NamedTuple):
    """How large an aggregate of honest clients can be: anything beyond was made by someone else."""

    number: float = math.inf  # no number is larger
    norm: float = math.inf


# From the uploads of a round, an upper bound on the distance of any two clients' models.
Certificate = Callable[[Sequence[Vector]], float]


def no_certificate(_config: Resolved) -> Certificate | None:
    """Where uploads tell nothing of how far apart the clients' models are."""
    return None


def total_weight(_config: Resolved) -> float | None:
    """The mean is over those that came."""
    return None


@dataclass(frozen=True)
class ServerSide:
    """An algorithm as the server knows it. No function changes its inputs."""

    memory: Memory
    upload_size: Callable[[Resolved, int], int]  # numbers in an upload, for so many parameters
    # Past aggregates (latest first, two at most), the mean of the uploads and their total weight make the next one.
    aggregate: Callable[[Resolved, Sequence[Vector], Vector, float], Vector]
    scale: Callable[[Resolved, Vector | None, Call], Scale]  # of an upload to be masked, from the last aggregate
    reach: Callable[[Resolved, int, int], Reach]  # of the aggregate of a round with so many numbers
    divisor: Callable[[Resolved], float | None] = total_weight  # of the sum of uploads; None: their weight
    certificate: Callable[[Resolved], Certificate | None] = no_certificate  # needs every upload by itself
    round_keys: bool = False  # clients share round keys that the server must not know
    exchanges: bool = True  # False: clients never talk


def full_vector(_config: Resolved, parameters: int) -> int:
    """Upload size of algorithms that send the whole model."""
    return parameters


def projected_vector(config: Resolved, _parameters: int) -> int:
    """Upload size of algorithms that send a projection."""
    return config.dim


def mean_only(_config: Resolved, _past: Sequence[Vector], mean: Vector, _weight: float) -> Vector:
    """The aggregate where a round stands for itself."""
    return mean


def stated_range(config: Resolved, _previous: Vector | None, call: Call) -> Scale:
    """The scale of an upload that nothing but the config bounds."""
    return finest(config.secure_range, call, HEADROOM)


def within_range(config: Resolved, _round: int, _size: int) -> Reach:
    """The mean of uploads that nothing but the range of masked numbers bounds."""
    return Reach(config.secure_range) if config.secure_aggregation else Reach()
