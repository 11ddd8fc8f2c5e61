"""Partitions: which client holds which training example.

A scheme only says who owns each place in a row of examples that is sorted by class and shuffled within; that the parts
are disjoint and covering then needs no care. To add one: such a function and one row in `PARTITIONS`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.errors import ConfigError, DataError

Integers = npt.NDArray[np.int64]

_DRAWS = 1000  # that `dirichlet` makes before it gives up
_MAX_PARAMETER = 1e6  # as ALPHA as good as iid; far beyond, the draw overflows


class Scheme(NamedTuple):
    """One row of `PARTITIONS`."""

    form: str
    parse: Callable[[str], float] | None  # None: takes no parameter
    owners: Callable[[Integers, int, float, np.random.Generator], Integers]  # class sizes, clients, parameter, rng
    by_class: bool  # clients get different classes, so targets must be class labels


def partition(spec: str, labels: Integers, clients: int, rng: np.random.Generator) -> list[Integers]:
    """Split the examples that have these labels among clients; `spec` is one of the forms in `PARTITIONS`.

    Guarantees:
    - One sorted index array per client; together they hold every example exactly once, and none is empty.
    - A pure function of the arguments and the generator's state.

    Raises `ConfigError` for a malformed `spec` and `DataError` where a client would be empty or labels are not (N,).
    """
    scheme, parameter = parse_partition(spec)
    if labels.ndim != 1:
        raise DataError(f"expected one label per example, got labels of shape {labels.shape}")
    if clients < 1:
        raise ConfigError(f"expected at least one client, got clients={clients}")
    if clients > len(labels):
        raise DataError(f"clients={clients} cannot share {len(labels)} examples: use fewer clients or more data")
    shuffled = rng.permutation(len(labels))
    row = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owners = scheme.owners(np.unique(labels, return_counts=True)[1], clients, parameter, rng)
    sizes = np.bincount(owners, minlength=clients)
    return [np.sort(part) for part in np.split(row[np.argsort(owners, kind="stable")], np.cumsum(sizes)[:-1])]


def parse_partition(spec: str) -> tuple[Scheme, float]:
    """The scheme that `spec` names and its parameter (0 if it takes none), or `ConfigError`."""
    name, colon, text = spec.partition(":")
    scheme = PARTITIONS.get(name)
    try:
        if scheme and scheme.parse:
            return scheme, scheme.parse(text)
        if scheme and not colon:
            return scheme, 0
    except ValueError:
        pass
    forms = ", ".join(known.form for known in PARTITIONS.values())
    raise ConfigError(f"no partition {spec!r}: expected one of {forms}")


def _iid(classes: Integers, clients: int, _parameter: float, _rng: np.random.Generator) -> Integers:
    """The row dealt like cards.

    Guarantees: any two clients differ by at most one example, in total and in each class.
    """
    return np.arange(classes.sum()) % clients


def _dirichlet(classes: Integers, clients: int, alpha: float, rng: np.random.Generator) -> Integers:
    """Each class divided among the clients in proportions from a symmetric Dirichlet(alpha): small alpha, great skew.

    As Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (ICML 2019); Hsu et al.
    (arXiv:1909.06335) draw a class mix per client instead. As is common practice, a draw that leaves a client without
    any example is drawn again, at most 1000 times.
    """
    for _ in range(_DRAWS):
        shares = np.cumsum(rng.dirichlet(np.full(clients, alpha), len(classes)), axis=1)
        ends = (shares * classes[:, None]).astype(np.int64)
        ends[:, -1] = classes  # whatever the sum was rounded to
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(axis=0).all():
            return np.repeat(np.tile(np.arange(clients), len(classes)), counts.ravel())
    raise DataError(
        f"partition dirichlet:{alpha:g} left some of clients={clients} without data in each of {_DRAWS} draws: "
        "use fewer clients or a larger ALPHA"
    )


def _shards(classes: Integers, clients: int, shards: float, rng: np.random.Generator) -> Integers:
    """The row cut into clients * S shards of equal size (to within one), S random ones for each client.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017).
    """
    count, total = clients * int(shards), int(classes.sum())
    if count > total:
        raise DataError(
            f"partition shards:{shards:g} cuts {total} examples into {count} shards, more than there are examples: "
            "use fewer clients or a smaller S"
        )
    return (rng.permutation(count) % clients)[np.arange(total) * count // total]


def _positive(number: float) -> float:
    if not 0 < number <= _MAX_PARAMETER:
        raise ValueError(number)
    return number


PARTITIONS: dict[str, Scheme] = {
    "iid": Scheme("iid", None, _iid, False),
    "dirichlet": Scheme("dirichlet:ALPHA (0 < ALPHA <= 1e6)", lambda text: _positive(float(text)), _dirichlet, True),
    "shards": Scheme("shards:S (S = 1, 2, 3, ...)", lambda text: _positive(int(text)), _shards, True),
}
