"""What a run can train by: an algorithm, whose two sides meet only in bytes, or a baseline that has no sides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedrp.algorithms.client_side import ClientSide
from fedrp.algorithms.server_side import ServerSide
from fedrp.compression.coding import Size
from fedrp.config.run import Resolved, RunConfig
from fedrp.privacy.events import Release

# Settings of every algorithm in which clients send something.
EXCHANGE_SETTINGS = frozenset(
    {"dropout", "quorum", "weighting", "aggregation", "secure_aggregation", "secure_range", "bits"}
)
AVERAGING_SETTINGS = EXCHANGE_SETTINGS | {"server_momentum"}


def no_defaults(config: RunConfig, _parameters: int) -> Resolved:
    """Where a method has no defaults of its own."""
    return Resolved.of(config)


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the settings of a run can name as its algorithm.

    Guarantees, checked for every entry of the tables: with one client and no server momentum, the delivered model is
    what local training gives.
    """

    summary: str
    settings: frozenset[str]  # of `RunConfig`, those that this method uses and some other does not; but for `dim`
    delivers: Literal["consensus", "client"]  # one common model, or each client its own
    releases: Callable[[Resolved], Sequence[Release]]  # who learns what
    resolve: Callable[[RunConfig, int], Resolved] = no_defaults  # every default filled in, for so many parameters
    default_size: Callable[[RunConfig, int], Size] | None = None  # what is sent if nothing is said; None: no projection
    lr_factor: float = 1.0  # the default learning rate, in units of the model's


@dataclass(frozen=True, kw_only=True)
class Algorithm(Method):
    """A method of the protocol: simulated, and deployed with Flower."""

    client: ClientSide
    server: ServerSide  # with the mechanisms between the two
