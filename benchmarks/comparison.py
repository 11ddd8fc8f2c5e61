"""Algorithms on the same tasks: default against default, and the best that was kept against the best."""

import statistics
from typing import NamedTuple

import kept
from experiments import EXPERIMENTS, MNIST, OWN, PRIVATE_FULL
from kept_runs import Options, everything, parsed

_ABOUT_THE_DATA = frozenset({"dataset", "model", "clients", "rounds", "local-epochs", "partition", "train-examples"})
_ABOUT_PRIVACY = frozenset({"dp-epsilon", "dp-delta", "noise-multiplier"})
_CHANGES_NOTHING = frozenset({"seed", "engine"})  # but the last digits


class Setting(NamedTuple):
    """A task on which algorithms are compared, default against default and best against best."""

    title: str
    base: str
    defaults: dict[str, str]  # algorithm -> what its defaults of today are when they are given


ALGORITHMS = ("fedavg", "fedavg-dp", "fedadmm", "fedrp", "fedrp-subspace")
_DEFAULT_SIZE = "--dim 4064 --bits 1 --bits-down 1"  # of LeNet-5
_DEFAULTS = {"fedadmm": "", "fedrp": "--projection gaussian --dim 1000", "fedrp-subspace": _DEFAULT_SIZE}
SETTINGS = (
    Setting("MNIST, E = 1", f"{MNIST} --local-epochs 1", {"fedavg": "--lr 0.4", **_DEFAULTS}),
    Setting("MNIST, E = 5", f"{MNIST} --local-epochs 5", {"fedavg": "--lr 0.1", **_DEFAULTS}),
    Setting("three clients", EXPERIMENTS["few-clients"].base, {"fedavg": "--lr 0.1", **_DEFAULTS}),
    Setting("Fashion-MNIST", EXPERIMENTS["fashion"].base, {"fedavg": "--lr 0.4", **_DEFAULTS}),
    Setting(
        "MNIST, noise",
        f"{PRIVATE_FULL} --dp-epsilon 10",
        {
            "fedavg-dp": "--clip 0.3 --lr 0.1",
            "fedrp-subspace": f"--projection sign --dim 1000 --clip 0.3{OWN}",
        },
    ),
)


class Method(NamedTuple):
    """Options of an algorithm, and what was kept of them in one setting."""

    options: Options
    results: list[kept.Result]

    @property
    def mean(self) -> float:
        """Accuracy; where every client keeps a model of its own, theirs on average."""
        return float(statistics.mean(result["accuracy_client_mean"] for result in self.results))


def methods_in(setting: Setting, algorithm: str) -> list[Method]:
    """Every kept run of an algorithm in a setting, whichever experiment asked for it, by options."""
    wanted = _about(parsed(setting.base))
    found: dict[tuple[tuple[str, str], ...], Method] = {}
    for line, result in everything().items():
        options = parsed(line)
        own = {name: value for name, value in options.items() if name not in wanted and name not in _CHANGES_NOTHING}
        if _about(options) == wanted and own.pop("algorithm", "") == algorithm:
            found.setdefault(tuple(sorted(own.items())), Method(own, [])).results.append(result)
    return list(found.values())


def _about(options: Options) -> Options:
    return {name: options[name] for name in sorted(_ABOUT_THE_DATA | _ABOUT_PRIVACY) if name in options}


def default_of(setting: Setting, algorithm: str) -> Method | None:
    """The kept runs with what are the defaults of today, given or not."""
    said = parsed(setting.defaults.get(algorithm, ""))
    found = [method for method in methods_in(setting, algorithm) if method.options in ({}, said)]
    return max(found, key=lambda method: len(method.results), default=None)


def best_of(setting: Setting, algorithm: str) -> Method | None:
    """The best mean among what was run with the most seeds: the best single run may be luck."""
    found = methods_in(setting, algorithm)
    most = max((len(method.results) for method in found), default=0)
    return max((m for m in found if len(m.results) == most), key=lambda method: method.mean, default=None)
