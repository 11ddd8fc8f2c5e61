"""Compute the tables of docs/privacy.md and write them between its markers.

    python benchmarks/privacy_tables.py

Everything here is arithmetic: no training, no randomness, about a minute on one core.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedrp.privacy import calibrate, projection_report
from fedrp.privacy.report import ProjectionReport

DOCUMENT = Path(__file__).parents[1] / "docs" / "privacy.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

ROWS = (1, 10, 100, 1_000, 10_000)
RATIO, DELTA, ROUNDS, CLIENTS, DISTANCE = 0.001, 1e-5, 30, 10, 0.1
TARGET = 1.0


def report(rows: int) -> ProjectionReport:
    return projection_report(
        rows,
        alpha=RATIO,
        delta=DELTA,
        rounds=ROUNDS,
        clients=CLIENTS,
        distance=DISTANCE,
        secure_aggregation=True,
    )


def table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    shown = [[f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" for cell in line] for line in lines]
    rows = [f"| {' | '.join(cells)} |" for cells in [header, *shown]]
    return "\n".join([rows[0], "|---:" * len(header) + "|", *rows[1:]])


def tables() -> str:
    reports = [report(rows) for rows in ROWS]
    one = [
        (r.dim, r.paper_epsilon, r.exact_epsilon, r.renyi_epsilon, r.pld_epsilon, r.joint_epsilon, r.secagg_epsilon)
        for r in reports
    ]
    many = [
        (
            r.dim,
            *(r.composed[name] for name in ("basic", "advanced", "renyi", "pld_lower", "pld")),
            r.joint_composed,
            r.secagg_composed,
        )
        for r in reports
    ]
    allowed = [(rows, calibrate(TARGET, DELTA, 1, rows), calibrate(TARGET, DELTA, ROUNDS, rows)) for rows in ROWS]
    targets = [(m, one.ratio, many.ratio) for m, one, many in allowed]
    noise, noise_many = (limit.noise_multiplier for limit in allowed[0][1:])  # the same for every m
    return "\n\n".join(
        [
            f"**One round.** Epsilon by view and bound; alpha = {RATIO}, delta = {DELTA:g}. Joint view: distance to\n"
            f"the others' span {DISTANCE} of the norm floor. Secure sum: {CLIENTS} clients of one direction.",
            table(["m", "paper", "exact", "Renyi", "PLD", "joint view", "secure sum"], one),
            f"**{ROUNDS} rounds.** The same, composed. Joint view and secure sum are by the tightest bound and rest\n"
            "on the assumption about the other clients of [sections 3 and 4](privacy-proofs.md#3-joint-view).",
            table(["m", "basic", "advanced", "Renyi", "PLD lower", "PLD", "joint view", "secure sum"], many),
            f"**Calibration.** The largest alpha for epsilon = {TARGET:g} at delta = {DELTA:g}. The smallest noise\n"
            f"multiplier for it is {noise:.4g} in 1 round, {noise_many:.4g} in {ROUNDS}, whatever m.",
            table(["m", "alpha, 1 round", f"alpha, {ROUNDS} rounds"], targets),
        ]
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--print", action="store_true", help="print the tables instead of writing them")
    text = tables()
    if arguments.parse_args().print:
        sys.stdout.write(text + "\n")
        return
    before, rest = DOCUMENT.read_text().split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
