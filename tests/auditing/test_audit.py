"""The audit: bounds that are not above the truth, and not so far below it that a broken mechanism would pass."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.table import ALGORITHMS
from fedrp.auditing.canary import AuditResult, Fault, Mechanism, _seen, audit
from fedrp.auditing.lower_bounds import audit_bounds, clopper_pearson
from fedrp.cli import main
from fedrp.errors import ConfigError
from fedrp.mechanisms import clip
from fedrp.privacy.events import Adversary, Composed, GaussianRelease, PoissonSampled, ProjectedRelease
from fedrp.privacy.gaussian_mechanism import gaussian_epsilon
from fedrp.privacy.projection_mechanism import exact_epsilon
from fedrp.privacy.sensitivity import clip_to_norm

# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 40), (40, 40), (999, 2000)])
def test_clopper_pearson_is_scipys(successes: int, trials: int) -> None:
    low, high = clopper_pearson(np.array([successes]), trials, 0.01)
    expected = binomtest(successes, trials).proportion_ci(confidence_level=0.98, method="exact")
    assert (low[0], high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def gaussian_scores(rng: np.random.Generator, shift: float, runs: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(shift, 1, runs), rng.normal(0, 1, runs)


def test_on_gaussians_the_bounds_stay_below_the_truth_and_come_near() -> None:
    """mu = 1.5, i.e. epsilon 7.16 at delta 1e-5; 200 audits at confidence 0.9."""
    truth = gaussian_epsilon(1 / 1.5, 1e-5, 1)
    rng = np.random.default_rng(1)
    found = [audit_bounds(*gaussian_scores(rng, 1.5, 1000), 1e-5, 0.9, GaussianRelease(1 / 1.5)) for _ in range(200)]
    above = sum(bounds.epsilon > truth for bounds in found)
    assert above <= 200 * 0.1 + 4 * math.sqrt(200 * 0.1 * 0.9)
    assert np.median([bounds.family.epsilon for bounds in found]) > 0.7 * truth
    assert np.median([bounds.any.epsilon for bounds in found]) > 0.15 * truth
    # The claim of a mechanism with half the noise: the same scores refute a claim of half the distance every time.
    assert min(bounds.family.epsilon for bounds in found) > gaussian_epsilon(1 / 0.75, 1e-5, 1)


@pytest.mark.parametrize(("rows", "ratio"), [(4, 0.5), (200, 0.1)])
def test_on_projections_too(rows: int, ratio: float) -> None:
    truth = exact_epsilon(rows, ratio, 1e-5)
    rng = np.random.default_rng(rows)
    event = ProjectedRelease(rows, ratio)
    found = []
    for _ in range(100):
        inside, outside = (1 + ratio) ** 2 * rng.chisquare(rows, 2000), rng.chisquare(rows, 2000)
        found.append(audit_bounds(inside, outside, 1e-5, 0.9, event).epsilon)
    assert np.mean(np.array(found) > truth) <= 0.1 + 4 * 0.03
    assert np.median(found) > 0.5 * truth


def test_worlds_that_are_alike_prove_nothing() -> None:
    rng = np.random.default_rng(3)
    found = [audit_bounds(*gaussian_scores(rng, 0.0, 400), 1e-5, 0.95, GaussianRelease(1.0)) for _ in range(100)]
    assert sum(bounds.epsilon > 0 for bounds in found) <= 5 + 4 * math.sqrt(5)


def test_worlds_without_overlap_prove_as_much_as_the_number_of_runs_allows() -> None:
    bounds = audit_bounds(np.ones(2000), np.zeros(2000), 1e-5, 0.95)
    limit = 1 - 0.0125 ** (1 / 1000)  # Clopper-Pearson for none of 1,000
    assert bounds.any.epsilon == pytest.approx(math.log((1 - limit - 1e-5) / limit))
    assert bounds.family is None
    swapped = audit_bounds(np.zeros(2000), np.ones(2000), 1e-5, 0.95)  # in either direction
    assert swapped.any.epsilon == pytest.approx(bounds.any.epsilon)


def test_only_the_order_of_scores_matters() -> None:
    inside, outside = gaussian_scores(np.random.default_rng(5), 1.0, 300)
    plain = audit_bounds(inside, outside, 1e-5, 0.9, GaussianRelease(1.0))
    bent = audit_bounds(inside**3, outside**3, 1e-5, 0.9, GaussianRelease(1.0))
    assert bent.epsilon == pytest.approx(plain.epsilon, rel=0.05)  # thresholds lie between scores


def test_the_family_is_read_off_the_claim() -> None:
    scores = gaussian_scores(np.random.default_rng(6), 1.0, 300)
    certain = PoissonSampled(GaussianRelease(1.0), 1.0)
    for event, known in [
        (Composed(certain, 3), True),
        (ProjectedRelease(5, 0.1), True),
        (PoissonSampled(GaussianRelease(1.0), 0.5), False),
        (None, False),
    ]:
        assert (audit_bounds(*scores, 1e-5, 0.9, event).family is not None) == known


@pytest.mark.parametrize("inside", [np.ones(3), np.array([1.0, np.nan, 2.0, 3.0]), np.ones((4, 2))])
def test_scores_that_cannot_be_used_are_refused(inside: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="scores must be finite"):
        audit_bounds(inside, np.ones(9), 1e-5, 0.9)


# --- the deployed mechanisms -----------------------------------------------------------------------------------------


def game(algorithm: str, **changes: object) -> RunConfig:
    return RunConfig(algorithm=algorithm, **{"clients": 2, "rounds": 1, "dim": 6, **changes})


def play(
    config: RunConfig, fault: Fault = Fault.NONE, adversary: Adversary | None = None, runs: int = 120
) -> AuditResult:
    return audit(config, runs, 0.95, fault, adversary, parameters=1000 if config.algorithm == "fedrp" else 20)


NOISY = [
    game("fedavg-dp", dp_epsilon=8.0),
    game("fedavg-dp", dp_epsilon=8.0, dp_noise="local"),
    game("fedavg-dp", dp_epsilon=8.0, clients=3, rounds=2),
    game("fedrp-subspace", dp_epsilon=8.0),
    game("fedrp-subspace", dp_epsilon=8.0, dp_noise="local", projection="sign"),
    game("fedavg-dp", dp_epsilon=8.0, clients=3, secure_aggregation=True),
    game("fedrp-subspace", dp_epsilon=8.0, clients=3, secure_aggregation=True, bits=1.0),
]
BALL = game("fedrp", clients=1, ball=0.02)


def label(config: RunConfig) -> str:
    masked = "-masked" if config.secure_aggregation else ""
    few = f"-{config.bits:g}-bits" if config.bits < 32 else ""
    return f"{config.algorithm}-{config.dp_noise}-{config.clients}-{config.rounds}{masked}{few}"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("config", [*NOISY, BALL], ids=label)
def test_no_mechanism_leaks_more_than_it_claims(config: RunConfig, seed: int) -> None:
    result = play(RunConfig(**{**vars(config), "seed": seed}))
    assert result.claim.epsilon is not None
    assert result.bounds.epsilon <= result.claim.epsilon
    assert not result.violated
    if config in NOISY:  # and the canary is strong enough to tell something
        assert result.bounds.epsilon > 0.2 * result.claim.epsilon


@pytest.mark.parametrize("fault", [Fault.NO_NOISE, Fault.HALF_NOISE, Fault.REUSED_KEY])
@pytest.mark.parametrize("config", [NOISY[0], NOISY[3], NOISY[5], NOISY[6]], ids=label)
def test_a_broken_mechanism_is_caught(config: RunConfig, fault: Fault) -> None:
    result = play(config, fault, runs=240)
    assert result.violated
    assert result.bounds.epsilon > result.claim.epsilon == pytest.approx(8.0)


def test_a_projection_with_a_key_that_is_used_again_is_caught() -> None:
    assert play(BALL, Fault.REUSED_KEY).violated


def test_a_mechanism_that_forgets_to_clip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By so much that the server alone would not notice: beyond that, the sum is none of honest clients."""
    monkeypatch.setattr(clip, "clip_to_norm", lambda update, bound: clip_to_norm(update, 4 * bound))
    assert play(NOISY[0]).violated


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "fedrp-subspace"])
def test_without_a_guarantee_the_worlds_are_told_apart(name: str) -> None:
    result = play(game(name))
    assert result.claim.epsilon is None
    assert result.bounds.any.epsilon > 2.4  # as much as 60 runs a world can show
    assert result.verdict == "nothing is claimed"


