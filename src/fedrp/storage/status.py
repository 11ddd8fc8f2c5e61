"""How a deployed run is doing, for people and monitors: a status file and a log, at sites and at the server."""

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrp.errors import SiteError
from fedrp.files import PRIVATE, write_atomically

FAILURES = "failures.jsonl"
_SHOWN = 5


def write_status(folder: Path, status: Mapping[str, object]) -> None:
    """Write `status.json`, with the time."""
    data = json.dumps({**status, "updated": _now()}, indent=2)
    write_atomically(folder / "status.json", data.encode())


def read_status(folder: Path) -> dict[str, Any]:
    """What `status.json` says; nothing if there is none."""
    path = folder / "status.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise SiteError(f"{path} cannot be read ({error}): remove it") from None


def statuses(folder: Path) -> list[dict[str, Any]]:
    """The status of every run below a state folder, or of the one run that is in it; the latest last."""
    found = [read_status(path.parent) for path in [*folder.glob("status.json"), *folder.glob("*/status.json")]]
    if not found and not failures(folder):
        raise SiteError(f"{folder} holds no status: give the state folder of a site, or the store of a server")
    return sorted(found, key=lambda status: str(status.get("updated")))


def failures(folder: Path) -> list[dict[str, Any]]:
    """The last failures of a site, the latest last."""
    try:
        lines = (folder / FAILURES).read_text().splitlines()[-_SHOWN:]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(f"{folder / FAILURES} cannot be read ({error}): move it away") from None
    return [entry for line in lines if isinstance(entry := _parsed(line), dict)]


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:  # half a line, as a full disk leaves it
        return None


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Add a JSON line. A log that cannot be written must not stop the work."""
    data = (json.dumps({"time": _now(), **line}) + "\n").encode()
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
