"""Whole numbers modulo 2^32 in the place of floating point, because only those add up under masks."""

import math
from dataclasses import dataclass

from fedrp.compression.grid import HEADROOM, Scale, decode, encode, finest
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ProtocolError
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.types import Vector, Words


@dataclass(frozen=True)
class FixedPoint(Mechanism):
    """Puts what the mechanisms before it give on a grid; the last mechanism wherever uploads are masked.

    Guarantees: the mean is off by at most |S| step / (2 W_S), see `fedrp.compression.grid`.
    """

    config: Resolved
    before: tuple[Mechanism, ...] = ()

    def client(self, upload: Numbers, context: AtClient) -> Words:
        """The upload times its weight, in steps."""
        scale = self.scale(context.previous, _asked(context.cohort))
        words, cut = encode(upload, scale, context.weight)
        if cut:
            beyond = f"{cut} of {upload.size} numbers beyond +-{scale.bound:g}"
            context.warn(f"{beyond} were cut off before masking: raise secure_range")
        return words

    def server(self, numbers: Numbers, context: AtServer) -> Vector:
        """The mean, from the sum of words."""
        return decode(numbers, context.divisor, self.scale(context.previous, _asked(context.cohort)).step)

    def scale(self, previous: Vector | None, cohort: Cohort) -> Scale:
        """What the last mechanism says that has something to say; else the stated range, and as fine as it goes."""
        said = [scale for mechanism in self.before if (scale := mechanism.scale(previous, cohort))]
        return said[-1] if said else finest(self.config.secure_range, cohort, HEADROOM)

    def reach(self, before: Reach, _round: int, _size: int) -> Reach:
        """The stated range, where nothing else bounds an upload."""
        return Reach(self.config.secure_range) if math.isinf(before.number) else before


def _asked(cohort: Cohort | None) -> Cohort:
    if cohort is None:
        raise ProtocolError("a masked upload needs a list of participants")
    return cohort