def test_the_server_sees_more_than_the_papers_statement_is_about() -> None:
    """Two clients: alone, a vector keeps within the theorem; with both under one matrix, it does not."""
    config = game("fedrp", ball=0.02)
    alone = play(config, adversary=Adversary.ONE_VECTOR)
    joint = play(config, adversary=Adversary.SERVER)
    assert alone.bounds.epsilon <= alone.claim.epsilon
    assert joint.claim.epsilon is None
    assert joint.bounds.any.epsilon > alone.claim.epsilon


def test_with_masks_the_server_is_within_the_claim_for_the_sum() -> None:
    result = play(game("fedrp", clients=3, ball=0.02, secure_aggregation=True))
    assert result.claim.adversary is Adversary.SERVER
    assert result.bounds.epsilon <= result.claim.epsilon


def test_what_is_played_is_the_deployed_upload() -> None:
    """Without noise the canary's upload has the clip's norm inside and none outside, and the mean half of it."""
    config = game("fedavg-dp", noise_multiplier=0.0, clip=2.0, lr=1.0)
    mechanism = Mechanism(ALGORITHMS["fedavg-dp"].resolve(config, 20), 20)
    inside, outside = (mechanism.run(world, 7) for world in (True, False))
    assert np.linalg.norm(inside.uploads[0][0]) == pytest.approx(2.0, rel=1e-5)
    assert np.linalg.norm(inside.aggregates[0]) == pytest.approx(1.0, rel=1e-5)
    assert not outside.uploads[0][0].any()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_who_sees_aggregates_takes_out_what_they_carry_of_earlier_rounds(momentum: float) -> None:
    config = game("fedavg-dp", rounds=4, noise_multiplier=0.0, clip=2.0, lr=1.0, server_momentum=momentum)
    resolved = ALGORITHMS["fedavg-dp"].resolve(config, 20)
    run = Mechanism(resolved, 20).run(True, 7)
    uploaded = np.stack([sum(uploads.values()) for uploads in run.uploads])
    np.testing.assert_allclose(_seen(resolved, Adversary.MODEL_HOLDER, run), uploaded, atol=1e-5)


