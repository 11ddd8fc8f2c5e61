"""The joint view: the server sees A w_1 .. A w_K, all made with one secret A, and client i's vector changes.

Given the others, z_i is Gaussian around a combination of their z, with variance d_i^2/m, d_i the distance of w_i to the
span of the others. A change of w_i by Delta moves both: the coefficients (a part `a` of the change inside the span)
and the distance (from d to kappa d). Per row this is one Gaussian pair with standard deviations 1, 1 against g, s, the
singular values of [[1, 0], [a, kappa]] in units of d: one direction grows, one shrinks, and g - s <= Delta/d. So
`ratio` is Delta / d_min, d_min a floor of the distance for both adjacent data sets. Proof:
docs/privacy-proofs.md, "Joint view".
"""

import math

import numpy as np
import numpy.typing as npt

from fedrp.errors import ConfigError
from fedrp.privacy.chi import chi_quadrature, log_tail_excess
from fedrp.privacy.composition import renyi_epsilon
from fedrp.privacy.numerics import root
from fedrp.privacy.projection_mechanism import exact_delta, exact_epsilon, highest_order, renyi_divergence

FloatArray = npt.NDArray[np.float64]

_INSIDE = (0.0, 0.5)  # (kappa - 1) / ratio; 1 is pure growth of the distance, known in closed form


def joint_delta(epsilon: float, rows: int, ratio: float) -> float:
    """The hockey-stick divergence of the joint view at e^epsilon, the largest over all directions of the change.

    Guarantees: never below `exact_delta(epsilon, rows, ratio)`, which the change straight away from the others' span
    attains; equal to it but for a ratio above 1 and a delta above 0.45, where a change inside the span tells more.
    """
    straight = exact_delta(epsilon, rows, ratio)
    if ratio == 0:
        return straight
    return max(straight, *(_mixed_delta(epsilon, rows, ratio, part) for part in _INSIDE))


def joint_epsilon(rows: int, ratio: float, delta: float) -> float:
    """The inverse of `joint_delta`.

    Guarantees: never below `exact_epsilon(rows, ratio, delta)`, never above the Renyi bound, for which the straight
    change is proved to be the worst at every order.
    """
    straight = exact_epsilon(rows, ratio, delta)
    if ratio == 0 or joint_delta(straight, rows, ratio) <= delta * (1 + 1e-6):
        return straight
    proved = renyi_epsilon(lambda order: renyi_divergence(order, rows, ratio), delta, highest_order(ratio))
    return root(lambda epsilon: joint_delta(epsilon, rows, ratio) - delta, straight, proved, rtol=1e-9)


def distances_to_span(vectors: npt.ArrayLike) -> FloatArray:
    """For each row of `vectors` (K x n), its distance to the span of the other rows; one vector's is its norm.

    Guarantees: never above the exact distance by more than rounding; 0 where the row lies in the span to float64
    precision, i.e. there is no protection.
    """
    matrix = _matrix(vectors, "vectors")
    scale = float(np.abs(matrix).max()) or 1.0
    _, factor = np.linalg.qr((matrix / scale).T)  # (min(n, K), K), with the same Gram matrix
    return scale * np.array([_distance_of_column(factor, index) for index in range(len(matrix))])


def distances_from_gram(gram: npt.ArrayLike) -> FloatArray:
    """As `distances_to_span`, from the K x K Gram matrix of the vectors: d_i^2 is its Schur complement.

    Guarantees: never above the exact distance of any Gram matrix that rounds to this one, so 0 for all clients whose
    others are linearly dependent to float64 precision. Squaring loses half of the digits: prefer `distances_to_span`.
    """
    matrix = _matrix(gram, "gram")
    slack = 1e-6 * float(np.abs(matrix).max())
    if matrix.shape[0] != matrix.shape[1] or not np.allclose(matrix, matrix.T, rtol=0, atol=slack):
        raise ConfigError(f"gram must be a symmetric K x K matrix, got shape={matrix.shape}")
    rounding = 4 * len(matrix) * np.finfo(np.float64).eps * float(np.linalg.norm(matrix))
    lowered = (matrix + matrix.T) / 2 - rounding * np.eye(len(matrix))
    return np.array([_schur_distance(lowered, index) for index in range(len(matrix))])


def _schur_distance(gram: FloatArray, index: int) -> float:
    others = np.delete(np.delete(gram, index, axis=0), index, axis=1)
    products = np.delete(gram[index], index)
    if np.linalg.eigvalsh(others).min(initial=math.inf) <= 0:
        return 0.0
    return math.sqrt(max(0.0, float(gram[index, index] - products @ np.linalg.solve(others, products))))


def _distance_of_column(matrix: FloatArray, index: int) -> float:
    others, column = np.delete(matrix, index, axis=1), matrix[:, index]
    basis, values, _ = np.linalg.svd(others, full_matrices=False)
    tolerance = max(others.shape) * np.finfo(np.float64).eps
    span = basis[:, values > tolerance * values.max(initial=0.0)]
    distance = float(np.linalg.norm(column - span @ (span.T @ column)))
    return distance if distance > tolerance * float(np.linalg.norm(column)) else 0.0


def _mixed_delta(epsilon: float, rows: int, ratio: float, part: float) -> float:
    """The divergence when the distance grows by `part * ratio` and the rest of the change lies inside the span."""
    kappa = 1 + part * ratio
    difference, total = ratio, math.hypot(kappa + 1, ratio * math.sqrt(1 - part**2))
    grown, shrunk = (total + difference) / 2, (total - difference) / 2
    up, down = (grown**2 - 1) / 2, (1 - shrunk**2) / 2
    log_volume = rows * math.log(kappa)
    return max(
        _two_sided_delta(epsilon + log_volume, up, down, rows),
        _two_sided_delta(epsilon - log_volume, down / shrunk**2, up / grown**2, rows),
    )


def _two_sided_delta(level: float, up: float, down: float, rows: int) -> float:
    """E[(1 - e^(level - L))+] for L = up X - down Y, X and Y independent chi-square with `rows` degrees of freedom."""
    nodes, weights = chi_quadrature(rows)
    threshold = (level + down * nodes**2) / up  # of X, given Y
    beyond = np.exp(log_tail_excess(np.sqrt(np.maximum(threshold, 1e-300)), up, rows))
    whole = -np.expm1(up * np.minimum(threshold, 0.0) - rows / 2 * math.log1p(2 * up))
    return float(weights @ np.where(threshold > 0, beyond, whole))


def _matrix(values: npt.ArrayLike, name: str) -> FloatArray:
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2 or matrix.size == 0 or not np.isfinite(matrix).all():
        raise ConfigError(f"{name} must be a finite matrix with one row per client, got shape={matrix.shape}")
    return matrix
