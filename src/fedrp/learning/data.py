"""Data sets as plain arrays: the bundled one, the classic ones from a data folder, and the user's own.

`mnist`, `fashion-mnist` and `cifar10` lie below the data folder: `mnist/` and `fashion-mnist/` hold the four IDX files,
gzipped or not, and `cifar-10-batches-bin/` the official binary batches. Debian's package `dataset-fashion-mnist` has
the same layout, so `/usr/share/datasets` serves as a data folder. `idx:FOLDER` reads the four IDX files in FOLDER.
`npz:FILE` reads the arrays x_train, y_train, x_test and y_test: x is (N, H, W), (N, C, H, W) or, for feature vectors,
(N, F), y integers from 0. To add a data set: a reader, if its format is new, and one row in `DATASETS`.
"""

import difflib
import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import platformdirs

from fedrp.errors import ConfigError, DataError

Inputs = npt.NDArray[np.uint8 | np.float32]  # (N, C, H, W) or (N, F)
Labels = npt.NDArray[np.int64]  # (N,)

_MINI = Path(__file__).parents[1] / "assets" / "mnist-mini.npz"
_UNREADABLE = (OSError, EOFError, zlib.error)
_BLOCK = 4096  # examples at a time, where a float64 copy of all of them might not fit
_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_RELABEL = "add relabel=True to number them from 0, in sorted order"
_CIFAR_SHAPE = (10_000, 1 + 3 * 32 * 32)  # of a file: per image its label, then the red, green and blue planes


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification task, split into training and test examples.

    Guarantees:
    - `train_x` and `test_x` are both uint8 (pixels) or both finite float32, and of equal shape but for N.
    - There is one label per example, an integer in [0, classes); neither part is empty.
    - `mean` and `std` are the training set's, per channel or feature: published for the classic sets, computed for
      `idx:` and `npz:`. Where `std` would be 0 it is 1, so that what never varies is only centred.
    """

    name: str
    train_x: Inputs
    train_y: Labels
    test_x: Inputs
    test_y: Labels
    mean: tuple[float, ...]  # for uint8 in units of 255, so that pixels count as [0, 1]
    std: tuple[float, ...]
    classes: int

    def normalised(self, x: Inputs) -> npt.NDArray[np.float32]:
        """(x - mean) / std per channel, as a new float32 array. `x` is any selection of this set's examples."""
        result = x.astype(np.float32)
        result /= _unit(x)
        by_channel = np.moveaxis(result, 1, -1)  # a view
        by_channel -= np.array(self.mean, np.float32)
        by_channel /= np.array(self.std, np.float32)
        return result


class Part(NamedTuple):
    """Examples and labels as read, not yet checked, and what to call them in an error."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    x_name: str
    y_name: str


Reader = Callable[[Path], tuple[Part, Part]]  # training and test part from a file or folder


class Facts(NamedTuple):
    """What is published about a data set and need not be computed."""

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Entry(NamedTuple):
    """One row of `DATASETS`."""

    path: Path  # below the data folder; an absolute path stands for itself
    files: tuple[str, ...]  # in `path`, each possibly with .gz behind; none if `path` is itself the file
    read: Reader
    facts: Facts | None
    remedy: str = "run 'fedrp data fetch {name}', or give another data folder, data_dir=... or FEDRP_DATA"

    def located(self, data_dir: Path | None = None) -> Path:
        """Where the files lie, or would lie once fetched."""
        return Path(data_dir or default_data_dir()).expanduser() / self.path


def default_data_dir() -> Path:
    """The folder that FEDRP_DATA names, else `fedrp` in the user's cache folder."""
    return Path(os.environ.get("FEDRP_DATA") or platformdirs.user_cache_path("fedrp")).expanduser()


