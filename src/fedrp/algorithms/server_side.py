"""The server's side of an algorithm: what it makes of numbers that it cannot read.

NumPy and the config only. Nothing here, nor anything that it imports, can make a key, a model or a matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedrp.config.run import Resolved
from fedrp.mechanisms.base import Mechanism, Reach
from fedrp.types import Vector

# What a client's next upload is made from, but for its data and noise: the last "aggregate"; the "history" of all
# aggregates and round keys, which a returning client replays; or state of its "own", of the rounds it took part in.
Memory = Literal["aggregate", "history", "own"]


# From the uploads of a round, an upper bound on the distance of any two clients' models.
Certificate = Callable[[Sequence[Vector]], float]


def no_certificate(_config: Resolved) -> Certificate | None:
    """Where uploads tell nothing of how far apart the clients' models are."""
    return None


def no_mechanisms(_config: Resolved) -> tuple[Mechanism, ...]:
    """Where updates are sent as they are; masks apart, which every algorithm can do."""
    return ()


def as_averaged(_config: Resolved, _round: int, mean: Reach) -> Reach:
    """The aggregate where a round stands for itself is as large as its mean."""
    return mean


@dataclass(frozen=True)
class ServerSide:
    """An algorithm as the server knows it. No function changes its inputs."""

    memory: Memory
    update_size: Callable[[Resolved, int], int]  # numbers in an update, for so many parameters
    # Past aggregates (latest first, two at most), the mean of the updates and their total weight make the next one.
    aggregate: Callable[[Resolved, Sequence[Vector], Vector, float], Vector]
    mechanisms: Callable[[Resolved], tuple[Mechanism, ...]] = no_mechanisms  # a client applies them in order
    reach: Callable[[Resolved, int, Reach], Reach] = as_averaged  # of the aggregate of a round, from that of its mean
    certificate: Callable[[Resolved], Certificate | None] = no_certificate  # needs every upload by itself
    round_keys: bool = False  # clients share round keys that the server must not know


def full_vector(_config: Resolved, parameters: int) -> int:
    """Update size of algorithms that send the whole model."""
    return parameters


def projected_vector(config: Resolved, _parameters: int) -> int:
    """Update size of algorithms that send a projection."""
    return config.dim


def mean_only(_config: Resolved, _past: Sequence[Vector], mean: Vector, _weight: float) -> Vector:
    """The aggregate where a round stands for itself."""
    return mean
