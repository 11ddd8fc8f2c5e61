"""Make the bundled data set `mnist-mini` from the four MNIST files.

usage: python scripts/make_mnist_mini.py FOLDER_WITH_THE_IDX_FILES [OUTPUT.npz]

Takes 1,000 training and 200 test images of each digit, evenly spaced through the original files, in their order. No
random numbers are involved: the arrays are the same everywhere, and so are the file's bytes for one version of zlib.
"""

import sys
from pathlib import Path

import numpy as np

from fedrp.learning.data import Labels, load_dataset

ASSET = Path(__file__).parents[1] / "src" / "fedrp" / "assets" / "mnist-mini.npz"


def spread(labels: Labels, per_class: int) -> Labels:
    """Sorted indices of `per_class` examples of each class, evenly spaced among those of the class."""
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return np.sort(np.concatenate([each[np.arange(per_class) * len(each) // per_class] for each in members]))


def main(folder: str, output: str = str(ASSET)) -> None:
    mnist = load_dataset(f"idx:{folder}")
    train, test = spread(mnist.train_y, 1000), spread(mnist.test_y, 200)
    np.savez_compressed(
        output,
        x_train=mnist.train_x[train, 0],
        y_train=mnist.train_y[train].astype(np.uint8),
        x_test=mnist.test_x[test, 0],
        y_test=mnist.test_y[test].astype(np.uint8),
    )
    print(f"wrote {output}: {len(train)} training and {len(test)} test images, {Path(output).stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
