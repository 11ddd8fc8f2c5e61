"""The audit of record-level noise: what is intact passes, what is broken is caught."""

import json

import numpy as np
import pytest

from fedrp.auditing.examples import audit_example
from fedrp.auditing.records import RecordAudit, RecordFault, audit_records, coins_p_value, guessed_epsilon
from fedrp.cli import main
from fedrp.errors import ConfigError
from fedrp.records.steps import LocalSteps

ALL = LocalSteps(12, 12, 1, 1)  # every record in every batch
FEW = LocalSteps(8, 2, 1, 1)  # a quarter of them


def audited(
    steps: LocalSteps, fault: RecordFault, trials: int = 160, canaries: int = 8, epsilon: float = 4.0
) -> RecordAudit:
    return audit_records(steps, steps.noise_for(epsilon, 1e-5), 1e-5, trials, canaries, fault=fault)


@pytest.mark.parametrize("steps", [ALL, FEW, LocalSteps(6, 3, 1, 2)])
def test_what_is_intact_is_not_refuted(steps: LocalSteps) -> None:
    found = audited(steps, RecordFault.NONE, trials=60, canaries=6)
    assert not found.violated
    assert found.lower_bound <= found.claimed == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        (ALL, RecordFault.NO_NOISE),
        (ALL, RecordFault.HALF_NOISE),
        (ALL, RecordFault.NO_CLIP),
        (FEW, RecordFault.NO_CLIP),
        (FEW, RecordFault.WRONG_RATE),
        (ALL, RecordFault.BATCH_CLIP),
    ],
)
def test_what_is_broken_is_caught(steps: LocalSteps, fault: RecordFault) -> None:
    assert audited(steps, fault).violated


@pytest.mark.parametrize("fault", [RecordFault.NO_NOISE, RecordFault.NO_CLIP])
def test_one_run_with_many_canaries_is_enough(fault: RecordFault) -> None:
    steps = LocalSteps(600, 600, 1, 1)
    intact, broken = (audited(steps, kind, 4, 600, epsilon=2.0) for kind in (RecordFault.NONE, fault))
    assert intact.one_run <= intact.claimed
    assert broken.one_run > broken.claimed


def test_guesses_that_are_no_better_than_chance_prove_nothing() -> None:
    rng = np.random.default_rng(0)
    assert guessed_epsilon(rng.normal(size=400), rng.random(400) < 0.5, 1e-5, 0.95) == 0.0


def test_many_right_guesses_are_rare_with_a_small_epsilon() -> None:
    """Without delta it is the tail of a binomial: 2^-20 for 20 right guesses at epsilon 0."""
    assert coins_p_value(20, 20, 20, 0.0, 0.0) == pytest.approx(2.0**-20)
    values = [coins_p_value(100, 100, 80, epsilon, 1e-5) for epsilon in (0.0, 0.5, 1.0, 2.0)]
    assert values == sorted(values)
    assert coins_p_value(100, 100, 80, 0.5, 1e-3) > coins_p_value(100, 100, 80, 0.5, 1e-6)


# --- an example that does not belong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "trials"), [(ALL, 60), (FEW, 12)])
def test_an_image_that_does_not_belong_does_not_refute_what_is_intact(steps: LocalSteps, trials: int) -> None:
    found = audit_example(steps, steps.noise_for(4.0, 1e-5), 1e-5, trials)
    assert not found.violated
    assert set(found.games) == {"example"}
    assert found.lower_bound <= found.claimed == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("fault", "trials"), [(RecordFault.NO_NOISE, 40), (RecordFault.HALF_NOISE, 60)])
def test_an_image_that_does_not_belong_shows_that_noise_is_missing(fault: RecordFault, trials: int) -> None:
    assert audit_example(ALL, ALL.noise_for(4.0, 1e-5), 1e-5, trials, fault=fault).violated


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("audit --canary=example", "--canary is for a site's own noise"),
        ("audit --records=5", "--records is for a site's own noise"),
        ("audit --dp-unit=record --dp-noise=shared --canaries=5", "--canaries is for a site's own noise"),
        ("audit --dp-unit=record --canary=example --canaries=3", "--canaries is for --canary gradient"),
        ("audit --dp-unit=record --noise-multiplier=0", "noise_multiplier=0.0 is not valid"),
        ("privacy --records=6000 --dp-epsilon=0", "dp_epsilon=0.0 is not valid"),
    ],
)
def test_what_would_do_nothing_is_refused(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert capsys.readouterr().err.startswith(f"fedrp: {told}")


@pytest.mark.parametrize("canary", ["gradient", "example"])
def test_the_command_plays_with_either_canary(canary: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dp-unit=record", "--records=3", "--batch-size=3", "--noise-multiplier=2", "--trials=4"]
    main(["audit", *options, f"--canary={canary}", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ("lower_bound_example" in told) == (canary == "example")
    assert not told["violated"]


def test_more_records_than_there_are_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="records=70000 is not valid"):
        audit_example(LocalSteps(70_000, 70_000, 1, 1), 1.0, 1e-5, 4)
