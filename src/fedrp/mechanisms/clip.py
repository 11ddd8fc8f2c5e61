"""Bound the norm of every update to C, and let C follow the clients' norms (Andrew et al. 2021) where asked for.

With `clip_quantile` a client adds one number, whether its norm was below C (in units of C), and the server makes the
next C of their mean. A sum is divided by the *expected* number of participants, which does not depend on who came.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedrp.config.run import Resolved
from fedrp.errors import ProtocolError
from fedrp.mechanisms.base import AtClient, AtServer, Mechanism, Numbers, Reach
from fedrp.mechanisms.cohort import largest_cohort
from fedrp.privacy.sensitivity import clip_to_norm
from fedrp.types import Vector

_CLIP_RATE = 0.2  # eta_C of Andrew et al.


@dataclass(frozen=True)
class Clip(Mechanism):
    """Clips updates to C.

    Guarantees: the norm of an update is at most C, whatever it was (NaN and infinity give zero); where C adapts, the
    vote that follows is +C/2 or -C/2.
    """

    config: Resolved

    @property
    def told(self) -> int:
        """The vote; on the way back, the next C."""
        return 1 if self.config.clip_quantile else 0

    @property
    def divisor(self) -> float:
        """The expected number of participants."""
        return float(self.config.expected_participants)

    def bound(self, previous: Vector | None) -> float:
        """C, after the aggregate of the round before.

        Raises:
            ProtocolError: the aggregate ends with a C that is none; noise in units of it would hide nothing.
        """
        if not self.config.clip_quantile or previous is None:
            return self.config.clip
        clip = float(previous[-1])
        if not (math.isfinite(clip) and clip > 0):
            raise ProtocolError(f"the aggregate names a clip of {clip:g}: expected a positive, finite number")
        return clip

    def largest_bound(self, round_: int) -> float:
        """What C can have grown to."""
        return self.config.clip * math.exp(_CLIP_RATE * self.config.clip_quantile * round_)

    def client(self, upload: Numbers, context: AtClient) -> Numbers:
        """The update, clipped, and the vote."""
        clip = self.bound(context.previous)
        clipped = clip_to_norm(upload, clip)
        if not self.told:
            return clipped
        below = float(np.linalg.norm(upload.astype(np.float64)) <= clip)
        return np.append(clipped.astype(np.float64), clip * (below - 0.5))

    def server(self, numbers: Numbers, context: AtServer) -> Numbers:
        """The mean, with the next C in the place of the votes. A round without uploads leaves C as it is."""
        if not self.told:
            return numbers
        clip, quantile, result = self.bound(context.previous), self.config.clip_quantile, numbers.copy()
        below = min(1.0, max(0.0, float(result[-1]) / clip + 0.5)) if context.weight else quantile
        result[-1] = clip * math.exp(-_CLIP_RATE * (below - quantile))
        return result

    def reach(self, _before: Reach, round_: int, _size: int) -> Reach:
        """C times the largest cohort, by the expected one; the last number is C itself."""
        clip = self.largest_bound(round_)
        most = clip * largest_cohort(self.config) / self.divisor
        return Reach(most, most + self.told * clip)
