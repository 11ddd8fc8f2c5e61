"""Federated learning with secret random projections."""

from fedrp._version import __version__
from fedrp.config import RunConfig, Speed
from fedrp.errors import FedRPError
from fedrp.models import load_vector, replace_batchnorm
from fedrp.result import RunResult
from fedrp.simulate import simulate
from fedrp.task import Task, named_task

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
