"""Figures of attacks: originals above reconstructions, and ROC curves."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedrp.attacks.metrics import Curve, Images, roc
from fedrp.attacks.outcome import Membership, Outcome
from fedrp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RARE = 1e-3  # the left end of the axes that show few false alarms


class Strip(NamedTuple):
    """A row of images and what it is called."""

    title: str
    images: Images  # (N, C, H, W)
    captions: Sequence[str] = ()  # one below each image


def draw(strips: Sequence[Strip], path: Path, heading: str = "") -> None:
    """Write strips of grey images, one below the other, as a PNG file."""
    columns = max(len(strip.images) for strip in strips)
    heights = [1.25 if strip.captions else 0.95 for strip in strips]
    margin = 0.2 + 0.08 * max(len(line) for strip in strips for line in strip.title.splitlines())
    figure = _figure(margin + 0.95 * columns, sum(heights) + 0.4 * bool(heading))
    widths = [margin, *[0.95] * columns]
    grid = figure.subplots(len(strips), columns + 1, squeeze=False, width_ratios=widths, height_ratios=heights)
    if heading:
        figure.suptitle(heading, fontsize=9, x=0.01, ha="left", wrap=True)
    for row, strip in zip(grid, strips, strict=True):
        for axes in row:
            axes.axis("off")
        row[0].text(1, 0.5, strip.title, ha="right", va="center", fontsize=9, transform=row[0].transAxes)
        for axes, image in zip(row[1:], strip.images, strict=False):
            axes.imshow(image[0], cmap="gray", vmin=0, vmax=1)
        for axes, caption in zip(row[1:], strip.captions, strict=False):
            axes.text(0.5, -0.06, caption, ha="center", va="top", fontsize=7, transform=axes.transAxes)
    _save(figure, path)


def draw_curves(curves: Mapping[str, Curve], path: Path, heading: str = "") -> None:
    """Write ROC curves as a PNG file: on even axes, and on logarithmic ones, where few false alarms are seen."""
    figure = _figure(9, 4.4)
    even, rare = figure.subplots(1, 2)
    for axes in (even, rare):
        for name, curve in curves.items():
            axes.step(curve.false_positives, curve.true_positives, where="post", label=name)
        diagonal = np.geomspace(_RARE, 1, 50)
        axes.plot(diagonal, diagonal, linestyle=":", color="grey", label="guessing")
        axes.set_xlabel("others taken for members")
        axes.set_ylabel("members found")
        axes.grid(alpha=0.3)
    even.set_title("all thresholds", fontsize=9)
    rare.set_title("few false alarms", fontsize=9)
    rare.set(xscale="log", yscale="log", xlim=(_RARE, 1), ylim=(_RARE, 1))
    even.legend(loc="lower right", fontsize="small")
    if heading:
        figure.suptitle(heading, fontsize=9, wrap=True)
    _save(figure, path)


def write(outcome: Outcome, folder: Path) -> None:
    """Put an outcome into a folder: `images.png` and `result.json`."""
    originals = np.concatenate([target.originals for target in outcome.targets])
    found = np.concatenate([target.found for target in outcome.targets])
    labels = [label for target in outcome.targets for label in target.labels]
    named = [label for target in outcome.targets for label in target.labels_found]
    got = [f"named {label}\n{value:.1f} dB" for label, value in zip(named, outcome.psnr, strict=True)]
    scenario = outcome.scenario
    attack = f"reconstruction from\n{scenario.algorithm}, by {scenario.adversary}"
    strips = [
        Strip("original", originals, [f"label {label}" for label in labels]),
        Strip(attack, found, got),
        Strip(
            "mean public image\n(costs no attack)",
            np.stack([outcome.prior] * len(originals)),
            [f"{value:.1f} dB" for value in outcome.mean_image],
        ),
    ]
    _write(folder, outcome.as_json(), lambda: draw(strips, folder / "images.png", outcome.verdict))


def write_membership(outcome: Membership, folder: Path) -> None:
    """Put an outcome into a folder: `roc.png` and `result.json`."""
    told = outcome.as_json()
    curves = {f"{name}, AUC {told[name]['auc']:.3f}": roc(*attack) for name, attack in outcome.attacks.items()}
    _write(folder, told, lambda: draw_curves(curves, folder / "roc.png", told["verdict"]))


def _write(folder: Path, told: Mapping[str, Any], drawn: Callable[[], None]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(told, indent=2))
        drawn()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'fedrp[report]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
