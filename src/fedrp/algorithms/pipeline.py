"""The mechanisms of a run in their order: what becomes of an update at a client, and of the uploads at the server.

The one place where mechanisms are applied, for the simulator, for Flower and for `fedrp.testing`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrp.algorithms.server_side import ServerSide
from fedrp.compression.coding import HALF, Coding, Plain, coding_of
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.fixed_point import FixedPoint
from fedrp.types import Vector


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
        masks = (FixedPoint(config, named),) if config.secure_aggregation else ()
        return cls(config, algorithm, (*named, *masks))

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
        return Plain(size, "<u4") if self.config.secure_aggregation else coding_of(size, self.config.bits)

    def aggregate_coding(self, size: int) -> Coding:
        """How an aggregate of so many numbers is written."""
        return coding_of(size, self.config.bits_down)

    def sent(self, update: Vector, context: AtClient) -> Numbers:
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
        for mechanism in reversed(self.mechanisms):
            numbers = mechanism.server(numbers, context)
        update = self.update_of(numbers)
        made = self.algorithm.aggregate(self.config, [self.update_of(vector) for vector in past], update, weight)
        told = numbers[update.size :]
        return np.concatenate([made, told]) if told.size else made

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
    def _told(self) -> int:
        return sum(mechanism.told for mechanism in self.mechanisms)


def _quantised(reach: Reach, bits: float) -> Reach:
    """Few bits make vectors longer, by sqrt(pi / 2) for one bit and less for more; single numbers by what they like."""
    if bits >= HALF:
        return reach
    norm = 2 * reach.norm / math.sqrt(min(1.0, bits))
    return Reach(norm, norm)
