"""What the paper's figures show: for each of them the runs, at three scales.

Figures 1 and 2 are accuracy per round with one and with five local epochs, figure 3 is accuracy against m. `quick`
takes the bundled images, `standard` full MNIST and a fifth of CIFAR-10, `full` the sizes of the paper.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fedrp.config.run import RunConfig

SCALES = ("quick", "standard", "full")
EPSILONS = {1: (5.0, 10.0, 40.0), 5: (5.0, 10.0, 30.0)}  # of FedAvg with noise, by local epochs: the paper's
DIMS = (1, 10, 50, 100, 500, 1000)
MORE_DIMS = (5000, 10000, 50000)  # on CIFAR-10
ALONE = "every client alone"
_CIFAR_IMAGES = 10_000  # of `standard`
_IMAGES_PER_SECOND = {"lenet5": 30_000, "cnn": 1_000}  # on two cores, roughly: docs/performance.md


class Curve(NamedTuple):
    """A run, and what a figure calls it."""

    label: str
    config: RunConfig


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. Against the round, or of the last round against m."""

    name: str
    title: str
    against: str  # "round" or "m"
    panels: tuple[Panel, ...]


def figures(scale: str, names: tuple[str, ...]) -> list[Figure]:
    """The figures of these names."""
    data = [_bundled()] if scale == "quick" else [_mnist(), _cifar(scale)]
    made = {
        "fig1": lambda: Figure("fig1", "Accuracy per round, E = 1", "round", tuple(_rounds(s, 1, scale) for s in data)),
        "fig2": lambda: Figure("fig2", "Accuracy per round, E = 5", "round", tuple(_rounds(s, 5, scale) for s in data)),
        "fig3": lambda: Figure("fig3", "Sensitivity to m, E = 1", "m", tuple(_against_m(s, scale) for s in data)),
    }
    return [made[name]() for name in names]


def expected_seconds(config: RunConfig, images: int) -> float:
    """How long a run takes on two cores, roughly."""
    steps = config.rounds * config.local_epochs * (config.train_examples or images)
    return 3 + steps / _IMAGES_PER_SECOND.get(config.model, 1_000)


class _Setting(NamedTuple):
    """A data set with its model."""

    title: str
    config: RunConfig
    printed_dim: int  # m of FedRP as printed, in figures 1 and 2
    dims: tuple[int, ...]  # of figure 3


def _bundled() -> _Setting:
    return _Setting("MNIST subset, LeNet-5, 10 clients", RunConfig(clients=10, rounds=6), 1000, DIMS)


def _mnist() -> _Setting:
    config = RunConfig(dataset="mnist", clients=100, rounds=30)
    return _Setting("MNIST, LeNet-5, 100 clients", config, 1000, DIMS)


def _cifar(scale: str) -> _Setting:
    """The settings that the grid `cifar-grid` of benchmarks/experiments.py chose on held-out training images."""
    images = None if scale == "full" else _CIFAR_IMAGES
    config = RunConfig(
        dataset="cifar10", model="cnn", clients=50, rounds=40, train_examples=images, batch_size=16, lr=0.05,
        lr_schedule="cosine",
    )  # fmt: skip
    title = f"CIFAR-10{'' if images is None else ', 10,000 images'}, CNN, 50 clients"
    return _Setting(title, config, 10_000, DIMS + MORE_DIMS)


def _rounds(setting: _Setting, epochs: int, scale: str) -> Panel:
    rounds = setting.config.rounds
    if epochs > 1 and scale != "full" and setting.config.model == "cnn":
        rounds //= 2
    base = replace(setting.config, local_epochs=epochs, rounds=rounds if scale != "quick" or epochs == 1 else 3)
    curves = [
        Curve("FedAvg", replace(base, algorithm="fedavg")),
        Curve("FedADMM", replace(base, algorithm="fedadmm")),
        Curve("FedRP-Subspace", replace(base, algorithm="fedrp-subspace")),
        Curve("FedRP as printed", _printed(base, setting.printed_dim)),
        *(
            Curve(f"FedAvg + DP, epsilon {epsilon:g}", replace(base, algorithm="fedavg-dp", dp_epsilon=epsilon))
            for epsilon in EPSILONS[epochs]
        ),
        Curve(ALONE, replace(base, algorithm="fwc")),
    ]
    return Panel(f"{setting.title}, E = {epochs}", tuple(curves))


def _against_m(setting: _Setting, scale: str) -> Panel:
    base = setting.config
    if setting.config.model == "cnn" and scale != "full":
        base = replace(base, rounds=base.rounds // 2)
    subspace = [
        Curve("FedRP-Subspace", replace(base, algorithm="fedrp-subspace", dim=m, bits=32.0, bits_down=32.0))
        for m in setting.dims
    ]
    printed = [Curve("FedRP as printed", _printed(base, m)) for m in setting.dims]
    return Panel(f"{setting.title}, E = 1", (*subspace, *printed))


def _printed(base: RunConfig, m: int) -> RunConfig:
    """One client's own model, as the paper's figures have it.

    The family is `sign`: the same accuracy as `gaussian` at a fraction of its time (docs/results.md).
    """
    return replace(base, algorithm="fedrp", dim=m, projection="sign", deliver="client")
