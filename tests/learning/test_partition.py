"""Partitions: always disjoint and covering, never an empty client, and each with its own shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.errors import ConfigError, DataError
from fedrp.learning.partition import PARTITIONS, parse_partition, partition
from fedrp.rng import RunSeed

SPECS = ["iid", "dirichlet:0.1", "dirichlet:1", "dirichlet:100", "shards:1", "shards:2", "shards:5"]
MNIST_LIKE = np.random.default_rng(0).integers(0, 10, 6000)


def split(spec: str, labels: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    return partition(spec, labels, clients, RunSeed(seed).generator("partition"))


def class_counts(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def test_every_scheme_is_covered_by_these_tests() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(PARTITIONS)


@settings(deadline=None)
@given(
    spec=st.sampled_from(SPECS) | st.floats(1e-300, 1e6).map("dirichlet:{}".format),
    labels=st.lists(st.integers(0, 5), max_size=200),
    clients=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_disjoint_covering_and_never_empty(spec: str, labels: list[int], clients: int, seed: int) -> None:
    try:
        parts = split(spec, np.array(labels, np.int64), clients, seed)
    except DataError:
        assert spec != "iid" or clients > len(labels), "iid fails only where it must"
        return
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("spec", SPECS)
def test_a_pure_function_of_the_seed(spec: str) -> None:
    first, again, other = (split(spec, MNIST_LIKE, 20, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@settings(deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=200), data=st.data())
def test_iid_differs_by_at_most_one_in_total_and_in_each_class(labels: list[int], data: st.DataObject) -> None:
    array = np.array(labels)
    parts = split("iid", array, data.draw(st.integers(1, len(labels))))
    assert np.ptp([len(part) for part in parts]) <= 1
    assert np.ptp(class_counts(parts, array), axis=0).max() <= 1


def test_dirichlet_is_more_skewed_for_smaller_alpha() -> None:
    def skew(alpha: float) -> float:
        counts = class_counts(split(f"dirichlet:{alpha}", MNIST_LIKE, 10), MNIST_LIKE)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert skew(0.1) > 0.5 > skew(1) > skew(1000)
    assert skew(1000) == pytest.approx(0.1, abs=0.03)


def test_dirichlet_shares_of_a_class_have_the_right_moments() -> None:
    """Shares of Dirichlet(a, ..., a) over K have mean 1/K and variance (K - 1) / (K^2 (K a + 1)).

    A class of 10,000 and 400 splits: 3.5 standard errors, a false alarm in 2,000; the seeds are fixed.
    """
    clients, alpha, splits = 5, 1.0, 400
    labels = np.zeros(10_000, np.int64)
    shares = np.array([[len(p) for p in split(f"dirichlet:{alpha}", labels, clients, seed)] for seed in range(splits)])
    first = shares[:, 0] / len(labels)
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert first.mean() == pytest.approx(1 / clients, abs=3.5 * np.sqrt(variance / splits))
    assert first.var() == pytest.approx(variance, rel=0.35)
    assert first.var() != pytest.approx((clients - 1) / (clients**2 * (clients * 2 * alpha + 1)), rel=0.35)


def test_dirichlet_draws_again_where_a_client_would_be_empty() -> None:
    """With alpha 0.1 and 100 clients every seventh draw leaves one empty, yet all splits succeed."""
    labels = np.repeat(np.arange(10), 6000)
    assert min(len(part) for seed in range(30) for part in split("dirichlet:0.1", labels, 100, seed)) >= 1


def test_shards_give_few_classes_and_equal_sizes() -> None:
    labels = np.repeat(np.arange(10), 600)
    parts = split("shards:2", labels, 100)
    assert {len(part) for part in parts} == {60}
    classes = (class_counts(parts, labels) > 0).sum(axis=1)
    assert classes.max() == 2
    assert classes.mean() > 1.5
    uneven = split("shards:3", MNIST_LIKE[:1000], 7)
    assert np.ptp([len(part) for part in uneven]) <= 3


@pytest.mark.parametrize(
    ("spec", "clients", "words"),
    [
        ("iid", 11, ["clients=11", "10 examples", "fewer clients"]),
        ("shards:2", 6, ["shards:2", "12 shards", "10 examples", "fewer clients", "smaller S"]),
        ("dirichlet:0.001", 10, ["dirichlet:0.001", "clients=10", "fewer clients", "larger ALPHA"]),
    ],
)
def test_too_little_data_is_an_error_with_a_remedy(spec: str, clients: int, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        split(spec, np.arange(10), clients)
    assert all(word in str(caught.value) for word in words), caught.value


BAD = """
    foo IID iid: iid:3 dirichlet dirichlet: dirichlet:-1 dirichlet:0 dirichlet:nan dirichlet:inf dirichlet:1e7
    dirichlet:x shards shards: shards:0 shards:-2 shards:1.5 shards:x shards:99999999999999999999
"""


@pytest.mark.parametrize("spec", ["", *BAD.split()])
def test_bad_specs_get_the_legal_forms(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"iid, dirichlet:ALPHA.*, shards:S"):
        parse_partition(spec)


@pytest.mark.parametrize("shape", [(), (12, 1), (12, 3)])
def test_labels_that_are_not_one_per_example_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="expected one label per example, got labels of shape"):
        split("iid", np.zeros(shape, np.int64), 2)


def test_clients_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="clients=0"):
        split("iid", MNIST_LIKE, 0)
