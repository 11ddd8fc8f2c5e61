"""Federated learning with secret random projections.

Names are imported when they are first used, so that help, versions and shell completion need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedrp.algorithms.registration import register
    from fedrp.config import RunConfig, Speed
    from fedrp.errors import FedRPError
    from fedrp.exporting.formats import export
    from fedrp.learning.layout import load_vector, replace_batchnorm
    from fedrp.learning.task import Task, named_task
    from fedrp.simulation.measures import Stop
    from fedrp.simulation.result import RunResult
    from fedrp.simulation.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "FedRPError",
    "RunConfig",
    "RunResult",
    "Speed",
    "Stop",
    "Task",
    "__version__",
    "export",
    "load_vector",
    "named_task",
    "register",
    "replace_batchnorm",
    "simulate",
]

_HOMES = {
    "FedRPError": "fedrp.errors",
    "RunConfig": "fedrp.config",
    "RunResult": "fedrp.simulation.result",
    "Speed": "fedrp.config",
    "Stop": "fedrp.simulation.measures",
    "Task": "fedrp.learning.task",
    "export": "fedrp.exporting.formats",
    "load_vector": "fedrp.learning.layout",
    "named_task": "fedrp.learning.task",
    "register": "fedrp.algorithms.registration",
    "replace_batchnorm": "fedrp.learning.layout",
    "simulate": "fedrp.simulation.simulate",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedrp' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
