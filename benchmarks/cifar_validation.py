"""Write runs/cifar-validation.npz: CIFAR-10's training images, 2,000 of which stand in for the test set.

Settings are chosen on it (experiment `cifar-grid`), so that the test images that results are stated on choose nothing.
The data folder is FEDRP_DATA.
"""

from pathlib import Path

import numpy as np

from fedrp.learning.data import load_dataset

OUT = Path(__file__).resolve().parents[1] / "runs" / "cifar-validation.npz"
SEED = 20240601
LEARNT, SCORED = 45_000, 2_000


def main() -> None:
    data = load_dataset("cifar10")
    order = np.random.default_rng(SEED).permutation(len(data.train_y))
    learnt, scored = order[:LEARNT], order[LEARNT : LEARNT + SCORED]
    OUT.parent.mkdir(exist_ok=True)
    np.savez(
        OUT,
        x_train=data.train_x[learnt],
        y_train=data.train_y[learnt],
        x_test=data.train_x[scored],
        y_test=data.train_y[scored],
    )
    print(f"{OUT}: {LEARNT} images to learn from, {SCORED} to score on")


if __name__ == "__main__":
    main()
