"""Projections: exact where they can be, within theory where they are random, the same whatever the circumstances."""

import json
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedrp.benchmarking.projection import projection_benchmark
from fedrp.errors import ConfigError
from fedrp.projection import kernels
from fedrp.projection.families import FAMILIES, make_projection, norm_bound
from fedrp.projection.tags import projection_tag
from fedrp.testing.projection_contracts import KEY, SHAPES, dense, normal
from oracles import projection as oracle

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "projection.json").read_text())
EXACT = ["sign", "hadamard"]  # orthogonal rows, results equal to the bit

every_family = pytest.mark.parametrize("family", FAMILIES)
every_exact_family = pytest.mark.parametrize("family", EXACT)
every_shape = pytest.mark.parametrize(("columns", "rows"), SHAPES)


def keys(count):
    return [KEY.derive(f"test/{i}") for i in range(count)]


# --- the operator ---


@every_family
@every_shape
def test_equals_the_dense_reference(family, columns, rows):
    projection = make_projection(family, KEY, columns, rows)
    matrix = oracle.matrix(family, KEY, columns, rows)
    vectors, thetas = normal(4, columns), normal(4, rows, seed=1)
    scale = np.linalg.norm(matrix, axis=1).max() * np.linalg.norm(vectors, axis=1).max()
    np.testing.assert_allclose(projection.forward(vectors), vectors.astype(float) @ matrix.T, atol=1e-6 * scale)
    scale = np.linalg.norm(matrix, axis=0).max() * np.linalg.norm(thetas, axis=1).max()
    np.testing.assert_allclose(projection.adjoint(thetas), thetas.astype(float) @ matrix, atol=1e-6 * scale)


@pytest.mark.parametrize(("columns", "rows"), [(40_000, 9000), (60_001, 20_000), (30_000, 30_000), (300_000, 70)])
def test_sign_equals_its_definition_in_many_blocks(columns, rows):
    projection = make_projection("sign", KEY, columns, rows)
    places, signs = oracle.sign_entries(KEY.derive(f"projection/sign/v1/{rows}x{columns}"), columns, rows)
    vector, theta = normal(columns), normal(rows)
    sums = np.bincount(places, signs * vector, rows)
    np.testing.assert_allclose(projection.forward(vector), sums, rtol=1e-7, atol=1e-7)
    np.testing.assert_array_equal(projection.adjoint(theta), theta[places] * signs.astype(np.float32))


@every_family
@every_shape
def test_norm_bound_holds(family, columns, rows):
    projection = make_projection(family, KEY, columns, rows)
    matrix = oracle.matrix(family, KEY, columns, rows)
    norm = np.sqrt(np.linalg.eigvalsh(matrix @ matrix.T).max())
    assert projection.norm_bound == norm_bound(family, columns, rows)
    if family in EXACT:
        assert projection.norm_bound == pytest.approx(norm, rel=1e-9)
    else:
        assert norm <= projection.norm_bound * (1 + 1e-9)
    if family == "gaussian":
        assert projection.norm_bound <= norm + 1 + 9 / np.sqrt(rows)


