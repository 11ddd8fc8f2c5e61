"""What shares of noise rest on: enough noise to be rounded before masking, and what statements about sums assume."""

import math

from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import MIN_SUMMED
from fedrp.errors import ConfigError
from fedrp.mechanisms.noise import TAIL, coarsest_step, noise_shares
from fedrp.privacy.noise import rounding_delta
from fedrp.types import MAX_COUNT

# What statements about masked uploads rest on.
SUMS_ONLY = (
    "masks hide single uploads: clients keep the rules of secure aggregation and their keys",
    "X25519, HKDF and AES are as good as ideal",
)
ONE_CURIOUS = "at most one curious client, who knows its own share of the noise"
_TAIL_MASS = math.erfc(TAIL / math.sqrt(2))
_LARGEST_EPSILON = 50.0  # up to which the cost of rounding is stated


def require_noise_above_grid(config: Resolved) -> None:
    """Refuse noise so small that rounding before masking would cost more than a thousandth of delta."""
    try:
        cost = _rounding(config)
    except ConfigError:  # the bound does not hold for so little noise
        cost = 1.0
    if cost > config.dp_delta / 1000:
        raise ConfigError(
            f"noise_multiplier={config.noise_multiplier:g} is too small to be rounded before masking: "
            "use more noise, or secure_aggregation=False"
        )


def _rounding(config: Resolved) -> float:
    """What is added to delta, at most, because noisy vectors are rounded and cut off before they are masked."""
    if config.dp_noise == "local" or not config.noise_multiplier:
        return 0.0  # post-processing of a noisy vector, or no noise at all
    cost, step = 0.0, coarsest_step(config)
    for count in (MIN_SUMMED, config.clients):
        cut = MAX_COUNT * count * config.rounds * _TAIL_MASS * (1 + math.exp(_LARGEST_EPSILON))
        smallest = min(noise_shares(config, count))
        cost = max(cost, cut + rounding_delta(smallest, step, count, MAX_COUNT, config.rounds, _LARGEST_EPSILON))
    return cost


def shares_added(config: Resolved) -> tuple[str, ...]:
    """What statements about shared noise rest on."""
    shares = "the clients of the quorum add their shares of the noise"
    if not config.secure_aggregation:
        return (shares,)
    return (shares, f"rounding before masking adds less than {_rounding(config) + 1e-30:.0e} to delta")


def sums_seen(config: Resolved) -> tuple[str, ...]:
    """What statements about shared noise rest on where the server looks."""
    # The sum of those left out carries only their shares, and late uploads complete it.
    late = "the server discards unread what comes from clients left out of a round (not needed with quorum 1)"
    return SUMS_ONLY if config.quorum == 1 else (*SUMS_ONLY, late)
