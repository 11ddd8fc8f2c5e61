"""Trackers by name."""

from collections.abc import Callable
from pathlib import Path

from fedrp.config.checks import require_choice
from fedrp.errors import ConfigError
from fedrp.trackers.tracker import Together, Tracker, together
from fedrp.trackers.writers import EventFiles, FileStore, OfflineRun, require_package


def tensorboard(folder: str | Path) -> Tracker:
    """Event files in FOLDER/tensorboard: `tensorboard --logdir FOLDER`. FOLDER is that of the run, if it has one.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    require_package("tensorboard")
    root = Path(folder)
    return Tracker("tensorboard", root, lambda run, last, _name: EventFiles(root / "tensorboard", run, last))


def mlflow(folder: str | Path, store: str | Path | None = None) -> Tracker:
    """A file store in FOLDER/mlflow, or in `store` for several runs: `mlflow ui --backend-store-uri FOLDER/mlflow`.

    Raises:
        ConfigError: mlflow is not installed.
    """
    require_package("mlflow")
    root = Path(folder)
    place = Path(store) if store else root / "mlflow"
    return Tracker("mlflow", root, lambda run, _last, name: FileStore(place, run, name))


def wandb(folder: str | Path) -> Tracker:
    """An offline run in FOLDER/wandb, for `wandb sync FOLDER/wandb/offline-run-*`; nothing is sent before that.

    Raises:
        ConfigError: wandb is not installed.
    """
    require_package("wandb")
    root = Path(folder)
    return Tracker("wandb", root, lambda run, last, name: OfflineRun(root, run, last, name))


TRACKERS: dict[str, Callable[[str | Path], Tracker]] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


def tracking(names: str, folder: Path, shared: Path | None = None) -> Together:
    """The trackers that a list names, separated by commas, of a run in `folder`; MLflow's store lies in `shared`.

    Raises:
        ConfigError: one of them is not known or not installed.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        require_choice("log", name, TRACKERS)
    if len(set(asked)) != len(asked):
        raise ConfigError(f"log='{names}' names a tracker twice: give each once")
    made = [
        mlflow(folder, shared / "mlflow") if name == "mlflow" and shared else TRACKERS[name](folder) for name in asked
    ]
    return together(*made)
