"""What every entry of BOUNDS promises, for every kind of event."""

import math

import pytest

from fedrp.privacy.bounds import BOUNDS, EpsilonInterval, Refused, bound
from fedrp.privacy.events import (
    Composed,
    GaussianRelease,
    JointProjectedRelease,
    NonPrivate,
    NothingReleased,
    PoissonSampled,
    ProjectedRelease,
    Sequence,
    Unsupported,
)
from fedrp.privacy.projection_mechanism import LARGEST_RATIO

EVENTS = [
    GaussianRelease(2.0),
    Composed(GaussianRelease(5.0), 30),
    Composed(PoissonSampled(GaussianRelease(2.0), 0.1), 30),
    Composed(PoissonSampled(GaussianRelease(2.0), 0.1, participation_hidden=True), 30),
    ProjectedRelease(10, 0.01),
    Composed(ProjectedRelease(1000, 0.001), 30),
    JointProjectedRelease(10, 0.05),
    Composed(JointProjectedRelease(10, 0.05), 3),
    Sequence((GaussianRelease(3.0), Composed(ProjectedRelease(10, 0.01), 2))),
]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(
    "event",
    [NothingReleased(), Composed(GaussianRelease(1.0), 0), Sequence(()), PoissonSampled(GaussianRelease(0.0), 0.0)],
    ids=str,
)
def test_what_does_not_happen_costs_nothing(name: str, event: object) -> None:
    assert bound(name, event, 1e-5) == (0.0, 0.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_clear_is_infinite_wherever_it_hides(name: str) -> None:
    shown = NonPrivate("in the clear")
    for event in (
        shown,
        Composed(shown, 3),
        Sequence((GaussianRelease(1.0), Composed(Sequence((shown,)), 2))),
        GaussianRelease(0),
        Composed(PoissonSampled(GaussianRelease(0), 0.1), 2),
    ):
        assert bound(name, event, 1e-5) == (math.inf, math.inf, math.inf)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_unknown_is_refused_wherever_it_hides(name: str) -> None:
    strange = Unsupported("nothing is known about it")
    for event in (strange, Composed(strange, 2), Sequence((GaussianRelease(1.0), strange))):
        assert bound(name, event, 1e-5) == Refused("nothing is known about it")
    assert isinstance(bound(name, "a string", 1e-5), Refused)  # type: ignore[arg-type]
    assert isinstance(bound(name, Composed(ProjectedRelease(10), 30), 1e-5), Refused)  # no sensitivity, no number


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_an_answer_is_an_ordered_interval_that_holds_the_exact_value(name: str, event: object) -> None:
    answer = bound(name, event, 1e-5)  # type: ignore[arg-type]
    if isinstance(answer, Refused):
        assert answer.reason
        return
    assert 0 <= answer.lower <= answer.estimate <= answer.upper < math.inf
    exact = bound("exact", event, 1e-5)  # type: ignore[arg-type]
    if isinstance(exact, EpsilonInterval):
        assert answer.lower <= exact.upper * (1 + 1e-9)
        assert answer.upper >= exact.lower * (1 - 1e-9)


@pytest.mark.parametrize("name", BOUNDS)
def test_integers_and_floats_agree(name: str) -> None:
    assert bound(name, GaussianRelease(2), 1e-5) == bound(name, GaussianRelease(2.0), 1e-5)
    assert bound(name, Composed(GaussianRelease(2), 9), 1e-5) == bound(name, Composed(GaussianRelease(2.0), 9.0), 1e-5)  # type: ignore[arg-type]
    assert bound(name, ProjectedRelease(10, 1), 1e-5) == bound(name, ProjectedRelease(10.0, 1.0), 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BOUNDS)
def test_more_rounds_less_noise_and_smaller_delta_cost_more(name: str) -> None:
    def epsilon(event: object, delta: float = 1e-5) -> float:
        answer = bound(name, event, delta)  # type: ignore[arg-type]
        return answer.upper if isinstance(answer, EpsilonInterval) else 0.0

    for cheap, dear in [
        (GaussianRelease(3.0), GaussianRelease(2.0)),
        (ProjectedRelease(10, 0.01), ProjectedRelease(10, 0.02)),
        (ProjectedRelease(10, 0.01), ProjectedRelease(20, 0.01)),
        (Composed(ProjectedRelease(10, 0.01), 3), Composed(ProjectedRelease(10, 0.01), 30)),
        (Composed(GaussianRelease(9.0), 3), Composed(GaussianRelease(9.0), 30)),
    ]:
        assert epsilon(cheap) <= epsilon(dear)
        assert epsilon(cheap, 1e-4) <= epsilon(cheap, 1e-6)


@pytest.mark.parametrize("kind", [ProjectedRelease, JointProjectedRelease])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_change_beyond_all_measure_is_refused_by_every_bound(name: str, kind: type[ProjectedRelease]) -> None:
    within = bound(name, kind(10, LARGEST_RATIO), 1e-5)
    assert isinstance(within, EpsilonInterval) or "norm floor" not in within.reason
    for ratio in (1.001 * LARGEST_RATIO, 1e7, 1e200):
        answer = bound(name, kind(10, ratio), 1e-5)
        assert isinstance(answer, Refused)
        assert "times its norm floor, more than 100000 times" in answer.reason
