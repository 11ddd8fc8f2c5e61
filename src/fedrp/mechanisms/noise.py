"""Add a client's share of the noise to what bounds its update, on a grid that does not depend on the update.

Each client adds noise so that the sum over a round's participants carries N(0, (zC)^2) in each coordinate; z is the
noise multiplier, C the bound. What that is worth is in `fedrp.algorithms.client_dp`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedrp.compression.coding import FULL
from fedrp.compression.grid import WORD_BITS, Scale, finest
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secure_aggregation import MIN_SUMMED, Cohort
from fedrp.errors import ConfigError
from fedrp.mechanisms.base import AtClient, Bound, Mechanism, Numbers, Reach
from fedrp.mechanisms.cohort import largest_cohort, rarely_too_few
from fedrp.privacy.noise import noise_share, rounding_delta, update_noise_multiplier
from fedrp.privacy.pld import SMALLEST_DELTA
from fedrp.types import MAX_COUNT, Precise, Vector

TAIL = 16.0  # deviations after which noise is cut off before masking: 1e-57 of it
NEGLIGIBLE = 1e-6  # of delta: rare enough to be stated as an assumption
_BIT_NOISE_SHARE = 1 / 20  # noise on the count of clients below C, as a share of their number
_GRID_BITS = 12  # a client's noise is at least 2^12 steps wide: coarse for doubles, exact in float32
_FEW_GRID_BITS = 3  # under masks with few bits: 1/8 of a deviation is as good (docs/privacy-proofs.md, section 5)
_FAR = 10.0  # deviations
_SMALL_COHORT = 64
_CHUNK = 1 << 20

# What statements about masked uploads rest on.
SUMS_ONLY = (
    "masks hide single uploads: clients keep the rules of secure aggregation and their keys",
    "X25519, HKDF and AES are as good as ideal",
)
ONE_CURIOUS = "at most one curious client, who knows its own share of the noise"
_TAIL_MASS = math.erfc(TAIL / math.sqrt(2))
_LARGEST_EPSILON = 50.0  # up to which the cost of rounding is stated


@dataclass(frozen=True)
class Noise(Mechanism):
    """Adds a client's share of the noise.

    Guarantees: the noise is a function of the client's own normals; the noises of the quorum suffice for the configured
    multiplier; which numbers can be sent does not depend on the update.
    """

    config: Resolved
    bounded: Bound  # by what the noise is measured

    def client(self, upload: Numbers, context: AtClient) -> Precise:
        """The upload with noise on the update, and noise of its own on a vote."""
        clip = self.bounded.bound(context.previous)
        share, *vote_share = (clip * share for share in noise_shares(self.config, context.participants))
        step = grid_step(self.config, clip) if share else None  # without noise there is nothing to hide
        noised, update = upload.astype(np.float64), upload.size - self.bounded.told
        add_noise(noised[:update], share, step, functools.partial(context.normals, "update"))
        if vote_share:
            add_noise(noised[update:], vote_share[0], step, functools.partial(context.normals, "vote"))
        return noised

    @property
    def width(self) -> int:
        """With few bits as many as the largest sum of a cohort needs on the grid of the noise, else 32."""
        config = self.config
        if config.bits == FULL or not config.noise_multiplier:
            return WORD_BITS
        step = grid_step(config, config.clip) / config.clip
        most = max(count * math.ceil(_largest(config, count) / step) for count in _cohorts(config))
        return min(WORD_BITS, most.bit_length() + 1)

    def scale(self, previous: Vector | None, cohort: Cohort) -> Scale:
        """The grid of the noise: only noise beyond any that occurs is cut off."""
        clip = self.bounded.bound(previous)
        bound = clip * _largest(self.config, len(cohort.clients))
        return Scale(bound, grid_step(self.config, clip)) if self.config.noise_multiplier else finest(bound, cohort)

    def reach(self, before: Reach, round_: int, size: int) -> Reach:
        """More by the noise of the largest cohort.

        A Gaussian vector of d numbers is longer than (sqrt(d) + 10) deviations with probability below e^-50.
        """
        largest = max(noise_shares(self.config, count)[0] * math.sqrt(count) for count in _cohorts(self.config))
        deviation = self.bounded.largest_bound(round_) * largest / self.config.expected_participants
        return Reach(before.number + TAIL * deviation, before.norm + deviation * (math.sqrt(size) + _FAR))


def add_noise(values: Precise, deviation: float, step: float | None, normals: Callable[[int, int], Precise]) -> None:
    """Add noise in place, and round to a grid that does not depend on the values; without a deviation, nothing.

    Floating point has holes: a float32 times a deviation reaches only some float32 numbers, and a value that is added
    moves them, so that one number could tell whether anything was added (docs/privacy-proofs.md, section 5).
    """
    if deviation == 0:
        return
    for start in range(0, values.size, _CHUNK):  # the intermediate values are larger: n may be 10^8
        part = values[start : start + _CHUNK]
        part += deviation * normals(part.size, start)
        if step is not None:
            part[:] = np.rint(part / step) * step


# --- how much --------------------------------------------------------------------------------------------------------


def noise_shares(config: Resolved, participants: int) -> list[float]:
    """The deviations of the noise that a client adds to its update and, where C adapts, to its vote; in units of C."""
    multipliers = [update_noise(config)]
    if config.clip_quantile:
        multipliers.append(_bit_noise(config))
    return [_share(config, participants, multiplier) for multiplier in multipliers]


def update_noise(config: Resolved) -> float:
    """The multiplier on the update itself: larger than z where a part of the budget goes into adapting C.

    Raises:
        ConfigError: the noise does not allow an adaptive C.
    """
    noise = config.noise_multiplier
    if not config.clip_quantile:
        return noise
    if noise >= 2 * _bit_noise(config):
        raise ConfigError(
            f"clip_quantile={config.clip_quantile:g} needs more clients a round: with {config.expected_participants} "
            f"and noise_multiplier {noise:.3g}, above {math.ceil(noise / (2 * _BIT_NOISE_SHARE))} are needed; give a "
            "fixed clip instead"
        )
    return update_noise_multiplier(noise, _bit_noise(config))


def _bit_noise(config: Resolved) -> float:
    return _BIT_NOISE_SHARE * config.expected_participants


def _share(config: Resolved, participants: int, deviation: float) -> float:
    """The noise that one client adds, so that the sum over the round has the given standard deviation at least."""
    if config.dp_noise == "local":
        return deviation
    minimum = math.ceil(participants * config.quorum)
    # A curious client knows the noise that it added itself: the others' must suffice. Not so where participation is
    # hidden: there the total must be the same whatever the number of participants.
    colluding = 0 if participation_hidden(config) else min(1, minimum - 1)
    return noise_share(deviation, participants, minimum, colluding).per_client


def participation_hidden(config: RunConfig) -> bool:
    """Whether the model alone cannot tell how many took part: coins decide, and the noise does not depend on them.

    Only where coins practically never choose too few: whoever is added then is not there by a coin of its own.
    """
    by_coins = config.sampling == "poisson" and rarely_too_few(config) <= NEGLIGIBLE * config.dp_delta
    computed = config.dp_delta >= SMALLEST_DELTA
    clients = config.dp_noise != "local" and not config.sums_records  # of records nothing is amplified
    return by_coins and computed and clients and config.quorum == 1.0


# --- the grid --------------------------------------------------------------------------------------------------------


def grid_step(config: Resolved, clip: float) -> float:
    """The grid of noised numbers: a power of two, 2^-12 of the smallest noise that a client may add, or less.

    It depends on nothing but the config and C: not on the numbers, and not on how many take part. Where thousands of
    uploads are masked it is coarser, so that the sum of all clients does not overflow.
    """
    exponent = math.floor(math.log2(clip * min(noise_shares(config, config.clients)))) - _grid_bits(config)
    if config.secure_aggregation:
        exponent = max(exponent, math.ceil(math.log2(clip * _finest_step(config))))
    return float(2.0**exponent)


def coarsest_step(config: Resolved) -> float:
    """The largest step of a run in which uploads are masked, in units of C.

    C is rarely a power of two and the step always is, so the step may be twice the one that C would need. Where C
    adapts, every mantissa of C must be expected.
    """
    if not config.clip_quantile:
        return grid_step(config, config.clip) / config.clip
    return max(math.ldexp(min(noise_shares(config, config.clients)), -_grid_bits(config)), 2 * _finest_step(config))


def _grid_bits(config: Resolved) -> int:
    """How fine the grid is. Where it is coarse, the variance of a sum tells how many clients are in it."""
    few = config.secure_aggregation and config.bits < FULL and not participation_hidden(config)
    return _FEW_GRID_BITS if few else _GRID_BITS


def _cohorts(config: Resolved) -> tuple[int, ...]:
    """Sizes of cohorts of which one has the most noise: of small ones each client makes up for those missing."""
    cohort = largest_cohort(config)
    return (*range(1, min(cohort, _SMALL_COHORT) + 1), cohort)


def _finest_step(config: Resolved) -> float:
    """The smallest step with which the sum of all clients does not overflow, in units of C."""
    everyone = Cohort(tuple(range(config.clients)), (1,) * config.clients)
    return finest(_largest(config, config.clients), everyone).step


def _largest(config: Resolved, participants: int) -> float:
    """The largest number of a noised upload, in units of C."""
    return (config.batch_size if config.sums_records else 1) + TAIL * max(noise_shares(config, participants))


# --- what shares rest on ---------------------------------------------------------------------------------------------


def require_noise_above_grid(config: Resolved) -> None:
    """Refuse noise so small that rounding before masking would cost more than a thousandth of delta."""
    try:
        cost = _rounding(config)
    except ConfigError:  # the bound does not hold for so little noise
        cost = 1.0
    if cost > config.dp_delta / 1000:
        remedy = "a smaller batch_size" if config.sums_records else "secure_aggregation=False"
        raise ConfigError(
            f"noise_multiplier={config.noise_multiplier:g} is too small to be rounded before masking: "
            f"use more noise, or {remedy}"
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
