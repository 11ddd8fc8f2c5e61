"""Client-level differential privacy, the same for every algorithm that offers it: clip, add noise, sum.

Each client bounds its update to norm C and adds noise, so that the sum over a round's participants carries N(0, (zC)^2)
in each coordinate; z is the noise multiplier. The sum is divided by the *expected* number of participants, which does
not depend on who came.

With `clip_quantile`, C follows the clients' norms (Andrew et al. 2021): a client also sends whether its norm was below
C, as one more number (in units of C) with noise of its own; the server answers with the next C as one more number.
"""

import dataclasses
import math
from collections.abc import Sequence

from fedrp.algorithms.cohort import least_participants
from fedrp.algorithms.server_side import Reach
from fedrp.compression.grid import Scale, finest
from fedrp.config import DEFAULT_QUORUM, RunConfig, settled
from fedrp.crypto.secure_aggregation import MIN_SUMMED, Call
from fedrp.errors import ConfigError, ProtocolError
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    Event,
    GaussianRelease,
    PoissonSampled,
    Release,
    Unsupported,
)
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier
from fedrp.privacy.noise import noise_share, rounding_delta, update_noise_multiplier
from fedrp.privacy.numerics import binomial
from fedrp.privacy.pld import SMALLEST_DELTA
from fedrp.types import MAX_COUNT, Vector

PRIVACY_SETTINGS = frozenset({"clip", "noise_multiplier", "dp_epsilon", "dp_noise", "clip_quantile"})
DEFAULT_EPSILON = 10.0
DEFAULT_CLIP = 0.3  # what a client learns in a few local steps; with 1 the noise is louder than that (docs/results.md)
_CLIP_RATE = 0.2  # eta_C of Andrew et al.
_BIT_NOISE_SHARE = 1 / 20  # noise on the count of clients below C, as a share of their number
_TAIL = 16.0  # deviations after which noise is cut off before masking: 1e-57 of it
_TAIL_MASS = math.erfc(_TAIL / math.sqrt(2))
_LARGEST_EPSILON = 50.0  # up to which the cost of rounding is stated
_NEGLIGIBLE = 1e-6  # of delta: rare enough to be stated as an assumption
_GRID_BITS = 12  # a client's noise is at least 2^12 steps wide: coarse for doubles, exact in float32
_FAR = 10.0  # deviations
_SMALL_COHORT = 64
_TOO_OFTEN = 1e-6

SUMS_ONLY = (
    "masks hide single uploads: clients keep the rules of secure aggregation and their keys",
    "X25519, HKDF and AES are as good as ideal",
)


def resolve_privacy(config: RunConfig) -> RunConfig:
    """The config with clip, quorum and noise multiplier; the latter from the target epsilon, if that was given."""
    if config.weighting != "uniform":
        raise ConfigError("weighting='samples' is not valid here: the privacy of a client rests on equal weights")
    quorum = config.quorum or (1.0 if config.dp_noise == "shared" else DEFAULT_QUORUM)
    noise = config.noise_multiplier
    if noise is None:
        noise = calibrate_noise_multiplier(
            config.dp_epsilon or DEFAULT_EPSILON,
            config.dp_delta,
            config.rounds,
            _rate(config),
            participation_hidden=_participation_hidden(dataclasses.replace(config, quorum=quorum)),
        )
    clip = config.clip or DEFAULT_CLIP
    resolved = dataclasses.replace(config, clip=clip, noise_multiplier=noise, dp_epsilon=None, quorum=quorum)
    _update_noise(resolved)  # refuses an adaptive clip that the noise does not allow
    if resolved.secure_aggregation:
        _require_noise_above_grid(resolved)
    return resolved


def _require_noise_above_grid(config: RunConfig) -> None:
    try:
        cost = _rounding(config)
    except ConfigError:  # the bound does not hold for so little noise
        cost = 1.0
    if cost > config.dp_delta / 1000:
        raise ConfigError(
            f"noise_multiplier={config.noise_multiplier:g} is too small to be rounded before masking: "
            "use more noise, or --no-secure-aggregation"
        )


