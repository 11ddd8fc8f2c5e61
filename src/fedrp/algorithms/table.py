"""The tables of algorithms and baselines. To add an algorithm: a file with its record, a line here and in `SERVERS`.

Installed packages add theirs by the entry point group `fedrp.algorithms`, programs by `fedrp.register`.
"""

import dataclasses
import logging
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from fedrp.algorithms.base import Algorithm as Algorithm
from fedrp.algorithms.base import Method
from fedrp.algorithms.client_dp import PRIVACY_SETTINGS
from fedrp.algorithms.fedadmm import FEDADMM
from fedrp.algorithms.fedavg import FEDAVG
from fedrp.algorithms.fedavg_dp import FEDAVG_DP
from fedrp.algorithms.fedrp import FEDRP
from fedrp.algorithms.final_mean import final_mean
from fedrp.algorithms.fwc import FWC
from fedrp.algorithms.servers import SERVERS, server_side
from fedrp.algorithms.subspace import SUBSPACE
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved, RunConfig
from fedrp.errors import ConfigError, first_line

_log = logging.getLogger(__name__)

_WAS_DEFAULT = (("dp_noise", "shared"),)  # what runs of earlier versions name where nothing was said
PLUGINS = "fedrp.algorithms"  # a group of entry points

ALGORITHMS: dict[str, Algorithm] = {
    "fedrp-subspace": SUBSPACE,
    "fedrp": FEDRP,
    "fedavg": FEDAVG,
    "fedavg-dp": FEDAVG_DP,
    "fedadmm": FEDADMM,
}
BASELINES: dict[str, Method] = {"fwc": FWC}  # for simulations only: their clients talk to nobody


def methods() -> dict[str, Method]:
    """Everything that a simulation can train by."""
    return {**ALGORITHMS, **BASELINES}


def method_of(config: RunConfig) -> Method:
    """What a config calls its algorithm."""
    known = methods()
    require_choice("algorithm", config.algorithm, known)
    return known[config.algorithm]


def algorithm_at(config: Resolved) -> Algorithm:
    """The algorithm of a config, or that of the exchange of models after its rounds."""
    method, rounds = method_of(config), ALGORITHMS.get(config.algorithm)
    if rounds and config.before is None:
        return rounds
    return Algorithm(
        summary=method.summary,
        settings=method.settings,
        delivers="consensus",
        releases=method.releases,
        client=final_mean(rounds.client if rounds else None),
        server=server_side(config),
    )


def add_algorithm(name: str, algorithm: Algorithm) -> None:
    """Add an algorithm from outside the package, on both sides of the protocol."""
    ALGORITHMS[name] = algorithm
    SERVERS[name] = algorithm.server


def _add_plugins() -> None:
    """Add what installed packages offer. One that is broken must not stop runs that do not need it."""
    for point in metadata.entry_points(group=PLUGINS):
        try:
            algorithm = point.load()
        except Exception as error:  # it is someone else's code
            _log.warning("algorithm '%s' of %s cannot be loaded: %s", point.name, point.value, first_line(error))
            continue
        if point.name in methods() or not isinstance(algorithm, Algorithm):
            reason = "the name is taken" if point.name in methods() else f"it is a {type(algorithm).__name__}"
            _log.warning("algorithm '%s' of %s is left out: %s", point.name, point.value, reason)
            continue
        add_algorithm(point.name, algorithm)


def require_used(config: RunConfig) -> None:
    """Refuse a setting that does nothing with the config's algorithm; one that has its default value was not given.

    `dim` passes everywhere: settings that are shared by runs to be compared name it.
    """
    require_choice("algorithm", config.algorithm, methods())
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        given = value != field.default and (field.name, value) not in _WAS_DEFAULT
        if given and field.name in _idle(config, config.algorithm):
            users = [name for name, method in methods().items() if field.name in method.settings]
            if config.algorithm in users:  # but not together with the other settings
                users = ["secure_aggregation=True without noise"]
            raise ConfigError(
                f"{field.name}={value} does nothing with algorithm '{config.algorithm}': leave it out, or use "
                f"{' or '.join(users)}"
            )


def for_each(config: RunConfig, names: Sequence[str]) -> list[RunConfig]:
    """One set of settings for several algorithms: what one does not use is left out there, if another uses it."""
    for name in names:
        require_choice("algorithm", name, methods())
    nowhere = frozenset.intersection(*(_idle(config, name) for name in names))
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config)}
    configs = []
    for name in names:
        idle = {setting: defaults[setting] for setting in _idle(config, name) - nowhere}
        configs.append(dataclasses.replace(config, algorithm=name, **idle))
    return configs


def _idle(config: RunConfig, name: str) -> frozenset[str]:
    """Settings that do nothing with an algorithm, the others being as they are."""
    known = methods()
    used = known[name].settings
    if config.dp_unit == "record" and "dp_unit" in used:
        used |= PRIVACY_SETTINGS
    idle = frozenset[str]().union(*(method.settings for method in known.values())) - used
    # With noise the range of masked numbers follows from the clip.
    noised = config.sums_records or (config.private and "dp_epsilon" in used)
    ranged = config.secure_aggregation and not noised
    return idle if ranged else idle | {"secure_range"}


_add_plugins()