@every_exact_family
@every_shape
def test_rows_are_orthogonal_and_balanced(family, columns, rows):
    matrix = dense(make_projection(family, KEY, columns, rows)).astype(float)
    products = matrix @ matrix.T
    energies = np.round(np.diag(products))
    np.testing.assert_allclose(products, np.diag(energies), atol=1e-4)
    assert set(energies) <= {columns // rows, -(-columns // rows)}
    assert energies.sum() == columns
    if family == "sign":
        assert set(np.unique(matrix)) <= {-1, 0, 1}
        assert (np.abs(matrix).sum(axis=0) == 1).all()


# --- the same whatever the circumstances ---


@every_exact_family
@pytest.mark.parametrize(("columns", "rows"), [(1_300_000, 1000), (1_300_000, 3), (700_001, 300_000)])
def test_bits_do_not_depend_on_stack_or_threads(family, columns, rows, monkeypatch):
    projection = make_projection(family, KEY, columns, rows)
    vectors, thetas = normal(3, columns), normal(3, rows)
    monkeypatch.setattr(kernels, "_threads", 1)
    images = np.stack([projection.forward(vector) for vector in vectors])
    preimages = np.stack([projection.adjoint(theta) for theta in thetas])
    for threads in (1, 2, 7):
        monkeypatch.setattr(kernels, "_threads", threads)
        np.testing.assert_array_equal(projection.forward(vectors), images)
        np.testing.assert_array_equal(projection.adjoint(thetas), preimages)


def test_gaussian_rows_of_a_stack_agree_with_single_vectors():
    projection = make_projection("gaussian", KEY, 5000, 40)
    vectors, thetas = normal(100, 5000), normal(100, 40)
    for apply, stack in ((projection.forward, vectors), (projection.adjoint, thetas)):
        together, alone = apply(stack), np.stack([apply(row) for row in stack])
        assert np.abs(together - alone).max() <= 1e-6 * np.linalg.norm(alone, axis=1).max()


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (300, 7), (140_001, 17)])
def test_gaussian_entries_do_not_depend_on_memory_or_threads(columns, rows, monkeypatch):
    wanted = np.unique(np.linspace(0, columns - 1, 40).astype(int))
    units = np.zeros((len(wanted), columns), np.float32)
    units[np.arange(len(wanted)), wanted] = 1
    kept = make_projection("gaussian", KEY, columns, rows)
    monkeypatch.setattr(kernels, "_threads", 3)
    streamed = make_projection("gaussian", KEY, columns, rows, memory_bytes=0)
    np.testing.assert_array_equal(kept.forward(units), streamed.forward(units))
    vectors, thetas = normal(20, columns), normal(20, rows)
    bound = kept.norm_bound * 2e-6
    for a, b, stack in (
        (kept.forward, streamed.forward, vectors),
        (kept.adjoint, streamed.adjoint, thetas),
        (kept.adjoint, streamed.adjoint, thetas[:2]),
    ):
        assert np.linalg.norm(a(stack) - b(stack)) <= bound * np.linalg.norm(stack)


def test_gaussian_tiles_cover_tall_and_wide_matrices(monkeypatch):
    monkeypatch.setattr("fedrp.projection.families._TILE_COLUMNS", 256)
    monkeypatch.setattr("fedrp.projection.families._TILE_ENTRIES", 1024)
    monkeypatch.setattr("fedrp.projection.deviates._STREAM_WORDS", 128)
    streamed = make_projection("gaussian", KEY, 700, 30, memory_bytes=0)
    np.testing.assert_allclose(dense(streamed), oracle.matrix("gaussian", KEY, 700, 30), rtol=2e-6, atol=1e-9)
    np.testing.assert_array_equal(streamed.forward(np.eye(700, dtype=np.float32)).T, dense(streamed))
    thetas = normal(40, 30)  # enough rows for the transposed product, over several tiles of rows
    alone = np.stack([streamed.adjoint(theta) for theta in thetas])
    np.testing.assert_allclose(streamed.adjoint(thetas), alone, atol=1e-5)


