"""The server sides of the bundled algorithms, by name: all that `fedrp.protocol.server` looks up."""

from collections.abc import Sequence

import numpy as np

from fedrp.algorithms.server_side import Certificate, Memory, ServerSide, full_vector, mean_only, projected_vector
from fedrp.compression.coding import FULL
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved
from fedrp.mechanisms.base import Mechanism, Reach
from fedrp.mechanisms.clip import Clip
from fedrp.mechanisms.difference import Difference
from fedrp.mechanisms.noise import Noise
from fedrp.mechanisms.record_sum import RecordSum
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


def _fedavg_reach(config: Resolved, round_: int, mean: Reach) -> Reach:
    """a_t = mean_t + beta (a_{t-1} - a_{t-2}), from 0: the mean times the sum of |impulse response| so far."""
    beta = config.server_momentum
    last, before, total = 1.0, 0.0, 1.0
    for _ in range(min(round_ - 1, _SETTLED_AFTER)):
        last, before = beta * (last - before), last
        total += abs(last)
    return Reach(mean.number * total)


def _differences(config: Resolved) -> tuple[Mechanism, ...]:
    return (Difference(),) if config.bits < FULL else ()


FEDAVG = ServerSide("aggregate", full_vector, _fedavg, _differences, _fedavg_reach)
FEDADMM = ServerSide("own", full_vector, mean_only, _differences)  # remembers: the dual variable


# --- FedAvg with noise -----------------------------------------------------------------------------------------------


def clipped_and_noised(config: Resolved) -> tuple[Mechanism, ...]:
    """Clip and noise, where clients protect what they send, or noise alone on sums of clipped gradients.

    What both are worth: `fedrp.algorithms.client_dp` and `fedrp.records.promise`.
    """
    if config.sums_records:
        records = RecordSum(config)
        return (records, Noise(config, records))
    clip = Clip(config)
    return (clip, Noise(config, clip)) if config.private else ()


def _running_sum(config: Resolved, past: Sequence[Vector], mean: Vector, _weight: float) -> Vector:
    """The sum of all averaged updates, so that a client which missed rounds needs only the latest aggregate."""
    if not past:
        return mean
    carried = _momentum(config, (*past, np.zeros_like(past[0])))
    return mean + (past[0] if carried is None else past[0] + carried)


def _running_reach(config: Resolved, round_: int, mean: Reach) -> Reach:
    """Every round adds at most what one round can, momentum carries it on."""
    times = round_ / (1 - config.server_momentum)
    return Reach(times * mean.number, times * mean.norm)


FEDAVG_DP = ServerSide("aggregate", full_vector, _running_sum, clipped_and_noised, _running_reach)


# --- FedRP -----------------------------------------------------------------------------------------------------------


def _certificate(config: Resolved) -> Certificate | None:
    """Theorem 1 for Gaussian matrices; of others it says nothing."""
    return _certified if config.projection == "gaussian" else None


def _certified(uploads: Sequence[Vector]) -> float:
    """Theorem 1: how far apart the clients' models can be, from their projections."""
    return consensus_certificate(np.stack(uploads), CERTIFICATE_CONFIDENCE).exact


# Remembers: the model and the dual variable.
FEDRP = ServerSide("own", projected_vector, mean_only, certificate=_certificate, round_keys=True)


# --- FedRP-Subspace --------------------------------------------------------------------------------------------------


SUBSPACE = ServerSide("history", projected_vector, mean_only, clipped_and_noised, round_keys=True)


# --- FWC: nothing is sent in its rounds ------------------------------------------------------------------------------


FWC = ServerSide("aggregate", full_vector, mean_only)


# --- after the last round --------------------------------------------------------------------------------------------


def _final_mean(rounds: ServerSide, config: Resolved) -> ServerSide:
    """The server side of the exchange of models after rounds: their mean.

    Where the rounds are masked, masks still depend on all that the models were made from. Elsewhere the server sees
    single uploads in every round, and clients that missed some of them are not left out.
    """
    memory: Memory = rounds.memory if config.secure_aggregation else "aggregate"
    return ServerSide(memory, full_vector, mean_only, round_keys=rounds.round_keys)


SERVERS: dict[str, ServerSide] = {
    "fedrp-subspace": SUBSPACE,
    "fedrp": FEDRP,
    "fedavg": FEDAVG,
    "fedavg-dp": FEDAVG_DP,
    "fedadmm": FEDADMM,
    "fwc": FWC,
}


def server_side(config: Resolved) -> ServerSide:
    """The server side of a config's algorithm, or of the exchange of models after its rounds."""
    require_choice("algorithm", config.algorithm, SERVERS)
    side = SERVERS[config.algorithm]
    return side if config.before is None else _final_mean(side, config.before)


def wire_tag(config: Resolved) -> int:
    """What messages of this run carry as their projection: family and version, or 0 where there is no secret matrix."""
    return projection_tag(config.projection) if server_side(config).round_keys else 0
