"""The server's store: a head that is replaced, and one file per completed round that is written once."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.epochs import Dealt
from fedrp.crypto.sizes import ENVELOPE_BYTES
from fedrp.errors import SiteError
from fedrp.files import write_atomically
from fedrp.protocol import wire
from fedrp.protocol.server import take_keys
from fedrp.protocol.server_state import Server, new_server
from fedrp.protocol.wire import Kind, Message
from fedrp.storage import server_state
from fedrp.storage.server import ServerFolder
from flower_helpers import in_child
from helpers import Federation, tiny_config

WAY_OUT = "put the latest copy of the store back, or give another store"


def comparable(server: Server) -> tuple[object, ...]:
    """All fields, with arrays as bytes."""
    vectors = {round_: vector.tobytes() for round_, vector in server.aggregates.items()}
    return dataclasses.replace(server, aggregates={}), vectors


def fresh(run: Federation) -> Server:
    return new_server(run.config, run.run, run.server.parameters)


def round_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "rounds").iterdir())


def rounds_later(run: Federation, rounds: int) -> Federation:
    for _ in range(rounds):
        run.round()
    return run


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_loaded_is_what_was_saved_at_every_moment(name: str, secure: bool, tmp_path: Path) -> None:
    run = Federation(tiny_config(name, rounds=4, secure_aggregation=secure))
    folder = ServerFolder(tmp_path, run.run)

    def same() -> bool:
        folder.save(run.server)
        return comparable(folder.load(fresh(run))) == comparable(run.server)

    assert same()
    for _ in range(4):
        packets = run.open()
        assert same()
        run.close(run.deliver(packets))
        assert same()


def test_every_field_of_the_server_is_kept() -> None:
    """A field that is added to the server must be added to the head, or it would be lost in a crash."""
    fields = {field.name for field in dataclasses.fields(Server)}
    assert fields == {*server_state.HEAD_FIELDS, "settings", "run", "parameters", "dealt", "aggregates"}


@pytest.mark.parametrize("name", ["fedavg", "fedadmm", "fedrp"])
def test_rounds_that_nobody_needs_any_more_are_removed(name: str, tmp_path: Path) -> None:
    run = Federation(tiny_config(name, rounds=4))
    folder = ServerFolder(tmp_path, run.run)
    for _ in range(4):
        run.round()
        folder.save(run.server)
    assert round_files(tmp_path) == ["000004.safetensors"]


def test_rounds_that_a_late_client_replays_are_kept(tmp_path: Path) -> None:
    run = rounds_later(Federation(tiny_config("fedrp-subspace", rounds=4)), 4)
    ServerFolder(tmp_path, run.run).save(run.server)
    assert round_files(tmp_path) == [f"{round_:06d}.safetensors" for round_ in range(5)]


def test_a_deal_for_a_completed_round_changes_nothing(tmp_path: Path) -> None:
    """Its file is written: an envelope that came later would be in the head and in no file."""
    run = rounds_later(Federation(tiny_config("fedrp", rounds=4)), 3)
    envelopes = wire.raw(bytes(4 * ENVELOPE_BYTES["x25519"]))
    forged = [Message(Kind.DEAL, run.bench.context, round_, 2, envelopes, 0) for round_ in range(4)]
    dealt = take_keys(run.server, run.read({2: wire.encode(forged)}))
    assert comparable(dealt) == comparable(run.server)


# --- what a save costs -----------------------------------------------------------------------------------------------


def long_run(clients: int, rounds: int, dim: int = 10) -> Server:
    """The server before its first round, for a run whose rounds are made by `after_a_round`."""
    config = tiny_config("fedrp-subspace", clients=clients, rounds=rounds, dim=dim)
    return new_server(resolved(config, 61_706), b"a run of tests..", dim)


def after_a_round(server: Server) -> Server:
    """As `close_round` leaves it: one more aggregate, and the envelopes of the round after it."""
    config, round_ = server.config, server.round + 1
    size = ENVELOPE_BYTES[config.sealing]
    data = np.random.default_rng(round_).bytes(size * config.clients)
    envelopes = tuple(data[start : start + size] for start in range(0, len(data), size))
    return dataclasses.replace(
        server,
        round=round_,
        last_seen=(round_,) * config.clients,
        aggregates={**server.aggregates, round_: np.full(server.upload_size, round_, np.float32)},
        dealt={**server.dealt, round_ + 1: Dealt(round_ % config.clients, envelopes)},
    )


def bytes_per_save(folder: ServerFolder, server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each save of a whole run writes."""
    written: list[int] = []

    def counting(path: Path, data: bytes) -> None:
        written[-1] += len(data)
        write_atomically(path, data)

    monkeypatch.setattr("fedrp.storage.server.write_atomically", counting)
    while server.round < server.config.rounds:
        server = after_a_round(server)
        written.append(0)
        folder.save(server)
    assert comparable(folder.load(long_run(server.config.clients, server.config.rounds))) == comparable(server)
    return written


