"""What noise lets a run learn, said before round 1, so that a run at chance level is announced and not discovered.

Over T rounds the mean of clipped updates moves the model by at most T C in the direction of the data, and the noise in
it moves the model by sqrt(T) z C sqrt(n) / K in directions of its own: z the noise multiplier, C the clip, n the
parameters, K the clients of a round. A projection to m numbers changes neither: its way back stretches noise of length
z C sqrt(m) / K by sqrt(n/m). Server momentum lets every round count more than once.

Where the levels are comes from kept runs (docs/results.md, "What noise lets a run learn"): LeNet-5 on MNIST alone. They
are a rule of thumb for other models, and say nothing of what a run would reach without noise.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fedrp.config.run import Resolved
from fedrp.mechanisms.noise import noise_shares

# All kept runs beyond one of the first two ended below 50 %, and all that ended below 14 % were beyond one. All within
# the rest ended above 50 %. In between there are runs of every kind.
_LOST_RATIO, _LOST_DRIFT = 0.15, 6.0
_WEAK_RATIO, _WEAK_DRIFT, _WEAK_REACH = 0.3, 2.0, 0.15


class Expectation(Enum):
    """What to expect of a run with noise."""

    CHANCE = "expected to stay near chance"
    LESS = "likely to learn less than without clip and noise"
    LEARN = "expected to learn"


@dataclass(frozen=True)
class Outlook:
    """How far the data can move a model in a run, against how far noise does."""

    reach: float  # at most, in the direction of the data
    drift: float  # by noise, in directions of its own
    start: float | None  # norm of the initial model; None where it is not known or the clip adapts: the ratio counts

    @property
    def signal_to_noise(self) -> float:
        """At most, over the whole run."""
        return self.reach / self.drift

    @property
    def expectation(self) -> Expectation:
        """By the rule of this module."""
        drift, reach = (self.drift / self.start, self.reach / self.start) if self.start else (0.0, math.inf)
        if self.signal_to_noise < _LOST_RATIO or drift > _LOST_DRIFT:
            return Expectation.CHANCE
        if self.signal_to_noise < _WEAK_RATIO or drift > _WEAK_DRIFT or reach < _WEAK_REACH:
            return Expectation.LESS
        return Expectation.LEARN

    def __str__(self) -> str:
        own = f", the model itself has norm {self.start:.3g}" if self.start else ""
        moved = f"over the run data can move it by {self.reach:.3g} at most, noise by {self.drift:.3g}"
        ratio = f"signal to noise at most {self.signal_to_noise:.2g}{own}"
        return f"this model is {self.expectation.value}: {moved} ({ratio}){self._remedy}"

    @property
    def _remedy(self) -> str:
        if self.expectation is Expectation.LEARN:
            return ""
        if self.signal_to_noise < _WEAK_RATIO:
            return "; more clients, a larger epsilon or a smaller model would help"
        return f"; a {'smaller' if self.drift > _WEAK_DRIFT * (self.start or 0.0) else 'larger'} clip would help"


def outlook_of(config: Resolved, parameters: int, start: float | None = None) -> Outlook | None:
    """The outlook of a run from a model with so many parameters and such a norm; None without noise."""
    if not config.private or not config.noise_multiplier:
        return None
    count = config.expected_participants
    noise = noise_shares(config, count)[0] * math.sqrt(parameters / count)  # of the mean of a round, in units of C
    momentum, ages = config.server_momentum, np.arange(1, config.rounds + 1)
    weights = (1 - momentum**ages) / (1 - momentum)  # by how much a round has moved the model in the end
    return Outlook(
        reach=config.clip * float(weights.sum()),
        drift=config.clip * noise * float(np.linalg.norm(weights)),
        start=None if config.clip_quantile else start,
    )
