"""What an algorithm is: a client side and a server side that meet only in bytes, and what it releases to whom."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedrp.algorithms.client_side import ClientSide
from fedrp.algorithms.server_side import ServerSide
from fedrp.config.run import Resolved, RunConfig
from fedrp.privacy.events import Release

# Settings of every algorithm in which clients send something.
EXCHANGE_SETTINGS = frozenset({"dropout", "quorum", "weighting", "aggregation", "secure_aggregation", "secure_range"})
AVERAGING_SETTINGS = EXCHANGE_SETTINGS | {"server_momentum"}


def no_defaults(config: RunConfig, _parameters: int) -> Resolved:
    """Where an algorithm has no defaults of its own."""
    return Resolved.of(config)


@dataclass(frozen=True)
class Algorithm:
    """An entry of the table.

    Guarantees, checked for every entry: with one client and no server momentum, the delivered model is what local
    training gives.
    """

    summary: str
    settings: frozenset[str]  # of `RunConfig`, those that this algorithm uses and some other does not; but for `dim`
    delivers: Literal["consensus", "client"]  # one common model, or each client its own
    client: ClientSide
    server: ServerSide  # with the mechanisms between the two
    releases: Callable[[Resolved], Sequence[Release]]  # who learns what
    resolve: Callable[[RunConfig, int], Resolved] = no_defaults  # every default filled in, for so many parameters
    lr_factor: float = 1.0  # the default learning rate, in units of the model's
