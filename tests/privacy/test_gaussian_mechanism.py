"""The Gaussian mechanism over rounds, and the noise that clients add."""

import json
import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.errors import ConfigError
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier, gaussian_delta, gaussian_epsilon
from fedrp.privacy.noise import noise_share, rounding_delta, update_noise_multiplier

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "privacy.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["gaussian_delta"][1:], ids=str)
def test_delta_matches_60_digit_arithmetic(vector: list) -> None:
    epsilon, separation, delta = (float(value) for value in vector)
    assert float(gaussian_delta(epsilon, separation)) == pytest.approx(delta, rel=1e-8)


@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("rounds", [1, 30, 1000])
def test_full_participation_matches_dp_accounting(noise: float, rounds: int) -> None:
    expected = dp_accounting.get_epsilon_gaussian(noise / math.sqrt(rounds), 1e-5)
    assert gaussian_epsilon(noise, 1e-5, rounds) == pytest.approx(expected, rel=1e-6)
    assert gaussian_epsilon(noise, 1e-5, rounds, 1.0, participation_hidden=True) == gaussian_epsilon(
        noise, 1e-5, rounds
    )


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(1.0, 0.1, 30), (0.7, 0.5, 10), (4.0, 0.01, 1000)])
def test_amplification_matches_the_accountant_of_dp_accounting(noise: float, rate: float, rounds: int) -> None:
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3 if rounds < 100 else 1e-4)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, rounds)
    hidden = gaussian_epsilon(noise, 1e-5, rounds, rate, participation_hidden=True)
    assert hidden == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert hidden < gaussian_epsilon(noise, 1e-5, rounds, rate)


def test_visible_participation_is_the_binomial_mixture() -> None:
    """Simulate coins and Gaussian outputs of a client that is seen to take part; 4 deviations either way."""
    noise, rate, rounds, draws = 1.5, 0.3, 10, 200_000
    epsilon = gaussian_epsilon(noise, 0.02, rounds, rate)
    rng = np.random.default_rng(3)
    taken = rng.random((draws, rounds)) < rate
    outputs = taken + noise * rng.normal(size=(draws, rounds))  # the client contributes 1 along one direction
    losses = (taken * (2 * outputs - 1) / (2 * noise**2)).sum(axis=1)
    excess = np.maximum(0.0, 1 - np.exp(epsilon - losses))
    error = excess.std() / math.sqrt(draws)
    assert abs(excess.mean() - 0.02) < 4 * error
    unamplified = np.maximum(0.0, 1 - np.exp(gaussian_epsilon(noise, 0.02, rounds, rate * 1.1) - losses))
    assert abs(unamplified.mean() - 0.02) > 4 * error


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-2, 3).map(lambda power: 10**power),
    st.floats(-12, -1).map(lambda power: 10**power),
    st.integers(1, 500),
    st.floats(0.01, 1),
)
def test_calibration_inverts_epsilon(epsilon: float, delta: float, rounds: int, rate: float) -> None:
    noise = calibrate_noise_multiplier(epsilon, delta, rounds, rate)
    spent = gaussian_epsilon(noise, delta, rounds, rate)
    assert spent <= epsilon
    assert gaussian_epsilon(noise * 0.999, delta, rounds, rate) > epsilon or noise < 1e-3
    assert gaussian_epsilon(noise * 1.1, delta, rounds, rate) <= spent
    assert gaussian_epsilon(noise, delta, rounds + 1, rate) >= spent
    assert gaussian_epsilon(noise, delta, rounds, min(1.0, rate * 1.1)) >= spent * (1 - 1e-9)


@pytest.mark.parametrize(("epsilon", "rounds", "rate"), [(10.0, 30, 0.1), (1.0, 100, 0.5)])
def test_calibration_with_amplification(epsilon: float, rounds: int, rate: float) -> None:
    noise = calibrate_noise_multiplier(epsilon, 1e-5, rounds, rate, participation_hidden=True)
    spent = gaussian_epsilon(noise, 1e-5, rounds, rate, participation_hidden=True)
    assert 0.995 * epsilon < spent <= epsilon
    assert noise < calibrate_noise_multiplier(epsilon, 1e-5, rounds, rate)


