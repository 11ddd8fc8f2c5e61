"""Figures of attacks: originals above, reconstructions below."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedrp.attacks.metrics import Images
from fedrp.attacks.outcome import Outcome
from fedrp.errors import ConfigError


class Strip(NamedTuple):
    """A row of images and what it is called."""

    title: str
    images: Images  # (N, C, H, W)


def draw(strips: Sequence[Strip], path: Path) -> None:
    """Write strips of grey images, one below the other, as a PNG file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'fedrp[report]'") from None
    columns = max(len(strip.images) for strip in strips)
    figure = Figure(figsize=(3.4 + 0.95 * columns, 0.95 * len(strips)), layout="constrained")
    grid = figure.subplots(len(strips), columns + 1, squeeze=False, width_ratios=[3.4, *[0.95] * columns])
    for row, strip in zip(grid, strips, strict=True):
        for axes in row:
            axes.axis("off")
        row[0].text(1, 0.5, strip.title, ha="right", va="center", fontsize=9, transform=row[0].transAxes)
        for axes, image in zip(row[1:], strip.images, strict=False):
            axes.imshow(image[0], cmap="gray", vmin=0, vmax=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def write(outcome: Outcome, folder: Path) -> None:
    """Put an outcome into a folder: `images.png` and `result.json`."""
    originals = np.concatenate([target.originals for target in outcome.targets])
    found = np.concatenate([target.found for target in outcome.targets])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(outcome.as_json(), indent=2))
        draw([Strip("original", originals), Strip("reconstruction", found)], folder / "images.png")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