def _rounding(config: RunConfig) -> float:
    """What is added to delta, at most, because noisy vectors are rounded and cut off before they are masked."""
    if config.dp_noise == "local" or not config.noise_multiplier:
        return 0.0  # post-processing of a noisy vector, or no noise at all
    cost, step = 0.0, _coarsestgrid_step(config)
    for count in (MIN_SUMMED, config.clients):
        cut = MAX_COUNT * count * config.rounds * _TAIL_MASS * (1 + math.exp(_LARGEST_EPSILON))
        smallest = min(noise_shares(config, count))
        cost = max(cost, cut + rounding_delta(smallest, step, count, MAX_COUNT, config.rounds, _LARGEST_EPSILON))
    return cost


def extra_numbers(config: RunConfig) -> int:
    """How many numbers privacy adds to an upload."""
    return 0 if config.clip_quantile is None else 1


def current_clip(config: RunConfig, previous: Vector | None) -> float:
    """The bound C of a round, after the aggregate of the one before.

    Raises:
        ProtocolError: the aggregate ends with a C that is none; noise in units of it would hide nothing.
    """
    if config.clip_quantile is None or previous is None:
        return settled(config.clip)
    clip = float(previous[-1])
    if not (math.isfinite(clip) and clip > 0):
        raise ProtocolError(f"the aggregate names a clip of {clip:g}: expected a positive, finite number")
    return clip


def expected_number(config: RunConfig) -> float:
    """What the sum of a round is divided by, whoever came."""
    return float(config.expected_participants)


def noised_scale(config: RunConfig, previous: Vector | None, call: Call) -> Scale:
    """The scale of a noised upload that is masked: only noise beyond any that occurs is cut off."""
    clip = current_clip(config, previous)
    bound = clip * _largest(config, len(call.clients))
    return Scale(bound, grid_step(config, clip)) if config.noise_multiplier else finest(bound, call)


def noised_reach(config: RunConfig, round_: int, size: int) -> Reach:
    """What the averaged update of a round can be, from the clip, the noise and the largest cohort.

    A Gaussian vector of d numbers is longer than (sqrt(d) + 10) deviations with probability below e^-50.
    """
    cohort = config.clients if config.sampling == "poisson" else config.expected_participants
    clip = settled(config.clip)
    if config.clip_quantile is not None:
        clip *= math.exp(_CLIP_RATE * config.clip_quantile * round_)
    # Small cohorts add the most noise, because each client makes up for those who may be missing.
    counts = (*range(1, min(cohort, _SMALL_COHORT) + 1), cohort)
    deviation = max(noise_shares(config, count)[0] * math.sqrt(count) for count in counts)
    number = clip * (cohort + _TAIL * deviation) / config.expected_participants
    norm = clip * (cohort + deviation * (math.sqrt(size) + _FAR)) / config.expected_participants
    votes = extra_numbers(config) * clip  # the last number is the next C itself
    return Reach(max(number, votes), norm + votes)


def most_rounds(config: RunConfig) -> int:
    """In how many rounds a client takes part at most: beyond this it refuses, whoever draws the coins.

    Honest coins ask for more with a probability of one in a million.
    """
    rate = _rate(config)
    return config.rounds if rate >= 1 else int(binomial().isf(_TOO_OFTEN, config.rounds, rate))


def _largest(config: RunConfig, participants: int) -> float:
    """The largest number of a noised upload, in units of C."""
    return 1 + _TAIL * max(noise_shares(config, participants))


def grid_step(config: RunConfig, clip: float) -> float:
    """The grid of noised numbers: a power of two, 2^-12 of the smallest noise that a client may add, or less.

    It depends on nothing but the config and C: not on the numbers, and not on how many take part. Where thousands of
    uploads are masked it is coarser, so that the sum of all clients does not overflow.
    """
    exponent = math.floor(math.log2(clip * min(noise_shares(config, config.clients)))) - _GRID_BITS
    if config.secure_aggregation:
        exponent = max(exponent, math.ceil(math.log2(clip * _finestgrid_step(config))))
    return float(2.0**exponent)


