"""What the paper's figures show: for each of them the runs, at three scales.

Figures 1 and 2 are accuracy per round with one and with five local epochs, figure 3 is accuracy against m. `quick`
takes the bundled images, `standard` full MNIST and a fifth of CIFAR-10, `full` the sizes of the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed

SCALES = ("quick", "standard", "full")
EPSILONS = {1: (5.0, 10.0, 40.0), 5: (5.0, 10.0, 30.0)}  # of FedAvg with noise, by local epochs: the paper's
DIMS = (1, 10, 50, 100, 500, 1000)
MORE_DIMS = (5000, 10000, 50000)  # on CIFAR-10
FEDAVG, FEDADMM, PRINTED, SUBSPACE = "FedAvg", "FedADMM", "FedRP as printed", "FedRP-Subspace"
ALONE = "every client alone"
_CIFAR_IMAGES = 10_000  # of `standard`
_CIFAR_DIMS = (100, 1000, 5000, 10000, 50000)  # of `standard`; as printed the middle and both ends
_CIFAR_PRINTED_DIMS = (100, 10000, 50000)
_CNN_NUMBERS = {0.1: 84_640, 1: 846_634}  # of one bit, by bits a parameter: whole words of 32
_IMAGES_PER_SECOND = {"lenet5": 30_000, "cnn": 1_000}  # on two cores, roughly: docs/performance.md
_ENGINES = {"lenet5": "stacked:4", "cnn": "stacked:1"}  # fixed, as a choice by time may differ from run to run
_SELDOM = 10  # rounds between scores where each client has a CNN of its own: to score takes longer than to train


class Curve(NamedTuple):
    """A run, and what a figure calls it."""

    label: str
    config: RunConfig

    @property
    def name(self) -> str:
        """What tells it from the other curves of its panel, and from the other points."""
        return self.label + (f", m = {self.config.dim:,}" if self.config.dim and "m = " not in self.label else "")


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


def speed_of(config: RunConfig, workers: int | None) -> Speed:
    """How a run is computed: such that its result is the same however many workers and other runs there are."""
    seldom = config.model == "cnn" and config.algorithm in ("fedrp", "fwc")
    return Speed(workers=workers, engine=_ENGINES[config.model], eval_every=_SELDOM if seldom else 1)


class _Setting(NamedTuple):
    """A data set with its model."""

    title: str
    config: RunConfig
    subspace: Mapping[str, int | None]  # curves of the subspace mode: numbers of one bit; None for the default
    printed_dim: int  # m of FedRP as printed, in figures 1 and 2
    dims: tuple[int, ...]  # of figure 3
    printed_dims: tuple[int, ...]


def _bundled() -> _Setting:
    config = RunConfig(clients=10, rounds=6)
    return _Setting("MNIST subset, LeNet-5, 10 clients", config, {SUBSPACE: None}, 1000, DIMS, DIMS)


def _mnist() -> _Setting:
    config = RunConfig(dataset="mnist", clients=100, rounds=30)
    return _Setting("MNIST, LeNet-5, 100 clients", config, {SUBSPACE: None}, 1000, DIMS, DIMS)


def _cifar(scale: str) -> _Setting:
    """The settings that the grid `cifar-grid` of benchmarks/experiments.py chose on held-out training images."""
    whole = scale == "full"
    config = RunConfig(
        dataset="cifar10", model="cnn", clients=50, rounds=40, train_examples=None if whole else _CIFAR_IMAGES,
        batch_size=16, lr=0.05, lr_schedule="cosine",
    )  # fmt: skip
    title = f"CIFAR-10{'' if whole else f', {_CIFAR_IMAGES:,} images'}, CNN, 50 clients"
    subspace = {SUBSPACE: _CNN_NUMBERS[0.1], f"{SUBSPACE}, m = n": _CNN_NUMBERS[1]}
    if whole:
        return _Setting(title, config, subspace, 10_000, DIMS + MORE_DIMS, DIMS + MORE_DIMS)
    return _Setting(title, config, subspace, 10_000, _CIFAR_DIMS, _CIFAR_PRINTED_DIMS)


def _rounds(setting: _Setting, epochs: int, scale: str) -> Panel:
    base = replace(setting.config, local_epochs=epochs)
    title = f"{setting.title}, E = {epochs}"
    if epochs > 1 and scale == "quick":
        base = replace(base, rounds=base.rounds // 2)
    if epochs > 1 and scale == "standard" and base.model == "cnn":  # five times the work: half the rounds, three curves
        base = replace(base, rounds=base.rounds // 2)
        return Panel(title, (_fedavg(base), _subspace(base, setting, SUBSPACE), _printed(base, setting.printed_dim)))
    curves = [
        _fedavg(base),
        Curve(FEDADMM, replace(base, algorithm="fedadmm")),
        *(_subspace(base, setting, label) for label in setting.subspace),
        _printed(base, setting.printed_dim),
        *(
            Curve(f"FedAvg + DP, epsilon {epsilon:g}", replace(base, algorithm="fedavg-dp", dp_epsilon=epsilon))
            for epsilon in EPSILONS[epochs]
        ),
        Curve(ALONE, replace(base, algorithm="fwc")),
    ]
    return Panel(title, tuple(curves))


def _against_m(setting: _Setting, scale: str) -> Panel:
    base = setting.config
    if base.model == "cnn" and scale == "standard":
        base = replace(base, rounds=base.rounds // 2)
    subspace = [
        Curve(SUBSPACE, replace(base, algorithm="fedrp-subspace", projection="sign", dim=m)) for m in setting.dims
    ]
    return Panel(f"{setting.title}, E = 1", (*subspace, *(_printed(base, m) for m in setting.printed_dims)))


def _fedavg(base: RunConfig) -> Curve:
    return Curve(FEDAVG, replace(base, algorithm="fedavg"))


def _subspace(base: RunConfig, setting: _Setting, label: str) -> Curve:
    base, numbers = replace(base, algorithm="fedrp-subspace"), setting.subspace[label]
    return Curve(label, base if numbers is None else replace(base, dim=numbers, bits=1.0, bits_down=1.0))


def _printed(base: RunConfig, m: int) -> Curve:
    """One client's own model, as the paper's figures have it.

    The family is `sign`: the same accuracy as `gaussian` at a fraction of its time (docs/results.md).
    """
    return Curve(PRINTED, replace(base, algorithm="fedrp", dim=m, projection="sign", deliver="client"))
