"""Files that a crash, a full disk or a second process cannot spoil."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fedrp.errors import SiteError

PRIVATE = 0o600


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`, completely or not at all, readable by the owner only.

    Guarantees: after a return the bytes are on the disk under their name; after an error or a kill the old file is
    there, unchanged.

    Raises:
        SiteError: the disk is full or the folder not writable.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise SiteError(f"cannot write {path}: {error.strerror}; what was there is unchanged") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename last: without this it may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, patience: float = 600.0) -> Iterator[None]:
    """Hold a lock file, which goes with the process however that ends.

    Raises:
        SiteError: another process holds it for longer than `patience` seconds.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
    except OSError as error:
        raise SiteError(f"cannot open {path}: {error.strerror}") from None
    try:
        _wait_for(descriptor, path, patience)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise SiteError(f"another process is working in {path.parent}: end it, or wait for it") from None
            time.sleep(0.05)
