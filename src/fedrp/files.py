"""Files that a crash, a full disk or a second process cannot spoil."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fedrp.errors import ConfigError, SiteError

_log = logging.getLogger(__name__)

PRIVATE = 0o600
SHARED = 0o666  # less what the umask takes away: for results, which hold no secret
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def replace_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Put `data` at `path`, completely or not at all.

    Guarantees: after a return the bytes are on the disk under their name; after an error or a kill the old file is
    there, unchanged.

    Raises:
        OSError: the disk is full or the folder not writable.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # what a crash left, or someone planted
        write_content(partial, data, mode)
        os.replace(partial, path)  # of a link at `path` too: the link goes, what it pointed to stays
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` of a deployed party at `path` as `replace_file` does, readable by the owner only.

    Raises:
        SiteError: the disk is full or the folder not writable.
    """
    try:
        replace_file(path, data)
    except OSError as error:
        raise SiteError(f"cannot write {path}: {error.strerror}; what was there is unchanged") from None


def erase(path: Path) -> None:
    """Overwrite a small secret file and remove it. What a journal or a copy of the disk keeps is beyond this.

    Raises:
        FileNotFoundError: there is none.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes(os.fstat(descriptor).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    sync_folder(path.parent)


def write_new(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write a file that was not there, through to the disk. Raises OSError if anything has its name, links included."""
    write_content(path, data, mode)
    sync_folder(path.parent)


def write_content(path: Path, data: bytes, mode: int) -> None:
    """As `write_new`, but its name is on the disk only after a `sync_folder`, which can be one for several files."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_durably(path: Path, line: str) -> None:
    """Add a line to a file, through to the disk. Raises OSError."""
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_private(path: Path) -> bytes:
    """The content of a secret file, which must be a file of its own that nobody but its owner may read.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is a link or no file, or others may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # not to wait for a pipe's other end
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link, which is not followed: give the file itself") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a file")
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"others may read the key file {path} (mode {stat.S_IMODE(mode):o}): chmod 600 it")
        return file.read()


def refuse_link(path: Path) -> None:
    """Refuse to read state through a symbolic link.

    Raises:
        SiteError: it is one.
    """
    if path.is_symlink():
        raise SiteError(f"{path} is a symbolic link, which is not followed: put the file itself back")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk raises inside into one line that names `path` and says how to go on.

    Raises:
        SiteError: what is inside could not write.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, "go on with resume=True") from None


@contextlib.contextmanager
def beginning(path: Path) -> Iterator[None]:
    """Turn what the first writes to a folder raise inside into one line that names `path`.

    Raises:
        ConfigError: that is no place to write to.
        SiteError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise unwritable(path, error, "start again") from None
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from None


def unwritable(path: Path, error: OSError, then: str) -> SiteError:
    """The one line about a write that failed: where, why, and what to do."""
    reason = error.strerror or str(error)
    remedy = "free space" if is_full(error) else "put that right"
    return SiteError(f"cannot write to {path}: {reason}: {remedy} and {then}")


def sha256_of(path: Path) -> str:
    """The SHA-256 sum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_full(error: Exception) -> bool:
    """Whether it says that there is no room left, on the disk or within a limit."""
    return isinstance(error, OSError) and error.errno in _FULL


def sync_folder(folder: Path) -> None:
    """Make a rename last: without this it may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, patience: float = 600.0, required: bool = True) -> Iterator[None]:
    """Hold a lock file, which goes with the process however that ends.

    Raises:
        SiteError: another process holds it for longer than `patience` seconds, or the file system has no locks; if the
            lock is not `required`, a warning is logged instead of the latter.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
    except OSError as error:
        raise SiteError(f"cannot open {path}: {error.strerror}") from None
    try:
        try:
            _wait_for(descriptor, path, patience)
        except OSError as error:
            text = f"cannot lock {path}: {error.strerror}"
            if required:
                raise SiteError(f"{text}: use a file system that has locks") from None
            _log.warning("%s: make sure that no other process works in this folder", text)
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
