"""Each kernel against its plain twin, to the bit, however its tasks are shared out."""

import threading

import numba
import numpy as np
import pytest
from scipy.linalg import hadamard

from fedrp.compiled import compiled
from fedrp.projection import kernels
from oracles import projection as oracle

random = np.random.default_rng(20240501)


def same_bits(a, b):
    """Equal to the last bit, except that -0 equals +0."""
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


def sign_problem(columns, width):
    blocks = -(-columns // width)
    signs = random.integers(0, 256, (-(-blocks // 8), width), np.uint8)
    return signs, random.integers(0, width, blocks)


SHAPES = [(1, 1), (5, 1), (7, 7), (40, 3), (1000, 37), (5000, 100), (100_000, 20_000), (60_000, 16_384)]


@pytest.mark.parametrize(("columns", "width"), SHAPES)
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_fold_equals_its_twin(columns, width, group):
    signs, rolls = sign_problem(columns, width)
    stride = columns + 5
    flat = random.standard_normal(3 * stride, np.float32)
    rows = flat.reshape(3, stride)[:, :columns]
    expected = oracle.fold(rows, signs, rolls, group)
    sums = np.full_like(expected, np.nan)
    tasks = 3 * sums.shape[1] * -(-width // kernels.TILE)
    for task in range(tasks):  # one by one and backwards: tasks do not lean on each other
        kernels.fold(read_only(flat), stride, columns, signs, rolls, group, sums, tasks - 1 - task, tasks - task)
    same_bits(sums, expected)


@pytest.mark.parametrize(("groups", "pieces", "rows"), [(1, 1, 1), (1, 1, 40), (5, 1, 40), (3, 7, 11), (64, 50, 2)])
def test_collect_equals_its_twin(groups, pieces, rows):
    sums = random.standard_normal((3, groups, pieces * rows))
    order = np.stack([piece * rows + random.permutation(rows) for piece in range(pieces)])
    expected = oracle.collect(sums, order)
    out = np.empty((3, rows), np.float32)
    for row in (2, 0, 1):
        kernels.collect(sums, order, out, row, row + 1)
    same_bits(out, expected)


@pytest.mark.parametrize(("columns", "width"), SHAPES)
def test_unfold_equals_its_twin(columns, width):
    signs, rolls = sign_problem(columns, width)
    sums = random.standard_normal((2, width), np.float32)
    stride = columns + 3
    flat = np.full(2 * stride, 7, np.float32)
    kernels.unfold(sums, columns, signs, rolls, flat, stride, 0, 2 * len(rolls))
    same_bits(flat.reshape(2, stride)[:, :columns], oracle.unfold(sums, columns, signs, rolls))
    assert (flat.reshape(2, stride)[:, columns:] == 7).all(), "wrote between the rows"


@pytest.mark.parametrize("size", [1, 4, 16, 1024, 65_536])
def test_mix_equals_its_twin_and_can_be_undone(size):
    columns, blocks = 2 * size + size // 2, 2 + (size > 1)
    signs = random.integers(0, 256, (1, size), np.uint8)
    vector = random.standard_normal(columns, np.float32)
    expected = vector.copy()
    for block in range(blocks):
        part = slice(min(block * size, columns - size), min(block * size, columns - size) + size)
        expected[part] = oracle.transform(np.where(signs[0] >> block & 1, -expected[part], expected[part]))
    mixed = vector.copy()
    kernels.mix(read_only(mixed), mixed, signs, False, 0, blocks)
    same_bits(mixed, expected)
    for block in reversed(range(blocks)):
        kernels.mix(read_only(mixed), mixed, signs, True, block, block + 1)
    np.testing.assert_allclose(mixed, vector, atol=4e-6)


def test_the_twin_of_mix_transforms():
    np.testing.assert_array_equal(oracle.transform(np.eye(64)) * 8, hadamard(64))


def test_normals_equal_their_twin_and_box_muller():
    words = random.integers(0, 2**32, 1 << 20, np.uint32)
    words[:64] = np.repeat([0, 1, 2**31, 2**32 - 1], 16)  # the ends of the range of radii ...
    words[64:128] = np.tile([0, 255, 2**30, 2**32 - 1], 16)  # ... with those of angles
    values = np.empty(words.size, np.float32)
    kernels.normals(words, np.float32(0.125), values)
    same_bits(values, oracle.normals32(words, 0.125))
    exact = oracle.normals(words) / 8
    np.testing.assert_allclose(values, exact, rtol=2e-6, atol=0)  # relative, also for the smallest
    np.testing.assert_allclose(values, exact, rtol=3e-7, atol=1e-8)


def test_normals_reach_the_far_tail():
    words = np.zeros(128, np.uint32)
    words[64:] = 1 << 29  # the middle of the quarter turn: all of the radius goes to one of the pair
    values = np.empty(128, np.float32)
    kernels.normals(words, np.float32(1), values)
    np.testing.assert_allclose(np.hypot(values[:64], values[64:]), np.sqrt(2 * np.log(2.0**41)), rtol=1e-6)
    assert np.abs(values).max() > 7.5


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_run_covers_all_tasks_once(threads, monkeypatch):
    monkeypatch.setattr(kernels, "_threads", threads)
    seen = np.zeros(7, int)
    used = set()

    def kernel(array, start, stop):
        array[start:stop] += 1
        used.add(threading.get_ident())

    kernels.run(kernel, 7, 1 << 30, seen)
    assert (seen == 1).all()
    assert len(used) <= threads
    kernels.run(kernel, 7, 10, seen)
    assert threading.get_ident() in used, "little work stays on the calling thread"


def test_run_passes_errors_on(monkeypatch):
    monkeypatch.setattr(kernels, "_threads", 3)

    def kernel(start, stop):
        if stop == 6:
            raise FloatingPointError("broken")

    with pytest.raises(FloatingPointError, match="broken"):
        kernels.run(kernel, 6, 1 << 30)


def test_threads_can_be_set(monkeypatch):
    monkeypatch.setattr(kernels, "_threads", 5)
    kernels.set_threads(2)
    assert kernels._threads == 2
    with pytest.raises(ValueError, match="count=0"):
        kernels.set_threads(0)


def test_kernels_compile_without_a_folder_for_compiled_code(monkeypatch):
    real = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)

    @compiled
    def double(array):
        for i in range(array.size):
            array[i] *= 2

    array = np.ones(3)
    double(array)
    assert (array == 2).all()
