"""What a caller of `simulate` gives: refused in one line before anything is computed."""

from pathlib import Path

from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed
from fedrp.errors import ConfigError
from fedrp.learning.task import Task


def require_arguments(
    config: object, task: object, speed: object, out: object, resume: bool, functions: dict[str, object]
) -> None:
    """Refuse arguments of the wrong kind, above all those that were swapped.

    Raises:
        ConfigError: one of them is not what its name says.
    """
    if isinstance(config, Task) and isinstance(task, RunConfig):
        raise ConfigError("simulate was given the task before the config: use simulate(config, task)")
    if isinstance(config, dict):
        raise ConfigError("config is a dict: use RunConfig(**config), which checks every setting")
    for name, value, kind in (("config", config, RunConfig), ("task", task, Task), ("speed", speed, Speed)):
        if not isinstance(value, kind):
            what = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
            raise ConfigError(f"{name} is {what}: expected a {kind.__name__}, as in simulate(config, task, speed)")
    if not isinstance(out, str | Path | None):
        raise ConfigError(f"out={out!r} is not valid: expected the path of a folder")
    if resume and out is None:
        raise ConfigError("resume=True needs out, the folder of the run to go on with")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}={function!r} is not valid: expected a function")