def _coarsestgrid_step(config: RunConfig) -> float:
    """The largest step of a run in which uploads are masked, in units of C.

    C is rarely a power of two and the step always is, so the step may be twice the one that C would need. Where C
    adapts, every mantissa of C must be expected.
    """
    if config.clip_quantile is None:
        clip = settled(config.clip)
        return grid_step(config, clip) / clip
    return max(math.ldexp(min(noise_shares(config, config.clients)), -_GRID_BITS), 2 * _finestgrid_step(config))


def _finestgrid_step(config: RunConfig) -> float:
    """The smallest step with which the sum of all clients does not overflow, in units of C."""
    everyone = Call(tuple(range(config.clients)), (1,) * config.clients)
    return finest(_largest(config, config.clients), everyone).step


def noise_shares(config: RunConfig, participants: int) -> list[float]:
    """The deviations of the noise that a client adds to its update and, where C adapts, to its vote; in units of C."""
    multipliers = [_update_noise(config)]
    if config.clip_quantile is not None:
        multipliers.append(_bit_noise(config))
    return [_share(config, participants, multiplier) for multiplier in multipliers]


def averaged(config: RunConfig, past: Sequence[Vector], mean: Vector, weight: float) -> Vector:
    """The sum of the uploads by the expected number of participants (`mean`); the last number becomes the next C.

    A weight of 0 is that of a round without uploads, which leaves C as it is.
    """
    result = mean.copy()
    if config.clip_quantile is not None:
        clip = current_clip(config, past[0] if past else None)
        below = min(1.0, max(0.0, float(result[-1]) / clip + 0.5)) if weight else config.clip_quantile
        result[-1] = clip * math.exp(-_CLIP_RATE * (below - config.clip_quantile))
    return result


def releases(config: RunConfig) -> list[Release]:
    """What the mechanism of this file gives away, to whom."""
    client = Adjacency.CLIENT_ZEROED  # everyone but who gets the model sees how many take part
    seen = _seen(config)
    bound = f"norm {config.clip:g}" if config.clip_quantile is None else "the round's C, which the noise grows with"
    clipped = f"every update is clipped to {bound}, so the sensitivity is enforced"
    if config.dp_noise == "local":
        own = (clipped, "every client adds all of the noise itself")
        return [Release(adversary, client, seen, own) for adversary in Adversary if adversary.real]
    shared: tuple[str, ...] = (clipped, "the clients of the quorum add their shares of the noise")
    if config.secure_aggregation:
        shared = (*shared, f"rounding before masking adds less than {_rounding(config) + 1e-30:.0e} to delta")
    alone = _seen_by_the_server(config, seen, shared)
    if _participation_hidden(config):
        enough = f"coins choose enough participants in every round (they do not with probability {_rarely(config):.1g})"
        return [
            *alone,
            Release(Adversary.CLIENTS, client, *_seen_by_a_participant(config, shared)),
            Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_ADD_REMOVE, _seen(config, hidden=True), (*shared, enough)),
        ]
    return [
        *alone,
        Release(Adversary.CLIENTS, client, seen, (*shared, _ONE_CURIOUS)),
        Release(Adversary.MODEL_HOLDER, client, seen, shared),
    ]


_ONE_CURIOUS = "at most one curious client, who knows its own share of the noise"


def _seen(config: RunConfig, own_share: float = 0.0, hidden: bool = False) -> Event:
    """The sums of all rounds, for whom a part of the variance of their noise is no noise."""
    noise = GaussianRelease(settled(config.noise_multiplier) * math.sqrt(1 - own_share))
    return Composed(PoissonSampled(noise, _rate(config), participation_hidden=hidden), config.rounds)


