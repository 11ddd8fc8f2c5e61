"""Run what figures show. A run is kept under the hash of its settings: it is made once, and goes on after a stop."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrp.backends.choice import open_backend
from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed
from fedrp.learning.task import Task, named_task
from fedrp.reporting.progress import Show, score_text
from fedrp.reporting.runs import Line
from fedrp.reproduction.plan import Figure, expected_seconds
from fedrp.simulation.runfolder import CONFIG_FILE, read_json
from fedrp.simulation.simulate import simulate
from fedrp.storage.begun import settings_of

Results = dict[str, dict[str, Any]]  # of runs, by `run_name`
Say = Callable[[str], None]

_RESULT_FILE = "result.json"
_HASH_DIGITS = 16


def run_name(config: RunConfig) -> str:
    """The folder of a run: two that have the same settings are the same run."""
    settings = settings_of(config)
    if settings["deliver"] in (None, "client"):  # what runs did before there was such a setting: they are found again
        del settings["deliver"]
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def run_all(figures: Sequence[Figure], root: Path, speed: Speed, data_dir: Path | None, say: Say) -> Results:
    """The results of all runs of these figures. Clients of a run are spread over all workers.

    Guarantees: what is in `root` is not run again; a run that was stopped loses at most one round.
    """
    wanted = {run_name(c.config): c for figure in figures for panel in figure.panels for c in panel.curves}
    tasks: dict[tuple[str, str], Task] = {}
    for curve in wanted.values():
        where = (curve.config.dataset, curve.config.model)
        if where not in tasks:  # all data are there before the first run begins
            tasks[where] = named_task(curve.config, data_dir)
    results = {name: _finished(root / name) for name in wanted if (root / name / _RESULT_FILE).exists()}
    missing = {name: curve for name, curve in wanted.items() if name not in results}
    expected = {
        name: expected_seconds(curve.config, _images(tasks[curve.config.dataset, curve.config.model]))
        for name, curve in missing.items()
    }
    say(f"{len(wanted)} runs, {len(results)} of them done; about {_duration(sum(expected.values()))} on two cores")
    began, done = time.monotonic(), 0.0
    with open_backend(speed) as backend:
        for number, (name, curve) in enumerate(missing.items(), len(results) + 1):
            folder, config = root / name, curve.config
            title = f"run {number} of {len(wanted)}, {config.dataset}, E = {config.local_epochs}, {curve.label}"
            show = _told(say, title + (f", m = {config.dim}" if config.dim else ""), config.rounds)
            resume = (folder / CONFIG_FILE).exists()
            task = tasks[config.dataset, config.model]
            made = simulate(config, task, speed, folder, resume, backend=backend, progress=show)
            results[name] = made.as_json()
            done += expected.pop(name)
            left = sum(expected.values()) * (time.monotonic() - began) / done
            say(f"{title}: {made.as_json()['accuracy']:.2f} %; about {_duration(left)} left")
    return results


def _told(say: Say, title: str, rounds: int) -> Show:
    """Tell of every fifth round: more would drown the rest."""

    def show(_run: str, line: Line) -> None:
        if line["round"] % 5 == 0 and line["round"] < rounds:
            say(f"{title}: round {line['round']} of {rounds}, {score_text(line)}, {line['seconds']:.1f} s a round")

    return show


def _finished(folder: Path) -> dict[str, Any]:
    return read_json(folder / _RESULT_FILE, f"remove {folder}, and it is made again")


def _images(task: Task) -> int:
    inputs, _targets = task.train  # type: ignore[misc] # of a named task: one pair of arrays
    return len(inputs)  # type: ignore[arg-type]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def of_figure(figure: Figure, results: Mapping[str, dict[str, Any]]) -> list[list[tuple[str, dict[str, Any]]]]:
    """For each panel its curves: label and result."""
    return [[(curve.label, results[run_name(curve.config)]) for curve in panel.curves] for panel in figure.panels]
