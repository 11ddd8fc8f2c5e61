"""A tracker: a callback of a run that hands each round to another program's files, each exactly once.

A run saves its checkpoint before it calls back, so a round that was lost on the way to a tracker is in the run folder,
and is handed over later. What is handed over is written down beside: a resumed run goes on in the same place.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedrp.errors import ConfigError, DataError
from fedrp.files import SHARED, beginning, replace_file, writing
from fedrp.reporting.report import privacy_lines
from fedrp.simulation.measures import OnRound, RoundModel, Signal, Stop
from fedrp.simulation.result import RoundRecord, RunResult
from fedrp.storage.begun import settings_of
from fedrp.trackers.writers import Settings, Writer

Open = Callable[[str | None, int, str], Writer]  # (run to go on with, last round handed over, name for people)


class Tracker(AbstractContextManager["Tracker"]):
    """Give it to `simulate(on_round=...)`; `finish(result)` adds what came of the run. Files are open until the end."""

    def __init__(self, name: str, folder: Path, opening: Open) -> None:
        self._folder, self._state_file, self._opening = folder, folder / f"{name}.json", opening
        self._writer: Writer | None = None
        self._finished = False
        self._summed_up = 0  # the round that the last summary was of

    def __call__(self, record: RoundRecord, model: RoundModel) -> None:
        """Hand over a round, and before it those of the run folder that are missing."""
        writer = self._writer or self._opened(settings_of(model.config))
        if record.round == 1 and writer.last > 0:
            raise ConfigError(f"{self._state_file} is of another run: give each run a folder of its own")
        for line in self._missed(writer.last, record.round):
            self._hand_over(writer, line)
        if record.round > writer.last:
            self._hand_over(writer, record.as_json())

    def finish(self, result: RunResult) -> None:
        """Hand over what came of the run: its figures, and against whom which epsilon holds."""
        writer = self._writer or self._opened(settings_of(result.config))
        for record in result.records:
            if record.round > writer.last:
                self._hand_over(writer, record.as_json())
        whole, last = result.as_json(), result.records[-1].round
        if self._summed_up != last:
            texts = {"result": repr(result), "privacy": "\n".join(privacy_lines(whole))}
            writer.summary(last, measured(whole), texts)
            self._keep(writer, last)
        self._finished = True

    def close(self) -> None:
        """Write what is left. A run that was not finished can be gone on with."""
        if self._writer:
            self._writer.close(self._finished)
            self._writer = None

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _opened(self, settings: Settings) -> Writer:
        with beginning(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        state = self._state()
        about = {name: value for name, value in settings.items() if value is not None}
        if state and state["settings"] != (known := {**about, "rounds": state["settings"].get("rounds")}):
            other = next(
                name for name in known.keys() | state["settings"] if known.get(name) != state["settings"].get(name)
            )
            raise ConfigError(f"{self._state_file} is of a run with another {other}: give each run a folder of its own")
        self._summed_up = state.get("summed_up", 0)
        self._settings = about
        self._writer = self._opening(
            state.get("run"), state.get("round", 0), f"{about['algorithm']} {about['dataset']}"
        )
        if not state:
            self._writer.settings(about)
            self._keep(self._writer, 0)
        return self._writer

    def _hand_over(self, writer: Writer, line: Mapping[str, Any]) -> None:
        with writing(self._folder):
            writer.round(line["round"], measured(line))
        self._keep(writer, self._summed_up)

    def _keep(self, writer: Writer, summed_up: int) -> None:
        self._summed_up = summed_up
        state = {"run": writer.run, "round": writer.last, "summed_up": summed_up, "settings": self._settings}
        with writing(self._state_file):
            replace_file(self._state_file, json.dumps(state, indent=2).encode(), SHARED)

    def _state(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._state_file.read_text()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{self._state_file} cannot be read ({error}): remove it to track anew") from None

    def _missed(self, last: int, now: int) -> list[dict[str, Any]]:
        """Rounds between two that the run folder holds; none where the run has no folder, or another one."""
        if now <= last + 1:
            return []
        try:
            lines = (self._folder / "metrics.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return []
        return [line for line in found if last < line["round"] < now]


def measured(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among what was recorded, by name."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return {
        name: float(value)
        for name, value in numbers.items()
        if name != "round" and not isinstance(value, bool) and math.isfinite(value)
    }


class Together(AbstractContextManager["Together"]):
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[OnRound]) -> None:
        self._callbacks = callbacks

    def __call__(self, record: RoundRecord, model: RoundModel) -> Signal | None:
        """Call all of them; the run ends if one of them asks for it."""
        answers = [callback(record, model) for callback in self._callbacks]
        return Stop if Stop in answers else None

    def finish(self, result: RunResult) -> None:
        """Tell all trackers among them what came of the run."""
        for callback in self._callbacks:
            if isinstance(callback, Tracker | Together):
                callback.finish(result)

    def close(self) -> None:
        """Close all trackers among them."""
        for callback in self._callbacks:
            if isinstance(callback, Tracker | Together):
                callback.close()

    def __exit__(self, *_error: object) -> None:
        self.close()


def together(*callbacks: OnRound) -> Together:
    """Callbacks as one, for `simulate(on_round=...)`: trackers, and functions of your own."""
    return Together(callbacks)
