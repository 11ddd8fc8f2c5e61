"""What several runs on the same data are worth together, per adversary.

Runs are adaptive releases, one after the other or interleaved, each with fresh noise and keys. Which runs are begun may
depend on earlier results; what a run releases must not, but for full participation (a bound on a sum of Gaussian
releases is a privacy filter: Smith, Thakurta 2022).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from fedrp.privacy import events
from fedrp.privacy.assumptions import ONE_RUN
from fedrp.privacy.events import Adjacency, Adversary, Event, Release
from fedrp.privacy.guarantee import Guarantee, guarantee

ALL_RUNS = "all runs on this data are counted here: none was made elsewhere, and no record of one was removed"
Unit = Literal["client", "record"]
ADVERSARIES = tuple(adversary for adversary in Adversary if adversary.real)

_WHOLE_CLIENT = frozenset({Adjacency.CLIENT_ZEROED, Adjacency.CLIENT_ADD_REMOVE})
_RECORD = Adjacency.RECORD_ADD_REMOVE
_OTHERS = events.Unsupported("runs on this data have statements about different neighbours")
_NOTHING = Release(Adversary.SERVER_AND_CLIENT, Adjacency.CLIENT_REPLACE, events.NothingReleased())


def units(runs: Iterable[Sequence[Release]], adversary: Adversary) -> tuple[Unit, ...]:
    """Whom a total can be about: clients, or records where a run protects these; clients first, if all runs say so."""
    kinds = [{release.adjacency is _RECORD for release in run if release.adversary is adversary} for run in runs]
    if not any(True in kind for kind in kinds):
        return ("client",)
    return ("record",) if {True} in kinds else ("client", "record")


def total(runs: Iterable[Sequence[Release]], adversary: Adversary, delta: float, unit: Unit | None = None) -> Guarantee:
    """The tightest statement about all that `adversary` sees of several runs, each given by its releases.

    `unit` is whom it is about, by default the first of `units`. What a run promises a client it promises its records.

    Guarantees: no number where one of the runs has none; never less than for a part of the runs, but for the slack of
    the bounds. Edge case: no runs cost nothing.
    """
    runs = list(runs)
    unit = unit or units(runs, adversary)[0]
    seen = [release for run in runs for release in _seen_by(adversary, _about(unit, adversary, run))]
    telling = [release for release in seen if any(True for _ in events.leaves(release.event))]
    adjacency = _common(frozenset(release.adjacency for release in telling))
    event = events.Sequence(tuple(_restated(release, adjacency) for release in telling))
    stated = guarantee(event, delta, adversary, adjacency, tuple(a for r in telling for a in r.assumptions))
    assumed = tuple(ALL_RUNS if assumption == ONE_RUN else assumption for assumption in stated.assumptions)
    return dataclasses.replace(stated, assumptions=assumed)


def _about(unit: Unit, adversary: Adversary, run: Sequence[Release]) -> Sequence[Release]:
    """What a run states that a total about a unit is made of: of records, where it does, else of clients."""
    of_records = [release for release in run if release.adversary is adversary and release.adjacency is _RECORD]
    return of_records if unit == "record" and of_records else [r for r in run if r.adjacency is not _RECORD]


def _seen_by(adversary: Adversary, run: Sequence[Release]) -> list[Release]:
    """What a run says about an adversary; where it says nothing, nothing is claimed."""
    found = [release for release in run if release.adversary is adversary]
    if found:
        return found
    apart = [release for release in run if release.adversary in (Adversary.SERVER, Adversary.CLIENTS)]
    if adversary is Adversary.SERVER_AND_CLIENT and {type(r.event) for r in apart} == {events.NothingReleased}:
        return [_NOTHING]  # who sees nothing alone sees nothing together
    return [Release(adversary, Adjacency.CLIENT_ADD_REMOVE, events.Unsupported("a run states nothing about it"))]


def _common(adjacencies: frozenset[Adjacency]) -> Adjacency:
    """The neighbours that all statements can be made about: a whole client, if none is about less."""
    if adjacencies <= _WHOLE_CLIENT:
        return Adjacency.CLIENT_ADD_REMOVE if Adjacency.CLIENT_ZEROED not in adjacencies else Adjacency.CLIENT_ZEROED
    if Adjacency.RECORD_REPLACE in adjacencies:
        return Adjacency.RECORD_REPLACE
    if _RECORD in adjacencies:
        return _RECORD
    return Adjacency.CLIENT_REPLACE


def _restated(release: Release, adjacency: Adjacency) -> Event:
    """The event for other neighbours: a replaced contribution moves a sum twice as far as one that is set to zero."""
    if release.adjacency is _RECORD and adjacency is not _RECORD:  # a replaced record is one less and one more
        return _OTHERS
    if release.adjacency not in _WHOLE_CLIENT or adjacency in _WHOLE_CLIENT:
        return release.event
    return events.Sequence(tuple(events.Composed(_halved(leaf), n) for leaf, n in events.leaves(release.event)))


def _halved(leaf: Event) -> Event:
    if isinstance(leaf, events.GaussianRelease):
        return events.GaussianRelease(leaf.noise_multiplier / 2)
    if isinstance(leaf, events.PoissonSampled):  # amplification is about a client that is there or not
        return events.PoissonSampled(events.GaussianRelease(leaf.event.noise_multiplier / 2), leaf.rate)
    if isinstance(leaf, events.NonPrivate | events.Unsupported):
        return leaf
    return _OTHERS
