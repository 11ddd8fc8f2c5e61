"""The page for ethics boards says what the code says: its odds, its quoted words, its line to quote."""

import math
import re

import pytest

from fedrp.privacy.events import Adjacency, Adversary
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier, gaussian_epsilon
from fedrp.reporting.statements import quote
from helpers import ROOT

PAGE = (ROOT / "docs" / "ethics-board.md").read_text()


def test_the_odds_are_those_of_epsilon() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.,]+) \| (\d+) in 100 \| ([\d.]+) in 100 \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "3", "8"]
    for epsilon, factor, rare, even in rows:
        grown = math.exp(float(epsilon))
        assert float(factor.replace(",", "")) == pytest.approx(grown, rel=0.01)
        assert float(rare) == pytest.approx(100 * grown / (grown + 99), abs=0.5)
        assert float(even) == pytest.approx(100 * grown / (grown + 1), abs=0.5)


def test_every_onlooker_and_every_neighbour_is_explained_in_its_printed_words() -> None:
    quoted = set(re.findall(r'^\|.*?"([^"]+)"', PAGE, re.MULTILINE))
    assert quoted == {a.value for a in Adversary if a.real} | {a.value for a in Adjacency}


def test_the_line_to_quote_is_one_that_is_printed() -> None:
    line = " ".join(re.findall(r"^> (.*)$", PAGE, re.MULTILINE))
    item = {
        "epsilon": 3.0,
        "delta": 1e-5,
        "bound": "exact",
        "adversary": Adversary.MODEL_HOLDER.value,
        "adjacency": Adjacency.CLIENT_ZEROED.value,
    }
    assert line == quote(item)


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_a_question_about_a_part_of_a_client_costs_at_most_twice(epsilon: float) -> None:
    """Two messages of a client differ by twice the clip. At the delta that two steps allow, epsilon doubles at most."""
    noise = calibrate_noise_multiplier(epsilon, 1e-5, 10)
    assert gaussian_epsilon(noise / 2, 1e-5 * (1 + math.exp(epsilon)), 10) <= 2 * epsilon
    assert f"delta explained below becomes {1 + math.exp(3):.0f} times as large" in PAGE.replace("\n", " ")
