"""Downloads, against a local server that can misbehave."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedrp.errors import ConfigError, DataError, SiteError
from fedrp.learning import data, fetch
from fedrp.learning.data import DATASETS, load_dataset
from fedrp.learning.fetch import SOURCES, Remote, Source, available, fetch_dataset
from helpers import files_up_to

CIFAR_FILES = DATASETS["cifar10"].files


class Server(ThreadingHTTPServer):
    """Serves `files`. Each request notes its path and range; `ranges` and `cut` make it misbehave."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.cut: int | None = None

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the game."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/files/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path.removeprefix("/files/"), self.headers["Range"]
        self.server.requests.append((name, wanted))
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start : self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def remote(name: str, content: bytes) -> Remote:
    return Remote(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def mnist(server: Server, monkeypatch) -> dict[str, bytes]:
    """Four small IDX files on the server, with their sums in the table."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = count.to_bytes(4, "big")
        raw = b"\0\0\x08\x03" + head + (28).to_bytes(4, "big") * 2 + images.tobytes()
        server.files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(raw)
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        server.files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(b"\0\0\x08\x01" + head + labels)
    table = tuple(remote(name, content) for name, content in server.files.items())
    monkeypatch.setitem(SOURCES, "mnist", Source("http://127.0.0.1:9/nowhere", table))
    return server.files


def archive(members: dict[str, bytes], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


def serve_cifar(server: Server, monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(data, "_CIFAR_SHAPE", (4, 3073))
    server.files["cifar-10-binary.tar.gz"] = content
    monkeypatch.setitem(SOURCES, "cifar10", Source("unused", (remote("cifar-10-binary.tar.gz", content),)))


def cifar_members() -> dict[str, bytes]:
    return {f"cifar-10-batches-bin/{name}": bytes([i]) * (4 * 3073) for i, name in enumerate(CIFAR_FILES)}


def test_every_fetchable_set_is_in_the_table_with_full_sums() -> None:
    assert {name for name, entry in DATASETS.items() if not entry.path.is_absolute()} == set(SOURCES)
    for name, source in SOURCES.items():
        assert all(len(file.sha256) == 64 and file.size > 0 for file in source.files)
        names = {file.name.removesuffix(".gz") for file in source.files}
        assert names == set(DATASETS[name].files) or names == {"cifar-10-binary.tar"}


def test_a_good_file_arrives_loads_and_is_not_fetched_twice(server: Server, mnist, tmp_path: Path, capsys) -> None:
    assert not {row.name: row.present for row in available(tmp_path)}["mnist"]
    paths = fetch_dataset("mnist", tmp_path, server.url)
    assert {path.name: path.read_bytes() for path in paths} == mnist
    assert sorted((tmp_path / "mnist").iterdir()) == sorted(paths), "nothing else is left"
    assert load_dataset("mnist", tmp_path).train_x.shape == (40, 1, 28, 28)
    assert {row.name: row.present for row in available(tmp_path)}["mnist"]
    output = capsys.readouterr()
    assert not output.out, "progress belongs to stderr"
    assert "train-images" in output.err

    server.requests.clear()
    assert fetch_dataset("mnist", tmp_path, server.url, progress=False) == paths
    assert not server.requests
    assert not capsys.readouterr().err


def test_a_damaged_file_is_replaced(server: Server, mnist, tmp_path: Path) -> None:
    (path, *_) = fetch_dataset("mnist", tmp_path, server.url, progress=False)
    path.write_bytes(b"damaged")
    server.requests.clear()
    fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert path.read_bytes() == mnist[path.name]
    assert server.requests == [(path.name, None)]


def test_a_wrong_sum_names_file_and_both_sums_and_leaves_nothing(server: Server, mnist, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    good = mnist[name]
    server.files[name] = bad = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(DataError, match=name) as caught:
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    for content in (good, bad):
        assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert not list((tmp_path / "mnist").iterdir())


def test_a_file_longer_than_published_is_cut_off_and_refused(server: Server, mnist, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    server.files[name] = mnist[name] + bytes(10_000_000)
    with pytest.raises(DataError, match="SHA-256"):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert not list((tmp_path / "mnist").iterdir())


def test_a_truncated_download_is_kept_and_resumed(server: Server, mnist, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    server.cut = 1000
    with pytest.raises(DataError, match="run the command again") as caught:
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert f"{name}.part" in str(caught.value)
    assert (tmp_path / "mnist" / f"{name}.part").stat().st_size == 1000
    assert not (tmp_path / "mnist" / name).exists()

    server.cut = None
    server.requests.clear()
    paths = fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert server.requests[0] == (name, "bytes=1000-")
    assert {path.name: path.read_bytes() for path in paths} == mnist
    assert not list((tmp_path / "mnist").glob("*.part"))


def test_a_server_without_ranges_is_asked_for_everything(server: Server, mnist, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    server.cut, server.ranges = 1000, False
    with pytest.raises(DataError):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    server.cut = None
    fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert (tmp_path / "mnist" / name).read_bytes() == mnist[name]


def test_a_complete_part_needs_no_server(server: Server, mnist, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    for name, content in mnist.items():
        (tmp_path / "mnist" / f"{name}.part").write_bytes(content)
    fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert not server.requests


def test_a_part_of_something_else_is_removed_and_the_next_try_succeeds(server: Server, mnist, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz.part").write_bytes(b"something else")
    with pytest.raises(DataError, match="SHA-256"):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    fetch_dataset("mnist", tmp_path, server.url, progress=False)


def test_a_missing_file_names_the_address(server: Server, mnist, tmp_path: Path) -> None:
    del server.files["train-labels-idx1-ubyte.gz"]
    with pytest.raises(DataError, match=f"{server.url}train-labels-idx1-ubyte.gz.*404"):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)


def test_no_server_at_all_names_the_address(mnist, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/nowhere/train-images.*refused"):
        fetch_dataset("mnist", tmp_path, progress=False)
    with pytest.raises(DataError, match=r"nonsense/train-images.*unknown url type"):
        fetch_dataset("mnist", tmp_path, "nonsense", progress=False)


def test_a_full_disk_is_one_line_and_the_download_goes_on_when_there_is_room(
    server: Server, mnist, tmp_path: Path
) -> None:
    with (
        files_up_to(1000),
        pytest.raises(SiteError, match=r"mnist: File too large: free space and run the command again"),
    ):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    assert {p.name: p.read_bytes() for p in fetch_dataset("mnist", tmp_path, server.url, progress=False)} == mnist


def test_an_archive_that_does_not_fit_unpacked_is_one_line(server: Server, monkeypatch, tmp_path: Path) -> None:
    packed = archive(cifar_members())
    serve_cifar(server, monkeypatch, packed)
    with files_up_to(len(packed)), pytest.raises(SiteError, match="File too large: free space"):
        fetch_dataset("cifar10", tmp_path / "data", server.url, progress=False)
    assert fetch_dataset("cifar10", tmp_path / "data", server.url, progress=False)


def test_a_folder_that_cannot_be_made_is_named(server: Server, mnist, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=f"{tmp_path / 'file'}.*data_dir"):
        fetch_dataset("mnist", tmp_path / "file", server.url, progress=False)


def test_cifar_is_unpacked_and_the_archive_removed(server: Server, monkeypatch, tmp_path: Path) -> None:
    harmless = {"cifar-10-batches-bin/readme.html": b"left out"}
    evil = {"../evil": b"x", "/tmp/fedrp-evil": b"x", "cifar-10-batches-bin/../../data_batch_1.bin": b"x"}  # noqa: S108 - must not be written
    serve_cifar(server, monkeypatch, archive(cifar_members() | harmless | evil))
    paths = fetch_dataset("cifar10", tmp_path / "data", server.url, progress=False)
    assert [path.name for path in paths] == list(CIFAR_FILES)
    everything = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(everything) == sorted(paths), "no archive, no scratch, nothing outside"
    assert load_dataset("cifar10", tmp_path / "data").test_y.tolist() == [5] * 4

    server.requests.clear()
    assert fetch_dataset("cifar10", tmp_path / "data", server.url, progress=False) == paths
    assert not server.requests
    paths[0].write_bytes(b"damaged")
    fetch_dataset("cifar10", tmp_path / "data", server.url, progress=False)
    assert load_dataset("cifar10", tmp_path / "data").classes == 10


def test_an_archive_that_lacks_a_file_or_has_a_link_instead_gives_none(server: Server, monkeypatch, tmp_path) -> None:
    last = f"cifar-10-batches-bin/{CIFAR_FILES[-1]}"
    members = {name: content for name, content in cifar_members().items() if name != last}
    serve_cifar(server, monkeypatch, archive(members, link=last))
    with pytest.raises(DataError, match=f"cifar-10-binary.tar.gz: lacks {last}"):
        fetch_dataset("cifar10", tmp_path, server.url, progress=False)
    assert not list(tmp_path.rglob("*.bin"))


def test_what_is_no_archive_is_refused(server: Server, monkeypatch, tmp_path: Path) -> None:
    serve_cifar(server, monkeypatch, archive(cifar_members())[:-50])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: cannot be unpacked"):
        fetch_dataset("cifar10", tmp_path, server.url, progress=False)
    assert not list(tmp_path.rglob("*.bin"))


def test_the_bundled_set_is_there_and_own_files_cannot_be_fetched(tmp_path: Path) -> None:
    assert load_dataset("mnist-mini", tmp_path).classes == 10
    (path,) = fetch_dataset("mnist-mini", tmp_path)
    assert path.is_file()
    assert [row.name for row in available(tmp_path) if row.present] == ["mnist-mini"]
    assert [row.path for row in available(tmp_path)][1] == tmp_path / "mnist"
    with pytest.raises(ConfigError, match=r"idx:x.*mnist, fashion-mnist, cifar10"):
        fetch_dataset("idx:x", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        fetch_dataset("minst", tmp_path)


def test_a_stalled_server_ends_in_an_error(server: Server, mnist, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "_TIMEOUT", 0.05)
    release = threading.Event()
    monkeypatch.setattr(Handler, "do_GET", lambda self: release.wait(5))
    with pytest.raises(DataError, match="timed out"):
        fetch_dataset("mnist", tmp_path, server.url, progress=False)
    release.set()
