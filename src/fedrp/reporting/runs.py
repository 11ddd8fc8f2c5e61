"""Runs as their folders tell of them: simulated ones, finished or not, and those of a deployed server."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from fedrp.config.run import RunConfig
from fedrp.config.toml import from_settings
from fedrp.errors import ConfigError, DataError
from fedrp.storage.status import read_status

ACCURACY, LOSS = "accuracy", "loss"
_CONFIG, _METRICS, _RESULT, _ENGINE = "config.json", "metrics.jsonl", "result.json", "engine.json"
_COMPARED = "compare.json"
_BEGUN, _LOG, _STATUS = "run.json", "log.jsonl", "status.json"  # of a deployed run
_AVERAGE = "_average"
_STATED = {"epsilon", "delta", "bound", "adversary", "adjacency", "assumptions", "reason"}
_TRAFFIC = ("up", "down", "keys_up", "keys_down")

Line = Mapping[str, Any]  # of one round


class Run(NamedTuple):
    """A run, as far as it is."""

    name: str  # that tells it from the others of a report
    folder: Path
    config: Mapping[str, Any]
    history: Sequence[Line]
    result: Mapping[str, Any] | None = None  # once it is finished
    engine: str | None = None
    status: Mapping[str, Any] | None = None  # of a deployed one

    @property
    def headline(self) -> str | None:
        """The name of what it is judged by; None before the first score, and where a server knows of none."""
        if self.result:
            return str(self.result["headline"])
        return next(iter(self.measures), None)

    @property
    def measures(self) -> list[str]:
        """The names of what was measured on the test set, what the run is judged by first."""
        lines = [self.result] if self.result else self.history
        first = [str(self.result["headline"])] if self.result else []
        return list(dict.fromkeys([*first, *(name for line in lines for name in measures_of(line))]))

    @property
    def rounds(self) -> int:
        """How many it is to have."""
        return int(self.config["rounds"])

    @property
    def state(self) -> str:
        """How far it is, in words."""
        done = self.history[-1]["round"] if self.history else 0
        if self.result or (self.status and self.status.get("finished")):
            return f"finished after {done} of {self.rounds} rounds" if done < self.rounds else f"{done} rounds"
        return f"round {done} of {self.rounds}"

    def points(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of all rounds that have a value of this name."""
        return [(line["round"], line[name]) for line in self.history if is_number(line.get(name))]

    def bytes_so_far(self) -> dict[int, float]:
        """By round: what a client has sent and received until its end, keys included, on the mean over clients."""
        total, found = 0.0, {}
        for line in self.history:
            total += traffic_of(line)
            found[int(line["round"])] = total / int(self.config["clients"])
        return found


def measures_of(line: Line) -> list[str]:
    """The names of what was measured after a round on the test set, what the run is judged by first."""
    return [name.removesuffix(_AVERAGE) for name in line if name.endswith(_AVERAGE)]


def traffic_of(line: Line) -> float:
    """All bytes of a round, of all clients together."""
    sizes = (line.get(f"bytes_{name}_total") for name in _TRAFFIC)
    return sum(size for size in sizes if is_number(size))


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that can be drawn: files may hold anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders: of a run, of a comparison, or the store of a server.

    Raises:
        ConfigError: a folder holds no run.
        DataError: a file of a run cannot be read.
    """
    found = []
    for folder in folders:
        below = _in_order(folder, run_folders(folder))
        if not below:
            raise ConfigError(f"{folder} holds no run: give the folder of a run or of a comparison")
        found += [_read(path) for path in below]
    return list(_named(found))


def _in_order(folder: Path, runs: list[Path]) -> list[Path]:
    """Runs of a comparison in the order in which they were asked for."""
    if not (folder / _COMPARED).exists():
        return runs
    asked = str(_object(folder / _COMPARED).get("algorithms")).split(",")
    return sorted(runs, key=lambda run: asked.index(run.name) if run.name in asked else len(asked))


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it holds a run, else those in it that do."""
    found = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    holding = [path for path in found if (path / _CONFIG).exists() or _is_deployed(path)]
    return holding[:1] if holding[:1] == [folder] else holding


def _is_deployed(folder: Path) -> bool:
    return (folder / _BEGUN).exists() and (folder / _STATUS).exists()


