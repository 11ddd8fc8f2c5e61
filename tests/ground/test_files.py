"""Files of secrets and state: what someone planted at their place is neither followed nor filled."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrp.cli import main
from fedrp.crypto.roster import load_identity, new_identity
from fedrp.errors import ConfigError, SiteError
from fedrp.files import locked, read_private, write_atomically
from fedrp.protocol.client_state import Client
from fedrp.storage.site import SiteFolder
from fedrp.storage.status import append_line
from fedrp.testing.loopback import make_node_key


def planted(link: Path) -> Path:
    """A file of someone else's that a link leads to, at a place where a secret or state is to be written."""
    target = link.parent / "elsewhere"
    target.write_text("theirs")
    link.symlink_to(target)
    return target


def test_a_link_at_the_place_of_a_new_key_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = planted(tmp_path / "site.key")
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", str(tmp_path / "site.key"), "--name", "amsterdam"])
    assert ended.value.code == ConfigError.exit_code
    line = f"fedrp: {tmp_path / 'site.key'} already exists: it is never overwritten, give another path\n"
    assert capsys.readouterr().err == line
    assert target.read_text() == "theirs"
    (tmp_path / "dangling.key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="already exists"):
        new_identity(tmp_path / "dangling.key", "amsterdam")
    assert not (tmp_path / "nowhere").exists()


def test_a_link_at_the_place_of_a_keys_partial_file_is_not_followed(tmp_path: Path) -> None:
    target = planted(tmp_path / f".site.key.{os.getpid()}.partial")
    new_identity(tmp_path / "site.key", "amsterdam")
    assert target.read_text() == "theirs"
    assert load_identity(tmp_path / "site.key").name == "amsterdam"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "site.key"]


def test_a_key_is_not_read_through_a_link_nor_from_a_pipe(tmp_path: Path) -> None:
    new_identity(tmp_path / "site.key", "amsterdam")
    (tmp_path / "link.key").symlink_to(tmp_path / "site.key")
    with pytest.raises(ConfigError, match=r"link\.key is a symbolic link, which is not followed: give the file itself"):
        load_identity(tmp_path / "link.key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="pipe is not a file"):
        read_private(tmp_path / "pipe")


def save_state(folder: Path) -> Path:
    site = SiteFolder(folder, bytes(16))
    site.root.mkdir(exist_ok=True)
    site.save(Client(0))
    return site.root / "state.safetensors"


WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("status.json", lambda path: write_atomically(path, b"ours")),
    ("node", make_node_key),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_what_a_planted_link_leads_to_is_not_written(
    tmp_path: Path, name: str, write: Callable[[Path], object], suffix: str
) -> None:
    target = planted(tmp_path / f"{name}{suffix}")
    write(tmp_path / name)
    assert target.read_text() == "theirs"
    assert not (tmp_path / name).is_symlink()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / f"{name}.partial").exists()


def test_a_sites_state_is_neither_written_nor_read_through_a_link(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    path.rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SiteError, match=r"state\.safetensors is a symbolic link, which is not followed"):
        SiteFolder(tmp_path, bytes(16)).load(0)
    SiteFolder(tmp_path, bytes(16)).save(Client(0, round=3))
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert SiteFolder(tmp_path, bytes(16)).load(0).round == 3


def test_locks_and_logs_do_not_follow_links(tmp_path: Path) -> None:
    target = planted(tmp_path / "lock")
    with (
        pytest.raises(SiteError, match=r"cannot open .*lock: Too many levels of symbolic links"),
        locked(tmp_path / "lock"),
    ):
        pytest.fail("a link was locked")
    (tmp_path / "log.jsonl").symlink_to(target)
    append_line(tmp_path / "log.jsonl", {"event": "round"})
    assert target.read_text() == "theirs"


def test_a_partial_file_that_a_crash_left_does_not_stay_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "state.partial").write_bytes(b"half")
    write_atomically(tmp_path / "state", b"whole")
    assert (tmp_path / "state").read_bytes() == b"whole"
    assert not (tmp_path / "state.partial").exists()