# --- command line ----------------------------------------------------------------------------------------------------

QUICK = ["audit", "--algorithm=fedavg-dp", "--dp-epsilon=8", "--trials=60"]


def test_the_command_line_tells_claim_bound_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QUICK, "--json"])
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["claimed_epsilon"] == pytest.approx(8.0)
    assert told["lower_bound"] <= 8.0
    assert (told["violated"], told["trials"], told["confidence"]) == (False, 60, 0.95)
    assert "trials 60/60" in captured.err
    main(QUICK)
    assert "verdict                  consistent with the claim" in capsys.readouterr().out


@pytest.fixture
def run_folder(tmp_path: Path, task: Task) -> Path:
    config = RunConfig("fedrp-subspace", clients=4, rounds=3, dim=50, noise_multiplier=1.5, server_momentum=0.5)
    simulate(config, task, out=tmp_path / "run")
    return tmp_path / "run"


def test_the_settings_of_a_run_are_audited(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its claim is the one that the run itself states, against the same adversary."""
    main(["audit", str(run_folder), "--trials=30", "--json"])
    told = json.loads(capsys.readouterr().out)
    stated = json.loads((run_folder / "result.json").read_text())["privacy"]
    (own,) = [item for item in stated if item["adversary"] == told["adversary"]]
    assert told["claimed_epsilon"] == own["epsilon"]
    main(["audit", str(run_folder), "--trials=4", "--rounds=2"])  # options win
    shown = capsys.readouterr().out
    assert f"fedrp-subspace, 4 clients, 2 rounds, noise multiplier 1.5, unmasked (settings of {run_folder})" in shown
    with pytest.raises(SystemExit) as caught:
        main(["audit", str(run_folder), "--trials=60", "--broken=no-noise"])
    assert caught.value.code == 7


def test_a_run_with_a_ball_is_audited(tmp_path: Path, task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    """Its norm floor was that of its own model; a stand-in has another."""
    config = RunConfig("fedrp", clients=1, rounds=1, dim=4, ball=0.05, projection="gaussian")
    simulate(config, task, out=tmp_path / "run")
    main(["audit", str(tmp_path / "run"), "--trials=10", "--parameters=400", "--json"])
    assert json.loads(capsys.readouterr().out)["claimed_epsilon"] is not None


def test_a_target_epsilon_replaces_the_noise_of_the_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", str(run_folder), "--trials=4", "--dp-epsilon=3", "--json"])
    assert json.loads(capsys.readouterr().out)["claimed_epsilon"] == pytest.approx(3.0)


def test_a_violation_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*QUICK, "--broken=no-noise", "--json"])
    captured = capsys.readouterr()
    assert caught.value.code == 7
    assert json.loads(captured.out)["violated"]
    assert "fedrp: the mechanism leaks more than claimed: epsilon is at least" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--broken=no-nose"], "unknown broken 'no-nose', did you mean 'no-noise'?"),
        (["--algorithm=fwc"], "algorithm 'fwc' sends nothing"),
        (["--algorithm=fedavg", "--broken=half-noise"], "adds no noise here"),
        (["--trials=2", "--algorithm=fedavg"], "trials=2 is not valid"),
        (["--algorithm=fedrp", "--clients=1", "--adversary=one-vector"], "says nothing about a server that looks"),
        (["--confidence=2"], "confidence=2.0 is not valid: expected a number between 0 and 1"),
        (["--parameters=-1"], "parameters=-1 is not valid: expected a whole number of at least 1"),
        (["--parameters=0"], "parameters=0 is not valid"),
        (["/nowhere"], "/nowhere is not the folder of a run: it has no readable config.json"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["audit", *options])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1  # no trial was made
