"""What parties of a deployment keep on disk: complete or not at all, theirs and of this run, or refused in one line."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrp.algorithms.table import ALGORITHMS
from fedrp.config import RunConfig
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ConfigError, DataError, SiteError
from fedrp.files import locked, write_atomically
from fedrp.flower import client_app
from fedrp.flower.messages import HELLO, ROUND, RefusedError, packet_of, question
from fedrp.protocol import wire
from fedrp.protocol.client_state import Client
from fedrp.protocol.wire import Kind, Message
from fedrp.simulation.simulate import simulate
from fedrp.storage.client_state import ARRAY_FIELDS, PLAIN_FIELDS, packed_clients, read_clients
from fedrp.storage.server import ServerFolder
from fedrp.storage.site import SiteFolder, Terms
from fedrp.testing.local import local_run
from flower_helpers import FIRST_NODE, FlowerFederation, tiny_load
from helpers import Federation, environment, round_keys, tiny_config, tiny_task


def same(one: Client, other: Client) -> bool:
    states = zip(one.state or (), other.state or (), strict=True)
    plain = [dataclasses.replace(client_state, state=None) for client_state in (one, other)]
    return plain[0] == plain[1] and all(np.array_equal(a, b) for a, b in states)


@pytest.fixture
def federation() -> Federation:
    run = Federation(tiny_config("fedrp"))
    run.round()
    return run


@pytest.fixture
def folder(tmp_path: Path, federation: Federation) -> SiteFolder:
    folder = SiteFolder(tmp_path / "state", federation.run)
    folder.begin(1, terms("fedrp"))
    folder.save(federation.clients[1])
    return folder


def terms(name: str = "fedavg", /, weight: int = 1, data: str = "default", **changes: object) -> Terms:
    return Terms.of(tiny_config(name, **changes), weight, data)


# --- the client's state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_that_is_written_and_read_between_all_messages_is_the_same_client(name: str, tmp_path: Path) -> None:
    kept, plain = Federation(tiny_config(name)), Federation(tiny_config(name))
    for _ in range(3):
        packets = kept.open()
        for client in packets:
            folder = SiteFolder(tmp_path / str(client), kept.run)
            folder.begin(client, terms(name))
            before = kept.clients[client]
            folder.save(before)
            kept.clients[client] = folder.load(client)
            assert same(kept.clients[client], before)
        kept.close(kept.deliver(packets))
        plain.round()
    for client, model in kept.final_models().items():
        assert np.array_equal(model, plain.final_models()[client])


def test_a_run_that_is_begun_has_a_new_state_on_the_disk(tmp_path: Path) -> None:
    folder = SiteFolder(tmp_path, bytes(16))
    folder.begin(2, terms())
    assert folder.load(2) == Client(2)


def test_only_the_owner_can_read_it_and_no_key_is_in_it(folder: SiteFolder, federation: Federation) -> None:
    folder.report({"round": 1})
    folder.log("round", {"round": 1})
    files = [path for path in folder.root.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.root.stat().st_mode & 0o777 == 0o700
    everything = b"".join(path.read_bytes() for path in files)
    assert not any(key.reveal() in everything or key.reveal().hex().encode() in everything
                   for key in round_keys(federation.config))  # fmt: skip


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_state_is_refused(kept: int, folder: SiteFolder) -> None:
    path = folder.root / "state.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SiteError, match=r"state.safetensors is damaged .*: let this site sit the run out"):
        folder.load(1)


def test_one_flipped_bit_anywhere_in_a_state_is_one_clear_error(folder: SiteFolder, federation: Federation) -> None:
    path = folder.root / "state.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 11):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            found = folder.load(1)
        except SiteError as error:
            told = str(error)
            assert re.fullmatch(rf"{path} [^\n]*: let this site sit the run out, [^\n]*", told)
        else:  # white space between the header and the data, which means nothing
            assert same(found, federation.clients[1])
            assert whole[position : position + 1] == b" "


def test_a_state_of_an_earlier_version_is_one_clear_error(folder: SiteFolder) -> None:
    path, metadata = folder.root / "state.safetensors", {"format": "fedrp site state 2", "run": folder.run.hex()}
    save_file({"model": torch.ones(3)}, path, {**metadata, "client": json.dumps({"client": 1, "state": ["model"]})})
    told = f"{path} is of another version of fedrp: finish its run with that one, or begin a new one"
    with pytest.raises(SiteError, match=f"^{told}$"):
        folder.load(1)


def test_every_field_of_a_client_is_kept() -> None:
    """A field that is added to the client must be added to its file, or it would be lost in a crash."""
    assert {field.name for field in dataclasses.fields(Client)} == {*PLAIN_FIELDS, *ARRAY_FIELDS}


def test_what_simulated_clients_share_is_stored_once_and_shared_again(tmp_path: Path) -> None:
    shared, run = np.ones((1000, 32), np.uint8), bytes(16)
    clients = [Client(client, mask_keys=shared, reply=bytes([client]) * 9) for client in range(5)]
    (tmp_path / "clients").write_bytes(packed_clients(run, clients))
    assert (tmp_path / "clients").stat().st_size < 2 * shared.nbytes
    loaded = read_clients(tmp_path / "clients", run)
    assert loaded == clients
    assert all(client.mask_keys is loaded[0].mask_keys for client in loaded)
    assert np.array_equal(loaded[0].mask_keys, shared)


def test_a_state_of_another_run_or_client_is_refused(folder: SiteFolder, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="belongs to client 1, this is client 2"):
        folder.load(2)
    other = SiteFolder(tmp_path, b"some other run..")
    other.begin(1, terms())
    (other.root / "state.safetensors").write_bytes((folder.root / "state.safetensors").read_bytes())
    with pytest.raises(SiteError, match="belongs to another run"):
        other.load(1)


def test_a_delivered_model_keeps_every_type_of_tensor(folder: SiteFolder) -> None:
    types = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    model = {str(number): torch.ones(3, dtype=dtype) for number, dtype in enumerate(types)} | {"empty": torch.empty(0)}
    delivered = load_file(folder.deliver(model))
    assert all(torch.equal(delivered[name], tensor) for name, tensor in model.items())
    assert [delivered[name].dtype for name in model] == [tensor.dtype for tensor in model.values()]


def test_a_file_of_something_else_is_refused(folder: SiteFolder) -> None:
    model = folder.deliver({"weight": torch.ones(3)})
    (folder.root / "state.safetensors").write_bytes(model.read_bytes())
    with pytest.raises(
        SiteError, match=r"state.safetensors is of another version of fedrp: finish its run with that one"
    ):
        folder.load(1)


# --- what a run began with -------------------------------------------------------------------------------------------


def test_a_run_is_tied_to_what_it_began_with(tmp_path: Path) -> None:
    folder = SiteFolder(tmp_path, bytes(16))
    folder.begin(0, terms(weight=30))
    folder.begin(0, terms(weight=30))
    folder.settle(terms(weight=30))
    with pytest.raises(ConfigError, match=r"^run 0{32} was started with rounds=3, not 4: other settings need a run of"):
        folder.settle(terms(weight=30, rounds=4))
    with pytest.raises(DataError, match=r"began with 30 examples here, now there are 31"):
        folder.settle(terms(weight=31))
    with pytest.raises(ConfigError, match=r"began on data 'default' here, not 'cohort-2': put data=\"default\" back"):
        folder.settle(terms(weight=30, data="cohort-2"))


@pytest.mark.parametrize("text", ["", "[]", '{"config": {}}', '{"config": 3, "weight": 1}'])
def test_a_state_with_damaged_terms_is_refused(text: str, folder: SiteFolder) -> None:
    (folder.root / "run.json").write_text(text)
    with pytest.raises(SiteError, match=r"run.json is damaged .*: let this site sit the run out"):
        folder.settle(terms("fedrp"))


@pytest.mark.parametrize("name", ["run.json", "state.safetensors"])
def test_a_site_that_has_lost_a_file_sits_the_run_out(name: str, folder: SiteFolder) -> None:
    """To begin anew would be to answer round 1 again: with new noise, and under the same masks."""
    (folder.root / name).unlink()
    for again in (folder.settle, lambda asked: folder.begin(1, asked)):
        with pytest.raises(SiteError, match=rf"was begun here, but .*{name} is gone: let this site sit the run out"):
            again(terms("fedrp"))


def test_a_crash_between_the_first_two_files_can_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SiteFolder(tmp_path, bytes(16))

    def dies(path: Path, data: bytes) -> None:
        if path.name == "run.json":
            raise KeyboardInterrupt
        write_atomically(path, data)

    monkeypatch.setattr("fedrp.storage.site.write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        folder.begin(2, terms())
    monkeypatch.undo()
    folder.begin(2, terms())
    folder.settle(terms())
    assert folder.load(2) == Client(2)


def test_a_run_from_before_sites_named_their_data_goes_on(folder: SiteFolder) -> None:
    old = json.loads((folder.root / "run.json").read_text())
    del old["data"]
    (folder.root / "run.json").write_text(json.dumps(old))
    folder.settle(terms("fedrp"))
    assert folder.terms("cohort-1").data == "cohort-1"


# --- the attack: a site that has forgotten what it sent --------------------------------------------------------------


def lose_the_state(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def lose_the_terms(folder: Path) -> None:
    (folder / "run.json").unlink()


def damage_the_state(folder: Path) -> None:
    (folder / "state.safetensors").write_bytes((folder / "state.safetensors").read_bytes()[:100])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lose_the_state, "was begun here, but {folder}/state.safetensors is gone: let this site sit the run out"),
        (lose_the_terms, "was begun here, but {folder}/run.json is gone: let this site sit the run out"),
        (shutil.rmtree, "was begun here, but {folder}/run.json is gone: let this site sit the run out"),
        (damage_the_state, "{folder}/state.safetensors is damaged"),
    ],
)
def test_a_site_that_has_lost_its_state_does_not_answer_a_round_again(
    loss: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    """New noise under the same masks: the difference of two answers would show both uploads' noise, and average it."""
    noisy = {"noise_multiplier": 2.0, "secure_aggregation": True, "quorum": 1.0}
    run = FlowerFederation(tmp_path, tiny_config("fedavg-dp", **noisy))
    run.app = client_app(tiny_load)  # secrets of the system, as deployed
    known = os.urandom(16)
    with local_run():
        greetings = [packet_of(run.answer(c, question(b"", FIRST_NODE + c, HELLO, known, 0))) for c in range(4)]
    signed = [wire.decode(greeting)[0].payload.tobytes()[32:] for greeting in greetings]
    entries = b"".join(struct.pack("<I", client) + key for client, key in enumerate(signed))
    keys = Message(Kind.MASK_KEYS, wire.context_of(known, 0), 1, wire.SERVER, wire.raw(entries))
    call = Message(Kind.ROUND, wire.context_of(known, 0), 1, wire.SERVER, Cohort((0, 1, 2, 3), (1,) * 4).payload(), 4)

    def asked() -> bytes:
        with local_run():
            return packet_of(run.answer(0, question(wire.encode([keys, call]), FIRST_NODE, ROUND, known, 1)))

    reply = asked()
    assert wire.messages_of(wire.decode(reply), Kind.UPLOAD)
    assert asked() == reply
    folder = run.folder(0)
    loss(folder)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"^SiteError$"):
            asked()
    reason = json.loads((folder.parent / "failures.jsonl").read_text().splitlines()[-1])["reason"]
    assert told.format(folder=folder) in reason
    assert "let this site sit the run out" in reason


