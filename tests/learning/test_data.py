"""Loaders: what they read, and how they refuse what they cannot."""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp.errors import ConfigError, DataError
from fedrp.learning import data
from fedrp.learning.data import DATASETS, Dataset, default_data_dir, load_dataset

ROOT = Path(__file__).parents[2]
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def idx_arrays(train: int = 30, test: int = 20, side: int = 28) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (n, side, side), dtype=np.uint8) for n in (train, test)]
    return [images[0], np.arange(train) % 10, images[1], np.arange(test) % 10]


def write_idx(folder: Path, arrays: list[np.ndarray], zipped: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name, array in zip(IDX_FILES, arrays, strict=True):
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array), 1))
        else:
            (folder / name).write_bytes(idx(array))
    return folder


def npz_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(3, 2, (30, 2, 5, 4)).astype(np.float32)
    return {"x_train": x[:20], "y_train": np.arange(20) % 3, "x_test": x[20:], "y_test": np.arange(10) % 3}


def load_npz(folder: Path, **changes: np.ndarray) -> Dataset:
    np.savez(folder / "own.npz", **npz_arrays() | changes)
    return load_dataset(f"npz:{folder / 'own.npz'}")


def refused(name: str, data_dir: Path | None, *words: str) -> None:
    """The data set is refused in one line that has all these words."""
    with pytest.raises(DataError) as caught:
        load_dataset(name, data_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


# The bundled set


def test_mnist_mini_is_small_balanced_and_whole() -> None:
    mini = load_dataset("mnist-mini")
    assert mini.train_x.shape == (10_000, 1, 28, 28)
    assert mini.test_x.shape == (2_000, 1, 28, 28)
    assert mini.train_x.dtype == np.uint8
    assert mini.train_y.dtype == np.int64
    assert np.bincount(mini.train_y).tolist() == [1000] * 10
    assert np.bincount(mini.test_y).tolist() == [200] * 10
    assert DATASETS["mnist-mini"].located().stat().st_size <= 2_500_000
    digest = hashlib.sha256(b"".join(a.tobytes() for a in (mini.train_x, mini.train_y, mini.test_x, mini.test_y)))
    assert digest.hexdigest() in (ROOT / "src/fedrp/assets/README.md").read_text()


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_mnist_mini", ROOT / "scripts/make_mnist_mini.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_picks_evenly_and_makes_what_the_loader_reads(script: ModuleType, tmp_path: Path) -> None:
    assert script.spread(np.array([0, 1, 0, 1, 0, 1, 0, 1]), 2).tolist() == [0, 1, 4, 5]

    folder = write_idx(tmp_path / "idx", idx_arrays(10_000, 2_000))
    script.main(str(folder), str(tmp_path / "a.npz"))
    script.main(str(folder), str(tmp_path / "b.npz"))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert np.array_equal(load_dataset(f"npz:{tmp_path / 'a.npz'}").train_x, load_dataset(f"idx:{folder}").train_x)


@pytest.mark.skipif(not (default_data_dir() / "mnist").is_dir(), reason="needs MNIST in the data folder")
def test_the_bundled_set_is_what_the_script_makes_of_mnist(script: ModuleType, tmp_path: Path) -> None:
    script.main(str(default_data_dir() / "mnist"), str(tmp_path / "again.npz"))
    again, mini = load_dataset(f"npz:{tmp_path / 'again.npz'}"), load_dataset("mnist-mini")
    assert np.array_equal(again.train_x, mini.train_x)
    assert np.array_equal(again.test_x, mini.test_x)


# IDX


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_sets_lie_below_the_data_folder(name: str, zipped: bool, tmp_path: Path, monkeypatch) -> None:
    arrays = idx_arrays()
    write_idx(tmp_path / name, arrays, zipped)
    loaded = load_dataset(name, tmp_path)
    assert loaded.name == name
    assert loaded.classes == 10
    for got, put in zip(
        (loaded.train_x[:, 0], loaded.train_y, loaded.test_x[:, 0], loaded.test_y), arrays, strict=True
    ):
        assert np.array_equal(got, put)
    assert loaded.train_x.flags.writeable, "torch.from_numpy warns about arrays that are not"
    monkeypatch.setenv("FEDRP_DATA", str(tmp_path))
    assert np.array_equal(load_dataset(name).train_x, loaded.train_x)


def test_idx_reads_any_set_of_that_format_and_computes_its_moments(tmp_path: Path) -> None:
    arrays = idx_arrays(side=9)
    folder = write_idx(tmp_path / "any", [arrays[0], arrays[1] % 4, arrays[2], arrays[3] % 4])
    loaded = load_dataset(f"idx:{folder}")
    assert loaded.train_x.shape == (30, 1, 9, 9)
    assert loaded.classes == 4
    assert loaded.mean == pytest.approx([arrays[0].mean() / 255])
    assert loaded.std == pytest.approx([arrays[0].std() / 255])


def test_a_missing_file_or_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    refused("mnist", tmp_path, "mnist/train-images-idx3-ubyte", "fedrp data fetch mnist", "data_dir=...")
    refused("cifar10", tmp_path, "data_batch_1.bin", "fedrp data fetch cifar10", "data_dir=...")
    refused(f"idx:{tmp_path}", None, "train-images-idx3-ubyte", "No such file")
    refused(f"npz:{tmp_path / 'no.npz'}", None, "no.npz", "No such file")
    refused(f"npz:{tmp_path}", None, str(tmp_path), "directory")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda raw: gzip.compress(raw)[:-20], ["cannot be read"]),
        (lambda raw: gzip.compress(raw)[:5], ["cannot be read"]),
        (lambda raw: b"not gzip", ["cannot be read", "gzip"]),
        (lambda raw: gzip.compress(b"\0\0\x0d" + raw[3:]), ["00000801", "00000d01"]),
        (lambda raw: gzip.compress(raw[:6]), ["00000801"]),
        (lambda raw: gzip.compress(b""), ["00000801"]),
        (lambda raw: gzip.compress(raw[:-1]), ["expected 38 bytes", "got 37"]),
        (lambda raw: gzip.compress(raw + b"\0"), ["expected 38 bytes", "got 39"]),
        (lambda raw: gzip.compress(raw[:-1] + b"\x0a"), ["labels from 0 to at most 9", "got 10"]),
        (lambda raw: gzip.compress(idx(np.arange(29) % 10)), ["30 examples", "29 labels"]),
    ],
)
def test_a_damaged_idx_file_is_named(broken, words: list[str], tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist", idx_arrays())
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(broken(gzip.decompress(path.read_bytes())))
    refused("mnist", tmp_path, str(path), "fedrp data fetch mnist", *words)


def test_images_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", idx_arrays(side=32))
    refused("mnist", tmp_path, "train-images-idx3-ubyte", "(1, 28, 28)", "(1, 32, 32)")
    folder = write_idx(tmp_path / "mixed", idx_arrays()[:2] + idx_arrays(side=27)[2:])
    refused(f"idx:{folder}", None, "t10k-images-idx3-ubyte", "(1, 28, 28)", "(1, 27, 27)")
    folder = write_idx(tmp_path / "empty", idx_arrays(test=0))
    refused(f"idx:{folder}", None, "t10k-images-idx3-ubyte", "(0, 28, 28)")


# CIFAR-10


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch) -> Path:
    """A folder in the official layout, but with 20 images a file."""
    monkeypatch.setattr(data, "_CIFAR_SHAPE", (20, 3073))
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rows = np.random.default_rng(2).integers(0, 256, (6, 20, 3073), dtype=np.uint8)
    rows[:, :, 0] %= 10
    for name, part in zip((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"), rows, strict=True):
        (folder / name).write_bytes(part.tobytes())
    return folder


def test_cifar_planes_and_labels(cifar: Path) -> None:
    loaded = load_dataset("cifar10", cifar.parent)
    assert loaded.train_x.shape == (100, 3, 32, 32)
    assert loaded.test_x.shape == (20, 3, 32, 32)
    record = (cifar / "data_batch_2.bin").read_bytes()[3073 : 2 * 3073]
    assert loaded.train_y[21] == record[0]
    assert loaded.train_x[21, 1, 0, 2] == record[1 + 1024 + 2]


def test_a_damaged_cifar_file_is_named(cifar: Path) -> None:
    path = cifar / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3073])
    refused("cifar10", cifar.parent, str(path), "expected 61460 bytes", "got 58387")
    path.write_bytes(b"\x0b" + whole[1:])
    refused("cifar10", cifar.parent, str(path), "labels from 0 to 9", "got 11")


