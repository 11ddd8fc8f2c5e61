"""What `fedrp privacy` prints: a table, a line to quote per adversary with its bound, what is assumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedrp import RunConfig, Task, simulate
from fedrp.cli import main
from fedrp.privacy.assumptions import SIMULATED
from fedrp.privacy.bounds import BOUNDS, MEANINGS
from fedrp.privacy.events import Adversary
from fedrp.privacy.report import NEIGHBOURS, projection_report
from fedrp.reporting.statements import quote, upwards
from flower_helpers import FlowerFederation
from helpers import tiny_config

REPORT = ["privacy", "--dim=100", "--alpha=0.01", "--rounds=5"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


@pytest.mark.parametrize("noise", [{}, {"dp_epsilon": 4.0}])
def test_a_run_has_a_row_and_a_line_to_quote_per_adversary(
    noise: dict[str, float], task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulate(RunConfig("fedrp-subspace", clients=4, rounds=2, dim=10, **noise), task, out=tmp_path / "run")
    text = shown(capsys, "privacy", str(tmp_path / "run"))
    table, _, quotes = text.partition("to quote:\n")
    for item in result.as_json()["privacy"]:
        assert item["adversary"].split()[-1] in table
        (line,) = [line for line in quotes.splitlines() if line.startswith(f"  against {item['adversary']}:")]
        assert line.strip().startswith(quote(item))
        if item["epsilon"] is None:
            assert "no guarantee" in line
        else:
            assert f"epsilon at most 4 at delta 1e-05 ({item['bound']} bound); neighbours: {item['adjacency']}" in line
            assert f"{item['bound']} bound: {MEANINGS[item['bound']]}" in text
            for assumption in item["assumptions"]:
                assert quotes.count(f"] {assumption}\n") == 1  # once, however many statements rest on it
                mark = next(row.split()[0] for row in quotes.splitlines() if row.endswith(f"] {assumption}"))
                assert mark in line
    assert ("[1]" in text) == bool(noise)
    assert json.loads(shown(capsys, "privacy", str(tmp_path / "run"), "--json")) == result.as_json()["privacy"]


@pytest.mark.parametrize("noise", [{}, {"dp_epsilon": 4.0}, {"dp_unit": "record", "dp_epsilon": 4.0}])
def test_a_simulation_says_that_its_own_secrets_are_public(
    noise: dict[str, Any], task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulate(RunConfig("fedrp-subspace", clients=4, rounds=1, dim=10, **noise), task, out=tmp_path / "run")
    stated = [item for item in result.privacy if item.epsilon]
    assert bool(stated) == bool(noise)
    assert all(SIMULATED in item.assumptions for item in stated)
    assert (SIMULATED in shown(capsys, "privacy", str(tmp_path / "run"))) == bool(noise)


@pytest.mark.parametrize("unit", [{}, {"dp_unit": "record"}])
def test_a_deployment_does_not_say_so(unit: dict[str, str], tmp_path: Path) -> None:
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp", dp_noise="local", **unit))
    run.run()
    told = [text for text in run.status(1)["privacy"] if text.startswith("epsilon")]
    assert told
    assert not any("simulation" in text for text in told)


def test_every_bound_says_what_it_is() -> None:
    assert set(MEANINGS) == set(BOUNDS)


def test_a_projection_is_quoted_for_the_view_that_each_adversary_has(capsys: pytest.CaptureFixture[str]) -> None:
    """With several clients the server sees more than one vector; insiders know the matrix."""

    def stated(*options: str) -> dict[str, float | None]:
        report = json.loads(shown(capsys, *REPORT, *options, "--json"))
        assert {item["adjacency"] for item in report["statements"]} == {NEIGHBOURS}
        return {item["adversary"]: item["epsilon"] for item in report["statements"]}

    plain, joint = stated(), stated("--distance=0.5")
    summed, single = stated("--secure-aggregation", "--clients=10"), stated("--clients=1")
    one, server = Adversary.ONE_VECTOR.value, Adversary.SERVER.value
    report = projection_report(100, alpha=0.01, rounds=5, delta=1e-5, distance=0.5)
    assert plain[one] == min(value for value in report.composed.values() if value and value >= (plain[one] or 0))
    assert plain[server] is None
    assert single[server] == plain[one]
    assert joint[server] == report.joint_composed
    assert (summed[server] or 0) < (plain[one] or 0) < (joint[server] or 0)
    for adversary in (Adversary.SERVER_AND_CLIENT, Adversary.CLIENTS, Adversary.MODEL_HOLDER):
        assert {found[adversary.value] for found in (plain, joint, summed, single)} == {None}


def test_the_bounds_of_a_projection_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *REPORT)
    report = projection_report(100, alpha=0.01, rounds=5, delta=1e-5)
    rows = {line.split()[0]: line.split()[1:] for line in text.partition("against")[0].splitlines() if line.strip()}
    assert report.paper_epsilon is not None
    assert report.composed["basic"] is not None
    assert rows["paper"][0] == upwards(report.paper_epsilon)
    assert rows["basic"][0] == upwards(report.composed["basic"])
    assert "5 rounds" in text
    assert (
        "rounds" not in shown(capsys, "privacy", "--dim=100", "--alpha=0.01").partition("against")[0].split("what")[0]
    )


@pytest.mark.parametrize(
    ("epsilon", "told"),
    [(0.0, "0"), (9.999999999999998, "10"), (13.041, "13.1"), (0.10201, "0.103"), (34.5, "34.5"), (1234.0, "1.24e+03")],
)
def test_an_upper_bound_is_not_rounded_down(epsilon: float, told: str) -> None:
    assert upwards(epsilon) == told
    assert float(upwards(epsilon)) >= epsilon * (1 - 1e-8)
