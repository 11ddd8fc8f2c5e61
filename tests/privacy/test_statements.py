"""Statements and reports made from bounds, and noise calibrated to them."""

import json
import math
from pathlib import Path

import pytest

from fedrp.errors import ConfigError
from fedrp.privacy import assumptions
from fedrp.privacy.bounds import BOUNDS, Refused, bound, tightest
from fedrp.privacy.calibration import calibrate, calibrate_ratio, composed_projection_epsilon
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    GaussianRelease,
    JointProjectedRelease,
    NonPrivate,
    NothingReleased,
    PoissonSampled,
    ProjectedRelease,
    Sequence,
    Unsupported,
    leaves,
)
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.guarantee import guarantee
from fedrp.privacy.projection_mechanism import exact_epsilon
from fedrp.privacy.report import projection_report


def test_nesting_does_not_matter() -> None:
    flat = Composed(GaussianRelease(4.0), 6)
    nested = Composed(Sequence((Composed(GaussianRelease(4.0), 2), GaussianRelease(4.0))), 2)
    assert list(leaves(Composed(Composed(GaussianRelease(4.0), 2), 3))) == [(GaussianRelease(4.0), 6)]
    for name in BOUNDS:
        assert bound(name, flat, 1e-5) == bound(name, nested, 1e-5)


def test_the_exact_bound_of_gaussian_rounds() -> None:
    event = Composed(PoissonSampled(GaussianRelease(2.0), 0.1), 30)
    assert bound("exact", event, 1e-5).upper == gaussian_epsilon(2.0, 1e-5, 30, 0.1)  # type: ignore[union-attr]
    hidden = Composed(PoissonSampled(GaussianRelease(2.0), 0.1, participation_hidden=True), 30)
    answer = tightest(hidden, 1e-5, Adversary.MODEL_HOLDER)
    assert not isinstance(answer, Refused)
    assert answer[0] == "pld"
    assert answer[1].upper == pytest.approx(gaussian_epsilon(2.0, 1e-5, 30, 0.1, participation_hidden=True))


def test_tiny_deltas_leave_the_loss_distribution_and_keep_the_rest() -> None:
    event = Composed(ProjectedRelease(1000, 0.001), 30)
    assert isinstance(bound("pld", event, 1e-20), Refused)
    answer = tightest(event, 1e-20, Adversary.SERVER)
    assert not isinstance(answer, Refused)
    assert answer[0] == "renyi"


def test_an_unknown_bound_is_named() -> None:
    with pytest.raises(ConfigError, match="bound='guess'"):
        bound("guess", NothingReleased(), 1e-5)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: GaussianRelease(-1.0), "noise_multiplier=-1.0"),
        (lambda: PoissonSampled(GaussianRelease(1.0), 2.0), "rate=2.0"),
        (lambda: PoissonSampled(ProjectedRelease(1), 0.5), "event=ProjectedRelease"),  # type: ignore[arg-type]
        (lambda: ProjectedRelease(0), "rows=0"),
        (lambda: ProjectedRelease(5, math.inf), "ratio=inf"),
        (lambda: Composed(NothingReleased(), -1), "count=-1"),
        (lambda: Composed(NothingReleased(), True), "count=True"),
    ],
)
def test_an_event_checks_its_numbers(call: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()  # type: ignore[operator]
    assert named in str(caught.value)


def test_a_projection_hides_nothing_from_those_who_may_know_the_matrix() -> None:
    event = Sequence((GaussianRelease(1.0), ProjectedRelease(10, 0.01)))
    for adversary in Adversary:
        statement = guarantee(event, 1e-5, adversary, Adjacency.RECORD_REPLACE)
        assert (statement.epsilon is None) == (adversary not in (Adversary.SERVER, Adversary.ONE_VECTOR))


@pytest.mark.parametrize(
    "event",
    [NonPrivate("in the clear"), Unsupported("never analysed"), ProjectedRelease(10), GaussianRelease(0)],
    ids=str,
)
def test_without_a_bound_there_is_no_number(event: object) -> None:
    statement = guarantee(event, 1e-5, Adversary.SERVER, Adjacency.CLIENT_ADD_REMOVE)  # type: ignore[arg-type]
    assert statement.epsilon is None
    assert str(statement).startswith("no guarantee against the server alone")
    assert statement.reason in str(statement)
    assert json.loads(json.dumps(statement.as_json()))["epsilon"] is None


def test_a_statement_names_adversary_neighbours_and_all_assumptions() -> None:
    event = Composed(JointProjectedRelease(10, 0.01), 3)
    statement = guarantee(event, 1e-5, Adversary.SERVER, Adjacency.RECORD_REPLACE, ("the moon is up",))
    assert statement.assumptions == (
        "the moon is up",
        assumptions.KEY_SECRECY,
        assumptions.RATIO,
        assumptions.HISTORIES,
        assumptions.OTHERS_FIXED,
        assumptions.ONE_RUN,
    )
    for text in (*statement.assumptions, Adversary.SERVER.value, Adjacency.RECORD_REPLACE.value, "delta 1e-05"):
        assert text in str(statement)
    hidden = PoissonSampled(GaussianRelease(1.0), 0.5, participation_hidden=True)
    assumed = (assumptions.SENSITIVITY, assumptions.COINS, assumptions.HIDDEN, assumptions.ONE_RUN)
    assert assumptions.implied_assumptions(hidden) == assumed
    assert assumptions.implied_assumptions(NothingReleased()) == ()


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "rows"), [(1.0, 1e-5, 30, 1000), (0.1, 1e-6, 1, 1), (5.0, 1e-20, 4, 50)]
)
def test_calibrate_inverts_the_composition(epsilon: float, delta: float, rounds: int, rows: int) -> None:
    allowed = calibrate(epsilon, delta, rounds, rows)
    spent = composed_projection_epsilon(rows, allowed.ratio, delta, rounds)
    assert 0.999 * epsilon < spent <= epsilon
    assert composed_projection_epsilon(rows, allowed.ratio * 1.001, delta, rounds) > epsilon
    assert gaussian_epsilon(allowed.noise_multiplier, delta, rounds) == pytest.approx(epsilon, rel=1e-6)
    assert calibrate_ratio(epsilon / 2, delta, rounds, rows) < allowed.ratio


