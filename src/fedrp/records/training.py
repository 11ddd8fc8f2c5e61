"""Record-level noise: SGD whose every step is a noised sum of single examples' clipped gradients (Abadi et al. 2016).

A record is in the batch of a step by a coin of its own. What it adds is mapped to the variables, clipped to norm C and
cut to a grid, so that sums are exact: one record more or less moves them by at most C, and no other record's gradient,
not even by rounding (docs/privacy-proofs.md, section 8). Coins and noise come from the client's own secret. The rest of
a step, momentum and penalties too, works on the noised mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fedrp.crypto.secret import SecretKey
from fedrp.engines.augment import require_images, taken, versions
from fedrp.engines.descent import advance, learning_rates
from fedrp.engines.per_example import Block, per_example
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective, Stack, on_device
from fedrp.learning.pixels import Inputs
from fedrp.learning.trainer import LocalModel
from fedrp.mechanisms.noise import add_noise
from fedrp.privacy.noise import update_noise_multiplier
from fedrp.records.steps import SMALLEST_CLIP, LocalSteps
from fedrp.types import Precise

MICROBATCH = 32  # examples whose gradients are in memory together
_SHRINK = 1 - 2**-22  # a coordinate rounded to float32 grows by at most 2^-24 of itself
_ABSURD = 1e30  # a norm beyond which scaling down would lose its precision
_SUM_BITS = 24  # what a record adds has steps of 2^-24 C: exact in float32, and sums of 2^28 records in double
_NOISE_BITS = 12  # noise has steps of 2^-12 of its deviation
_CLIP_RATE = 0.2  # eta_C of Andrew et al.
_COUNT_NOISE = 1 / 20  # noise on the count of gradients below C, as a share of the expected batch


class RecordNoise(NamedTuple):
    """What protects the records of one client in a round."""

    steps: LocalSteps
    clip: float
    noise_multiplier: float
    quantile: float  # of the gradients' norms that C follows within the round; 0: it stays
    secret: SecretKey  # of this client and round, known to nobody else

    @property
    def count_noise(self) -> float:
        """Deviation of the noise on the count that C follows."""
        return _COUNT_NOISE * self.steps.expected

    @property
    def sum_noise(self) -> float:
        """The multiplier on the sum: larger where a part of the budget goes into adapting C."""
        z = self.noise_multiplier
        return update_noise_multiplier(z, self.count_noise) if self.quantile and z else z


@dataclass(frozen=True)
class RecordTrainer:
    """A `Trainer` that protects records. `protection` has an entry for each client that is trained in a call.

    Guarantees: a client's result depends on its start, data, protection and round alone. Divergence stops nobody: it
    would tell of the data what noise hides.
    """

    model: LocalModel
    protection: Sequence[RecordNoise]
    microbatch: int = MICROBATCH

    def train(
        self,
        start: Stack,
        data: Sequence[Examples],
        _clients: Sequence[int],
        _round: int,
        sgd: LocalSGD,
        objective: Objective = PLAIN,
    ) -> Stack:
        """Take the steps of a round from `start` (k x d) and return the variables reached (k x d)."""
        gradients = per_example(self.model)
        begin, reached = on_device(start, self.model.device), np.empty_like(start)
        require_images(sgd.augment, data)
        for row, (part, own) in enumerate(zip(data, self.protection, strict=True)):
            here = part.on(self.model.device)
            client = SiteRound(gradients, self.microbatch, here, own, sgd, objective, row)
            reached[row] = client.descend(begin[row : row + 1]).cpu().numpy()
        return reached

    def sums(self, start: Stack, data: Sequence[Examples], sgd: LocalSGD, objective: Objective = PLAIN) -> Precise:
        """The sum of all records' clipped gradients at `start` (k x d), without noise: exact in double precision.

        For a round that is one such sum: `fedrp.mechanisms.record_sum` says who adds the noise.
        """
        gradients, begin = per_example(self.model), on_device(start, self.model.device)
        require_images(sgd.augment, data)
        found = np.empty(start.shape)
        for row, (part, own) in enumerate(zip(data, self.protection, strict=True)):
            here, rows = part.on(self.model.device), slice(row, row + 1)
            weights = begin[rows] if objective.weights is None else objective.weights(begin[rows], rows)
            client = SiteRound(gradients, self.microbatch, here, own, sgd, objective, row)
            found[row], _ = client.clipped_sum(weights[0], 0, own.clip, start.shape[1])
        return found


class Gradients(Protocol):
    """What gives the gradients of single examples: `PerExample`, or what an audit puts in its place."""

    def gradients(self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, places: int, seed: int) -> Iterator[Block]:
        """See `fedrp.engines.per_example.PerExample.gradients`."""


@dataclass(frozen=True)
class SiteRound:
    """A client in a round. What leaves `noised_mean` is all that the rest of the world gets of its records."""

    gradients: Gradients
    microbatch: int
    data: Examples
    own: RecordNoise
    sgd: LocalSGD
    objective: Objective
    row: int  # that the objective knows it by

    def descend(self, begin: torch.Tensor) -> torch.Tensor:
        """The variables (d,) after all steps of the round."""
        rows, variables, velocity = slice(self.row, self.row + 1), begin.clone(), torch.zeros_like(begin)
        count, clip = self.own.steps.of_a_round, self.own.clip
        sgd = self.sgd._replace(grad_clip=0.0)  # single gradients are clipped, and the noised mean is long by noise
        rate = learning_rates([count], sgd, self.objective, begin)
        for step in range(count):
            weights = variables if self.objective.weights is None else self.objective.weights(variables, rows)
            mean, clip = self.noised_mean(weights[0], step, clip, variables.shape[1])
            noised = torch.from_numpy(mean.astype(np.float32)[None]).to(variables.device)
            advance(variables, velocity, self.objective.gradient(variables, noised, rows), rate, sgd)
        return variables[0]

    def noised_mean(self, weights: torch.Tensor, step: int, clip: float, size: int) -> tuple[Precise, float]:
        """The noised sum of a batch over its expected size, and the C of the next step."""
        noised, below = self.clipped_sum(weights, step, clip, size)
        deviation = clip * self.own.sum_noise
        grid = 2.0 ** (math.floor(math.log2(deviation)) - _NOISE_BITS) if deviation else None
        add_noise(noised, deviation, grid, self._secret("noise", step).fine_normals)
        if self.own.quantile:
            share = (below + self._count_noise(step)) / self.own.steps.expected + 0.5
            clip *= math.exp(-_CLIP_RATE * (min(1.0, max(0.0, share)) - self.own.quantile))
            clip = max(clip, SMALLEST_CLIP)
        return noised / self.own.steps.expected, clip

    def clipped_sum(self, weights: torch.Tensor, step: int, clip: float, size: int) -> tuple[Precise, float]:
        """The exact sum of a batch's clipped gradients, and how many more than half of them were below C."""
        total, below = torch.zeros(size, dtype=torch.float64, device=weights.device), 0.0
        seed = int(self._secret("layers", step).keystream(8).view("<u8")[0]) >> 1
        for rows, used in self.gradients.gradients(weights, *self._batch(step), self.microbatch, seed):
            mapped = rows if self.objective.project is None else self.objective.project(rows)
            bounded, short = clipped_rows(mapped, clip)
            total += bounded[:used].sum(dim=0, dtype=torch.float64)
            below += float(short[:used].sum()) - used / 2
        return total.cpu().numpy(), below

    def _batch(self, step: int) -> Examples:
        """The records whose coins say so."""
        records = len(self.data.y)
        chosen = sampled(self._secret("coins", step), records, self.own.steps.rate)
        entropy = np.random.Philox(key=self._secret("versions", step).keystream(16).view("<u8"))
        moved = versions(self.sgd.augment, records, np.random.Generator(entropy))[chosen]
        return taken(self.data, torch.from_numpy(chosen + moved).to(self.data.y.device), self.sgd.augment)

    def _count_noise(self, step: int) -> float:
        scale = self.own.count_noise if self.own.noise_multiplier else 0.0
        return scale * float(self._secret("count", step).fine_normals(1)[0])

    def _secret(self, purpose: str, step: int) -> SecretKey:
        return self.own.secret.derive(f"step/{purpose}/{step}")


def sampled(coins: SecretKey, records: int, rate: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The records of a Poisson sample, in order: each with probability `rate`, or less by at most 2^-53."""
    if rate >= 1:
        return np.arange(records)
    words = coins.keystream(8 * records).view("<u8") >> np.uint64(11)
    return np.flatnonzero(words < np.uint64(math.floor(rate * 2.0**53)))


def clipped_rows(vectors: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (b, d) cut to norm `bound` and to a grid that depends on it alone, and which were not longer (b,).

    Guarantees: the norm of a row is at most `bound`; sums of rows in double precision are exact, in any order; a row
    with a number that is not finite, or absurdly large, becomes zero.
    """
    norms = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    usable = norms < _ABSURD * min(1.0, bound)  # not where it is NaN
    scale = torch.where(usable, (bound * _SHRINK / norms).clamp(max=1.0), 0.0).to(vectors.dtype)
    step = 2.0 ** (math.floor(math.log2(bound)) - _SUM_BITS)
    whole = torch.where(usable[:, None], vectors, 0.0).mul_(scale[:, None] / step).trunc_().mul_(step)
    return whole, norms <= bound
