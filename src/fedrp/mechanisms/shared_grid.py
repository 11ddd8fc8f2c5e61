"""Few bits under masks: levels of one grid, whose sum over a whole cohort fits into a word of a few bits.

A word has b + ceil(log2 of the largest cohort) bits: 8 for one bit and 100 clients. A round's cohort uses as many
levels as then fit (three, in that case), so that a sum cannot wrap around whatever clients send. The range of the grid
follows from a norm that all know: the mean norm of the clients' vectors in the last round, which every client tells in
one more word of 32 bits, and the server hands on. Where there is none (in the first round, and in the second where that
is the first with differences) each client takes its own norm, and the server their mean: longer vectors count for less
then.

One word more is the sum of a client's levels: where masks do not cancel, it does not fit.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedrp.compression.grid import WORD_BITS, decode, encode, finest
from fedrp.compression.levels import bound_of, deviations, from_levels, to_levels
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ProtocolError
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.cohort import asked, largest_cohort
from fedrp.types import Vector, Words

_MANY = 0.1  # share of numbers that are cut off which a client's owner should know of


@dataclass(frozen=True)
class SharedGrid(Mechanism):
    """Puts updates on a grid of few levels; the last mechanism wherever uploads are masked, have few bits and no noise.

    Guarantees: unbiased but for numbers that are cut off, which are `fedrp.compression.levels.cut_share` of those of a
    client whose norm is the mean one; no sum of a cohort wraps around; one that is none of levels is refused.
    """

    config: Resolved
    differences: bool  # whether the first vectors are whole models, and later ones what has changed

    @property
    def width(self) -> int:
        """Bits of a word."""
        return min(WORD_BITS, int(self.config.bits) + (largest_cohort(self.config) - 1).bit_length())

    @property
    def told(self) -> int:
        """The norm; on the way back, the mean of them."""
        return 1

    @property
    def checks(self) -> int:
        """The sum of the levels."""
        return 1

    def client(self, upload: Numbers, context: AtClient) -> Words:
        """The levels, the norm and the sum of the levels."""
        cohort = asked(context.cohort)
        norm, most = float(np.linalg.norm(upload.astype(np.float64))), self.config.secure_range
        told, beyond = encode(np.array([norm]), finest(most, cohort), context.weight)
        if beyond:
            context.warn(f"a norm of {norm:.3g} is beyond {most:g} and was cut off before masking: raise secure_range")
        common, steps = self._common_norm(context.previous), self._steps(cohort)
        bound = bound_of(min(norm, most) if common is None else common, upload.size, steps)
        levels, cut = to_levels(upload, bound, steps, context.words)
        if cut > _MANY * upload.size:
            longer = f"the update has norm {norm:.3g}, those of the last round had {common or 0:.3g} on average"
            context.warn(f"{cut} of {upload.size} numbers were cut off before masking: {longer}")
        return np.concatenate([levels, told, levels.sum(dtype=np.uint32, keepdims=True)])

    def server(self, numbers: Numbers, context: AtServer) -> Vector:
        """The mean of the updates, and of their norms."""
        cohort, weight = asked(context.cohort), context.weight
        levels, steps = numbers[:-2] & np.uint32(2**self.width - 1), self._steps(cohort)
        if levels.sum(dtype=np.uint32) != numbers[-1] or levels.max(initial=0) > steps * weight:
            raise ProtocolError("the sum of the masked uploads is none of levels: a client sent garbage")
        norm = decode(numbers[-2:-1], weight, finest(self.config.secure_range, cohort).step)
        common = self._common_norm(context.previous)
        bound = bound_of(float(norm[0]) if common is None else common, levels.size, steps)
        mean = from_levels(levels, weight, bound, steps) / np.float32(context.divisor)
        return np.concatenate([mean, 0 * norm if self.differences and context.previous is None else norm])

    def reach(self, _before: Reach, round_: int, _size: int) -> Reach:
        """The longest sum of levels, and the norm that is told; of differences, as many as there were rounds."""
        most = deviations(2**self.width) * self.config.secure_range
        if self.differences:
            most *= round_ / (1 - self.config.server_momentum)
        return Reach(most, math.hypot(most, self.config.secure_range))

    def _steps(self, cohort: Cohort) -> int:
        """The highest level, with which the sum of a cohort's fits into a word."""
        return int((2**self.width - 1) // len(cohort.clients))

    def _common_norm(self, previous: Vector | None) -> float | None:
        """The mean norm of the last round, if there is one.

        Raises:
            ProtocolError: the aggregate ends with a norm that is none.
        """
        norm = 0.0 if previous is None else float(previous[-1])
        if not (math.isfinite(norm) and norm >= 0):
            raise ProtocolError(f"the aggregate names a norm of {norm:g}: expected a finite number of at least 0")
        return norm or None
