"""What every projection family promises, as checks that can be run on one's own: see `fedrp.testing.contracts`."""

import copy
import pickle  # only to see that it is refused
from collections.abc import Callable

import numpy as np
import torch

from fedrp.config.checks import require_choice
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.projection.families import FAMILIES, FloatArray, Projection, make_projection, norm_bound
from fedrp.projection.tags import TAGS, projection_tag
from fedrp.testing.contracts import require

KEY = SecretKey(bytes(range(32)))
SHAPES = [(1, 1), (2, 1), (7, 1), (7, 3), (7, 7), (64, 64), (100, 33), (257, 16), (300, 299), (9000, 5), (9001, 90)]
_MATRICES = 1000  # drawn for a mean


def normal(*shape: int, seed: int = 0) -> FloatArray:
    """Standard normal numbers."""
    return np.random.Generator(np.random.PCG64([seed, *shape])).standard_normal(shape, np.float32)


def dense(projection: Projection) -> FloatArray:
    """The matrix, read off from the images of unit vectors."""
    return projection.adjoint(np.eye(projection.rows, dtype=np.float32))


def forward_and_adjoint_belong_together_and_are_linear(family: str) -> None:
    """(A x)' theta = x' (A' theta), and A (2 x - y/2) = 2 A x - A y / 2, up to rounding."""
    for seed, (columns, rows) in enumerate(SHAPES):
        require_linear(make_projection(family, KEY.derive(f"{columns}x{rows}"), columns, rows), 3 * seed)


def require_linear(projection: Projection, seed: int) -> None:
    """`forward` and `adjoint` of one projection are linear and of one matrix, on random vectors."""
    columns, rows = projection.columns, projection.rows
    x, y, theta = (normal(size, seed=seed + i) for i, size in enumerate((columns, columns, rows)))
    slack = 1e-5 * projection.norm_bound * np.linalg.norm(x) * np.linalg.norm(theta)
    image, preimage = projection.forward(x), projection.adjoint(theta)
    apart = abs(float(image.astype(float) @ theta) - float(x.astype(float) @ preimage))
    require(bool(apart <= slack), f"{columns}x{rows}: forward and adjoint are not of one matrix")
    slack = 1e-5 * projection.norm_bound * (2 * np.linalg.norm(x) + np.linalg.norm(y))
    combined = projection.forward(2 * x - np.float32(0.5) * y)
    apart = float(np.linalg.norm(combined - (2 * image - np.float32(0.5) * projection.forward(y))))
    require(bool(apart <= slack), f"{columns}x{rows}: forward is not linear")
    require(not projection.forward(np.zeros(columns, np.float32)).any(), "A 0 is not 0")


def the_norm_bound_holds(family: str) -> None:
    """`norm_bound` is at least A's largest singular value, and the same for every key."""
    for columns, rows in SHAPES:
        projection = make_projection(family, KEY, columns, rows)
        norm = float(np.linalg.norm(dense(projection).astype(float), 2))
        require(projection.norm_bound == norm_bound(family, columns, rows), "the bound depends on more than the shape")
        require(norm <= projection.norm_bound * (1 + 1e-6), f"||A|| = {norm} is above {projection.norm_bound}")


def key_and_shape_decide_the_matrix(family: str) -> None:
    """The same ones give the same bits, another key or shape another matrix."""
    first, again = (dense(make_projection(family, SecretKey(KEY.reveal()), 300, 20)) for _ in range(2))
    require(first.tobytes() == again.tobytes(), "the same key gave another matrix")
    for other in (make_projection(family, KEY.derive("round/2"), 300, 20), make_projection(family, KEY, 300, 21)):
        require(not np.array_equal(first, dense(other)[:20]), "another key or shape gave the same matrix")