def assert_constant(written: list[int], clients: int) -> None:
    """Round numbers have more digits later on, once per client; nothing else grows."""
    assert max(written[1:]) - min(written[1:]) <= 8 * clients + 200


def test_a_save_writes_as_much_in_the_last_round_as_in_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = bytes_per_save(ServerFolder(tmp_path, b"a run of tests.."), long_run(50, 120), monkeypatch)
    assert_constant(written, 50)
    assert max(written) < 3 * 50 * ENVELOPE_BYTES["x25519"]


def test_a_thousand_rounds_of_a_thousand_clients_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """144 MB of envelopes, more than the header of one safetensors file may hold."""
    written = bytes_per_save(ServerFolder(tmp_path, b"a run of tests.."), long_run(1000, 1000), monkeypatch)
    assert_constant(written, 1000)
    assert sum(path.stat().st_size for path in (tmp_path / "rounds").iterdir()) > 144e6


def test_a_save_within_a_round_writes_no_round_again(tmp_path: Path) -> None:
    run = rounds_later(Federation(tiny_config("fedavg")), 2)
    folder = ServerFolder(tmp_path, run.run)
    folder.save(run.server)
    before = (tmp_path / "rounds" / "000002.safetensors").stat()
    run.open()
    folder.save(run.server)
    after = (tmp_path / "rounds" / "000002.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


# --- a server that dies ----------------------------------------------------------------------------------------------


def dying_at(folder: Path, operation: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work` in a process that kills itself at its n-th change to a folder."""

    def doomed() -> None:
        left = operation

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (writes or event in {"os.rename", "os.mkdir", "os.remove"}) and str(folder) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work()

    return doomed


@pytest.mark.parametrize("name", ["fedrp", "fedrp-subspace"])
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_state_or_the_new(name: str, tmp_path: Path) -> None:
    run = rounds_later(Federation(tiny_config(name)), 1)
    old = run.server
    new = rounds_later(run, 1).server
    outcomes = []
    for operation in range(1, 20):
        root = tmp_path / str(operation)
        root.mkdir()
        folder = ServerFolder(root, run.run)
        folder.save(old)
        status, _ = in_child(dying_at(root, operation, lambda folder=folder: folder.save(new)))
        if not os.WIFSIGNALED(status):
            break
        found = comparable(folder.load(fresh(run)))
        outcomes.append([comparable(old), comparable(new)].index(found))
        folder.save(new)  # over what was left behind
        assert comparable(folder.load(fresh(run))) == comparable(new)
        assert not list(root.rglob("*.partial"))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == ({0, 1} if name == "fedrp" else {0})  # after the head, only what is not needed is removed


def test_what_was_written_before_a_kill_does_not_pass_for_what_came_after(tmp_path: Path) -> None:
    """The round is done again, by other clients: its file must be the one that the head was written with."""
    run = rounds_later(Federation(tiny_config("fedrp-subspace")), 1)
    folder = ServerFolder(tmp_path, run.run)
    folder.save(run.server)
    other = dataclasses.replace(run.server, round=2, aggregates={**run.server.aggregates, 2: np.ones(12, np.float32)})
    for name, data in server_state.packed_rounds(other, 1):
        write_atomically(tmp_path / "rounds" / name, data)
    assert comparable(folder.load(fresh(run))) == comparable(run.server)
    run.round()
    folder.save(run.server)
    assert comparable(folder.load(fresh(run))) == comparable(run.server)


# --- files that are not as they should be ----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Federation, ServerFolder]:
    run = rounds_later(Federation(tiny_config("fedrp-subspace")), 2)
    folder = ServerFolder(tmp_path, run.run)
    folder.save(run.server)
    return run, folder


FILES = ["head.safetensors", "rounds/000001.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_one_clear_error(name: str, stored: tuple[Federation, ServerFolder]) -> None:
    run, folder = stored
    path = folder.root / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 37):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            found = folder.load(fresh(run))
        except SiteError as error:
            told = str(error)
            assert told.startswith(f"{path} ")
            assert told.endswith(WAY_OUT)
            assert "\n" not in told
        else:  # white space between the header and the data, which means nothing
            assert comparable(found) == comparable(run.server)
            assert whole[position : position + 1] == b" "


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_one_clear_error(name: str, kept: int, stored: tuple[Federation, ServerFolder]) -> None:
    run, folder = stored
    path = folder.root / name
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SiteError, match=rf"^{path} is damaged \(.*\): {WAY_OUT}$"):
        folder.load(fresh(run))


def test_a_missing_round_is_one_clear_error(stored: tuple[Federation, ServerFolder]) -> None:
    run, folder = stored
    path = folder.root / "rounds" / "000001.safetensors"
    path.unlink()
    with pytest.raises(SiteError, match=rf"^{path} is missing: {WAY_OUT}$"):
        folder.load(fresh(run))


def test_a_round_under_the_name_of_another_is_one_clear_error(stored: tuple[Federation, ServerFolder]) -> None:
    run, folder = stored
    rounds = folder.root / "rounds"
    (rounds / "000002.safetensors").replace(rounds / "000001.safetensors")
    with pytest.raises(SiteError, match=rf"000001.safetensors is damaged \(it is not that of round 1\): {WAY_OUT}$"):
        folder.load(fresh(run))


def test_a_round_of_another_run_is_one_clear_error(stored: tuple[Federation, ServerFolder], tmp_path: Path) -> None:
    run, folder = stored
    other = dataclasses.replace(run.server, run=bytes(16))
    for name, data in server_state.packed_rounds(other, 0):
        (folder.root / "rounds" / name).write_bytes(data)
    with pytest.raises(SiteError, match=rf"000000.safetensors belongs to another run: {WAY_OUT}$"):
        folder.load(fresh(run))


OTHER_VERSION = "is of another version of fedrp: finish its run with that one, or begin a new one$"


def test_a_store_of_an_earlier_version_is_one_clear_error(tmp_path: Path) -> None:
    run = Federation(tiny_config("fedavg"))
    save_file({"1": np.ones(3, np.float32)}, tmp_path / "server.safetensors", {"run": run.run.hex(), "state": "{}"})
    with pytest.raises(SiteError, match=rf"^{tmp_path / 'server.safetensors'} {OTHER_VERSION}"):
        ServerFolder(tmp_path, run.run).load(fresh(run))


def test_a_head_with_other_fields_is_one_clear_error(
    stored: tuple[Federation, ServerFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = stored
    monkeypatch.delitem(server_state.HEAD_FIELDS, "left_out")
    with pytest.raises(SiteError, match=rf"head.safetensors {OTHER_VERSION}"):
        folder.load(fresh(run))


def test_only_the_owner_can_read_it(stored: tuple[Federation, ServerFolder]) -> None:
    _, folder = stored
    assert {path.stat().st_mode & 0o777 for path in folder.root.rglob("*.safetensors")} == {0o600}
    assert (folder.root / "rounds").stat().st_mode & 0o777 == 0o700


def test_the_head_is_small_and_readable(stored: tuple[Federation, ServerFolder]) -> None:
    _, folder = stored
    with safe_open(folder.root / "head.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
    assert about["state"]["round"] == 2
    assert about["keys"] == [[0, 0], [2, 2]]  # the secret of the set-up served for round 1 too
    assert about["aggregates"] == [[1, 2]]
