"""What makes the paper's theorem applicable to printed FedRP: a bound on how far a model can move, and on its norm.

With `ball` = R every client keeps its model within R of the common start w^0, in every round, whatever its data: any
two models are within 2 R (sensitivity enforced), and no norm is below ||w^0|| - R. The start is secret, so the floor
that a statement may use is the public setting `norm_floor`, which every client checks against the start: a check that
does not depend on data. With `sensitivity` instead, the user vouches for the distance, and clients check the norm of
what they are about to project.
"""

import functools
import math

import numpy as np

from fedrp.compression.coding import FULL
from fedrp.config.run import Resolved
from fedrp.errors import PrivacyError
from fedrp.mechanisms.cohort import needed
from fedrp.mechanisms.noise import SUMS_ONLY
from fedrp.privacy.events import Adjacency, Adversary, Composed, Event, ProjectedRelease, Release, Unsupported
from fedrp.privacy.sensitivity import Basis, NormFloor, Sensitivity, ball_sensitivity, project_to_ball
from fedrp.types import Vector

NOT_GAUSSIAN = Unsupported("the theorems are about Gaussian matrices")
JOINT = Unsupported(
    "the server sees the vectors of several clients under one matrix: what hides a client is its distance to the span "
    "of the others', which nothing bounds"
)
FEW_BITS = Unsupported(
    "rounding single projections to few bits before they are masked tells more than their sum, and so does the mean of "
    "their norms"
)
_SUMMED = (
    "the server discards unread what comes from clients left out of a round (not needed with quorum 1)",
    "rounding single projections before they are masked, and cutting off numbers beyond secure_range, tells nothing "
    "more than their sum",
)


def kept_in_bounds(config: Resolved, model: Vector, start: Vector) -> Vector:
    """The model that a client goes on with and projects: the nearest one that the configured bounds allow.

    Guarantees: with `ball`, within it of `start`, for any model (NaN and infinity give the start); with `norm_floor`,
    a norm of at least that.

    Raises:
        PrivacyError: the norm floor does not hold; nothing has been sent.
    """
    if config.ball:
        model = project_to_ball(model, start, config.ball)
        floor = _norm(start) - config.ball
        if config.norm_floor and floor < config.norm_floor:
            raise PrivacyError(
                f"norm_floor={config.norm_floor:g} does not hold with ball={config.ball:g}: the common start is too "
                "short, and nothing was sent; lower norm_floor or ball, or leave the floor to its default"
            )
    elif config.norm_floor and not _norm(model) >= config.norm_floor:
        raise PrivacyError(
            f"a client's model is shorter than norm_floor={config.norm_floor:g}: it was not sent; lower norm_floor"
        )
    return model


def bounds_of(config: Resolved) -> tuple[Sensitivity, NormFloor] | None:
    """How far a client's model can move and how short it can be, and why that is believed; None where nothing is."""
    if not config.norm_floor:
        return None
    floor = functools.partial(NormFloor, config.norm_floor, Basis.ENFORCED)
    if config.ball:
        return ball_sensitivity(config.ball), floor("every client checks that the ball stays that far from the origin")
    if config.sensitivity:
        return Sensitivity(config.sensitivity, Basis.ASSUMED, "as configured"), floor("a client below it stops")
    return None


def ratio_of(config: Resolved) -> float | None:
    """The quotient of sensitivity and norm floor, alpha, of one client's vector, or None where nothing bounds it."""
    bounds = bounds_of(config)
    return bounds[0].bound / bounds[1].bound if bounds else None


def projected_releases(config: Resolved) -> list[Release]:
    """What the server learns from projected models, and what the paper's theorem says of a single one.

    The theorem is about one vector under one matrix. That is what the server has if one client takes part in a round;
    otherwise it holds for a server that looks at one client's vector alone, which is a statement of its own.
    """
    adjacency = adjacency_of(config)
    alone = config.sampling == "fixed" and config.expected_participants == 1
    if config.projection != "gaussian":
        return [Release(Adversary.SERVER, adjacency, NOT_GAUSSIAN)]
    if config.secure_aggregation and config.bits < FULL:
        return [Release(Adversary.SERVER, adjacency, FEW_BITS)]
    if config.secure_aggregation:
        summed = summed_release(config, needed(config, config.expected_participants))
        return [Release(Adversary.SERVER, adjacency, summed, (*assumed(config), *SUMS_ONLY, *_SUMMED))]
    single = Composed(ProjectedRelease(config.dim, ratio_of(config)), config.rounds)
    if alone:
        return [Release(Adversary.SERVER, adjacency, single, assumed(config))]
    server = Release(Adversary.SERVER, adjacency, JOINT)
    if ratio_of(config) is None:
        return [server]
    return [server, Release(Adversary.ONE_VECTOR, adjacency, single, assumed(config))]


def summed_release(config: Resolved, least: int) -> Event:
    """What a server learns that sees only the sum of the projections of at least `least` clients a round.

    Vectors within R of w^0 add up to a norm of at least `least` times the floor. In one round a single client moves the
    sum by its own 2 R. Over several rounds all others may react to it, each by 2 R: the factor `least` is gone again.
    """
    ratio = ratio_of(config)
    if not config.ball or ratio is None:  # without a ball the vectors of several clients may cancel
        return ProjectedRelease(config.dim)
    shared = config.rounds == 1 and config.weighting == "uniform"
    return Composed(ProjectedRelease(config.dim, ratio / least if shared else ratio), config.rounds)


def adjacency_of(config: Resolved) -> Adjacency:
    """The strongest that holds: a ball does not ask how much of the data was exchanged, but weights tell its size."""
    whole = config.ball and config.weighting == "uniform"
    return Adjacency.CLIENT_REPLACE if whole else Adjacency.RECORD_REPLACE


def assumed(config: Resolved) -> tuple[str, ...]:
    """The bounds with their bases, as a statement lists them."""
    bounds = bounds_of(config)
    if bounds is None:
        return ()
    sensitivity, floor = bounds
    listed = (
        f"the sensitivity is {sensitivity.bound:g}: {sensitivity.reason} ({sensitivity.basis.value})",
        f"the norm floor is {floor.bound:g}: {floor.reason} ({floor.basis.value})",
    )
    # A stop is seen. With a ball it depends on the start alone; without, it depends on data.
    return listed if config.ball else (*listed, "neither neighbour stops a client at the norm floor")


def _norm(vector: Vector) -> float:
    return math.sqrt(float(np.dot(vector.astype(np.float64), vector.astype(np.float64))))
