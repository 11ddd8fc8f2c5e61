"""Releases as JSON, so that what was spent can be composed again years later, by better bounds.

Names in a record are those of the tables below and of the enumerations' members, never of classes or modules: nothing
that a record says is imported, and what is not in the tables is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedrp.errors import ConfigError
from fedrp.privacy import events
from fedrp.privacy.events import Adjacency, Adversary, Event, Release

EVENTS: dict[str, type[Any]] = {
    "nothing": events.NothingReleased,
    "in-the-clear": events.NonPrivate,
    "unsupported": events.Unsupported,
    "gaussian": events.GaussianRelease,
    "poisson-sampled": events.PoissonSampled,
    "sampled-records": events.SampledRecords,
    "projected": events.ProjectedRelease,
    "projected-jointly": events.JointProjectedRelease,
    "composed": events.Composed,
    "sequence": events.Sequence,
}
_NAMES = {kind: name for name, kind in EVENTS.items()}


def release_record(release: Release) -> dict[str, Any]:
    """A release as a JSON object."""
    return {
        "adversary": release.adversary.name,
        "adjacency": release.adjacency.name,
        "event": event_record(release.event),
        "assumptions": list(release.assumptions),
    }


def release_of(record: Mapping[str, Any]) -> Release:
    """The inverse of `release_record`.

    Raises:
        ValueError, KeyError, TypeError: it is not such a record.
    """
    adversary, adjacency = Adversary[record["adversary"]], Adjacency[record["adjacency"]]
    return Release(adversary, adjacency, event_of(record["event"]), tuple(map(str, record["assumptions"])))


def event_record(event: Event) -> dict[str, Any]:
    """An event as a JSON object."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if isinstance(event, events.PoissonSampled | events.Composed):
        fields["event"] = event_record(event.event)
    elif isinstance(event, events.Sequence):
        fields["events"] = [event_record(part) for part in event.events]
    return {"kind": _NAMES[type(event)], **fields}


def event_of(record: Mapping[str, Any]) -> Event:
    """The inverse of `event_record`.

    Raises:
        ValueError, KeyError, TypeError: it is not such a record.
    """
    fields = dict(record)
    kind = EVENTS[fields.pop("kind")]
    if "event" in fields:
        fields["event"] = event_of(fields["event"])
    if "events" in fields:
        fields["events"] = tuple(map(event_of, fields["events"]))
    try:
        made: Event = kind(**fields)
    except ConfigError as error:  # a number out of range
        raise ValueError(str(error)) from None
    return made