def one_bit_of_the_key_changes_everything(family: str) -> None:
    """Matrices of keys that differ in one bit are uncorrelated."""
    for bit in (0, 77, 255):
        raw = bytearray(KEY.reveal())
        raw[bit // 8] ^= 1 << bit % 8
        a, b = (dense(make_projection(family, key, 2000, 10)).astype(float) for key in (KEY, SecretKey(bytes(raw))))
        correlation = (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum())
        count = max(1, int(np.count_nonzero(a * b)))
        require(abs(correlation) < 5 / np.sqrt(count), f"bit {bit}: matrices correlate by {correlation:.3f}")


def lengths_are_kept_on_average(family: str) -> None:
    """E ||A w||^2 = ||w||^2 within 4.5 standard errors, whose bound is Var ||A w||^2 <= 2 ||w||^4 / m."""
    columns, rows = 700, 50
    few, one = np.zeros((2, columns), np.float32)
    few[::140], one[123] = 1, 1
    inputs = [normal(columns), few, one, np.ones(columns, np.float32), np.float32(0.97) ** np.arange(columns)]
    units = np.stack([vector / np.linalg.norm(vector) for vector in inputs]).astype(np.float32)
    squares = np.zeros(len(units))
    for number in range(_MATRICES):
        images = make_projection(family, KEY.derive(f"test/{number}"), columns, rows).forward(units)
        squares += (images.astype(float) ** 2).sum(axis=1)
    worst = float(np.abs(squares / _MATRICES - 1).max())
    require(worst < 4.5 * np.sqrt(2 / rows / _MATRICES), f"the mean of ||A w||^2 is off by {worst:.3f}")


def stacks_and_layouts_are_irrelevant(family: str) -> None:
    """Rows of a stack are projected as they would be alone, wherever they lie in memory; nothing is written to."""
    projection = make_projection(family, KEY, 500, 20)
    stack = normal(6, 500)
    alone = np.stack([projection.forward(row) for row in stack])
    frozen = stack.copy()
    frozen.flags.writeable = False
    for layout in (stack, np.asfortranarray(stack), np.repeat(stack, 2, axis=1)[:, ::2], frozen):
        np.testing.assert_allclose(projection.forward(layout), alone, rtol=0, atol=1e-5)
    thetas = normal(40, 20)
    np.testing.assert_allclose(
        projection.adjoint(thetas), np.stack([projection.adjoint(theta) for theta in thetas]), rtol=0, atol=1e-5
    )
    require(projection.forward(stack[:0]).shape == (0, 20), "an empty stack has no empty image")


def tensors_of_a_device_are_projected_alike(family: str) -> None:
    """A as tensors (`native`), where a family has that, is the same matrix: to the bit of a float64 product."""
    for columns, rows in SHAPES:
        projection = make_projection(family, KEY, columns, rows)
        operator = projection.native(torch.device("cpu"))
        if operator is None:
            continue
        matrix = dense(projection).astype(float)
        vectors, thetas = normal(3, columns).astype(float), normal(3, rows, seed=1).astype(float)
        reach = 1e-12 * projection.norm_bound * columns
        images, preimages = operator.forward(torch.from_numpy(vectors)), operator.adjoint(torch.from_numpy(thetas))
        np.testing.assert_allclose(images.numpy(), vectors @ matrix.T, rtol=0, atol=reach)
        np.testing.assert_allclose(preimages.numpy(), thetas @ matrix, rtol=0, atol=reach)


def wrong_arrays_and_dimensions_are_refused(family: str) -> None:
    """With one line that names what is wrong."""
    projection = make_projection(family, KEY, 100, 10)
    for array in (np.ones(99, np.float32), np.ones(100), np.ones((2, 2, 100), np.float32), np.ones(100, np.int32)):
        _require_raised(ValueError, "vectors: expected float32", projection.forward, array)
        _require_raised(ValueError, "coefficients: expected float32", projection.adjoint, array)
        _require_raised(ValueError, "out: expected float32", projection.forward, np.ones(100, np.float32), array)
    for rows in (0, -1, 11):
        _require_raised(ConfigError, f"dim={rows}", make_projection, family, KEY, 10, rows)


def a_projection_does_not_leak(family: str) -> None:
    """It cannot be pickled or copied, and shows its shape alone."""
    projection = make_projection(family, KEY, 10, 3)
    require(repr(projection) == f"{type(projection).__name__}(3x10)", "its repr shows more than the shape")
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        _require_raised(TypeError, "cannot be pickled or copied", leak, projection)


def its_tag_is_its_own(family: str) -> None:
    """No other family has the same one on the wire."""
    others = [projection_tag(name) for name in TAGS if name != family]
    require(projection_tag(family) not in others, "another family has the same tag")


def _require_raised(kind: type[Exception], text: str, function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except kind as error:
        require(text in str(error), f"'{error}' does not say '{text}'")
    else:
        raise AssertionError(f"no {kind.__name__} '{text}'")


PROJECTION_CONTRACTS: tuple[Callable[[str], None], ...] = (
    forward_and_adjoint_belong_together_and_are_linear,
    the_norm_bound_holds,
    key_and_shape_decide_the_matrix,
    one_bit_of_the_key_changes_everything,
    lengths_are_kept_on_average,
    stacks_and_layouts_are_irrelevant,
    tensors_of_a_device_are_projected_alike,
    wrong_arrays_and_dimensions_are_refused,
    a_projection_does_not_leak,
    its_tag_is_its_own,
)


def check_projection(name: str) -> None:
    """Run every contract on a projection family of the table.

    Raises:
        AssertionError: a promise is broken.
    """
    require_choice("projection", name, FAMILIES)
    for contract in PROJECTION_CONTRACTS:
        contract(name)
