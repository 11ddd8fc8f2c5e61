"""Writers of the three formats. None of them needs a network, and none is allowed to use one."""

import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedrp.errors import ConfigError

_PROJECT = "fedrp"
_LAST_WRITTEN = "seconds"  # of a round's metrics the one that MLflow gets last: with it a round is complete


Values = Mapping[str, float]
Settings = Mapping[str, Any]  # by name, of JSON's types
Texts = Mapping[str, str]


class Writer(Protocol):
    """What writes in the format of a tracker."""

    @property
    def run(self) -> str:
        """What the tracker calls the run; to go on with it."""

    @property
    def last(self) -> int:
        """The last round that it holds."""

    def settings(self, settings: Settings) -> None:
        """Write the settings of the run, before its first round."""

    def round(self, number: int, values: Values) -> None:
        """Write what was measured in a round."""

    def summary(self, number: int, values: Values, texts: Texts) -> None:
        """Write what came of the run, which ended with this round."""

    def close(self, finished: bool) -> None:
        """Write what is left."""


class EventFiles:
    """TensorBoard's event files. After a crash a mark in a new file has TensorBoard forget what is written again."""

    def __init__(self, folder: Path, run: str | None, last: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.run, self.last = "tensorboard", last
        self._writer = SummaryWriter(folder, purge_step=None if run is None else last + 1)

    def settings(self, settings: Settings) -> None:
        """As a table."""
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        self._text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)

    def round(self, number: int, values: Values) -> None:
        """A scalar each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
        self.last = number

    def summary(self, number: int, values: Values, texts: Texts) -> None:
        """As texts."""
        for name, text in texts.items():
            self._text(name, text.replace("\n", "  \n"), number)
        self._text("summary", "\n".join(f"- {name}: {value:g}" for name, value in values.items()), number)

    def close(self, finished: bool) -> None:  # noqa: ARG002 - event files know no end
        """Write what is left."""
        self._writer.close()

    def _text(self, name: str, text: str, number: int) -> None:
        self._writer.add_text(name, text, number)
        self._writer.flush()


class FileStore:
    """MLflow's store of files. A run that was killed goes on as the same run."""

    def __init__(self, folder: Path, run: str | None, name: str) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=folder.absolute().as_uri())
        found = self._client.get_experiment_by_name(_PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(_PROJECT)
        if run is None:
            self.run = str(self._client.create_run(experiment, run_name=name).info.run_id)
        else:
            self.run = run
            self._client.update_run(run, status="RUNNING")
        steps = [int(item.step) for item in self._client.get_metric_history(self.run, _LAST_WRITTEN)] if run else []
        self.last = max(steps, default=0)

    def settings(self, settings: Settings) -> None:
        """As params."""
        for name, value in settings.items():
            self._client.log_param(self.run, name, value)

    def round(self, number: int, values: Values) -> None:
        """Metrics, with the round as their step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        ordered = sorted(values, key=lambda name: name == _LAST_WRITTEN)
        metrics = [Metric(_mlflow_name(name), values[name], now, number) for name in ordered]
        self._client.log_batch(self.run, metrics=metrics)
        self.last = number

    def summary(self, number: int, values: Values, texts: Texts) -> None:  # noqa: ARG002 - a tag has no step
        """As tags."""
        for name, value in {**{f"summary.{name}": f"{value:g}" for name, value in values.items()}, **texts}.items():
            self._client.set_tag(self.run, _mlflow_name(name), value)

    def close(self, finished: bool) -> None:
        """Say how it ended."""
        self._client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


def _mlflow_name(name: str) -> str:
    """Metrics of a user may be called anything, those of MLflow not."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class OfflineRun:
    """A run of Weights & Biases that waits on the disk for `wandb sync`; all sittings of a run have one id."""

    def __init__(self, folder: Path, run: str | None, last: int, name: str) -> None:
        import wandb

        self.run, self.last = run or uuid.uuid4().hex[:8], last
        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,  # user, machine, command line
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        folder.mkdir(parents=True, exist_ok=True)
        place: dict[str, Any] = {"dir": str(folder), "project": _PROJECT, "id": self.run, "name": name}
        self._run = wandb.init(mode="offline", settings=quiet, reinit="create_new", **place)

    def settings(self, settings: Settings) -> None:
        """As its config."""
        self._run.config.update(dict(settings))  # type: ignore[no-untyped-call]

    def round(self, number: int, values: Values) -> None:
        """A row of its history, with the round as its step."""
        self._run.log(dict(values), step=number, commit=True)
        self.last = number

    def summary(self, number: int, values: Values, texts: Texts) -> None:  # noqa: ARG002 - it has one summary
        """As its summary."""
        self._run.summary.update({**values, **texts})

    def close(self, finished: bool) -> None:
        """Have its process write what it holds, and end."""
        self._run.finish(exit_code=0 if finished else 1)


def require_package(name: str) -> None:
    """Import a tracker's package, quietly: nothing may leave the machine.

    Raises:
        ConfigError: it is not installed.
    """
    for switch, value in _QUIET.items():
        os.environ.setdefault(switch, value)
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401
        elif name == "mlflow":
            import mlflow  # noqa: F401
        else:
            import wandb  # noqa: F401
    except ImportError:
        raise ConfigError(f"log='{name}' needs {name}: pip install 'fedrp[{name}]'") from None


_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # which MLflow would like to be a data base
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
