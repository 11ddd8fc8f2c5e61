"""The server sides of the bundled algorithms, by name: all that `fedrp.protocol.server` looks up."""

from collections.abc import Sequence

import numpy as np

from fedrp.algorithms.client_dp import averaged, expected_number, extra_numbers, noised_reach, noised_scale
from fedrp.algorithms.server_side import (
    Certificate,
    Reach,
    ServerSide,
    full_vector,
    mean_only,
    projected_vector,
    stated_range,
    within_range,
)
from fedrp.compression.grid import Scale
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved
from fedrp.crypto.secure_aggregation import Call
from fedrp.privacy.certificate import CERTIFICATE_CONFIDENCE, consensus_certificate
from fedrp.projection.tags import projection_tag
from fedrp.types import Vector

_SETTLED_AFTER = 10_000  # rounds after which momentum adds nothing more


# --- FedAvg ----------------------------------------------------------------------------------------------------------


def _momentum(config: Resolved, past: Sequence[Vector]) -> Vector | None:
    """The step, times beta, from the aggregate before the last to the last one."""
    beta = np.float32(config.server_momentum)
    return beta * (past[0] - past[1]) if beta and len(past) > 1 else None


def _fedavg(config: Resolved, past: Sequence[Vector], mean: Vector, _weight: float) -> Vector:
    carried = _momentum(config, past)
    return mean if carried is None else mean + carried


def _fedavg_reach(config: Resolved, round_: int, size: int) -> Reach:
    """a_t = mean_t + beta (a_{t-1} - a_{t-2}), from 0: the range times the sum of |impulse response| so far."""
    beta = config.server_momentum
    last, before, total = 1.0, 0.0, 1.0
    for _ in range(min(round_ - 1, _SETTLED_AFTER)):
        last, before = beta * (last - before), last
        total += abs(last)
    return Reach(within_range(config, round_, size).number * total)


FEDAVG = ServerSide("aggregate", full_vector, _fedavg, stated_range, _fedavg_reach)
FWC = ServerSide("own", full_vector, mean_only, stated_range, within_range, exchanges=False)
FEDADMM = ServerSide("own", full_vector, mean_only, stated_range, within_range)  # remembers: the dual variable


# --- FedAvg with noise -----------------------------------------------------------------------------------------------


def _full_noised_vector(config: Resolved, parameters: int) -> int:
    return parameters + extra_numbers(config)


def _running_sum(config: Resolved, past: Sequence[Vector], mean: Vector, weight: float) -> Vector:
    """The sum of all averaged updates, so that a client which missed rounds needs only the latest aggregate."""
    result = averaged(config, past, mean, weight)
    if not past:
        return result
    total = past[0].copy()
    carried = _momentum(config, (*past, np.zeros_like(total)))
    if carried is not None:
        total += carried
    total[total.size - extra_numbers(config) :] = 0  # the bound C is not summed
    return result + total


def _running_reach(config: Resolved, round_: int, size: int) -> Reach:
    """Every round adds at most what one round can, momentum carries it on."""
    number, norm = noised_reach(config, round_, size)
    times = round_ / (1 - config.server_momentum)
    return Reach(times * number, times * norm)


FEDAVG_DP = ServerSide(
    "aggregate", _full_noised_vector, _running_sum, noised_scale, _running_reach, divisor=expected_number
)


# --- FedRP -----------------------------------------------------------------------------------------------------------


def _certificate(config: Resolved) -> Certificate | None:
    """Theorem 1 for Gaussian matrices; of others it says nothing."""
    return _certified if config.projection == "gaussian" else None


def _certified(uploads: Sequence[Vector]) -> float:
    """Theorem 1: how far apart the clients' models can be, from their projections."""
    return consensus_certificate(np.stack(uploads), CERTIFICATE_CONFIDENCE).exact


FEDRP = ServerSide(  # remembers: the model and the dual variable
    "own", projected_vector, mean_only, stated_range, within_range, certificate=_certificate, round_keys=True
)


# --- FedRP-Subspace --------------------------------------------------------------------------------------------------


def _theta(config: Resolved, _parameters: int) -> int:
    return config.dim + (extra_numbers(config) if config.private else 0)


def _mean_theta(config: Resolved, past: Sequence[Vector], mean: Vector, weight: float) -> Vector:
    return averaged(config, past, mean, weight) if config.private else mean


def _theta_scale(config: Resolved, previous: Vector | None, call: Call) -> Scale:
    return (noised_scale if config.private else stated_range)(config, previous, call)


def _theta_reach(config: Resolved, round_: int, size: int) -> Reach:
    return (noised_reach if config.private else within_range)(config, round_, size)


def _theta_divisor(config: Resolved) -> float | None:
    return expected_number(config) if config.private else None


SUBSPACE = ServerSide(
    "history", _theta, _mean_theta, _theta_scale, _theta_reach, divisor=_theta_divisor, round_keys=True
)


SERVERS: dict[str, ServerSide] = {
    "fedrp-subspace": SUBSPACE,
    "fedrp": FEDRP,
    "fedavg": FEDAVG,
    "fedavg-dp": FEDAVG_DP,
    "fedadmm": FEDADMM,
    "fwc": FWC,
}


def server_side(config: Resolved) -> ServerSide:
    """The server side of a config's algorithm."""
    require_choice("algorithm", config.algorithm, SERVERS)
    return SERVERS[config.algorithm]


def wire_tag(config: Resolved) -> int:
    """What messages of this run carry as their projection: family and version, or 0 where there is no secret matrix."""
    return projection_tag(config.projection) if server_side(config).round_keys else 0
