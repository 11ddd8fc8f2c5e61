"""A site's own privacy ledger: all runs that were ever begun there, what each releases, and what the site allows.

    STATE/ledger.json   one entry per run, with its releases as data, so that they can be composed again
          ledger.lock   held while a run is begun

A run id is the server's to invent, so what a run may cost is no bound on what a site spends. A run is charged in full,
all its rounds, when it is begun: before the first reply leaves. It is charged once, to the data set that the *site*
names (`data` in its node config): neither the server nor records that are added can open a new account.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrp.algorithms.statements import releases_of
from fedrp.config.checks import require, require_choice, require_types
from fedrp.config.run import Resolved, RunConfig
from fedrp.config.toml import from_settings, read_toml
from fedrp.errors import ConfigError, FedRPError, PrivacyError, SiteError
from fedrp.files import locked, write_atomically
from fedrp.privacy.events import Adversary, Release
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.records import release_of, release_record
from fedrp.privacy.total import ADVERSARIES, Unit, total
from fedrp.storage.site import DEFAULT_DATA, SiteFolder, Terms

FILE = "ledger.json"
_FORMAT = "fedrp site ledger 1"
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_NAMES = {adversary.name.lower().replace("_", "-"): adversary for adversary in ADVERSARIES}

# --- what a site allows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caps:
    """What all runs on one data set may cost together; None: no limit."""

    total_epsilon: float | None = None  # at `total_delta`, against each adversary of `total_against`
    total_delta: float = 1e-5
    total_runs: int | None = None
    total_rounds: int | None = None
    total_against: tuple[Adversary, ...] = ADVERSARIES
    source: str = ""  # the file that says so

    def __post_init__(self) -> None:
        require_types(self)
        epsilon, delta = self.total_epsilon, self.total_delta
        require(epsilon is None or 0 <= epsilon < math.inf, "total_epsilon", epsilon, "a finite number of at least 0")
        require(1e-100 <= delta < 1, "total_delta", delta, "a number above 0 and below 1")
        for name in ("total_runs", "total_rounds"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "a whole number of at least 0")
        require(len(self.total_against) > 0, "total_against", "[]", f"some of {', '.join(_NAMES)}")


CAPS = tuple(field.name for field in dataclasses.fields(Caps) if field.name != "source")


def read_caps(agreed: Path) -> Caps:
    """The caps in the file of what a site agreed to. A file that names none agrees to one run.

    Raises:
        ConfigError: the file cannot be read, or a cap has a value that it cannot have.
    """
    listed = {name: value for name, value in read_toml(agreed).items() if name in CAPS}
    against = listed.get("total_against", list(_NAMES))
    if not isinstance(against, list) or not all(isinstance(name, str) for name in against):
        raise ConfigError(f'{agreed}: total_against must be a list, as ["clients", "model-holder"], got {against!r}')
    for name in against:
        require_choice(f"adversary in total_against of {agreed}", name, _NAMES)
    if not listed.keys() & {"total_epsilon", "total_runs", "total_rounds"}:
        listed["total_runs"] = 1
    return Caps(**{**listed, "total_against": tuple(_NAMES[name] for name in against), "source": str(agreed)})


# --- what was begun --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A run that was begun, charged in full."""

    run: str  # its id, in hex
    data: str
    begun: str  # when
    algorithm: str
    rounds: int
    agreed: str  # the file that it was admitted by; empty for none
    releases: tuple[Release, ...]

    def record(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "releases": [release_record(release) for release in self.releases]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Entry":
        """The inverse of `record`."""
        return cls(
            run=str(record["run"]),
            data=str(record["data"]),
            begun=str(record["begun"]),
            algorithm=str(record["algorithm"]),
            rounds=int(record["rounds"]),
            agreed=str(record["agreed"]),
            releases=tuple(release_of(release) for release in record["releases"]),
        )


@dataclass(frozen=True)
class SiteLedger:
    """The entries of a state folder, in the order in which runs were begun."""

    entries: tuple[Entry, ...] = ()

    def has(self, run: str) -> bool:
        """Whether a run was begun."""
        return any(entry.run == run for entry in self.entries)

    def on(self, data: str) -> tuple[Entry, ...]:
        """The runs on one data set."""
        return tuple(entry for entry in self.entries if entry.data == data)

    def plus(self, entries: Iterable[Entry]) -> "SiteLedger":
        """The ledger with more entries."""
        return SiteLedger((*self.entries, *entries))


def read_ledger(state: Path) -> SiteLedger:
    """The ledger of a state folder; an empty one where nothing was ever begun.

    Raises:
        SiteError: it is damaged, or missing where there are runs.
    """
    path = state / FILE
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != _FORMAT or stored["sha256"] != _checksum(stored["runs"]):
            raise ValueError("format or checksum is wrong")
        return SiteLedger(tuple(Entry.of_record(record) for record in stored["runs"]))
    except FileNotFoundError:
        if not any((*state.glob("*/run.json"), *state.glob("*/state.safetensors"))):
            return SiteLedger()
        raise SiteError(
            f"{state} holds runs but no {FILE} of what they spent: if they are older than such files, or it is lost, "
            f"count the runs whose folders are still there with 'fedrp ledger rebuild {state}'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SiteError(
            f"{path} is damaged ({error!r}) and was left as it is: no run is begun; move it away and count the runs "
            f"whose folders are still there with 'fedrp ledger rebuild {state}'"
        ) from None


def _write_ledger(state: Path, ledger: SiteLedger) -> None:
    runs = [entry.record() for entry in ledger.entries]
    stored = {"format": _FORMAT, "sha256": _checksum(runs), "runs": runs}
    write_atomically(state / FILE, json.dumps(stored, indent=1).encode())


def _checksum(runs: object) -> str:
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


# --- beginning a run -------------------------------------------------------------------------------------------------


def begin(folder: SiteFolder, index: int, terms: Terms, caps: Caps) -> None:
    """Begin a run at this site, or go on with one that was begun. Nothing may be sent before this has returned.

    Guarantees: after a return the run is in the ledger and its state in its folder, both on the disk; if it is refused,
    nothing is kept of it; after a crash at any step it can be called again, and the run is charged once.

    Raises:
        PrivacyError: the run would exceed a cap.
        ConfigError, DataError: it was begun on other terms.
        SiteError: the ledger, or what the site knew of the run, is gone or damaged.
    """
    state, run = folder.state, folder.run.hex()
    with _locked(state):
        ledger = read_ledger(state)
        if ledger.has(run):
            folder.settle(terms)
            return
        if not (state / FILE).exists():
            _write_ledger(state, ledger)  # runs without a ledger mean a loss
        # A folder counts whether or not it is listed: the ledger may be an older copy, or a crash came in between.
        ledger = ledger.plus(entry for entry in _unlisted(state, ledger, terms.data) if entry.run != run)
        entry = _entry(run, terms, _now(), caps.source)
        require_within(caps, ledger.on(terms.data), entry)
        folder.begin(index, terms)
        _write_ledger(state, ledger.plus([entry]))


def rebuild(state: Path, data: str = DEFAULT_DATA) -> int:
    """Enter the runs whose folders are there and that the ledger does not list, and say how many those are.

    `data` is the data set of runs that are older than such names.
    """
    if not state.is_dir():
        raise SiteError(f"{state} is not a folder: give the state folder of a site")
    with _locked(state):
        ledger = read_ledger(state) if (state / FILE).exists() else SiteLedger()
        found = _unlisted(state, ledger, data)
        _write_ledger(state, ledger.plus(found))
        return len(found)


def begun_runs(state: Path) -> SiteLedger:
    """All runs that were begun at a site, also those that a crash kept out of its ledger.

    Raises:
        SiteError: the ledger is damaged, or missing where there are runs.
    """
    ledger = read_ledger(state)
    return ledger.plus(_unlisted(state, ledger, DEFAULT_DATA))


def _locked(state: Path) -> AbstractContextManager[None]:
    """Keep other runs of the site from being begun."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SiteError(f"cannot use the state folder {state}: {error.strerror}") from None
    return locked(state / "ledger.lock")


def _unlisted(state: Path, ledger: SiteLedger, data: str) -> list[Entry]:
    """The runs that have a folder and no entry."""
    found = []
    for path in sorted(state.glob("*/run.json")):
        run = path.parent.name
        if _RUN_ID.fullmatch(run) and not ledger.has(run):
            begun = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
            terms = SiteFolder(state, bytes.fromhex(run)).terms(data)
            found.append(_entry(run, terms, begun.isoformat(timespec="seconds"), ""))
    return sorted(found, key=lambda entry: entry.begun)


def _entry(run: str, terms: Terms, begun: str, agreed: str) -> Entry:
    try:
        config = Resolved.of(from_settings(RunConfig, dict(terms.settings)))
        releases = tuple(releases_of(config, [terms.records]))
    except (FedRPError, KeyError) as error:
        raise SiteError(f"what run {run} releases cannot be told from its settings ({error})") from None
    return Entry(run, terms.data, begun, config.algorithm, config.rounds, agreed, releases)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# --- what a run may add ----------------------------------------------------------------------------------------------


def require_within(caps: Caps, begun: Sequence[Entry], asked: Entry) -> None:
    """Refuse a run that would exceed a cap, in one line with the cap, what is spent, and what the run would add.

    Raises:
        PrivacyError: it would.
    """
    counted = [
        ("total_runs", caps.total_runs, len(begun), 1),
        ("total_rounds", caps.total_rounds, sum(entry.rounds for entry in begun), asked.rounds),
    ]
    for name, cap, before, added in counted:
        if cap is not None and before + added > cap:
            raise _beyond(caps, asked, f"{name}={cap}", f"{before} spent, this run would add {added}")
    if caps.total_epsilon is None:
        return
    for adversary in caps.total_against:
        cap_text, whom = f"total_epsilon={caps.total_epsilon:g}", f"against {adversary.value}"
        after = spent([*begun, asked], adversary, caps.total_delta)
        if after.epsilon is None:
            hint = "leave that adversary out of total_against to allow it"
            raise _beyond(caps, asked, cap_text, f"with this run there is none {whom}, because {after.reason}; {hint}")
        if after.epsilon > caps.total_epsilon:
            already = spent(begun, adversary, caps.total_delta).epsilon or 0.0
            added_text = f"{already:.4g} spent, this run would add {after.epsilon - already:.4g}"
            raise _beyond(caps, asked, cap_text, f"{added_text} (delta {caps.total_delta:g}, {whom})")


def _beyond(caps: Caps, asked: Entry, cap: str, why: str) -> PrivacyError:
    return PrivacyError(
        f"run {asked.run} is refused, and nothing was sent: {cap} on data '{asked.data}' by {caps.source}: {why}"
    )


def spent(entries: Iterable[Entry], adversary: Adversary, delta: float, unit: Unit | None = None) -> Guarantee:
    """What runs cost together, whole clients where all runs protect these, else records (or as `unit` says)."""
    return total([entry.releases for entry in entries], adversary, delta, unit)
