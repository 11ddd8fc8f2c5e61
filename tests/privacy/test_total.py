"""Several runs on the same data: what they are worth together, and releases that are kept as JSON until then."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import method_of
from fedrp.privacy.assumptions import ONE_RUN
from fedrp.privacy.bounds import EpsilonInterval, bound, tightest
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    Event,
    GaussianRelease,
    JointProjectedRelease,
    NonPrivate,
    NothingReleased,
    PoissonSampled,
    ProjectedRelease,
    Release,
    Sequence,
    Unsupported,
)
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.ledger import statements
from fedrp.privacy.records import EVENTS, event_of, event_record, release_of, release_record
from fedrp.privacy.total import ADVERSARIES, ALL_RUNS, total
from helpers import tiny_config

DELTA = 1e-5


def upper(name: str, event: Event, delta: float = DELTA) -> float:
    answer = bound(name, event, delta)
    assert isinstance(answer, EpsilonInterval), answer
    return answer.upper


# --- releases of different kinds -------------------------------------------------------------------------------------


def test_gaussian_releases_of_different_noise_are_one_release() -> None:
    """z = 3 four times and z = 6 sixteen times: sqrt(4/9 + 16/36) = sqrt(8)/3, as z = 3 eight times."""
    together = Sequence((Composed(GaussianRelease(3.0), 4), Composed(GaussianRelease(6.0), 16)))
    assert upper("exact", together) == pytest.approx(gaussian_epsilon(3.0, DELTA, 8), rel=1e-12)
    assert upper("exact", together) * (1 - 1e-9) <= upper("pld", together) <= upper("exact", together) * 1.01


def test_always_taking_part_is_not_sampling() -> None:
    sampled = Composed(PoissonSampled(GaussianRelease(2.0), 1.0, participation_hidden=True), 5)
    for name in ("exact", "renyi", "pld"):
        assert bound(name, sampled, DELTA) == bound(name, Composed(GaussianRelease(2.0), 5), DELTA)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("noise", "rate", "rounds"), [(2.0, 0.1, 60), (1.0, 0.3, 300), (0.5, 0.9, 10), (8.0, 1.0, 9)])
def test_a_split_of_equal_releases_costs_what_they_cost_together(
    noise: float, rate: float, rounds: int, hidden: bool
) -> None:
    """Two kinds that differ in the eighth digit are one kind, whose cost is known."""
    one, other = (PoissonSampled(GaussianRelease(z), rate, hidden) for z in (noise, noise * (1 + 1e-8)))
    split = Sequence((Composed(one, rounds // 3), Composed(other, rounds - rounds // 3)))
    whole = gaussian_epsilon(noise, DELTA, rounds, rate, participation_hidden=hidden)
    assert whole * (1 - 1e-6) <= upper("pld", split) <= whole * 1.01


def test_different_releases_cost_more_than_each_and_less_than_their_sum() -> None:
    amplified = Composed(PoissonSampled(GaussianRelease(1.0), 0.1, participation_hidden=True), 100)
    seen, always = Composed(PoissonSampled(GaussianRelease(2.0), 0.2), 30), Composed(GaussianRelease(4.0), 2)
    for parts in [(amplified, seen), (amplified, always), (seen, always), (amplified, seen, always)]:
        alone = [tightest(part, DELTA, Adversary.CLIENTS)[1].upper for part in parts]
        name, answer = tightest(Sequence(parts), DELTA, Adversary.CLIENTS)
        assert max(alone) < answer.upper < sum(alone), name
        assert name == "pld"


# --- releases as JSON ------------------------------------------------------------------------------------------------

leaf_events = st.one_of(
    st.just(NothingReleased()),
    st.builds(NonPrivate, st.text()),
    st.builds(Unsupported, st.text()),
    st.builds(GaussianRelease, st.floats(0, 1e6)),
    st.builds(PoissonSampled, st.builds(GaussianRelease, st.floats(0, 9)), st.floats(0, 1), st.booleans()),
    st.builds(ProjectedRelease, st.integers(1, 10**6), st.none() | st.floats(0, 10)),
    st.builds(JointProjectedRelease, st.integers(1, 10**6), st.none() | st.floats(0, 10)),
)
all_events = st.recursive(
    leaf_events,
    lambda inner: st.one_of(
        st.builds(Composed, inner, st.integers(0, 10**6)),
        st.lists(inner, max_size=4).map(lambda parts: Sequence(tuple(parts))),
    ),
    max_leaves=8,
)


@given(all_events, st.sampled_from(Adversary), st.sampled_from(Adjacency), st.lists(st.text(), max_size=3))
def test_a_release_that_was_written_as_json_is_the_same_release(
    event: Event, adversary: Adversary, adjacency: Adjacency, assumptions: list[str]
) -> None:
    release = Release(adversary, adjacency, event, tuple(assumptions))
    assert release_of(json.loads(json.dumps(release_record(release)))) == release


def test_every_event_has_a_name_of_its_own() -> None:
    assert set(EVENTS.values()) == set(Event.__args__)
    assert event_record(GaussianRelease(2.0)) == {"kind": "gaussian", "noise_multiplier": 2.0}


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "os.system", "command": "true"},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": -1.0},
        {"kind": "gaussian", "noise_multiplier": 1.0, "more": 2},
        {"kind": "composed", "event": {"kind": "nothing"}, "count": 1.5},
        {"kind": "composed", "event": "nothing", "count": 1},
        {"noise_multiplier": 1.0},
    ],
    ids=str,
)
def test_a_record_of_no_event_is_refused(record: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        event_of(record)


# --- totals ----------------------------------------------------------------------------------------------------------


def released(name: str, /, **changes: object) -> list[Release]:
    config = resolved(tiny_config(name, **changes), 83)
    return list(method_of(config).releases(config))


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda who: who.name)
def test_one_run_is_worth_what_it_states_and_no_runs_cost_nothing(adversary: Adversary) -> None:
    run = released("fedavg-dp", noise_multiplier=4.0, dp_noise="local")
    (stated,) = [item for item in statements(run, DELTA) if item.adversary is adversary]
    alone = total([run], adversary, DELTA)
    assert (alone.epsilon, alone.adjacency) == (pytest.approx(stated.epsilon), stated.adjacency)
    assert ALL_RUNS in alone.assumptions
    assert ONE_RUN not in alone.assumptions
    assert total([], adversary, DELTA).epsilon == 0


def test_runs_add_up_as_rounds_do() -> None:
    run = released("fedavg-dp", noise_multiplier=4.0, dp_noise="local", rounds=3)
    more = released("fedavg-dp", noise_multiplier=8.0, dp_noise="local", rounds=8)
    spent = total([run, run, run], Adversary.SERVER, DELTA).epsilon
    assert spent == pytest.approx(gaussian_epsilon(4.0, DELTA, 9), rel=1e-9)
    assert total([run, more], Adversary.SERVER, DELTA).epsilon == pytest.approx(gaussian_epsilon(4.0, DELTA, 5))


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda who: who.name)
def test_a_run_without_a_guarantee_leaves_none(adversary: Adversary) -> None:
    noisy = released("fedavg-dp", noise_multiplier=4.0, dp_noise="local")
    for plain in (released("fedavg"), released("fedavg", secure_aggregation=True), released("fedrp")):
        answer = total([noisy, plain], adversary, DELTA)
        assert answer.epsilon is None
        assert answer.reason


def test_who_sees_nothing_alone_sees_nothing_together() -> None:
    alone = released("fwc")
    totals = {who: total([alone, alone], who, DELTA).epsilon for who in ADVERSARIES}
    assert totals == {who: None if who is Adversary.MODEL_HOLDER else 0 for who in ADVERSARIES}


def test_statements_about_different_neighbours_are_made_about_the_weaker_ones() -> None:
    """A contribution that is replaced moves a sum twice as far as one that is set to zero."""

    def run(adjacency: Adjacency, event: Event) -> list[Release]:
        return [Release(Adversary.SERVER, adjacency, event)]

    noisy = run(Adjacency.CLIENT_ZEROED, Composed(PoissonSampled(GaussianRelease(6.0), 1.0), 3))
    added = run(Adjacency.CLIENT_ADD_REMOVE, GaussianRelease(6.0))
    record = run(Adjacency.RECORD_REPLACE, ProjectedRelease(10, 1e-3))
    client = run(Adjacency.CLIENT_REPLACE, GaussianRelease(6.0))
    both = total([noisy, added], Adversary.SERVER, DELTA)
    assert (both.adjacency, both.epsilon) == (Adjacency.CLIENT_ZEROED, pytest.approx(gaussian_epsilon(6.0, DELTA, 4)))
    replaced = total([noisy, client], Adversary.SERVER, DELTA)
    assert replaced.adjacency is Adjacency.CLIENT_REPLACE
    assert replaced.epsilon == pytest.approx(gaussian_epsilon(6.0, DELTA, 4 * 3 + 1))  # z / 2 is as z four times
    weaker = total([noisy, record], Adversary.SERVER, DELTA)
    assert weaker.adjacency is Adjacency.RECORD_REPLACE
    assert weaker.epsilon > gaussian_epsilon(3.0, DELTA, 3)
    strange = total([run(Adjacency.CLIENT_ZEROED, ProjectedRelease(10, 1e-3)), record], Adversary.SERVER, DELTA)
    assert strange.epsilon is None


def test_amplification_is_not_claimed_for_a_client_that_is_replaced() -> None:
    hidden = PoissonSampled(GaussianRelease(2.0), 0.1, participation_hidden=True)
    runs = [
        [Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_ADD_REMOVE, hidden)],
        [Release(Adversary.MODEL_HOLDER, Adjacency.CLIENT_REPLACE, Composed(GaussianRelease(50.0), 1))],
    ]
    spent = total(runs, Adversary.MODEL_HOLDER, DELTA).epsilon
    assert spent >= gaussian_epsilon(1.0, DELTA, 1, 0.1)