def test_gaussian_streams_in_bounded_memory():
    columns, rows = 1_000_000, 30
    vector, image = normal(columns), np.empty(rows, np.float32)
    projection = make_projection("gaussian", KEY, columns, rows, memory_bytes=1 << 20)
    tracemalloc.start()
    projection.forward(vector, image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20 < 4 * columns * rows


# --- arrays in and out ---


@every_family
def test_padded_stacks_and_targets_are_used_in_place(family):
    columns, rows, pitch, count = 300_011, 50, 300_016, 4
    projection = make_projection(family, KEY, columns, rows)
    padded = np.full((count, pitch), np.nan, np.float32)
    padded[:, :columns] = normal(count, columns)
    target = np.full((count, pitch), 5, np.float32)
    expected = projection.forward(padded[:, :columns].copy())
    thetas = normal(count, rows)
    projection.adjoint(thetas)
    tracemalloc.start()
    images = projection.forward(padded[:, :columns])
    returned = projection.adjoint(thetas, out=target[:, :columns])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(target[:, :columns], projection.adjoint(thetas))
    assert returned.base is target
    assert (target[:, columns:] == 5).all()
    if family in EXACT:
        assert peak < padded.nbytes / 2


@every_family
def test_odd_layouts_and_read_only_arrays_are_accepted(family):
    projection = make_projection(family, KEY, 500, 20)
    stack = normal(6, 500)
    expected = projection.forward(stack)
    frozen = stack.copy()
    frozen.flags.writeable = False
    slack = 0 if family in EXACT else 1e-5
    for layout in (np.asfortranarray(stack), np.repeat(stack, 2, axis=1)[:, ::2], stack[::-1].copy()[::-1], frozen):
        np.testing.assert_allclose(projection.forward(layout), expected, rtol=0, atol=slack)
    same = np.broadcast_to(stack[0], (3, 500))
    np.testing.assert_allclose(projection.forward(same), np.stack([expected[0]] * 3), rtol=0, atol=slack)
    assert projection.forward(stack[:0]).shape == (0, 20)
    assert projection.adjoint(expected[:0]).shape == (0, 500)


def test_unknown_family_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"unknown projection 'fourier'.*gaussian, sign, hadamard"):
        make_projection("fourier", KEY, 10, 2)


def test_tags_tell_families_and_versions_apart():
    assert [projection_tag(family) for family in ("gaussian", "sign", "hadamard")] == [0x101, 0x201, 0x301]


# --- the right distribution, and not another ---


@cache
def lengths(family, name, rows, count):
    """||A w||^2 / ||w||^2 for many keys."""
    unit = (INPUTS[name] / np.linalg.norm(INPUTS[name])).astype(np.float32)
    images = [make_projection(family, key, len(unit), rows).forward(unit) for key in keys(count)]
    return (np.stack(images).astype(float) ** 2).sum(axis=1)


def mean_is_one(values, rows):
    """Whether the mean is 1 within 4.5 standard errors; the variance is 2/m at most."""
    return abs(values.mean() - 1) < 4.5 * np.sqrt(2 / rows / len(values))


def sparse(columns, nonzeros):
    vector = np.zeros(columns)
    vector[np.random.default_rng(nonzeros).choice(columns, nonzeros, replace=False)] = 1
    return vector


INPUTS = {
    "dense": normal(700),
    "sparse": sparse(700, 5),
    "one": sparse(700, 1),
    "constant": np.ones(700),
    "lopsided": 0.97 ** np.arange(700),
}


@every_family
@pytest.mark.parametrize("name", INPUTS)
def test_lengths_are_kept_on_average(family, name):
    values = lengths(family, name, 50, 1000)
    assert mean_is_one(values, 50)
    for wrong in (1.03, 1 / 1.03, np.sqrt(50), 1 / 700):
        assert not mean_is_one(wrong**2 * values, 50)


@every_family
@pytest.mark.parametrize("name", INPUTS)
def test_lengths_scatter_as_theory_says(family, name):
    rows, values = 50, lengths(family, name, 50, 1000)
    if family == "gaussian":  # m ||A w||^2 / ||w||^2 is chi-square with m degrees of freedom, exactly
        assert stats.kstest(rows * values, "chi2", args=(rows,)).pvalue > 1e-3
        assert stats.kstest(rows * values, "chi2", args=(rows + 2,)).pvalue < 1e-3
        return
    # Var <= 2/m; the sample variance of 1000 scatters by a twentieth of it, or more where lengths rarely change
    rare = family == "sign" and name == "sparse"
    assert values.var() < 2 / rows * (1.5 if rare else 1.25)
    if not rare:  # Johnson-Lindenstrauss with the constant of the normal limit
        assert (np.abs(values - 1) > 3.5 * np.sqrt(2 / rows)).mean() < 0.005


