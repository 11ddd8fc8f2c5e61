"""Run what figures show. A run is kept under the hash of its settings: it is made once, and goes on after a stop."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed, most_workers, usable_cores
from fedrp.learning.task import Task, named_task
from fedrp.reporting.progress import score_text
from fedrp.reproduction.page import Shown
from fedrp.reproduction.plan import Curve, Figure, expected_seconds
from fedrp.reproduction.workplaces import Event, Failed, Finished, Job, Told, Warned, one_after_another, side_by_side
from fedrp.simulation.runfolder import read_json
from fedrp.storage.begun import settings_of

Results = dict[str, dict[str, Any]]  # of runs, by `run_name`
Say = Callable[[str], None]

_RESULT_FILE = "result.json"
_HASH_DIGITS = 16
_TOLD = 5  # rounds between two lines of a run: more would drown the rest
_CORES = 2  # that `expected_seconds` speaks of


class Made(NamedTuple):
    """What came of all runs."""

    results: Results
    failed: tuple[str, ...]  # titles of runs that were given up


def run_name(config: RunConfig) -> str:
    """The folder of a run: two that have the same settings are the same run."""
    text = json.dumps(settings_of(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def run_all(
    figures: Sequence[Figure], root: Path, data_dir: Path | None, say: Say, workers: int | None = None, jobs: int = 1
) -> Made:
    """The results of all runs of these figures.

    Args:
        figures: what is to be shown.
        root: where runs are kept, a folder each.
        data_dir: where data sets are.
        say: told how far it is, a line at a time.
        workers: of a run, where `jobs` is one.
        jobs: runs that are made at a time, each by one worker.

    Guarantees: what is in `root` is not run again; a run that was stopped loses at most one round; results do not
    depend on `workers` and `jobs`, but for times and memory; a run that fails takes no other with it.
    """
    wanted = {run_name(c.config): c for figure in figures for panel in figure.panels for c in panel.curves}
    tasks: dict[tuple[str, str], Task] = {}
    for curve in wanted.values():
        where = (curve.config.dataset, curve.config.model)
        if where not in tasks:  # all data are there before the first run begins
            tasks[where] = named_task(curve.config, data_dir)

    def task_of(config: RunConfig) -> Task:
        return tasks[config.dataset, config.model]

    results = {name: _finished(root / name) for name in wanted if (root / name / _RESULT_FILE).exists()}
    missing = {name: curve.config for name, curve in wanted.items() if name not in results}
    work = {name: expected_seconds(config, _images(task_of(config))) for name, config in missing.items()}
    clock = _Clock(work, jobs)
    cores = min(usable_cores(), jobs if jobs > 1 else most_workers(Speed(workers=workers)))
    say(f"{len(wanted)} runs, {len(results)} of them done; about {_duration(clock.expected(cores))} on {_cores(cores)}")
    titles = _titles(wanted)
    failed: list[str] = []

    def hear(name: str, event: Event) -> None:
        title = titles[name]
        match event:
            case Told(line):
                rounds, done = missing[name].rounds, int(line["round"])
                clock.round_over(name, done, rounds)
                if done % _TOLD == 0 and done < rounds:
                    say(f"{title}: round {done} of {rounds}, {score_text(line)}, {line['seconds']:.1f} s a round")
            case Warned(text):
                say(f"{title}: {text}")
            case Finished(result):
                clock.over(name)
                results[name] = result
                say(f"{title}: {result['accuracy']:.2f} %; about {_duration(clock.left())} left")
            case Failed(why):
                clock.over(name)
                failed.append(title)
                say(f"{title}: failed: {why}")

    longest_first = sorted(missing, key=lambda name: -work[name]) if jobs > 1 else list(missing)
    runs = {name: Job(missing[name], root / name, data_dir) for name in longest_first}
    if jobs > 1:
        side_by_side(runs, jobs, hear)
    else:
        one_after_another(runs, task_of, workers, hear)
    return Made(results, tuple(failed))


class _Clock:
    """How long the rest will take, by what was done so far; a run of its own can not be shared by jobs."""

    def __init__(self, work: Mapping[str, float], jobs: int) -> None:
        self._whole, self._rest = dict(work), dict(work)
        self._jobs, self._done, self._began = jobs, 0.0, time.monotonic()

    def expected(self, cores: int) -> float:
        """Seconds for all of it, before anything was done."""
        return self._work_left() * _CORES / cores

    def round_over(self, name: str, done: int, rounds: int) -> None:
        """Rounds that an earlier sitting did are not counted as done in this one."""
        self._done += self._whole[name] / rounds
        self._rest[name] = self._whole[name] * (1 - done / rounds)

    def over(self, name: str) -> None:
        """A run has come to its end."""
        self._rest[name] = 0.0

    def left(self) -> float:
        """Seconds, if it goes on as it went."""
        return self._work_left() * (time.monotonic() - self._began) / self._done if self._done else 0.0

    def _work_left(self) -> float:
        """Of all jobs, those included that wait for the last ones."""
        return max(sum(self._rest.values()), self._jobs * max(self._rest.values(), default=0.0))


def _titles(wanted: Mapping[str, Curve]) -> dict[str, str]:
    titles = {}
    for number, (name, curve) in enumerate(wanted.items(), 1):
        where = f"{curve.config.dataset}, E = {curve.config.local_epochs}"
        titles[name] = f"run {number} of {len(wanted)}, {where}, {curve.name}"
    return titles


def _finished(folder: Path) -> dict[str, Any]:
    return read_json(folder / _RESULT_FILE, f"remove {folder}, and it is made again")


def _images(task: Task) -> int:
    inputs, _targets = task.train  # type: ignore[misc] # of a named task: one pair of arrays
    return len(inputs)  # type: ignore[arg-type]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def of_figure(figure: Figure, results: Mapping[str, dict[str, Any]]) -> list[Shown]:
    """Its panels, as far as there are results."""
    return [
        Shown(
            panel.title,
            [(c.label, results[run_name(c.config)]) for c in panel.curves if run_name(c.config) in results],
            tuple(c.name for c in panel.curves if run_name(c.config) not in results),
        )
        for panel in figure.panels
    ]
