"""Where the server may know the start of a run, a projection must hide more than a secret start would need.

Printed FedRP uploads z = A w, and training moves w little, so with a start that is known (pretrained weights,
constants, a factory that seeds torch itself) the first uploads are z for a w that is nearly known.

**Counting.** One z has 24 m bits (m numbers of float32). A matrix of `sign` has n secret signs, besides permutations:
where n > 24 m, z cannot tell all signs, however much is computed. A matrix of `hadamard` has 2 n signs, and n > 12 m is
enough. Below that nothing protects but the cost of the search, and for `sign` with n/m of 1 and 2 there is none: rows
are found by sorting. A `gaussian` matrix has m n numbers, so that any n will do.

The count is about one vector. Those of several clients are nearly the same vector, and tell little more.

**Rotation.** What is sent under a secret `haar` rotation tells inner products of the A w, whatever A is.
"""

from fedrp.algorithms.table import ALGORITHMS
from fedrp.config.run import Resolved
from fedrp.errors import ConfigError
from fedrp.learning.initial import initial_laws
from fedrp.learning.layout import ModelFactory
from fedrp.projection.families import FAMILIES

_GIVEN = 0.5  # share of the numbers from which a start counts as given


def given_share(factory: ModelFactory) -> float:
    """The share of a model's parameters that its factory gives alike whatever torch's seed is."""
    template, laws = initial_laws(factory)
    given = sum(template[law.part].size for law in laws if law.spread == 0)
    return given / template.size


def require_hidden_start(config: Resolved, factory: ModelFactory, parameters: int) -> None:
    """Refuse a projection of whose matrix a start that is given would tell too much.

    Raises:
        ConfigError: uploads are projected models, n/m is too small for the family, and most of the start is given.
    """
    algorithm = ALGORITHMS[config.algorithm]
    if not (
        algorithm.server.round_keys and algorithm.delivers == "client"
    ):  # elsewhere uploads are no projected models
        return
    if config.rotation == "haar":
        return
    family = config.projection
    least = FAMILIES[family].hiding_ratio
    if parameters >= least * config.dim or (share := given_share(factory)) < _GIVEN:
        return
    smaller = f", or dim={parameters // least} at most" if parameters >= least else ""
    raise ConfigError(
        f"projection='{family}' with dim={config.dim} is not safe for a model that starts from given weights "
        f"({share:.0%} of them do not depend on torch's seed, so the server may know them): one upload could tell "
        f"the secret matrix, as n/m = {parameters / config.dim:.3g} is below {least}; "
        f"use projection='gaussian', or rotation='haar'{smaller}"
    )