def test_the_report_of_all_views() -> None:
    report = projection_report(
        1000, sensitivity=0.02, norm_min=20.0, delta=1e-5, rounds=30, clients=10, distance=2.0, secure_aggregation=True
    )
    values = json.loads(json.dumps(report.as_json()))
    assert values["alpha"] == pytest.approx(0.001)
    assert values["paper_epsilon"] == pytest.approx(1.23947, abs=1e-5)
    assert values["exact_epsilon"] == pytest.approx(0.14902, abs=1e-5)
    assert values["exact_epsilon"] <= values["pld_epsilon"] <= values["renyi_epsilon"] <= values["paper_epsilon"]
    assert set(values["composed"]) == {"basic", "advanced", "renyi", "pld", "pld_lower"}
    composed = values["composed"]
    assert composed["pld_lower"] <= composed["pld"] <= composed["renyi"] <= composed["basic"]
    assert values["joint_epsilon"] == pytest.approx(exact_epsilon(1000, 0.01, 1e-5))
    assert values["secagg_epsilon"] == pytest.approx(exact_epsilon(1000, 0.0001, 1e-5))
    assert values["joint_composed"] > values["joint_epsilon"]
    assert assumptions.OTHERS_FIXED in values["assumptions"]


def test_the_report_in_units_of_the_norm_floor() -> None:
    plain = projection_report(10, alpha=0.01, delta=1e-5)
    assert plain.joint_epsilon is None
    assert plain.secagg_epsilon is None
    assert plain.composed["basic"] == plain.exact_epsilon
    scaled = projection_report(10, alpha=0.01, delta=1e-5, distance=0.5)
    assert scaled.joint_epsilon == pytest.approx(exact_epsilon(10, 0.02, 1e-5))
    given = projection_report(10, sensitivity=1, norm_min=100, delta=1e-5, secure_aggregation=True, sum_norm=1000)
    assert given.exact_epsilon == plain.exact_epsilon
    assert given.secagg_epsilon == exact_epsilon(10, 0.001, 1e-5)


def test_a_report_without_loss_distribution_at_tiny_delta() -> None:
    report = projection_report(10, alpha=0.01, delta=1e-20, rounds=2)
    assert report.pld_epsilon is None
    assert report.composed["pld"] is None
    assert report.composed["renyi"] is not None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"alpha": 0.1, "sensitivity": 1.0, "norm_min": 1.0},
        {"sensitivity": 1.0},
        {"sensitivity": 1.0, "norm_min": 0.0},
        {"alpha": 0.1, "secure_aggregation": True},
        {"alpha": 0.1, "distance": 0.0},
        {"alpha": 0.1, "rounds": 0},
    ],
)
def test_the_report_refuses_half_a_question(settings: dict) -> None:
    with pytest.raises(ConfigError):
        projection_report(10, delta=1e-5, **settings)


def test_the_tables_of_the_documentation_are_what_the_code_computes() -> None:
    """Three lines of each table; `python benchmarks/privacy_tables.py` writes all of them."""
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    tables = [part for part in text.split("<!-- tables: begin -->")[1].split("\n\n") if part.startswith("| m |")]
    lines = [{cells[0]: cells[1:] for cells in map(_cells, table.splitlines()[2:])} for table in tables]
    assert [list(table) for table in lines] == [["1", "10", "100", "1,000", "10,000"]] * 3
    for rows in (1, 1000, 10_000):
        one, many, allowed = (table[f"{rows:,}"] for table in lines)
        report = projection_report(rows, alpha=0.001, delta=1e-5, rounds=30)
        assert one[:4] == _shown(report.paper_epsilon, report.exact_epsilon, report.renyi_epsilon, report.pld_epsilon)
        assert one[4:] == _shown(exact_epsilon(rows, 0.01, 1e-5), exact_epsilon(rows, 0.0001, 1e-5))
        assert many[:5] == _shown(*(report.composed[n] for n in ("basic", "advanced", "renyi", "pld_lower", "pld")))
        assert allowed[1] == _shown(calibrate_ratio(1.0, 1e-5, 30, rows))[0]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _shown(*values: float | None) -> list[str]:
    return [f"{value:.4g}" for value in values]


@pytest.mark.parametrize(
    "lengths",
    [{"alpha": 1e7}, {"alpha": 1e200}, {"sensitivity": 1.0, "norm_min": 1e-9}, {"alpha": 1, "distance": 1e-9}],
)
def test_a_report_on_a_change_beyond_all_measure_is_refused_in_one_line(lengths: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="times its norm floor, more than 100000 times: give a smaller sensitivity"):
        projection_report(10, delta=1e-5, **lengths)
