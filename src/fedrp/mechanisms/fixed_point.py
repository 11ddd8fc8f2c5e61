"""Whole numbers modulo a power of two in the place of floating point, because only those add up under masks."""

import math
from dataclasses import dataclass

from fedrp.compression.grid import HEADROOM, WORD_BITS, Scale, decode, encode, finest
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.cohort import asked
from fedrp.types import Vector, Words


@dataclass(frozen=True)
class FixedPoint(Mechanism):
    """Puts what the mechanisms before it give on a grid; the last one where masked uploads have noise or all bits.

    Guarantees: the mean is off by at most |S| step / (2 W_S), see `fedrp.compression.grid`.
    """

    config: Resolved
    before: tuple[Mechanism, ...] = ()

    @property
    def width(self) -> int:
        """As few bits as a mechanism before it knows to suffice."""
        return min((mechanism.width for mechanism in self.before), default=WORD_BITS)

    def client(self, upload: Numbers, context: AtClient) -> Words:
        """The upload times its weight, in steps."""
        scale = self.scale(context.previous, asked(context.cohort))
        words, cut = encode(upload, scale, context.weight)
        if cut:
            beyond = f"{cut} of {upload.size} numbers beyond +-{scale.bound:g}"
            context.warn(f"{beyond} were cut off before masking: raise secure_range")
        return words

    def server(self, numbers: Numbers, context: AtServer) -> Vector:
        """The mean, from the sum of words."""
        step = self.scale(context.previous, asked(context.cohort)).step
        return decode(numbers, context.divisor, step, self.width)

    def scale(self, previous: Vector | None, cohort: Cohort) -> Scale:
        """What the last mechanism says that has something to say; else the stated range, and as fine as it goes."""
        said = [scale for mechanism in self.before if (scale := mechanism.scale(previous, cohort))]
        return said[-1] if said else finest(self.config.secure_range, cohort, HEADROOM)

    def reach(self, before: Reach, _round: int, _size: int) -> Reach:
        """The stated range, where nothing else bounds an upload."""
        return Reach(self.config.secure_range) if math.isinf(before.number) else before
