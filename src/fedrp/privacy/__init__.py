"""Interim front door (to be replaced)."""
from typing import NamedTuple
import numpy as np
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier as calibrate_noise_multiplier, gaussian_epsilon
class NonPrivate(NamedTuple):
    reason: str
class NothingReleased(NamedTuple):
    pass
class ProjectedRelease(NamedTuple):
    rows: int
class GaussianRelease(NamedTuple):
    noise_multiplier: float
    rounds: int
    rate: float
Event = NonPrivate|NothingReleased|ProjectedRelease|GaussianRelease
class Guarantee(NamedTuple):
    epsilon: float
    delta: float
def guarantee(e, c):
    if isinstance(e, GaussianRelease): return Guarantee(gaussian_epsilon(e.noise_multiplier, c.dp_delta, e.rounds, e.rate), c.dp_delta)
def clip_to_norm(v, c):
    n=float(np.linalg.norm(v.astype(np.float64)))
    return v if n<=c else v*np.float32(c/n)