def simulated_below(folder: Path) -> tuple[list[Run], list[str]]:
    """All simulated runs below a folder, at any depth, by their paths; and what is wrong with those left out."""
    runs, flaws = [], []
    for path in sorted(folder.rglob(_CONFIG)):
        if not any((path.parent / name).exists() for name in (_METRICS, _RESULT)):
            continue  # one that did nothing yet, or someone else's file
        try:
            runs.append(_read(path.parent)._replace(name=str(path.parent.relative_to(folder))))
        except DataError as error:
            flaws.append(str(error))
    return runs, flaws


def stamps(folder: Path) -> tuple[object, ...]:
    """Something that changes with the files of the runs in a folder."""
    files = (path / name for path in run_folders(folder) for name in (_CONFIG, _METRICS, _RESULT, _LOG, _STATUS))
    found = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            found.append((path, about.st_mtime_ns, about.st_size))
    return tuple(found)


def _read(folder: Path) -> Run:
    if not (folder / _CONFIG).exists():
        return _deployed(folder)
    config = _object(folder / _CONFIG)
    try:
        from_settings(RunConfig, config)
    except ConfigError as error:
        raise DataError(f"{folder / _CONFIG} holds no settings ({error}): leave its run out") from None
    history = _of_rounds(folder / _METRICS, _lines(folder / _METRICS))
    result = _result(folder / _RESULT) if (folder / _RESULT).exists() else None
    if result and len(result["history"]) < len(history):  # it goes on, after it was finished once
        result = None
    engine = _object(folder / _ENGINE).get("engine") if (folder / _ENGINE).exists() else None
    return Run(str(config["algorithm"]), folder, config, history, result, engine)


def _result(path: Path) -> dict[str, Any]:
    """A result that has what a report relies on."""
    result = _object(path)
    statements = result.get("privacy")
    stated = isinstance(statements, list) and all(
        isinstance(item, dict) and item.keys() >= _STATED for item in statements
    )
    if not stated or not isinstance(result.get("history"), list) or "headline" not in result:
        raise DataError(f"{path} is no result of a run: leave its run out")
    return result


def _deployed(folder: Path) -> Run:
    """A run at a server, or at a site: what their logs tell of each round, in the words of a simulated one."""
    status = read_status(folder)
    config = _object(folder / _BEGUN).get("config")
    known = {**(config if isinstance(config, dict) else {}), **status}
    told = [line for line in _lines(folder / _LOG) if line.get("event") == "round"]
    rounds = {line["round"]: _as_measured(line) for line in _of_rounds(folder / _LOG, told)}
    config = {"clients": 1, **known} if status.get("role") == "client" else known
    if not all(is_number(config.get(name)) for name in ("rounds", "clients")):
        raise DataError(f"{folder / _STATUS} does not say how many rounds and clients there are: it is no status")
    return Run(str(config.get("algorithm")), folder, config, [rounds[key] for key in sorted(rounds)], status=status)


def _as_measured(line: Line) -> Line:
    there, away = line.get("participants"), (line.get("refused"), line.get("absent"))
    counts = {}
    if isinstance(there, list):  # a server knows who took part and who did not, a site how many were called
        counts = {"participants": len(there), "dropped": sum(len(names or ()) for names in away)}
    elif there is not None:
        counts = {"participants": there}
    traffic = {f"bytes_{way}_total": line.get(f"bytes_{way}") for way in ("up", "down")}
    return {"round": line["round"], "seconds": line.get("seconds"), **traffic, **counts}


def _object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): leave its run out") from None


def _lines(path: Path) -> list[Line]:
    """The lines of a log, without one at its end that is still being written."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): leave its run out") from None
    whole = text[: text.rfind("\n") + 1].splitlines()
    try:
        return [dict(json.loads(line)) for line in whole]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}): leave its run out") from None


def _of_rounds(path: Path, lines: Iterable[Line]) -> list[Line]:
    found = list(lines)
    if not all(isinstance(line.get("round"), int) for line in found):
        raise DataError(f"{path} has a line that says of no round: leave its run out")
    return found


def _named(runs: Sequence[Run]) -> Iterator[Run]:
    """Names as short as tells the runs apart: by algorithm, dimension, name of the folder, or its path."""
    names = [run.name for run in runs]
    ways: tuple[Callable[[Run], str], ...] = (
        lambda run: f" (m={run.config['dim']})" if is_number(run.config.get("dim")) else "",
        lambda run: f", {run.folder.name}",
        lambda run: f", {run.folder}",
    )
    for way in ways:
        told = [name + way(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
        names = told if len(set(told)) > len(set(names)) else names
    return (run._replace(name=name) for run, name in zip(runs, names, strict=True))