def _seen_by_a_participant(config: RunConfig, shared: tuple[str, ...]) -> tuple[Event, tuple[str, ...]]:
    """The sums where the total noise does not depend on how many take part, so that a client knows a part of it."""
    fewest = int(binomial().ppf(_NEGLIGIBLE * config.dp_delta / config.rounds, config.clients, config.participation))
    if fewest < 2:
        return Unsupported("a client knows its own share of the noise, which may be all of it"), ()
    often = f"at least {fewest} clients take part in every round, as they do but for a millionth of delta"
    return _seen(config, own_share=1 / fewest), (*shared, _ONE_CURIOUS, often)


def _seen_by_the_server(config: RunConfig, seen: Event, shared: tuple[str, ...]) -> list[Release]:
    """What single shares of noise are worth: nothing, unless the server sees sums only."""
    both, client = (Adversary.SERVER, Adversary.SERVER_AND_CLIENT), Adjacency.CLIENT_ZEROED
    if not config.secure_aggregation:
        single = Unsupported("a client adds only its share of the noise, and the server sees single uploads")
        return [Release(adversary, client, single) for adversary in both]
    assumed = (*shared, *SUMS_ONLY)
    if settled(config.quorum) < 1:
        # The sum of those left out carries only their shares, and late uploads complete it.
        late = "the server discards unread what comes from clients left out of a round (not needed with --quorum 1)"
        assumed = (*assumed, late)
    if _participation_hidden(config):
        own = _seen_by_a_participant(config, assumed)
        return [Release(both[0], client, seen, assumed), Release(both[1], client, *own)]
    return [Release(both[0], client, seen, assumed), Release(both[1], client, seen, (*assumed, _ONE_CURIOUS))]


def _too_few(config: RunConfig) -> list[float]:
    """How likely coins choose 0, 1, ... clients, for each number that is too small, so that some are added."""
    counts = range(least_participants(config))
    return [float(binomial().pmf(count, config.clients, config.participation)) for count in counts]


def _rarely(config: RunConfig) -> float:
    """The probability, or more, that coins choose too few clients in any round."""
    return min(1.0, config.rounds * sum(_too_few(config)))


def _rate(config: RunConfig) -> float:
    """The probability with which a client takes part in a round, being added to too few included."""
    if config.sampling == "fixed":
        return config.expected_participants / config.clients
    few = _too_few(config)
    added = sum((len(few) - count) * probability for count, probability in enumerate(few))
    return min(1.0, config.participation + added / config.clients)


def _participation_hidden(config: RunConfig) -> bool:
    """Whether the model alone cannot tell how many took part: coins decide, and the noise does not depend on them.

    Only where coins practically never choose too few: whoever is added then is not there by a coin of its own.
    """
    by_coins = config.sampling == "poisson" and _rarely(config) <= _NEGLIGIBLE * config.dp_delta
    computed = config.dp_delta >= SMALLEST_DELTA
    return by_coins and computed and config.dp_noise == "shared" and config.quorum == 1.0


def _share(config: RunConfig, participants: int, deviation: float) -> float:
    """The noise that one client adds, so that the sum over the round has the given standard deviation at least."""
    if config.dp_noise == "local":
        return deviation
    minimum = math.ceil(participants * settled(config.quorum))
    # A curious client knows the noise that it added itself: the others' must suffice. Not so where participation is
    # hidden: there the total must be the same whatever the number of participants.
    colluding = 0 if _participation_hidden(config) else min(1, minimum - 1)
    return noise_share(deviation, participants, minimum, colluding).per_client


def _bit_noise(config: RunConfig) -> float:
    return _BIT_NOISE_SHARE * config.expected_participants


def _update_noise(config: RunConfig) -> float:
    """The multiplier on the update itself: larger than z where a part of the budget goes into adapting C."""
    noise = settled(config.noise_multiplier)
    if config.clip_quantile is None:
        return noise
    if noise >= 2 * _bit_noise(config):
        raise ConfigError(
            f"clip_quantile={config.clip_quantile:g} needs more clients a round: with {config.expected_participants} "
            f"and noise_multiplier {noise:.3g}, above {math.ceil(noise / (2 * _BIT_NOISE_SHARE))} are needed; give a "
            "fixed --clip instead"
        )
    return update_noise_multiplier(noise, _bit_noise(config))
