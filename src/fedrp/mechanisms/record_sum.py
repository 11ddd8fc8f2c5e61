"""A round that is one sum of single records' clipped gradients, of whose noise each client adds a share.

Local training clips (`fedrp.records.training`), so that a record moves a client's sum by at most C, and sums exactly.
Here is what that is worth to the noise and to whoever checks a sum. Learning rate and denominator come after the sum
of all clients: neither is in the units that noise is measured in.
"""

from dataclasses import dataclass

from fedrp.config.run import Resolved
from fedrp.mechanisms.base import AtClient, Mechanism, Numbers, Reach
from fedrp.mechanisms.cohort import largest_cohort
from fedrp.types import Vector


@dataclass(frozen=True)
class RecordSum(Mechanism):
    """Hands a sum on as it is; says how far a record can move it, and how large it is at most."""

    config: Resolved

    def client(self, upload: Numbers, _context: AtClient) -> Numbers:
        """The sum itself, of norm C times the records that a step takes at most."""
        return upload

    @property
    def divisor(self) -> float:
        """The expected number of participants."""
        return float(self.config.expected_participants)

    def bound(self, _previous: Vector | None) -> float:
        """C: what a record more or less moves a sum by, at most."""
        return self.config.clip

    def largest_bound(self, _round: int) -> float:
        """C stays."""
        return self.config.clip

    def reach(self, _before: Reach, _round: int, _size: int) -> Reach:
        """C times the records of the largest cohort, by the expected one."""
        most = self.config.clip * self.config.batch_size * largest_cohort(self.config) / self.divisor
        return Reach(most, most)
