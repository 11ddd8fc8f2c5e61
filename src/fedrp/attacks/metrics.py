"""How well an attack did: likeness of images, and areas under ROC curves with their uncertainty."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest, rankdata

Images = npt.NDArray[np.float64]  # (N, C, H, W), values from 0 to 1

_WINDOW = 1.5  # standard deviation of the Gaussian window, in pixels
_MOST_DB = 100.0  # of images that are equal: a finite number, so that means exist


def psnr(image: Images, other: Images) -> float:
    """Peak signal-to-noise ratio in dB, for values from 0 to 1."""
    error = float(np.mean(np.square(image - other)))
    return min(_MOST_DB, -10 * math.log10(error)) if error else _MOST_DB


def ssim(image: Images, other: Images) -> float:
    """Structural similarity (Wang et al. 2004) of (C, H, W): Gaussian window of 1.5 pixels, mean over all pixels."""
    c1, c2 = 0.01**2, 0.03**2

    def local(values: Images) -> Images:
        return np.asarray(gaussian_filter(values, (0, _WINDOW, _WINDOW), truncate=3.5))

    mean_a, mean_b = local(image), local(other)
    var_a, var_b = local(image**2) - mean_a**2, local(other**2) - mean_b**2
    covariance = local(image * other) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return float(np.mean(luminance * (2 * covariance + c2) / (var_a + var_b + c2)))


def matched(originals: Images, found: Images) -> npt.NDArray[np.intp]:
    """For each original, the index of the reconstruction that is held against it: the best pairing in total."""
    errors = [[float(np.mean(np.square(a - b))) for b in found] for a in originals]
    return np.asarray(linear_sum_assignment(errors)[1])


class Area(NamedTuple):
    """Area under a ROC curve and its 95 % interval (Hanley and McNeil 1982)."""

    auc: float
    low: float
    high: float


def area(positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64]) -> Area:
    """How well scores tell two groups apart: the probability that a positive scores higher. 0.5 is guessing."""
    p, n = len(positive), len(negative)
    ranks = rankdata(np.concatenate([positive, negative]))
    auc = float((ranks[:p].sum() - p * (p + 1) / 2) / (p * n))
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = (auc * (1 - auc) + (p - 1) * (q1 - auc**2) + (n - 1) * (q2 - auc**2)) / (p * n)
    margin = 1.96 * math.sqrt(max(variance, 0.0))
    return Area(auc, max(0.0, auc - margin), min(1.0, auc + margin))


class Curve(NamedTuple):
    """A ROC curve: for every threshold, which share of others and of members is above it."""

    false_positives: npt.NDArray[np.float64]
    true_positives: npt.NDArray[np.float64]


def roc(positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64]) -> Curve:
    """The curve from (0, 0) to (1, 1); its trapezoids have the area of `area`, ties included."""
    thresholds = np.unique(np.concatenate([positive, negative]))
    shares = [1 - np.searchsorted(np.sort(group), thresholds) / len(group) for group in (negative, positive)]
    return Curve(*(np.concatenate([[0.0], share[::-1]]) for share in shares))


class Rate(NamedTuple):
    """Positives that a threshold finds, and what is known of it beyond these scores (Clopper and Pearson, 95 %)."""

    found: float  # of all positives
    low: float  # at least, in the long run
    false_high: float  # of negatives that it names wrongly: at most, in the long run


def rate_at(positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64], false_positives: float) -> Rate:
    """What is found by the threshold that wrongly names the given share of negatives."""
    threshold = np.quantile(negative, 1 - false_positives)
    (right, low, _), (_, _, high) = (_share(group > threshold) for group in (positive, negative))
    return Rate(right, low, high)


def _share(named: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    """A share and its 95 % interval."""
    interval = binomtest(int(named.sum()), len(named)).proportion_ci()
    return float(named.mean()), float(interval.low), float(interval.high)
