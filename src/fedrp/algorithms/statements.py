"""What a run gives away: of clients, as its algorithm declares, and of records, at sites of known sizes."""

import dataclasses
from collections.abc import Iterable

from fedrp.algorithms.table import method_of
from fedrp.config.run import Resolved
from fedrp.privacy import events
from fedrp.privacy.assumptions import SIMULATED
from fedrp.privacy.events import Release
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import statements
from fedrp.records.promise import record_releases


def releases_of(config: Resolved, sizes: Iterable[int]) -> list[Release]:
    """What each adversary learns in a run of sites with so many records each.

    Where records alone are protected nothing is stated of whole clients, but what a secret projection is worth.
    """
    declared = method_of(config).releases(config)
    if config.record_private and not config.private:
        declared = [release for release in declared if _projected(release)]
    return [*record_releases(config, sizes), *declared]


def stated(config: Resolved, sizes: Iterable[int], simulated: bool = False) -> tuple[Guarantee, ...]:
    """What is proved about each of these releases; of a simulation: what is, where it is deployed."""
    found = statements(releases_of(config, sizes), config.dp_delta)
    return tuple(_of_a_deployment(item) if simulated and item.epsilon else item for item in found)


def _of_a_deployment(item: Guarantee) -> Guarantee:
    return dataclasses.replace(item, assumptions=(*item.assumptions, SIMULATED))


def _projected(release: Release) -> bool:
    return any(isinstance(leaf, events.ProjectedRelease) for leaf, _ in events.leaves(release.event))
