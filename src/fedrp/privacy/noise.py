"""Who adds how much noise: shares of clients, what adaptive clipping costs, what rounding before masking costs."""

import math
from typing import NamedTuple

from fedrp.errors import ConfigError
from fedrp.privacy import _checks


class NoiseShare(NamedTuple):
    """The deviation each client adds, and what the sum then carries."""

    per_client: float
    guaranteed: float  # if only the minimum of clients arrive and the colluding ones subtract their own
    expected: float  # if all expected clients arrive


def noise_share(std: float, expected_clients: int, minimum_clients: int, colluding_clients: int = 0) -> NoiseShare:
    """What each client adds so that the sum carries at least `std`, although some clients may not arrive.

    per_client = std / sqrt(minimum - colluding): independent Gaussians add in variance, and a party knows its own.

    Guarantees: `guaranteed == std`; `expected >= std`, the excess being the price of the margin. The caller must drop a
    round that fewer than `minimum_clients` reach: its sum carries less than `std`. With one expected client it is the
    local model, in which every client adds all of it.
    """
    std = _checks.number("std", std, at_least=0)
    expected = _checks.whole("expected_clients", expected_clients, at_least=1)
    minimum = _checks.whole("minimum_clients", minimum_clients, at_least=1)
    colluding = _checks.whole("colluding_clients", colluding_clients, at_least=0)
    if minimum > expected:
        raise ConfigError(f"minimum_clients must be at most expected_clients={expected}, got minimum_clients={minimum}")
    if colluding >= minimum:
        raise ConfigError(
            f"colluding_clients must be below minimum_clients={minimum}, got colluding_clients={colluding}"
        )
    per_client = std / math.sqrt(minimum - colluding)
    return NoiseShare(per_client, std, per_client * math.sqrt(expected))


def update_noise_multiplier(noise_multiplier: float, count_std: float) -> float:
    """The multiplier for the update when adaptive clipping also releases a noisy count (Andrew et al. 2021, Thm 1).

    A round releases the update with multiplier z_update and sum_i (b_i - 1/2) + N(0, count_std^2), b_i being 1 where
    the update was not clipped; the count has sensitivity 1/2, so 1/z^2 = 1/z_update^2 + 1/(2 count_std)^2.

    Guarantees: at least `noise_multiplier`; the pair costs exactly one Gaussian release with `noise_multiplier`.
    """
    total = _checks.number("noise_multiplier", noise_multiplier, at_least=0)
    count_std = _checks.number("count_std", count_std, above=0)
    if 2 * count_std <= total:
        raise ConfigError(f"count_std must be above noise_multiplier / 2 = {total / 2:g}, got count_std={count_std!r}")
    return total / math.sqrt(1 - (total / (2 * count_std)) ** 2)


def rounding_delta(share_std: float, grid: float, clients: int, dim: int, rounds: int, epsilon: float) -> float:
    """What must be added to delta because each client rounds its noisy vector to a grid before the sum is formed.

    The sum of the rounded vectors is not a function of the rounded sum, but it is within total variation distance
    T m eta of one (docs/privacy-proofs.md, "Rounding before masking"), t = share_std / grid, E = e^(-pi^2 t^2 / 2):

        eta = E (2 + 1.01 K (K + 1 + 2 pi t^2 sqrt(K)) e^(2.02 K E)),    added to delta: (1 + e^epsilon) T m eta

    Guarantees: an upper bound, for `share_std >= grid`; below 1e-60 e^epsilon at `share_std = 6 grid`, K m T <= 1e9.
    Edge case: nothing where every client adds all the noise (`clients=1`), because rounding is then post-processing.
    """
    share_std = _checks.number("share_std", share_std, above=0)
    grid = _checks.number("grid", grid, above=0)
    clients = _checks.whole("clients", clients, at_least=1)
    coordinates = _checks.whole("dim", dim, at_least=1) * _checks.whole("rounds", rounds, at_least=1)
    epsilon = _checks.number("epsilon", epsilon, at_least=0)
    if clients == 1:
        return 0.0
    t = share_std / grid
    if t < 1:
        raise ConfigError(
            f"share_std must be at least grid={grid!r} for the rounding bound, got share_std={share_std!r}"
        )
    tail = math.exp(-((math.pi * t) ** 2) / 2)
    spread = 1.01 * clients * (clients + 1 + 2 * math.pi * t**2 * math.sqrt(clients))
    if 2.02 * clients * tail > 1:
        return 1.0
    eta = tail * (2 + spread * math.exp(2.02 * clients * tail))
    return min(1.0, (1 + math.exp(min(epsilon, 700.0))) * coordinates * eta)
