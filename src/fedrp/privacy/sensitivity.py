"""How far one change of the data can move what is released, and what enforces it."""

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.errors import ConfigError
from fedrp.privacy import _checks

FloatVector = npt.NDArray[np.floating]

_SHRINK = 1 - 2**-22  # a coordinate rounded to float32 grows by at most 2^-24 of itself


class Basis(Enum):
    """Why a bound is believed."""

    ENFORCED = "enforced by the code on every release"
    ASSUMED = "given by the user, not checked"
    ESTIMATED = "measured on this run's data; neighbouring data may differ"


class Sensitivity(NamedTuple):
    """A bound on the distance between the vectors of two adjacent data sets."""

    bound: float
    basis: Basis
    reason: str


class NormFloor(NamedTuple):
    """A lower bound on the norm of a vector, for both of two adjacent data sets."""

    bound: float
    basis: Basis
    reason: str


def clip_to_norm(vector: FloatVector, bound: float) -> FloatVector:
    """The vector itself if its norm is at most `bound`, else scaled down to it; same type.

    Guarantees: the float64 norm of the result is at most `bound`, also after rounding to float32; the input is not
    changed. Edge cases:

    | input | result |
    |---|---|
    | zero vector | zero vector |
    | bound = 0 | zero vector |
    | NaN or infinity anywhere | zero vector: nothing of it can be released safely |
    | bound negative, infinite or NaN | `ConfigError` |
    """
    bound = _checks.number("bound", bound, at_least=0)
    wide = np.asarray(vector, np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    if bound == 0 or largest == 0 or not math.isfinite(largest):
        return np.zeros_like(vector)
    relative = float(np.linalg.norm(wide / largest))  # of the order of 1: no overflow, no underflow
    if relative <= bound / largest and _norm(vector) <= bound:
        return vector.copy()
    result = (wide / largest * (_SHRINK * bound / relative)).astype(vector.dtype)
    return result if _norm(result) <= bound else np.zeros_like(vector)


def project_to_ball(vector: FloatVector, center: FloatVector, radius: float) -> FloatVector:
    """The nearest point of the ball around `center`: center + clip(vector - center, radius); in the type of `vector`.

    Guarantees: ||result - center|| <= radius in float64, whatever came before, so any two results for the same center
    are within 2 radius, over all rounds. Edge cases: NaN or infinity gives the center; so does a radius too small for
    the resolution of the type.
    """
    radius = _checks.number("radius", radius, at_least=0)
    if vector.shape != center.shape or not np.isfinite(center).all():
        raise ConfigError(f"center must be finite and of shape {vector.shape}, got shape={center.shape}")
    middle = np.asarray(center, np.float64)
    moved = clip_to_norm(np.asarray(vector, np.float64) - middle, radius)
    for shrink in (1.0, _SHRINK, 1 - 2**-12):
        result = (middle + shrink * moved).astype(vector.dtype)
        if _norm(result.astype(np.float64) - middle) <= radius:
            return result
    return center.astype(vector.dtype)


def ball_sensitivity(radius: float) -> Sensitivity:
    """Of a vector kept in a ball: 2 R, for every adjacency, every pair of secret histories and every round."""
    radius = _checks.number("radius", radius, at_least=0)
    return Sensitivity(2 * radius, Basis.ENFORCED, f"the vector is kept within {radius:g} of the common start")


def measured_norm_floor(norm: float, sensitivity: float) -> NormFloor | None:
    """From the norm seen in this run: a neighbour's may be smaller by the sensitivity. None if nothing is left."""
    norm = _checks.number("norm", norm, at_least=0)
    floor = norm - _checks.number("sensitivity", sensitivity, at_least=0)
    return NormFloor(floor, Basis.ESTIMATED, f"measured norm {norm:g} less the sensitivity") if floor > 0 else None


def _norm(vector: FloatVector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))