def test_two_coordinates_meet_in_a_sign_row_as_often_as_they_should():
    columns, rows = 40_000, 20  # five blocks of 8200 coordinates, of 410 pieces each
    places = np.array([0, 1, 20, 8000, 8200, 8220, 30_000, columns - 1])
    units = np.zeros((len(places), columns), np.float32)
    units[np.arange(len(places)), places] = 1
    found = np.stack([np.abs(make_projection("sign", key, columns, rows).forward(units)) for key in keys(300)])
    met = np.einsum("kar,kbr->ab", found, found)
    assert met[0, 1] < 30, "neighbours fall into one piece but for the last of it, and never meet there"
    pairs = met[np.triu_indices(len(places), 1)][1:]
    expected = len(found) / rows
    assert np.abs(pairs - expected).max() < 5 * np.sqrt(expected)
    assert abs(pairs.mean() - expected) < 5 * np.sqrt(expected / len(pairs))


@every_exact_family
def test_every_row_and_sign_is_equally_likely(family):
    """One unit vector, many keys: what a row holds is exchangeable over rows and symmetric in sign."""
    rows, count = 6, 1200
    unit = np.zeros((1, 13), np.float32)
    unit[0, 4] = 1
    images = np.concatenate([make_projection(family, key, 13, rows).forward(unit) for key in keys(count)])
    energy = (images**2).sum(axis=0)
    assert abs(energy - count / rows).max() < 5 * np.sqrt(count / rows)
    for row in range(rows):
        signs = np.sign(images[images[:, row] != 0, row])
        assert abs(signs.sum()) < 5 * np.sqrt(len(signs))


def test_hadamard_spreads_every_coordinate():
    columns, rows = 5000, 64
    images = make_projection("hadamard", KEY, columns, rows).forward(np.eye(columns, dtype=np.float32)[::50])
    assert (images != 0).mean() > 0.95
    assert np.abs(images).max() < 8 / np.sqrt(rows)


def entries():
    projection = make_projection("gaussian", KEY, 1 << 20, 4)
    return projection.adjoint(2 * np.eye(4, dtype=np.float32))  # 2 is sqrt(m): standard normals


def test_gaussian_entries_are_normal():
    values = entries()
    for row in values[:2]:
        sample = row[: 1 << 18].astype(float)
        assert stats.kstest(sample, "norm").pvalue > 1e-3
        assert stats.kstest(sample * 1.02, "norm").pvalue < 1e-3
        assert stats.kstest(np.round(sample, 1), "norm").pvalue < 1e-3
    flat = values.reshape(-1).astype(float)
    for order, moment in enumerate([0, 1, 0, 3, 0, 15], start=1):
        spread = np.sqrt((stats.norm.moment(2 * order) - moment**2) / flat.size)
        assert abs((flat**order).mean() - moment) < 4.5 * spread


def tails_are_normal(values):
    """Whether as many values lie beyond each threshold as should, within four standard deviations or so."""
    tests = []
    for threshold in (3, 4, 4.5, 5):
        expected = values.size * 2 * stats.norm.sf(threshold)
        count = np.count_nonzero(np.abs(values) > threshold)
        tests += [stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)]
    return min(tests) > 1e-4


def test_gaussian_tails_are_whole():
    values = entries()
    assert tails_are_normal(values)
    assert not tails_are_normal(0.98 * values)
    assert not tails_are_normal(np.clip(values, -4.4, 4.4))


def test_gaussian_entries_are_independent():
    values = entries()[:, : 1 << 18].astype(float)
    flat = values.reshape(-1)
    limit = 4.5 / np.sqrt(flat.size)
    for lag in (1, 2, 63, 64, 65, 128, 1 << 18):
        x, y = flat[:-lag], flat[lag:]
        for a, b in ((x, y), (x**2, y**2), (x**2, y), (np.abs(x), np.abs(y))):
            assert abs(np.corrcoef(a, b)[0, 1]) < limit * np.sqrt(flat.size / len(x))


# --- the benchmark ---


@every_family
@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_benchmark_reports_positive_numbers(family, memory_bytes):
    report = projection_benchmark(family, 3000, 20, memory_bytes, repeats=1)
    promised = ["forward_seconds", "adjoint_seconds", "copy_seconds", "peak_rss_mb", "values_per_second"]
    assert all(report[name] > 0 for name in promised)
    assert report["extra_memory_ratio"] >= 0
    assert ("stacked_forward_gflops" in report) == (family == "gaussian")
