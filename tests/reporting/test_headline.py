"""What a one-line result says of privacy: the worst that holds, or nothing; and warnings in words."""

import dataclasses

import pytest

from fedrp import Task, simulate
from fedrp.privacy.events import Adjacency, Adversary
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import delta_warnings, headline
from fedrp.reporting.report import privacy_lines
from helpers import tiny_config

REAL = [adversary for adversary in Adversary if adversary.real]


def statement(
    epsilon: float | None, adversary: Adversary = Adversary.SERVER, delta: float = 1e-5, record: bool = False
) -> Guarantee:
    adjacency = Adjacency.RECORD_REPLACE if record else Adjacency.CLIENT_ZEROED
    return Guarantee(epsilon, delta, "pld", adversary, adjacency, (), None if epsilon is not None else "no noise")


def test_the_largest_epsilon_is_quoted() -> None:
    ledger = [statement(epsilon, adversary) for epsilon, adversary in zip([1.0, 7.0, 0.0, 3.0], REAL, strict=True)]
    assert headline(ledger) == ledger[1]


@pytest.mark.parametrize("without", REAL)
def test_nothing_is_quoted_if_one_adversary_has_no_guarantee(without: Adversary) -> None:
    assert headline([statement(None if adversary is without else 1.0, adversary) for adversary in REAL]) is None


def test_what_holds_for_one_vector_alone_neither_helps_nor_harms() -> None:
    ledger = [statement(2.0, adversary) for adversary in REAL]
    for epsilon in (None, 0.5, 9.0):
        assert headline([statement(epsilon, Adversary.ONE_VECTOR), *ledger]) == ledger[0]


def test_an_empty_ledger_quotes_nothing() -> None:
    assert headline([]) is None


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({}, False),  # against the server there is no guarantee: it sees single shares of the noise
        ({"secure_aggregation": True}, True),
        ({"dp_noise": "local"}, True),
    ],
)
def test_a_run_quotes_an_epsilon_only_if_it_holds_against_everyone(
    changes: dict[str, object], quoted: bool, task: Task
) -> None:
    result = simulate(tiny_config("fedavg-dp", **changes), task).as_json()
    epsilons = [item["epsilon"] for item in result["privacy"]]
    assert result["epsilon"] == (max(epsilons) if quoted else None)
    assert (result["adversary"] is not None) == quoted


def test_where_coins_hide_participation_the_weaker_epsilon_is_quoted(task: Task) -> None:
    """Against whoever gets the model it is amplified; against the others it is not."""
    hidden = {"clients": 20, "participation": 0.9, "sampling": "poisson", "secure_aggregation": True}
    result = simulate(tiny_config("fedavg-dp", rounds=1, **hidden), task).as_json()
    epsilons = {item["adversary"]: item["epsilon"] for item in result["privacy"]}
    assert result["epsilon"] == max(epsilons.values()) > epsilons[Adversary.MODEL_HOLDER.value]


# --- a delta that promises little ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "record", "told"),
    [(0.01, False, None), (0.011, False, "100 clients"), (0.0011, False, None), (0.0011, True, "1000 records")],
)
def test_a_delta_above_one_by_their_number_is_warned_of(delta: float, record: bool, told: str | None) -> None:
    ledger = [statement(1.0, adversary, delta, record) for adversary in REAL]
    warnings = delta_warnings(ledger, clients=100, records=1000)
    assert len(warnings) == (1 if told else 0)  # once, however many statements have it
    assert all(f"there are {told}" in text and f"delta {delta:g} is above 1/" in text for text in warnings)


@pytest.mark.parametrize("epsilon", [None, 0.0])
def test_where_nothing_is_promised_or_released_delta_does_not_matter(epsilon: float | None) -> None:
    assert delta_warnings([statement(epsilon, delta=0.5)], clients=100, records=1000) == ()


def test_the_warning_is_in_the_result_and_below_the_table(task: Task) -> None:
    config = tiny_config("fedavg-dp", secure_aggregation=True)
    assert simulate(config, task).as_json()["warnings"] == []
    result = simulate(dataclasses.replace(config, dp_delta=0.3), task).as_json()
    (text,) = result["warnings"]
    assert text.startswith("delta 0.3 is above 1/4, and there are 4 clients: ")
    assert privacy_lines(result)[-1] == f"warning: {text}"
