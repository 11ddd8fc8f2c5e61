"""What a site brings: its model, its examples, and how they are told apart from those of others."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from fedrp.config.run import RunConfig
from fedrp.errors import FedRPError
from fedrp.flower.settings import Values
from fedrp.learning.evaluate import Metrics, require_metrics
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Loss
from fedrp.learning.task import Source


class LoadError(FedRPError):
    """A site's own `load` function failed."""

    exit_code = 3


@dataclass(frozen=True)
class ClientContext:
    """Where a task is being loaded: which client this is, in which run."""

    name: str  # of the site, as in the roster
    index: int  # its place in the roster
    config: RunConfig  # of the run
    node: Values  # the site's own settings (`--node-config`)
    run: Values  # the run config, with the app's own keys


@dataclass(frozen=True)
class LocalTask:
    """What one site trains on. Nothing of it leaves the site.

    Args:
        model: builds the network; the same at every site.
        train: the site's examples.
        test: examples that the delivered model is scored on, at the site; the score stays there.
        loss: mean loss of (outputs, targets).
        metrics: functions of (outputs, targets) by name, each of all test examples at once.
    """

    model: ModelFactory
    train: Source
    test: Source | None = None
    loss: Loss = nn.functional.cross_entropy
    metrics: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_metrics(self.metrics)


Load = Callable[[ClientContext], LocalTask]