# NPZ


def test_npz_keeps_values_and_normalises_per_channel(tmp_path: Path) -> None:
    loaded = load_npz(tmp_path)
    assert loaded.train_x.dtype == np.float32
    assert np.array_equal(loaded.train_x, npz_arrays()["x_train"])
    assert loaded.classes == 3
    normal = loaded.normalised(loaded.train_x)
    assert normal.dtype == np.float32
    assert normal.mean(axis=(0, 2, 3)) == pytest.approx([0, 0], abs=1e-5)
    assert normal.std(axis=(0, 2, 3)) == pytest.approx([1, 1], abs=1e-5)


def test_npz_takes_grey_images_and_feature_vectors(tmp_path: Path) -> None:
    grey = load_npz(tmp_path, x_train=np.full((20, 6, 7), 51, np.uint8), x_test=np.zeros((10, 6, 7), np.uint8))
    assert grey.train_x.shape == (20, 1, 6, 7)
    assert (grey.mean, grey.std) == (pytest.approx((0.2,)), (1.0,))

    features = np.random.default_rng(0).normal(size=(20, 5))
    features[:, 2] = 0.1  # constant, and not exact in binary
    table = load_npz(tmp_path, x_train=features, x_test=features[:10])
    assert table.train_x.shape == (20, 5)
    normal = table.normalised(table.train_x)
    assert normal.std(axis=0) == pytest.approx([1, 1, 0, 1, 1], abs=1e-5)
    assert np.abs(normal[:, 2]).max() < 1e-6


