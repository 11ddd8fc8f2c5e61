"""How far one record moves a model, measured: train again on neighbouring data sets, with the same randomness.

An estimate, never a bound: it has seen a few neighbours of the data at hand, and over several rounds it holds the
secrets fixed, which no theorem of docs/privacy-proofs.md allows. It tells where to put an enforced bound.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fedrp.algorithms.resolve import learning_rate
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved, RunConfig
from fedrp.engines.choice import make_trainer
from fedrp.engines.descent import local_sgd
from fedrp.errors import ConfigError
from fedrp.learning.initial import public_initial
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Examples, Loss, Stack
from fedrp.learning.pixels import floats
from fedrp.learning.task import Task, split_among_clients
from fedrp.privacy.sensitivity import Basis, NormFloor, Sensitivity, measured_norm_floor
from fedrp.records.defaults import training_defaults
from fedrp.rng import RunSeed
from fedrp.types import Vector

CHANGES = ("replace", "remove")
_TOGETHER = 8  # data sets that are trained in one call


class Spread(NamedTuple):
    """Distances to the neighbours' models after one round."""

    smallest: float
    mean: float
    largest: float
    deviation: float


@dataclass(frozen=True)
class SensitivityEstimate:
    """How far the models of neighbouring data sets ended up from that of the data at hand, round by round."""

    sensitivity: Sensitivity  # the largest distance over neighbours and rounds, labelled as an estimate
    norm_floor: NormFloor | None  # from the smallest norm in this run
    rounds: tuple[Spread, ...]
    neighbours: int
    change: str

    def as_json(self) -> dict[str, Any]:
        """The estimate as a JSON object."""
        floor = self.norm_floor
        return {
            "sensitivity": self.sensitivity.bound,
            "basis": self.sensitivity.basis.value,
            "reason": self.sensitivity.reason,
            "norm_floor": floor.bound if floor else None,
            "alpha": self.sensitivity.bound / floor.bound if floor else None,
            "neighbours": self.neighbours,
            "change": self.change,
            "rounds": [spread._asdict() for spread in self.rounds],
        }


def estimate_sensitivity(
    config: RunConfig, task: Task, neighbours: int = 8, change: str = "replace", client: int = 0, workers: int = 1
) -> SensitivityEstimate:
    """Train one client's model on its data and on data sets that differ in one record, and compare.

    Plain local SGD whatever the algorithm: the client alone, from the public start, `rounds` times `local_epochs`, with
    the run's batches and learning rate. No penalty, ball, subspace, clip of updates or aggregate has a part in it.

    A record is replaced by one of another client, drawn by the run's seed; or removed, which also shuffles the batches
    anew, so that distances are larger than the record's own effect.

    Guarantees: a function of the config, the task and `neighbours`, whatever the number of workers (to rounding).
    """
    require_choice("change", change, CHANGES)
    lr = learning_rate(config)
    settings = Resolved.of(dataclasses.replace(training_defaults(config), lr=lr))
    if neighbours < 1 or not 0 <= client < config.clients:
        raise ConfigError(f"neighbours={neighbours} of client={client} is not valid: at least 1, client below clients")
    parts = split_among_clients(task, config)
    rng = RunSeed(config.seed).generator("neighbours", client)
    changed = [_changed(parts, client, change, rng) for _ in range(neighbours)]
    chunks = [changed[first : first + _TOGETHER - 1] for first in range(0, neighbours, _TOGETHER - 1)]
    jobs = [_Job(settings, task.model, task.loss, client, (parts[client], *chunk)) for chunk in chunks]
    if workers > 1 and len(jobs) > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(jobs)), context) as pool:
            measured = list(pool.map(_measured, jobs))
    else:
        measured = [_measured(job) for job in jobs]
    distances = np.concatenate([distances for distances, _ in measured], axis=1)  # (rounds, neighbours)
    bound = float(distances.max())
    reason = f"the largest distance to {neighbours} neighbours of client {client}, one record each ({change}d)"
    return SensitivityEstimate(
        Sensitivity(bound, Basis.ESTIMATED, reason),
        measured_norm_floor(min(norm for _, norm in measured), bound),
        tuple(_spread(row.tolist()) for row in distances),
        neighbours,
        change,
    )


class _Job(NamedTuple):
    """Data sets to train on side by side, the first being the one at hand. Can be sent to another process."""

    config: Resolved
    factory: ModelFactory
    loss: Loss
    client: int
    data: tuple[Examples, ...]


def _measured(job: _Job) -> tuple[Stack, float]:
    """Distances (rounds x neighbours) to the first model, and the smallest norm of any model."""
    config, seed = job.config, RunSeed(job.config.seed)
    trainer = make_trainer(job.factory, job.loss, torch.device("cpu"), seed)
    start: Vector = public_initial(job.factory, seed)
    models = np.tile(start, (len(job.data), 1))
    distances, norms = [], []
    for round_ in range(1, config.rounds + 1):
        sgd = local_sgd(config, config.lr, round_)
        models = trainer.train(models, job.data, [job.client] * len(job.data), round_, sgd).copy()
        distances.append(np.linalg.norm(models[1:] - models[0], axis=1))
        norms.append(float(np.linalg.norm(models, axis=1).min()))
    return np.stack(distances), min(norms)


def _changed(parts: Sequence[Examples], client: int, change: str, rng: np.random.Generator) -> Examples:
    x, y = floats(parts[client].x), parts[client].y
    index = int(rng.integers(len(y)))
    if change == "remove":
        if len(y) < 2:
            raise ConfigError(f"client {client} has one record: nothing is left to train on without it")
        kept = torch.arange(len(y)) != index
        return Examples(x[kept], y[kept])
    others = [part for number, part in enumerate(parts) if number != client] or [parts[client]]
    donor = others[int(rng.integers(len(others)))]
    record = int(rng.integers(len(donor.y)))
    x, y = x.clone(), y.clone()
    x[index], y[index] = floats(donor.x[record : record + 1])[0], donor.y[record]
    return Examples(x, y)


def _spread(values: list[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(min(values), statistics.mean(values), max(values), deviation)
