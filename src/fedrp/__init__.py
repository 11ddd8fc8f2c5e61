"""Federated learning with secret random projections."""

from fedrp._version import __version__
from fedrp.config import RunConfig, Speed
from fedrp.errors import FedRPError
from fedrp.learning.layout import load_vector, replace_batchnorm
from fedrp.learning.task import Task, named_task
from fedrp.simulation.result import RunResult
from fedrp.simulation.simulate import simulate

__all__ = [
    "FedRPError",
    "RunConfig",
    "RunResult",
    "Speed",
    "Task",
    "__version__",
    "load_vector",
    "named_task",
    "replace_batchnorm",
    "simulate",
]
