"""Downloads of the classic data sets: resumable, atomic, checked against published SHA-256 sums."""

import contextlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedrp.errors import ConfigError, DataError
from fedrp.files import is_full, sha256_of, unwritable
from fedrp.learning.data import DATASETS, find_entry, load_dataset

_CHUNK = 1 << 16
_TIMEOUT = 30  # seconds without a byte


class Remote(NamedTuple):
    """A file to download."""

    name: str
    size: int
    sha256: str


class Source(NamedTuple):
    """Where a data set comes from: its files as they are, or one .tar.gz archive of them."""

    base_url: str
    files: tuple[Remote, ...]


class Row(NamedTuple):
    """One line of `fedrp data list`. `present` says that the files are there; loading shows whether they are sound."""

    name: str
    path: Path
    present: bool


def _source(base_url: str, table: str) -> Source:
    rows = (line.split() for line in table.strip().splitlines())
    return Source(base_url, tuple(Remote(name, int(size), sha256) for name, size, sha256 in rows))


# Addresses, sizes and sums are those of TensorFlow Datasets, tensorflow_datasets/url_checksums/{mnist,fashion_mnist,
# cifar10}.txt. That one address is plain HTTP does no harm: the sum decides.
SOURCES: dict[str, Source] = {
    "mnist": _source(
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        """
        train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
        train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
        t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
        t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
        """,
    ),
    "fashion-mnist": _source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        """
        train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
        train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
        t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
        t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
        """,
    ),
    "cifar10": _source(
        "https://www.cs.toronto.edu/~kriz",
        "cifar-10-binary.tar.gz 170052171 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
}


def available(data_dir: Path | None = None) -> list[Row]:
    """Every named data set, where it lies or would lie, and whether it is there."""
    rows = []
    for name, entry in DATASETS.items():
        path = entry.located(data_dir)
        present = path.exists() and all((path / f).is_file() or (path / f"{f}.gz").is_file() for f in entry.files)
        rows.append(Row(name, path, present))
    return rows


def fetch_dataset(
    name: str, data_dir: Path | None = None, base_url: str | None = None, progress: bool = True
) -> list[Path]:
    """Download what is not there yet, below `base_url` if given, and return the data set's files.

    Guarantees:
    - A file appears under its name only complete and with the published SHA-256 sum.
    - What was interrupted stays as a `.part` file, and the next call goes on from there.
    - Files with the right sum are not downloaded again, nor is a set that came as an archive and loads.
    - Of an archive only the expected files are taken, whatever else it may hold.

    Raises `ConfigError` for a name that cannot be fetched, `SiteError` for a full disk, `DataError` for everything else
    that goes wrong on the way.
    """
    entry = find_entry(name)
    folder = entry.located(data_dir)
    if name not in DATASETS:
        raise ConfigError(f"{name!r} cannot be fetched; what can: {', '.join(SOURCES)}")
    if name not in SOURCES:
        return [folder]  # part of the package
    base, remotes = SOURCES[name]
    files = [folder / remote.name for remote in remotes]
    unpacked = [folder / file for file in entry.files]
    archived = files[0].name.endswith(".tar.gz")
    if archived:
        with contextlib.suppress(DataError):
            load_dataset(name, data_dir)
            return unpacked
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
            for target, remote in zip(files, remotes, strict=True):
                _download(f"{(base_url or base).rstrip('/')}/{remote.name}", target, remote, bar)
        if archived:
            _unpack(files[0], folder, entry.files)
    except OSError as error:
        if is_full(error):
            raise unwritable(folder, error, "run the command again, or give another folder, data_dir=...") from None
        raise DataError(f"{folder}: {error}; give another folder, data_dir=...") from None
    return unpacked if archived else files


def _download(url: str, target: Path, remote: Remote, bar: Progress) -> None:
    task = bar.add_task(remote.name, total=remote.size)
    part = target.with_name(f"{target.name}.part")
    try:
        if target.is_file() and sha256_of(target) == remote.sha256:
            bar.update(task, completed=remote.size)
            return
        got = _transfer(url, part, remote.size, lambda done: bar.update(task, completed=done))
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if is_full(error):
            raise
        raise DataError(f"{url}: download failed ({error}); run the command again to go on from {part}") from None
    if got < remote.size:
        raise DataError(f"{url}: got {got} of {remote.size} bytes; run the command again to go on from {part}")
    digest = sha256_of(part)
    if digest != remote.sha256:
        part.unlink()
        raise DataError(f"{url}: {target.name} has SHA-256 {digest}, expected {remote.sha256}; removed what came")
    os.replace(part, target)


def _transfer(url: str, part: Path, size: int, report: Callable[[int], None]) -> int:
    """Append to `part` what it lacks; returns its size, which is one too many if the server sends more than `size`."""
    done = part.stat().st_size if part.is_file() else 0
    if done >= size:
        return done
    headers = {"Range": f"bytes={done}-"} if done else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - of our table, and its sum is checked
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310 - as above
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0  # the server ignored the range and sends everything
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(min(_CHUNK, size + 1 - done)):
                file.write(chunk)
                done += len(chunk)
                report(done)
    return done


def _unpack(archive: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Move the files `names` from the archive to `folder`, all or none, and remove the archive."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as scratch:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    inside, _, name = member.name.rpartition("/")
                    # Links could lead anywhere; a name from the list cannot.
                    if inside == folder.name and name in names and member.isreg() and (data := tar.extractfile(member)):
                        with Path(scratch, name).open("wb") as file:
                            shutil.copyfileobj(data, file)
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            if is_full(error):
                raise
            raise DataError(f"{archive}: cannot be unpacked ({error})") from None
        for name in names:
            if not Path(scratch, name).is_file():
                raise DataError(f"{archive}: lacks {folder.name}/{name}")
        for name in names:
            os.replace(Path(scratch, name), folder / name)
    archive.unlink()
