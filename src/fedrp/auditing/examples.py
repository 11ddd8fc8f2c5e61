"""Audit of record-level noise with an example for a canary: a real model on real images, one of which does not belong.

All but one of a site's records are images of the bundled data set. The canary is an image of pure noise, under the
label that the untrained model finds least likely. All that is between them and the numbers that leave the site is as
deployed: coins, per-example gradients of the model, clip, sum, noise, and the steps that follow from these. The
adversary knows images, canary and every step; its score of a run is the likelihood ratio of the canary's own clipped
gradient in what a step gives beyond what the others' gradients are expected to add.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedrp.auditing.lower_bounds import FloatArray
from fedrp.auditing.records import CLIP, SGD, RecordAudit, RecordFault, as_it_runs, bounds_of
from fedrp.config.checks import require
from fedrp.config.run import RunConfig
from fedrp.crypto.secret import SecretKey
from fedrp.engines.per_example import per_example
from fedrp.learning.objective import PLAIN, Examples
from fedrp.learning.pixels import Pixels
from fedrp.learning.task import named_task, split_among_clients
from fedrp.learning.trainer import LocalModel, batch_input, make_local_model
from fedrp.records.steps import LocalSteps
from fedrp.records.training import MICROBATCH, RecordNoise, SiteRound, clipped_rows
from fedrp.rng import RunSeed
from fedrp.types import KEY_BYTES

_RATE = 0.05  # of learning
_DATASET, _MODEL = "mnist-mini", "lenet5"


def audit_example(
    steps: LocalSteps,
    noise_multiplier: float,
    delta: float,
    trials: int,
    confidence: float = 0.95,
    fault: RecordFault = RecordFault.NONE,
    seed: int = 0,
    on_trial: Callable[[int], None] | None = None,
) -> RecordAudit:
    """Play the game against the steps of a site with this noise. `trials` are runs in each of the two worlds."""
    require(trials >= 4, "trials", trials, "a whole number of at least 4")
    site, scores = _site(steps, noise_multiplier, fault, RunSeed(seed)), []
    for trial in range(trials):
        rng = RunSeed(seed).generator("audit", trial)
        scores.append((site.score(True, rng), site.score(False, rng)))
        if on_trial:
            on_trial(trial + 1)
    games = {"example": bounds_of(steps, np.array(scores).T, delta, 1 - (1 - confidence) / 2)}  # two bounds hold
    return RecordAudit(steps.epsilon(noise_multiplier, delta), delta, games, 0.0, confidence, trials, 1, fault)


@dataclass(frozen=True)
class _Site:
    """A site, as it is claimed to be, and what is broken in what runs."""

    steps: LocalSteps
    noise_multiplier: float
    fault: RecordFault
    model: LocalModel
    data: Examples  # the last one is the canary

    def score(self, there: bool, rng: np.random.Generator) -> float:
        """The log-likelihood ratio of a run: how much more likely all its steps are with the canary than without."""
        runs, share, clip, gradients = as_it_runs(self.fault, self.steps, per_example(self.model))
        count = len(self.data.y) - 1 + there
        weights, found = torch.from_numpy(self.model.layout.flatten(self.model.module)), 0.0
        for _ in range(self.steps.rounds):
            own = RecordNoise(runs, clip, share * self.noise_multiplier, 0.0, SecretKey(rng.bytes(KEY_BYTES)))
            part = Examples(self.data.x[:count], self.data.y[:count])
            site = SiteRound(gradients, MICROBATCH, part, own, SGD, PLAIN, 0)
            for step in range(self.steps.of_a_round):
                mean, _ = site.noised_mean(weights, step, clip, len(weights))
                found += self._likelihood(mean * runs.expected, weights)
                weights = weights - _RATE * torch.from_numpy(mean.astype(np.float32))
        return found

    def _likelihood(self, noised: FloatArray, weights: torch.Tensor) -> float:
        others, canary = self._expected(weights)
        length, noise, rate = float(np.linalg.norm(canary)), CLIP * self.noise_multiplier, self.steps.rate
        if length == 0:
            return 0.0
        part = float((noised - rate * others) @ canary) / length
        exponent = (2 * part * length - length**2) / (2 * noise**2)
        return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + exponent))

    def _expected(self, weights: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """What the others add to a step if all are drawn, and what the canary adds if it is there."""
        sums, gradients = [], per_example(self.model).gradients
        for part in (slice(None, -1), slice(-1, None)):
            total = torch.zeros(len(weights), dtype=torch.float64)
            x, y = self.data.x[part], self.data.y[part]
            for rows, used in gradients(weights, x, y, min(MICROBATCH, len(y) + 1), 0):
                total += clipped_rows(rows, CLIP)[0][:used].sum(dim=0, dtype=torch.float64)
            sums.append(total.numpy())
        return sums[0], sums[1]


def _site(steps: LocalSteps, noise_multiplier: float, fault: RecordFault, seed: RunSeed) -> _Site:
    config = RunConfig(algorithm="fedavg", dataset=_DATASET, model=_MODEL, clients=1)
    task = named_task(config)
    (data,) = split_among_clients(task, config)
    require(steps.records <= len(data.y), "records", steps.records, f"at most the {len(data.y)} of {_DATASET}")
    model = make_local_model(task.model, task.loss, torch.device("cpu"), seed)
    others = Examples(data.x[: steps.records - 1], data.y[: steps.records - 1])
    canary = seed.generator("canary").integers(0, 256, (1, *data.x.shape[1:]), np.uint8)
    if not isinstance(others.x, Pixels):
        raise TypeError(f"images of {_DATASET} are bytes")
    x = Pixels(torch.cat([others.x.raw, torch.from_numpy(canary)]), others.x.scale)
    with torch.inference_mode():
        unlikely = model.module.eval()(batch_input(x[-1:], model.device)).argmin(dim=1)
    return _Site(steps, noise_multiplier, fault, model, Examples(x, torch.cat([others.y, unlikely])))
