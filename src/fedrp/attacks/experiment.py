"""An inversion attack from start to end: choose pictures, record a run on them, attack one adversary's view, compare.

Only this file knows both the truth and the attack; it hands the attack a `View` and public data, nothing else.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.attacks.clues import angles, find_clues
from fedrp.attacks.inversion import Effort, invert
from fedrp.attacks.metrics import Area, Pictures, area, matched, psnr, ssim
from fedrp.attacks.record import record
from fedrp.attacks.victim import SMOOTH, Victim
from fedrp.attacks.view import ADVERSARIES, Recording
from fedrp.config import RunConfig, require_choice
from fedrp.data import Dataset, load_dataset
from fedrp.errors import ConfigError, DataError
from fedrp.rng import RunSeed
from fedrp.task import Task
from fedrp.training import Examples

OnStep = Callable[[int, int], None]  # (targets done, targets in all)


@dataclass(frozen=True)
class Scenario:
    """Who attacks what. Clients hold `pictures` pictures each and take one step on all of them in a round."""

    algorithm: str = "fedavg"
    adversary: str = "server"
    model: str = SMOOTH
    dataset: str = "mnist-mini"
    clients: int = 4
    pictures: int = 1
    targets: int = 4  # clients attacked; an adversary that sees aggregates attacks all others at once
    dim: int = 1000
    projection: str | None = None
    rounds: int = 10  # of the run; the noise of private algorithms depends on it
    round: int = 1  # that is attacked
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("adversary", self.adversary, ADVERSARIES)
        for name in ("clients", "pictures", "targets"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not valid: expected a whole number of at least 1")
        if self.adversary != "server" and self.clients < 2:
            raise ConfigError(
                f"clients={self.clients} is not valid: '{self.adversary}' needs a second client to attack"
            )
        if not 1 <= self.round <= self.rounds:
            raise ConfigError(f"round={self.round} is not valid: the run has rounds 1 to {self.rounds}")


class Target(NamedTuple):
    """One attacked vector: the pictures behind it and what was made of it."""

    clients: tuple[int, ...]
    originals: Pictures
    found: Pictures  # in the order of the originals
    labels: tuple[int, ...]
    labels_found: tuple[int, ...]
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    mismatch: float


@dataclass(frozen=True)
class Outcome:
    """What an attack got."""

    scenario: Scenario
    effort: Effort
    parameters: int
    guessed: bool  # keys had to be guessed
    targets: tuple[Target, ...]
    mean_picture: tuple[float, ...]  # PSNR of the mean of public pictures, per attacked picture
    other_picture: tuple[float, ...]  # and of a public picture drawn at random
    seconds: float

    @property
    def psnr(self) -> tuple[float, ...]:
        """Of all attacked pictures."""
        return tuple(value for target in self.targets for value in target.psnr)

    @property
    def label_rate(self) -> float:
        """The share of labels that were found."""
        right = sum((Counter(t.labels) & Counter(t.labels_found)).total() for t in self.targets)
        return right / sum(len(t.labels) for t in self.targets)

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        similarity = [value for target in self.targets for value in target.ssim]
        return {
            **dataclasses.asdict(self.scenario),
            **self.effort._asdict(),
            "parameters": self.parameters,
            "keys_guessed": self.guessed,
            "psnr": _mean(self.psnr),
            "psnr_each": [round(value, 2) for value in self.psnr],
            "ssim": _mean(similarity),
            "label_rate": self.label_rate,
            "psnr_mean_picture": _mean(self.mean_picture),
            "psnr_other_picture": _mean(self.other_picture),
            "mismatch": [target.mismatch for target in self.targets],
            "seconds": round(self.seconds, 1),
        }


def attack_pictures(
    scenario: Scenario, effort: Effort, data_dir: Path | None = None, on_step: OnStep | None = None
) -> Outcome:
    """Record a run and reconstruct its pictures from one adversary's view."""
    dataset = load_dataset(scenario.dataset, data_dir)
    chosen = _chosen(scenario, dataset)
    recording = record_run(scenario, dataset, chosen)
    view = recording.view(ADVERSARIES[scenario.adversary])
    prior = _unit(dataset.test_x).mean(axis=0)
    seed = RunSeed(scenario.seed)
    began = time.monotonic()
    clues = find_clues(view, seed, scenario.round)[: scenario.targets]
    targets = []
    for number, clue in enumerate(clues):
        truth = np.concatenate([chosen[client] for client in clue.clients])
        guess = invert(view.public, clue, len(truth), effort, prior, seed)
        originals = _unit(dataset.train_x[truth])
        found = guess.pictures[matched(originals, guess.pictures)]
        pairs = list(zip(originals, found, strict=True))
        target = Target(
            clients=clue.clients,
            originals=originals,
            found=found,
            labels=tuple(sorted(dataset.train_y[truth].tolist())),
            labels_found=guess.labels,
            psnr=tuple(psnr(*pair) for pair in pairs),
            ssim=tuple(ssim(*pair) for pair in pairs),
            mismatch=guess.mismatch,
        )
        targets.append(target)
        if on_step:
            on_step(number + 1, len(clues))
    attacked = [picture for target in targets for picture in target.originals]
    others = _unit(dataset.test_x[seed.generator("other-picture").integers(len(dataset.test_x), size=len(attacked))])
    return Outcome(
        scenario=scenario,
        effort=effort,
        parameters=clues[0].model.size,
        guessed=clues[0].guessed,
        targets=tuple(targets),
        mean_picture=tuple(psnr(picture, prior) for picture in attacked),
        other_picture=tuple(psnr(*pair) for pair in zip(attacked, others, strict=True)),
        seconds=time.monotonic() - began,
    )


