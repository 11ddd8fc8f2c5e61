"""All views of the projection mechanism at once: what `fedrp privacy` prints."""

from dataclasses import asdict, dataclass
from typing import Any

from fedrp.errors import ConfigError
from fedrp.privacy import _checks
from fedrp.privacy.assumptions import OTHERS_FIXED, implied_assumptions
from fedrp.privacy.bounds import EpsilonInterval, Refused, bound, tightest, too_large
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    Event,
    JointProjectedRelease,
    NonPrivate,
    ProjectedRelease,
    Unsupported,
)
from fedrp.privacy.guarantee import guarantee
from fedrp.privacy.projection_mechanism import LARGEST_RATIO

ALIGNED = "the clients' vectors point the same way: ||sum of w_i|| is at least clients times the norm floor"
NEIGHBOURS = "data sets whose vectors differ by at most the given sensitivity"
_JOINT = Unsupported("it sees several vectors under one matrix, and no distance between them is given")
_MATRIX = NonPrivate("it knows the secret matrices or what was made with them, and there is no noise")


@dataclass(frozen=True)
class ProjectionReport:
    """Epsilons at `delta`, upper bounds unless the name says lower; None where not asked for or not available."""

    dim: int
    alpha: float
    delta: float
    rounds: int
    paper_epsilon: float | None
    exact_epsilon: float | None
    renyi_epsilon: float | None
    pld_epsilon: float | None
    composed: dict[str, float | None]  # over all rounds: basic, advanced, renyi, pld, and pld_lower
    joint_epsilon: float | None
    joint_composed: float | None
    secagg_epsilon: float | None
    secagg_composed: float | None
    adversary: str
    assumptions: tuple[str, ...]
    statements: tuple[dict[str, Any], ...]  # over all rounds, one per adversary, as a result has them

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def projection_report(
    dim: int,
    *,
    delta: float,
    rounds: int = 1,
    alpha: float | None = None,
    sensitivity: float | None = None,
    norm_min: float | None = None,
    clients: int | None = None,
    distance: float | None = None,
    secure_aggregation: bool = False,
    sum_norm: float | None = None,
) -> ProjectionReport:
    """Bounds for a vector released through a fresh secret `dim` x n Gaussian matrix each round, against the server.

    Give `alpha`, or `sensitivity` and `norm_min`; with `alpha` alone, lengths are in units of the norm floor.
    `distance`, a floor of the distance to the span of the other clients' vectors, asks for the joint view.
    `secure_aggregation` asks for the view of the sum, of norm `sum_norm` or else `clients` times the norm floor.
    """
    moved, floor = _lengths(alpha, sensitivity, norm_min)
    rounds = _checks.whole("rounds", rounds, at_least=1)
    single = ProjectedRelease(dim, moved / floor)
    assumptions = list(implied_assumptions(Composed(single, rounds)))
    joint = secagg = None
    if distance is not None:
        joint = JointProjectedRelease(dim, moved / _checks.number("distance", distance, above=0))
        assumptions += implied_assumptions(Composed(joint, rounds))
    if secure_aggregation:
        if sum_norm is None and clients is None:
            raise ConfigError("secure aggregation needs the number of clients or sum_norm, got clients=None")
        if sum_norm is None:
            sum_norm = _checks.whole("clients", clients, at_least=1) * floor
            assumptions.append(ALIGNED)
        secagg = ProjectedRelease(dim, moved / _checks.number("sum_norm", sum_norm, above=0))
        assumptions += [OTHERS_FIXED] * (rounds > 1)
    for asked in (single, joint, secagg):
        if asked is not None and (asked.ratio or 0) > LARGEST_RATIO:
            raise ConfigError(f"{too_large(asked.ratio or 0)}: give a smaller sensitivity or a larger norm floor")
    everything = tuple(dict.fromkeys(assumptions))
    # The server gets a number for the view that it has: the sum, all vectors, or the only one.
    seen = secagg or joint or (single if clients == 1 else None)
    events: dict[Adversary, Event] = {
        Adversary.ONE_VECTOR: Composed(single, rounds),
        Adversary.SERVER: _JOINT if seen is None else Composed(seen, rounds),
        **dict.fromkeys((Adversary.SERVER_AND_CLIENT, Adversary.CLIENTS, Adversary.MODEL_HOLDER), _MATRIX),
    }
    own = {Adversary.SERVER: everything if seen is secagg else ()}
    pld = bound("pld", Composed(single, rounds), delta)
    composed = {name: _upper(name, single, rounds, delta) for name in ("basic", "advanced", "renyi", "pld")}
    return ProjectionReport(
        dim=single.rows,
        alpha=moved / floor,
        delta=float(delta),
        rounds=rounds,
        paper_epsilon=_upper("paper", single, 1, delta),
        exact_epsilon=_upper("exact", single, 1, delta),
        renyi_epsilon=_upper("renyi", single, 1, delta),
        pld_epsilon=_upper("pld", single, 1, delta),
        composed={**composed, "pld_lower": pld.lower if isinstance(pld, EpsilonInterval) else None},
        joint_epsilon=_upper("exact", joint, 1, delta),
        joint_composed=_tightest(joint, rounds, delta),
        secagg_epsilon=_upper("exact", secagg, 1, delta),
        secagg_composed=_tightest(secagg, rounds, delta),
        adversary=Adversary.SERVER.value,
        assumptions=everything,
        statements=tuple(_statement(event, delta, whom, own.get(whom, ())) for whom, event in events.items()),
    )


def _statement(event: Event, delta: float, whom: Adversary, assumptions: tuple[str, ...]) -> dict[str, Any]:
    stated = guarantee(event, delta, whom, Adjacency.RECORD_REPLACE, assumptions)
    return {**stated.as_json(), "adjacency": NEIGHBOURS}  # which neighbours the sensitivity is about, its giver knows


def _lengths(alpha: float | None, sensitivity: float | None, norm_min: float | None) -> tuple[float, float]:
    """Sensitivity and norm floor, in units of the floor if only their ratio is known."""
    if alpha is not None and sensitivity is None and norm_min is None:
        return _checks.number("alpha", alpha, at_least=0), 1.0
    if alpha is not None or sensitivity is None or norm_min is None:
        given = f"alpha={alpha}, sensitivity={sensitivity}, norm_min={norm_min}"
        raise ConfigError(f"give either alpha, or sensitivity and norm_min; got {given}")
    return _checks.number("sensitivity", sensitivity, at_least=0), _checks.number("norm_min", norm_min, above=0)


def _upper(name: str, event: ProjectedRelease | None, rounds: int, delta: float) -> float | None:
    answer = Refused("not asked for") if event is None else bound(name, Composed(event, rounds), delta)
    return answer.upper if isinstance(answer, EpsilonInterval) else None


def _tightest(event: ProjectedRelease | None, rounds: int, delta: float) -> float | None:
    answer = Refused("not asked for") if event is None else tightest(Composed(event, rounds), delta, Adversary.SERVER)
    return None if isinstance(answer, Refused) else answer[1].upper
