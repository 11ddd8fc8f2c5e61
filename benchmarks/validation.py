"""Write runs/NAME-validation.npz: the training images of a data set, some of which stand in for the test set.

    python benchmarks/validation.py cifar10      for the experiments cifar-grid*
    python benchmarks/validation.py mnist        for the experiment records-grid

Settings are chosen on it, so that the test images that results are stated on choose nothing. The data folder is
FEDRP_DATA.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedrp.learning.data import load_dataset

RUNS = Path(__file__).resolve().parents[1] / "runs"
SEED = 20240601


class Sizes(NamedTuple):
    """How many training images are learnt from, and how many are scored on."""

    learnt: int
    scored: int


SIZES = {"cifar10": Sizes(45_000, 2_000), "mnist": Sizes(54_000, 6_000)}


def write(name: str) -> Path:
    """The file of a data set."""
    data, sizes, out = load_dataset(name), SIZES[name], RUNS / f"{name}-validation.npz"
    order = np.random.default_rng(SEED).permutation(len(data.train_y))
    learnt, scored = order[: sizes.learnt], order[sizes.learnt : sum(sizes)]
    out.parent.mkdir(exist_ok=True)
    np.savez(
        out,
        x_train=data.train_x[learnt],
        y_train=data.train_y[learnt],
        x_test=data.train_x[scored],
        y_test=data.train_y[scored],
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SIZES)
    name = parser.parse_args().name
    print(f"{write(name)}: {SIZES[name].learnt:,} images to learn from, {SIZES[name].scored:,} to score on")


if __name__ == "__main__":
    main()