def attack_links(scenario: Scenario, data_dir: Path | None = None) -> Area:
    """How well the server alone can tell which clients hold pictures of the same class, from angles between uploads."""
    dataset = load_dataset(scenario.dataset, data_dir)
    chosen = _chosen(scenario, dataset)
    view = record_run(scenario, dataset, chosen).view(ADVERSARIES["server"])
    cosines = angles(view, scenario.round)
    labels = [int(dataset.train_y[truth[0]]) for truth in chosen]
    pairs = list(itertools.combinations(range(scenario.clients), 2))
    same = np.array([cosines[pair] for pair in pairs if labels[pair[0]] == labels[pair[1]]])
    different = np.array([cosines[pair] for pair in pairs if labels[pair[0]] != labels[pair[1]]])
    if not len(same) or not len(different):
        raise ConfigError(f"clients={scenario.clients} is too few: no two of them hold pictures of one class")
    return area(same, different)


def record_run(scenario: Scenario, dataset: Dataset, chosen: list[npt.NDArray[np.intp]]) -> Recording:
    """Train a real run in which client i holds the training pictures `chosen[i]`, and keep its packets."""
    data = [
        Examples(torch.from_numpy(dataset.normalised(dataset.train_x[index])), torch.from_numpy(dataset.train_y[index]))
        for index in chosen
    ]
    shape = tuple(dataset.train_x.shape[1:])
    task = Task(Victim(scenario.model, shape, dataset.classes), [], ([], []), model_name=scenario.model)
    config = RunConfig(
        algorithm=scenario.algorithm,
        model=scenario.model,
        clients=scenario.clients,
        rounds=max(scenario.rounds, scenario.round + 1),  # an aggregate reaches the clients in the next round
        batch_size=scenario.pictures,
        dim=scenario.dim,
        projection=scenario.projection,
        seed=scenario.seed,
    )
    (mean,), (deviation,) = dataset.mean, dataset.std
    return record(config, task, data, -mean / deviation, (1 - mean) / deviation, dataset.classes)


def _chosen(scenario: Scenario, dataset: Dataset) -> list[npt.NDArray[np.intp]]:
    """The training pictures of each client, drawn by the seed."""
    if dataset.train_x.dtype != np.uint8 or len(dataset.mean) != 1 or dataset.train_x.ndim != 4:
        raise DataError(
            f"data set '{scenario.dataset}' cannot be attacked: this attack is about grey pictures of bytes"
        )
    count = scenario.clients * scenario.pictures
    if count > len(dataset.train_x):
        raise DataError(f"clients={scenario.clients} with pictures={scenario.pictures}: there are not so many pictures")
    drawn = RunSeed(scenario.seed).generator("attacked").choice(len(dataset.train_x), count, replace=False)
    return list(drawn.reshape(scenario.clients, scenario.pictures))


def _unit(pictures: npt.NDArray[Any]) -> Pictures:
    return np.asarray(pictures / 255.0, np.float64)


def _mean(values: Any) -> float:
    return float(np.mean(values))
