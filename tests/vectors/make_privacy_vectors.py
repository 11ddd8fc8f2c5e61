"""Reference values for the privacy bounds, by mpmath with 60 decimal digits: writes privacy.json beside this file.

Every value comes from the textbook formula (a difference of two tail probabilities), which is useless in double
precision and fine with 60 digits; nothing of fedrp is imported. Run: python tests/vectors/make_privacy_vectors.py
"""

import json
from pathlib import Path

import mpmath as mp

mp.mp.dps = 60


def tail(rows, value, upper):
    """A tail of chi-square with `rows` degrees of freedom; by integrating the chi density where series are slow."""
    half, value = mp.mpf(rows) / 2, mp.mpf(value)
    if rows <= 20_000:
        low, high = (value / 2, mp.inf) if upper else (0, value / 2)
        return mp.gammainc(half, low, high, regularized=True)
    constant = (1 - half) * mp.log(2) - mp.loggamma(half)

    def density(s):
        return mp.exp((rows - 1) * mp.log(s) - s * s / 2 + constant)

    edge, root = mp.sqrt(value), mp.sqrt(rows)
    start, end = (max(edge, root - 30), max(edge, root) + 30) if upper else (root - 30, min(edge, root + 30))
    return mp.quad(density, mp.linspace(start, end, 121)) if end > start else mp.mpf(0)


def projection_deltas(epsilon, rows, ratio):
    epsilon, q = mp.mpf(epsilon), 1 + mp.mpf(ratio)
    c, volume = (q**2 - 1) / 2, rows * mp.log(q)
    tau = (epsilon + volume) / c
    growing = tail(rows, tau, True) - mp.exp(epsilon) * tail(rows, q**2 * tau, True)
    tau = (volume - epsilon) / c
    shrinking = tail(rows, q**2 * tau, False) - mp.exp(epsilon) * tail(rows, tau, False) if tau > 0 else mp.mpf(0)
    return growing, shrinking


def projection_epsilon(rows, ratio, delta):
    target = mp.log(mp.mpf(delta))
    low, high = mp.mpf(0), mp.mpf(1)
    while projection_deltas(high, rows, ratio)[0] > delta:
        high *= 2
    if projection_deltas(low, rows, ratio)[0] <= delta:
        return low
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if mp.log(projection_deltas(middle, rows, ratio)[0]) > target else (low, middle)
    return high


def renyi_by_quadrature(order, ratio):
    """ln E_Q[(p/q)^order] / (order - 1) for N(0, (1 + ratio)^2) against N(0, 1), one row."""
    order, q = mp.mpf(order), 1 + mp.mpf(ratio)

    def integrand(x):
        return mp.exp(-order * x * x / (2 * q * q) - (1 - order) * x * x / 2) / q**order / mp.sqrt(2 * mp.pi)

    return mp.log(mp.quad(integrand, [-mp.inf, 0, mp.inf])) / (order - 1)


def gaussian_delta(epsilon, separation):
    epsilon, mu = mp.mpf(epsilon), mp.mpf(separation)
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def chi_square_quantile(rows, probability):
    low, high = mp.mpf(0), mp.mpf(10 * rows + 10)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(rows, middle, False) < probability else (low, middle)
    return high


def text(value):
    return mp.nstr(value, 17)


def main():
    curve = []
    for rows in (1, 2, 3, 10, 1000, 10_000, 1_000_000):
        for ratio in ("1e-9", "1e-6", "1e-3", "0.1", "1", "30"):
            if rows == 1_000_000 and float(ratio) > 0.01:
                continue
            unit = mp.mpf(ratio) * mp.sqrt(rows)
            for epsilon in ("0", "1e-6", text(unit / 10), text(5 * unit), "1", "1000"):
                growing, shrinking = projection_deltas(epsilon, rows, ratio)
                if growing < mp.mpf(10) ** -35:  # 60 digits less the cancellation
                    continue
                reliable = text(shrinking) if shrinking > mp.mpf(10) ** -35 else None
                curve.append([epsilon, rows, ratio, text(growing), reliable])
    inverse = [
        [rows, ratio, delta, text(projection_epsilon(rows, ratio, mp.mpf(delta)))]
        for rows in (1, 10, 1000)
        for ratio in ("1e-4", "0.001", "0.01", "0.5")
        for delta in ("1e-3", "1e-5", "1e-12", "1e-30")
    ]
    renyi = [
        [order, ratio, text(renyi_by_quadrature(order, ratio))]
        for ratio, orders in (("0.01", ("1.001", "2", "20", "50")), ("0.5", ("1.1", "1.5", "1.79")))
        for order in orders
    ]
    gaussian = [
        [epsilon, separation, text(gaussian_delta(epsilon, separation))]
        for separation in ("1e-4", "0.01", "0.5", "3", "40")
        for epsilon in ("0", "1e-6", "0.1", "1", "30", "1000")
        if gaussian_delta(epsilon, separation) > mp.mpf(10) ** -35
    ]
    quantiles = [
        [rows, probability, text(chi_square_quantile(rows, mp.mpf(probability)))]
        for rows in (1, 10, 1000)
        for probability in ("0.1", "1e-4", "1e-9")
    ]
    tables = {
        "projection_delta": (["epsilon", "rows", "ratio", "growing", "shrinking"], curve),
        "projection_epsilon": (["rows", "ratio", "delta", "epsilon"], inverse),
        "renyi_one_row": (["order", "ratio", "divergence"], renyi),
        "gaussian_delta": (["epsilon", "separation", "delta"], gaussian),
        "chi_square_quantile": (["rows", "probability", "quantile"], quantiles),
    }
    origin = f"tests/vectors/make_privacy_vectors.py, mpmath {mp.__version__}, {mp.mp.dps} decimal digits"
    parts = [f'"origin": {json.dumps(origin)}']
    for name, (columns, rows) in tables.items():
        lines = ",\n  ".join(json.dumps(row) for row in [columns, *rows])
        parts.append(f'"{name}": [\n  {lines}\n]')
    (Path(__file__).parent / "privacy.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