def load_dataset(name: str, data_dir: Path | None = None, relabel: bool = False) -> Dataset:
    """Read and check a data set: a name in `DATASETS`, `idx:FOLDER` or `npz:FILE`. Errors name file and remedy.

    With `relabel`, whole numbers or texts that are labels become 0, 1, ... in sorted order.
    """
    entry = find_entry(name)
    facts = entry.facts
    try:
        train, test = (part._replace(y=_column(part.y)) for part in entry.read(entry.located(data_dir)))
        if facts is None:
            train, test = _relabelled(train, test) if relabel else _numbered(train, test)
        train_x, train_y = checked(train, facts and facts.shape, facts and facts.classes)
        classes = facts.classes if facts else int(train_y.max()) + 1
        test_x, test_y = checked(test, train_x.shape[1:], classes)
        if train_x.dtype != test_x.dtype:
            raise DataError(f"{train.x_name} is {train_x.dtype} but {test.x_name} is {test_x.dtype}")
    except _UnnumberedError:
        raise
    except DataError as error:
        raise DataError(f"{error}; {entry.remedy.format(name=name)}") from None
    mean, std = (facts.mean, facts.std) if facts else _moments(train_x)
    return Dataset(name, train_x, train_y, test_x, test_y, mean, std, classes)


def find_entry(name: str) -> Entry:
    """The row of `DATASETS` called `name`, or one made for `idx:FOLDER` or `npz:FILE`."""
    if name in DATASETS:
        return DATASETS[name]
    prefix, _, path = name.partition(":")
    if path and prefix in _FORMATS:
        return Entry(Path(path).expanduser().absolute(), *_FORMATS[prefix], None, "check what {name} points to")
    close = difflib.get_close_matches(name.lower(), DATASETS, 1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    raise ConfigError(f"unknown data set {name!r}{hint} known: {', '.join(DATASETS)}, idx:FOLDER, npz:FILE")


def _unit(x: Inputs) -> float:
    return 255.0 if x.dtype == np.uint8 else 1.0


def _moments(x: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    by_channel = np.moveaxis(x, 1, -1)
    axes = tuple(range(x.ndim - 1))
    mean = by_channel.mean(axis=axes, dtype=np.float64)
    blocks = (by_channel[start : start + _BLOCK] - mean for start in range(0, len(x), _BLOCK))
    variance = sum(np.square(block).sum(axis=axes) for block in blocks) / (x.size / x.shape[1])
    # Compared exactly: rounding in the mean leaves a constant channel a tiny deviation, and dividing by it noise.
    std = np.where(by_channel.max(axis=axes) > by_channel.min(axis=axes), np.sqrt(variance) / _unit(x), 1.0)
    return tuple((mean / _unit(x)).tolist()), tuple(std.tolist())


class _UnnumberedError(DataError):
    """Labels that are good for nothing but to be numbered anew."""


def _column(y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _relabelled(train: Part, test: Part) -> tuple[Part, Part]:
    """Labels numbered from 0, in the sorted order of those of the training part."""
    known, numbers = np.unique(train.y, return_inverse=True)
    if strange := sorted(set(test.y.ravel().tolist()) - set(known.tolist())):
        raise DataError(f"{test.y_name} has the label {strange[0]!r}, which {train.y_name} does not have")
    return train._replace(y=numbers.reshape(train.y.shape)), test._replace(y=np.searchsorted(known, test.y))


def _numbered(train: Part, test: Part) -> tuple[Part, Part]:
    """The parts as they are, if their labels are not texts, and count from 0."""
    for part in (train, test):
        if part.y.dtype.kind in "US" and part.y.size:
            raise _UnnumberedError(f"{part.y_name}: labels are text, e.g. {part.y.flat[0]!s}: {_RELABEL}")
    labels = np.concatenate([train.y.ravel(), test.y.ravel()])
    if labels.size and labels.dtype.kind in "iu" and labels.min() != 0:
        raise _UnnumberedError(f"{train.y_name}: labels are {labels.min()} to {labels.max()}, not from 0: {_RELABEL}")
    return train, test


def checked(part: Part, shape: tuple[int, ...] | None, classes: int | None) -> tuple[Inputs, Labels]:
    """The part in canonical types, or the first thing wrong with it; None stands for whatever the part itself has."""
    x, y = part.x, part.y
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{part.y_name}: expected one integer label per example, got {y.dtype} of shape {y.shape}")
    if x.ndim not in (2, 3, 4) or x.size == 0 or x.dtype.kind not in "buif":
        raise DataError(f"{part.x_name}: expected numbers (N, F), (N, H, W) or (N, C, H, W), got {x.dtype} {x.shape}")
    if len(x) != len(y):
        raise DataError(f"{part.x_name} holds {len(x)} examples but {part.y_name} holds {len(y)} labels")
    if x.ndim == 4 and x.shape[1] == x.shape[2] > 3 and x.shape[3] in (1, 3):
        raise DataError(f"{part.x_name}: {x.shape} looks like (N, H, W, C): transpose it to (N, C, H, W)")
    if x.ndim == 3:
        x = x[:, None]
    if x.shape[1:] != (shape or x.shape[1:]):
        raise DataError(f"{part.x_name}: expected examples of shape {shape}, got {x.shape[1:]}")
    limit = classes or len(y)  # more classes than examples are no numbering from 0
    if wrong := {int(label) for label in (y.min(), y.max()) if not 0 <= label < limit}:
        raise DataError(f"{part.y_name}: expected labels from 0 to at most {limit - 1}, got {min(wrong)}")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what overflows is refused below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{part.x_name}: holds values that are not finite in float32")
    return np.require(x, requirements=["C", "W"]), y.astype(np.int64)


def _read_idx(folder: Path) -> tuple[Part, Part]:
    # The gzipped file comes first: it is the one that `fedrp data fetch` repairs.
    files = [zipped if (zipped := folder / f"{name}.gz").is_file() else folder / name for name in _IDX_FILES]
    train_x, train_y, test_x, test_y = (_idx_array(path, dims) for path, dims in zip(files, (3, 1, 3, 1), strict=True))
    names = [str(path) for path in files]
    return Part(train_x, train_y, names[0], names[1]), Part(test_x, test_y, names[2], names[3])


def _idx_array(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """An IDX file of bytes: the magic number, `dims` sizes as big-endian uint32, then the data."""
    raw = _bytes(path)
    magic, start = bytes([0, 0, 8, dims]), 4 + 4 * dims
    if raw[:4] != magic or len(raw) < start:
        raise DataError(f"{path}: expected an IDX file that starts with {magic.hex()}, got '{raw[:4].hex()}'")
    shape = tuple(np.frombuffer(raw, ">u4", dims, offset=4).tolist())
    size = start + math.prod(shape)
    if len(raw) != size:
        raise DataError(f"{path}: expected {size} bytes for shape {shape}, got {len(raw)}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _read_cifar(folder: Path) -> tuple[Part, Part]:
    *train, test = (_cifar_part(folder / name) for name in _CIFAR_FILES)
    x, y = np.concatenate([part.x for part in train]), np.concatenate([part.y for part in train])
    return Part(x, y, str(folder), str(folder)), test


def _cifar_part(path: Path) -> Part:
    raw = _bytes(path)
    if len(raw) != math.prod(_CIFAR_SHAPE):
        raise DataError(f"{path}: expected {math.prod(_CIFAR_SHAPE)} bytes, got {len(raw)}")
    rows = np.frombuffer(raw, np.uint8).reshape(_CIFAR_SHAPE)
    if rows[:, 0].max() > 9:  # checked here, where the one bad file among six can be named
        raise DataError(f"{path}: expected labels from 0 to 9, got {rows[:, 0].max()}")
    return Part(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], str(path), str(path))


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)  # without the path, which is named already


def _read_npz(path: Path) -> tuple[Part, Part]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            train, test = (
                Part(arrays[f"x_{part}"], arrays[f"y_{part}"], f"{path}[x_{part}]", f"{path}[y_{part}]")
                for part in ("train", "test")
            )
    except (*_UNREADABLE, KeyError, TypeError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected npz arrays x_train, y_train, x_test, y_test ({_reason(error)})") from None
    return train, test


_MNIST = Facts((1, 28, 28), 10, (0.1307,), (0.3081,))
_FASHION = Facts((1, 28, 28), 10, (0.2860,), (0.3530,))
_CIFAR10 = Facts((3, 32, 32), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

_FORMATS: dict[str, tuple[tuple[str, ...], Reader]] = {"idx": (_IDX_FILES, _read_idx), "npz": ((), _read_npz)}

DATASETS: dict[str, Entry] = {
    "mnist-mini": Entry(_MINI, (), _read_npz, _MNIST, "install fedrp again"),
    "mnist": Entry(Path("mnist"), _IDX_FILES, _read_idx, _MNIST),
    "fashion-mnist": Entry(Path("fashion-mnist"), _IDX_FILES, _read_idx, _FASHION),
    "cifar10": Entry(Path("cifar-10-batches-bin"), _CIFAR_FILES, _read_cifar, _CIFAR10),
}
