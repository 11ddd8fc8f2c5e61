"""The mechanisms of a run in their order: what becomes of an update at a client, and of the uploads at the server.

The one place where mechanisms are applied, for the simulator, for Flower and for `fedrp.testing`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrp.algorithms.server_side import ServerSide
from fedrp.compression.coding import (
    FULL,
    HALF,
    Coding,
    MaskedWords,
    Plain,
    WithExact,
    aggregate_coding_of,
    upload_coding_of,
)
from fedrp.compression.grid import WORD_BITS
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.difference import Difference
from fedrp.mechanisms.fixed_point import FixedPoint
from fedrp.mechanisms.shared_grid import SharedGrid
from fedrp.types import Precise, Vector


@dataclass(frozen=True)
class Pipeline:
    """An algorithm's server side and the mechanisms between it and the clients."""

    config: Resolved
    algorithm: ServerSide
    mechanisms: tuple[Mechanism, ...]

    @classmethod
    def of(cls, config: Resolved, algorithm: ServerSide) -> "Pipeline":
        """The mechanisms that the algorithm names, and under masks whole numbers after them."""
        named = algorithm.mechanisms(config)
        return cls(config, algorithm, (*named, *_for_masks(config, named)))

    def upload_size(self, parameters: int) -> int:
        """How many numbers a client sends, for so many parameters."""
        size = self.algorithm.update_size(self.config, parameters)
        for mechanism in self.mechanisms:
            size = mechanism.size(size)
        return size

    def aggregate_size(self, parameters: int) -> int:
        """How many numbers an aggregate has, for so many parameters: mechanisms are undone but for what they tell."""
        return self.algorithm.update_size(self.config, parameters) + self._told

    def upload_coding(self, size: int) -> Coding:
        """How an upload of so many numbers is written."""
        if not self.config.secure_aggregation:
            return upload_coding_of(size, self.config.bits)
        width, whole = self.mechanisms[-1].width, self._told + self.checks
        return MaskedWords(size, width, whole) if width < WORD_BITS else Plain(size, "<u4")

    def aggregate_coding(self, size: int) -> Coding:
        """How an aggregate of so many numbers is written."""
        bits, told = self.config.bits_down, self._told
        coding = aggregate_coding_of(size - told, bits)
        return WithExact(coding, told) if told and bits < FULL else aggregate_coding_of(size, bits)

    def sent(self, update: Vector | Precise, context: AtClient) -> Numbers:
        """What a client sends of its update: words where a mechanism makes some, float32 otherwise."""
        upload: Numbers = update
        for mechanism in self.mechanisms:
            upload = mechanism.client(upload, context)
        return upload if upload.dtype == np.uint32 else upload.astype(np.float32, copy=False)

    @property
    def divisor(self) -> float | None:
        """What the sum of uploads is divided by, whoever came; None: by their weight."""
        return next((m.divisor for m in self.mechanisms if m.divisor is not None), None)

    def aggregate(
        self, past: Sequence[Vector], numbers: Numbers, weight: float, cohort: Cohort | None = None
    ) -> Vector:
        """The next aggregate, from the last two, latest first, and the mean of the uploads (of words: the sum)."""
        context = AtServer(past[0] if past else None, weight, self.divisor or weight, cohort)
        told: list[Vector] = []  # the first mechanism's last, as they are undone from the last
        for mechanism in reversed(self.mechanisms):
            numbers = mechanism.server(numbers, context)
            if mechanism.told:
                numbers, last = np.split(numbers, [-mechanism.told])
                told.insert(0, last)
        made = self.algorithm.aggregate(self.config, [self.update_of(vector) for vector in past], numbers, weight)
        return np.concatenate([made, *told]) if told else made

    def update_of(self, aggregate: Vector) -> Vector:
        """An aggregate without what mechanisms have added for themselves: what the algorithm made."""
        return aggregate[: aggregate.size - self._told]

    def reach(self, round_: int, size: int) -> Reach:
        """How large the aggregate of a round, of `size` numbers, can be if all clients are honest."""
        reach = Reach()
        for mechanism in self.mechanisms:
            reach = mechanism.reach(reach, round_, size)
        if not self.config.secure_aggregation:
            reach = _quantised(reach, self.config.bits)
        return _quantised(self.algorithm.reach(self.config, round_, reach), self.config.bits_down)

    @property
    def checks(self) -> int:
        """How many numbers an upload has more than an aggregate."""
        return sum(mechanism.checks for mechanism in self.mechanisms)

    @property
    def _told(self) -> int:
        return sum(mechanism.told for mechanism in self.mechanisms)


def _for_masks(config: Resolved, named: tuple[Mechanism, ...]) -> tuple[Mechanism, ...]:
    """What makes words of an upload that masks go on, if they do."""
    if not config.secure_aggregation:
        return ()
    if config.bits == FULL or ((config.private or config.sums_records) and config.noise_multiplier):
        return (FixedPoint(config, named),)
    return (SharedGrid(config, any(isinstance(mechanism, Difference) for mechanism in named)),)


def _quantised(reach: Reach, bits: float) -> Reach:
    """Few bits make vectors longer, by sqrt(pi / 2) for one bit and less for more; single numbers by what they like."""
    if bits >= HALF:
        return reach
    norm = 2 * reach.norm / math.sqrt(min(1.0, bits))
    return Reach(norm, norm)