def test_edge_cases() -> None:
    assert gaussian_epsilon(0, 1e-5, 1) == math.inf
    assert gaussian_epsilon(0, 1e-5, 0) == 0.0
    assert gaussian_epsilon(0, 1e-5, 5, 0) == 0.0
    assert gaussian_epsilon(1e9, 1e-5, 1) == 0.0
    assert calibrate_noise_multiplier(1.0, 1e-5, 0) == 0.0
    assert gaussian_epsilon(1, 1e-5, 30) == gaussian_epsilon(1.0, 1e-5, 30, 1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: gaussian_epsilon(-1.0, 1e-5, 1), "noise_multiplier=-1.0"),
        (lambda: gaussian_epsilon(1.0, 2.0, 1), "delta=2.0"),
        (lambda: gaussian_epsilon(1.0, 1e-5, -1), "rounds=-1"),
        (lambda: gaussian_epsilon(1.0, 1e-5, 1, 1.5), "sampling_rate=1.5"),
        (lambda: calibrate_noise_multiplier(0.0, 1e-5, 1), "epsilon=0.0"),
        (lambda: gaussian_epsilon(1.0, 1e-13, 1, 0.5, participation_hidden=True), "delta=1e-13"),
        (lambda: noise_share(1.0, 3, 4), "minimum_clients=4"),
        (lambda: noise_share(1.0, 3, 2, 2), "colluding_clients=2"),
        (lambda: update_noise_multiplier(2.0, 1.0), "count_std=1.0"),
        (lambda: rounding_delta(0.5, 1.0, 3, 10, 1, 1.0), "share_std=0.5"),
    ],
)
def test_bad_values_are_named_in_one_line(call: object, named: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        call()  # type: ignore[operator]
    assert named in str(caught.value)


@given(st.floats(1e-9, 100), st.integers(1, 500), st.integers(0, 400), st.integers(0, 50))
def test_shares_add_up_to_the_noise_when_only_the_minimum_arrives(
    std: float, minimum: int, spare: int, colluding: int
) -> None:
    colluding = min(colluding, minimum - 1)
    share = noise_share(std, minimum + spare, minimum, colluding)
    assert share.per_client * math.sqrt(minimum - colluding) == pytest.approx(std)
    assert share.guaranteed == std
    assert share.expected >= std * (1 - 1e-12)


def test_one_expected_client_is_the_local_model() -> None:
    assert noise_share(2.0, 1, 1) == (2.0, 2.0, 2.0)


def test_adaptive_clipping_costs_what_two_gaussian_releases_cost() -> None:
    update = update_noise_multiplier(1.0, 5.0)
    assert update == pytest.approx((1 - (1 / 10) ** 2) ** -0.5)
    assert 1 / update**2 + 1 / (2 * 5.0) ** 2 == pytest.approx(1.0)
    assert update_noise_multiplier(0, 5.0) == 0.0


def _rounded_sum(deviation: float, means: list[float], reach: int) -> np.ndarray:
    """Probabilities of sum_i round(N(mean_i, deviation^2)) on -reach..reach."""
    grid = np.arange(-reach, reach + 1)
    total = (grid == 0).astype(float)
    for mean in means:
        one = 0.5 * np.array([math.erf((x + 0.5 - mean) / deviation / 2**0.5) for x in grid])
        one -= 0.5 * np.array([math.erf((x - 0.5 - mean) / deviation / 2**0.5) for x in grid])
        total = np.convolve(total, one, mode="same")
    return total


def _smeared_sum(deviation: float, means: list[float], reach: int) -> np.ndarray:
    """The same for a function of the unrounded sum: a lattice point s is drawn with probability B(s - sum)."""
    clients = len(means)
    fine = 200  # steps per grid cell
    offsets = (np.arange(-reach * fine, reach * fine + 1)) / fine
    box = np.where(np.abs(offsets) < 0.5, 1.0, np.where(np.abs(offsets) == 0.5, 0.5, 0.0))
    spline = box
    for _ in range(clients - 1):
        spline = np.convolve(spline, box, mode="same") / fine
    variance = clients * deviation**2
    density = np.exp(-((offsets - sum(means)) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    smeared = np.convolve(spline, density, mode="same") / fine
    return smeared[::fine]


@pytest.mark.parametrize("means", [[0.3, 0.1], [0.5, 0.25, -0.4], [0.5, 0.5, 0.5]])
def test_rounding_each_share_is_close_to_a_function_of_the_sum(means: list[float]) -> None:
    for deviation, resolved in ((0.3, True), (0.5, True), (1.0, False)):
        actual = _rounded_sum(deviation, means, 24)
        ideal = _smeared_sum(deviation, means, 24)
        assert actual.sum() == pytest.approx(1, abs=1e-9)
        assert ideal.sum() == pytest.approx(1, abs=1e-6)  # the kernel is one: splines are a partition of unity
        distance = np.abs(actual - ideal).sum() / 2
        if resolved:  # the gap is real where the noise is finer than the grid
            assert distance > 1e-4
        else:
            assert distance <= rounding_delta(deviation, 1.0, len(means), 1, 1, 0.0) / 2
            assert distance < 1e-3


def test_rounding_costs_nothing_at_practical_resolutions() -> None:
    assert rounding_delta(6.0, 1.0, 1000, 1000, 1000, 0.0) < 1e-60
    assert rounding_delta(1e-3, 2**-16, 100, 10_000, 100, 10.0) == 0.0
    assert rounding_delta(0.1, 1.0, 1, 1000, 30, 1.0) == 0.0  # post-processing
    values = [rounding_delta(t, 1.0, 10, 100, 1, 1.0) for t in (1.0, 2.0, 3.0, 4.0)]
    assert values == sorted(values, reverse=True)