def test_moments_do_not_depend_on_the_block_size(tmp_path: Path, monkeypatch) -> None:
    whole = load_npz(tmp_path)
    monkeypatch.setattr(data, "_BLOCK", 7)
    assert load_npz(tmp_path).std == pytest.approx(whole.std, rel=1e-12)


def test_published_moments_are_those_of_the_bundled_data() -> None:
    mini = load_dataset("mnist-mini")
    normal = mini.normalised(mini.train_x[:5000])
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    pixel = np.array([[[[255]]]], np.uint8)
    assert mini.normalised(pixel).item() == pytest.approx((1 - 0.1307) / 0.3081)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_train": np.arange(19) % 3}, ["[x_train]", "20 examples", "[y_train]", "19 labels"]),
        ({"y_train": np.zeros((20, 1), int)}, ["[y_train]", "(20, 1)"]),
        ({"y_train": np.zeros(20)}, ["[y_train]", "integer", "float64"]),
        ({"y_train": np.arange(20) - 1}, ["[y_train]", "got -1"]),
        ({"y_train": np.arange(20) + 1}, ["[y_train]", "got 20"]),
        ({"y_test": np.arange(10) % 4}, ["[y_test]", "0 to at most 2", "got 3"]),
        ({"x_train": np.zeros((20, 2, 5, 3), np.float32)}, ["[x_test]", "(2, 5, 3)", "(2, 5, 4)"]),
        ({"x_train": np.zeros(20)}, ["[x_train]", "(N, F)", "(20,)"]),
        ({"x_train": np.zeros((20, 0))}, ["[x_train]", "(20, 0)"]),
        ({"x_train": np.full((20, 2), "a")}, ["[x_train]", "numbers", "<U1"]),
        ({"x_train": np.zeros((20, 2), complex)}, ["[x_train]", "complex128"]),
        ({"x_train": np.full((20, 2), np.nan)}, ["[x_train]", "not finite"]),
        ({"x_train": np.full((20, 2), 1e300)}, ["[x_train]", "not finite"]),
        ({"x_train": np.zeros((20, 32, 32, 3), np.uint8)}, ["[x_train]", "(N, H, W, C)", "transpose"]),
        ({"x_train": np.zeros((20, 2, 5, 4), np.uint8)}, ["uint8", "float32"]),
        ({"x_train": np.full((20, 2), None)}, ["own.npz", "pickle"]),
    ],
)
def test_npz_refuses(changes: dict[str, np.ndarray], words: list[str], tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **npz_arrays() | changes)
    refused(f"npz:{tmp_path / 'own.npz'}", None, str(tmp_path / "own.npz"), *words)


def test_npz_refuses_missing_arrays_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **{name: array for name, array in npz_arrays().items() if name != "y_test"})
    refused(f"npz:{path}", None, str(path), "y_test is not a file")
    np.save(tmp_path / "one.npy", np.zeros(3))
    refused(f"npz:{tmp_path / 'one.npy'}", None, "one.npy", "x_train")
    path.write_text("hello")
    refused(f"npz:{path}", None, str(path))


@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_npz_loads_or_is_refused(position: int, value: int, cut: bool, tmp_path_factory) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **npz_arrays())
    raw = bytearray(buffer.getvalue())
    position %= len(raw)
    raw[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(raw[:position] if cut else raw)
    with contextlib.suppress(DataError):
        load_dataset(f"npz:{path}")


# Names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("minst", ["did you mean 'mnist'?", "cifar10", "npz:FILE"]),
        ("CIFAR-10", ["did you mean 'cifar10'?"]),
        ("imagenet", ["'imagenet'; known: mnist-mini, mnist, fashion-mnist, cifar10, idx:FOLDER, npz:FILE"]),
        ("idx:", ["idx:FOLDER"]),
        ("csv:file", ["npz:FILE"]),
        ("", ["known:"]),
    ],
)
def test_unknown_names_get_a_suggestion_and_the_list(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataset(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_data_folder_is_the_variable_or_the_cache(monkeypatch) -> None:
    monkeypatch.setenv("FEDRP_DATA", "~/somewhere")
    assert default_data_dir() == Path.home() / "somewhere"
    monkeypatch.setenv("FEDRP_DATA", "")
    assert default_data_dir().name == "fedrp"
    monkeypatch.delenv("FEDRP_DATA")
    assert default_data_dir().name == "fedrp"