# --- a disk that is full, a process that is killed -------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_state(small_disk: Path, federation: Federation) -> None:
    folder = SiteFolder(small_disk, federation.run)
    folder.begin(1, terms("fedrp"))
    old = federation.clients[1]
    folder.save(old)
    big = dataclasses.replace(old, round=2, reply=bytes(100_000))
    with pytest.raises(SiteError, match=r"state.safetensors: No space left on device; what was there is unchanged"):
        folder.save(big)
    assert same(folder.load(1), old)
    assert not list(folder.root.glob("*.partial"))
    folder.save(dataclasses.replace(old, round=2))  # and there is room for what fits
    assert folder.load(1).round == 2


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked process that does `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_kill_at_any_step_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "state"
    seen = set()
    for step in range(1, 40):
        write_atomically(path, b"old" * 1000)

        def dies(step: int = step) -> None:
            left = step

            def watch(*_: object) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.settrace(lambda frame, *_: watch if frame.f_code.co_filename.endswith("files.py") else None)
            write_atomically(path, b"new" * 2000)

        killed = in_child(dies) == signal.SIGKILL
        assert path.read_bytes() in (b"old" * 1000, b"new" * 2000)
        seen.add((killed, path.read_bytes()[:3]))
    assert {(True, b"old"), (True, b"new")} <= seen


# --- two at once -----------------------------------------------------------------------------------------------------

HOLDER = "import sys, time; from pathlib import Path; from fedrp.files import locked\n" \
    "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"  # fmt: skip


def test_a_second_process_waits_and_then_says_why(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, env=environment()
    )
    with holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(SiteError, match="another process is working in"), locked(tmp_path / "lock", 0.2):
                pass
        finally:
            holder.kill()
    began = time.monotonic()
    with locked(tmp_path / "lock", 5):  # a lock goes with its process
        assert time.monotonic() - began < 4


def no_locks(*_arguments: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_file_system_without_locks_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", no_locks)
    why = r"cannot lock .*: Function not implemented: use a file system that has locks"
    with pytest.raises(SiteError, match=why), locked(tmp_path / "lock"):
        pass


def test_a_run_folder_is_written_there_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fcntl.flock", no_locks)
    simulate(tiny_config("fedavg"), tiny_task(), out=tmp_path)
    assert (tmp_path / "result.json").exists()
    assert "make sure that no other process works in this folder" in caplog.text


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_server_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    run, plain = Federation(tiny_config(name)), Federation(tiny_config(name))
    folder = ServerFolder(tmp_path, run.run)
    fresh = run.server
    for _ in range(3):
        folder.save(run.server)
        run.server = folder.load(dataclasses.replace(fresh, round=0, dealt={}, aggregates={}))
        run.round()
        plain.round()
    for client, model in run.final_models().items():
        assert np.array_equal(model, plain.final_models()[client])


def run_of(store: Path, config: RunConfig) -> bytes:
    with ServerFolder.open(store, config) as folder:
        return folder.run


def test_a_store_keeps_its_run_and_refuses_other_settings(tmp_path: Path) -> None:
    first = run_of(tmp_path / "store", tiny_config())
    assert run_of(tmp_path / "store", tiny_config()) == first
    assert run_of(tmp_path / "other", tiny_config()) != first
    with pytest.raises(ConfigError, match=r"^the run in .*store was started with seed=0, not 5: go on with the same"):
        run_of(tmp_path / "store", tiny_config(seed=5))


def test_of_two_servers_that_begin_at_once_one_makes_the_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the first has seen that there is no run yet, and is about to write one."""
    begun: list[bytes] = []

    def second_comes(path: Path, data: bytes) -> None:
        monkeypatch.setattr("fedrp.storage.server.write_atomically", write_atomically)
        with pytest.raises(SiteError, match="another process is working"):
            begun.append(run_of(tmp_path, tiny_config()))
        write_atomically(path, data)

    monkeypatch.setattr("fedrp.storage.server.write_atomically", second_comes)
    first = run_of(tmp_path, tiny_config())
    assert not begun
    assert run_of(tmp_path, tiny_config()) == first


def test_a_store_with_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    run = Federation(tiny_config("fedavg"))
    ServerFolder(tmp_path, run.run).save(run.server)
    with pytest.raises(SiteError, match=r"head.safetensors belongs to another run"):
        ServerFolder(tmp_path, bytes(16)).load(dataclasses.replace(run.server, run=bytes(16)))


@pytest.mark.parametrize("text", ["", "[]", '{"run": "zz"}', '{"run": 3}'])
def test_a_damaged_store_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SiteError, match=r"run.json is damaged"):
        run_of(tmp_path, tiny_config())


def test_a_log_line_is_json_and_a_full_disk_does_not_stop_the_work(tmp_path: Path, small_disk: Path) -> None:
    for root in (tmp_path, small_disk):
        folder = ServerFolder(root, bytes(16))
        folder.log("round", {"round": 3})
        assert json.loads((root / "log.jsonl").read_text())["round"] == 3
    for _ in range(3):
        folder.log("round", {"text": "x" * 50_000})
