"""`fedrp site`: only the site's own code runs there, whatever is submitted; it stays, and ends and resumes in order."""

import ast
import contextlib
import inspect
import json
import os
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvicorn
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from safetensors.numpy import load_file

from fedrp import simulate
from fedrp.cli import main
from fedrp.crypto.roster import entry_of, merged, new_identity, write_roster
from fedrp.errors import SiteError
from fedrp.extras import FLOWER_BELOW, FLOWER_FROM
from fedrp.files import locked
from fedrp.flower.environment import LOOPBACK, free_port
from fedrp.flower.executor import work
from fedrp.learning.layout import layout_of
from fedrp.testing.local import local_run
from fedrp.testing.loopback import Loopback
from helpers import ROOT, TinyNet, tiny_config, tiny_task

APP = ROOT / "tests" / "end_to_end" / "flower_app"


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes must find this source and the tests' helpers."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests/support'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """`fedrp site` takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


# --- settings --------------------------------------------------------------------------------------------------------


def site_file(folder: Path, **changes: object) -> Path:
    """A site's settings that are all right, but for the changes; None leaves a key out."""
    identity = new_identity(folder / "site.key", "amsterdam")
    write_roster(folder / "roster.toml", entry_of(identity))
    for name in ("ca.crt", "agreed.toml", "node"):
        (folder / name).touch(mode=0o600)
    right = {
        **{"app": "tiny.client_app:app", "superlink": "server.example.org:8000", "root-certificates": "ca.crt"},
        **{"node-key": "node", "key": "site.key", "roster": "roster.toml", "state": "state", "agreed": "agreed.toml"},
    }
    settings = {**right, **{name.replace("_", "-"): value for name, value in changes.items()}}
    path = folder / "site.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if value is not None))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code of the command line, and what it says on standard error, which must be one line."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return int(ended.value.code or 0), text


def test_settings_that_are_right_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    main(["site", str(site_file(tmp_path)), "--check"])
    told = capsys.readouterr().out
    assert told.startswith("site amsterdam (client 0 of roster ")
    assert told.endswith("with tiny.client_app:app\n")
    assert not (tmp_path / "state").exists()


WRONG = [
    ({"superlnk": "a:1"}, 2, "unknown key 'superlnk', did you mean 'superlink'?"),
    ({"key": None}, 2, "has no 'key': add key = ..."),
    ({"agreed": None}, 2, "has no 'agreed'"),
    ({"roster": 3}, 2, "roster=3 is not valid: expected a path"),
    ({"app": "tiny"}, 2, "app=tiny is not valid: expected 'module:name'"),
    ({"app": "no_such_app:app"}, 2, "cannot load app=no_such_app:app: ModuleNotFoundError"),
    ({"app": "json:dumps"}, 2, "app=json:dumps is a function: expected what fedrp.flower.client_app returns"),
    ({"superlink": "https://server:8000"}, 2, "expected 'host:port', without https://"),
    ({"superlink": "server:80000"}, 2, "superlink=server:80000 is not valid"),
    ({"port": 70000}, 2, "port=70000 is not valid"),
    ({"port": "8000"}, 2, "port='8000' is not valid: expected int"),
    ({"poll": 0}, 2, "poll=0.0 is not valid: expected 0.1 to 60 seconds"),
    ({"device": "gpu"}, 2, "device=gpu cannot be used here"),
    ({"root_certificates": "gone.crt"}, 2, "root_certificates: cannot read"),
    ({"agreed": "gone.toml"}, 2, "agreed: cannot read"),
    ({"key": "roster.toml"}, 2, "others may read the key file"),
    ({"roster": "agreed.toml"}, 2, "not a roster, it has no [[client]] entries"),
]


@pytest.mark.parametrize(("changes", "code", "line"), WRONG, ids=[f"{c}" for c, _, _ in WRONG])
def test_a_wrong_setting_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], code: int, line: str
) -> None:
    ended, text = said(capsys, "site", site_file(tmp_path, **changes))
    assert ended == code
    assert line in text
    assert not (tmp_path / "state").exists()


def test_values_of_the_apps_own_are_plain_and_hide_none_of_the_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = site_file(tmp_path)
    right = path.read_text()
    path.write_text(f"{right}[node]\nimages = [1, 2]\n")
    assert "node.images=[1, 2] is not valid: expected text, a number" in said(capsys, "site", path)[1]
    path.write_text(f'{right}[node]\nagreed = "other.toml"\n')
    assert "expected another name: 'agreed' stands above" in said(capsys, "site", path)[1]


def test_a_node_key_that_others_may_read_and_a_key_of_another_site_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = site_file(tmp_path)
    (tmp_path / "node").chmod(0o644)
    assert "others may read the key file" in said(capsys, "site", path)[1]
    (tmp_path / "node").chmod(0o600)
    (tmp_path / "roster.toml").unlink()
    write_roster(tmp_path / "roster.toml", merged([entry_of(new_identity(tmp_path / "b.key", "bergen"))]))
    assert "no client 'amsterdam' in the roster" in said(capsys, "site", path)[1]


def test_a_second_process_for_the_same_site_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    (tmp_path / "state").mkdir()
    with locked(tmp_path / "state" / "site.lock"):
        code, line = said(capsys, "site", site_file(tmp_path))
    assert code == SiteError.exit_code
    assert f"another process is working in {tmp_path / 'state'}: end it, or wait for it" in line


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.40.0", "1.43.0", "2.0.0", "nightly"])
def test_another_version_of_flower_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    installed = tmp_path / f"flwr-{version}.dist-info"  # found before the one that is installed
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flwr\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said(capsys, "site", "site.toml") == (
        2,
        f"fedrp: flwr {version} is not a version that this fedrp was tested with: pip install 'flwr>=1.41,<1.43'\n",
    )


def test_the_tested_versions_are_those_that_the_package_asks_for() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, below = (".".join(map(str, version)) for version in (FLOWER_FROM, FLOWER_BELOW))
    assert package["optional-dependencies"]["flower"] == [f"flwr>={lowest},<{below}"]


def test_flowers_main_loop_sleeps_as_the_supernode_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `look_every` replaces is still there, and all there is."""
    from flwr.supernode import start_client_internal as main_loop

    from fedrp.flower.supernode import look_every

    tree = ast.parse(inspect.getsource(main_loop))
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "time.sleep"]
    assert {n.attr for n in uses if n.value.id == "time"} == {"sleep"}  # type: ignore[attr-defined]
    assert sorted(ast.unparse(call.args[0]) for call in calls) == ["0.5", "0.5", "3"]
    slept: list[float] = []
    monkeypatch.setattr(main_loop, "time", main_loop.time)  # put back afterwards
    monkeypatch.setattr("time.sleep", slept.append)
    look_every(1.5)
    main_loop.time.sleep(3)
    main_loop.time.sleep(0.5)
    assert slept == [1.5, 0.1]


# --- the executor, at the runtime API of a real SuperNode ------------------------------------------------------------

SECRET = b"of this SuperNode"
NODE = 11


class RuntimeApi:
    """A SuperNode's runtime API with its state, fed as its connection to a SuperLink would feed it."""

    def __init__(self) -> None:
        self.states = NodeStateFactory(ObjectStoreFactory())
        self.state, self.store = self.states.state(), self.states.objectstore_factory.store()
        run = Run.create_empty(1)  # as in `local_run`
        run.fab_hash = self.state.store_fab(Fab("", b"not even a zip archive", {}))
        self.state.set_node_id(NODE)
        self.state.store_run(run)
        self.state.set_run_series_context(0, Context(1, NODE, {"key": "of the SuperNode"}, RecordDict(), {"rounds": 3}))
        config = uvicorn.Config(create_app(self.states, SECRET), LOOPBACK, free_port(), ws="none", log_level="error")
        self.server, self.address = uvicorn.Server(config), f"{LOOPBACK}:{config.port}"

    def ask(self, message: Message, kind: TaskType, late: float = 0.0) -> None:
        """Offer a task; its message follows `late` seconds later."""
        self.state.create_task(kind, 1)
        time.sleep(late)
        self.store.preregister(1, get_object_tree(message))
        self.state.store_message(message)
        for name, part in get_all_nested_objects(message).items():
            self.store.put(name, part.deflate())

    def reply(self) -> Message:
        """The next reply, with its content."""
        found: list[Message] = []
        wait_for(lambda: found.extend(self.state.get_messages_legacy(is_reply=True)) or found, 30)
        tree = self.store.get_object_tree(found[0].metadata.message_id)
        wait_for(lambda: all(self.store.get(part.object_id) for part in iterate_object_tree(tree)), 30)
        return pull_and_inflate_object_from_tree(
            tree, lambda name: self.store.get(name) or b"", lambda _: None, return_type=Message
        )


def a_message(text: str) -> Message:
    with local_run():
        message = Message(RecordDict({"r": ConfigRecord({"text": text})}), NODE, "query")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def api() -> Iterator[RuntimeApi]:
    given = RuntimeApi()
    thread = threading.Thread(target=given.server.run)
    thread.start()
    wait_for(lambda: given.server.started, 20)
    yield given
    given.server.should_exit = True
    thread.join()


@contextlib.contextmanager
def executing(api: RuntimeApi, answer: Callable[[Message, Context], Message]) -> Iterator[None]:
    """The executor at work on a SuperNode's tasks."""
    done = threading.Event()

    def watch() -> None:
        if done.is_set():
            raise SiteError("the test is over")

    def run() -> None:
        with contextlib.suppress(SiteError), local_run():
            work(api.address, SECRET, answer, watch)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    done.set()
    thread.join()


def echo(message: Message, context: Context) -> Message:
    (record,) = message.content.config_records.values()
    told = {"text": str(record["text"]), "rounds": int(context.run_config["rounds"])}
    return Message(RecordDict({"r": ConfigRecord(told)}), reply_to=message)


@pytest.mark.parametrize("kind", [TaskType.CLIENT_APP, TaskType.AGENT_APP])
def test_every_type_of_task_is_answered_by_the_sites_app(api: RuntimeApi, kind: TaskType) -> None:
    """A run says itself of which type its tasks are, and one that stays would block the SuperNode for all others."""
    first, second = a_message("first"), a_message("second")
    with executing(api, echo):
        for message in (first, second):
            api.ask(message, kind)
            record = api.reply().content.config_records["r"]
            assert record == {"text": message.content.config_records["r"]["text"], "rounds": 3}


def test_a_message_that_comes_after_its_task_is_waited_for(api: RuntimeApi) -> None:
    message = a_message("late")
    with executing(api, echo):
        api.ask(message, TaskType.CLIENT_APP, late=1.5)
        assert api.reply().content.config_records["r"]["text"] == "late"


def test_an_app_that_fails_tells_the_server_nothing_and_goes_on(api: RuntimeApi) -> None:
    def fail(message: Message, context: Context) -> Message:
        if message.content.config_records["r"]["text"] == "good":
            return echo(message, context)
        raise ValueError("the path /srv/patients/meier.png")

    bad, good = a_message("bad"), a_message("good")
    with executing(api, fail):
        api.ask(bad, TaskType.CLIENT_APP)
        reply = api.reply()
        assert reply.error.reason == "the message could not be answered"
        assert reply.metadata.reply_to_message_id == bad.metadata.message_id
        api.ask(good, TaskType.CLIENT_APP)
        assert api.reply().content.config_records["r"]["text"] == "good"


def test_a_process_without_the_secret_gets_no_task(api: RuntimeApi) -> None:
    api.ask(a_message("for the site only"), TaskType.CLIENT_APP)
    with pytest.raises(SiteError, match=r"the SuperNode gives no task \(HTTP 401\): start both again"):
        work(api.address, b"a guess", echo, lambda: None)


# --- the real thing --------------------------------------------------------------------------------------------------

CANARY = "sent by a stranger"
_HOSTILE = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "evil"
version = "{version}"
license = "MIT"

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "evil.server_app:app"
clientapp = "evil.client_app:app"

[tool.flwr.app.config]
rounds = 1
""",
    "evil/__init__.py": "",
    "evil/client_app.py": """
# {canary}
from pathlib import Path
from flwr.clientapp import ClientApp

Path("{marker}").touch()
app = ClientApp()

@app.query()
def reply(message, context):
    return message
""",
    "evil/server_app.py": """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    content = RecordDict({{"fedrp": ConfigRecord({{"packet": b""}})}})
    asked = [Message(content, node, "query", group_id="00" * 16 + "/0") for node in nodes]
    replies = grid.send_and_receive(asked, timeout=60)
    Path("{replies}").write_text(json.dumps([str(reply.content if reply.has_content() else reply.error)
                                             for reply in replies]))
""",
}


def hostile_app(folder: Path, version: str) -> Path:
    """An app whose client part leaves a mark wherever it is imported."""
    for name, text in _HOSTILE.items():
        path = folder / "evil" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.format(version=version, canary=CANARY, marker=folder / "marker", replies=folder / "replies.json")
        )
    return folder / "evil"


def holding(folder: Path) -> list[Path]:
    """Files below a folder that hold a piece of the hostile app."""
    return [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def test_a_strangers_app_is_neither_unpacked_nor_run_at_a_site(tmp_path: Path) -> None:
    with Loopback(tmp_path / "federation", ["amsterdam"], APP) as federation:
        site = federation.site_state("amsterdam")
        for number, version in enumerate(["1.0.0", "1/../../../escaped"]):
            stranger = tmp_path / f"stranger-{number}"
            with federation.running({}, hostile_app(stranger, version)) as lines:
                log = "\n".join(lines)
            assert (stranger / "replies.json").exists(), log
            (reply,) = json.loads((stranger / "replies.json").read_text())
            assert "refused" in reply  # by the site's own app, which did not agree to such a run
            assert not (stranger / "marker").exists()
        assert holding(federation.root / "flwr" / "superlink")  # the server unpacks it: the search does find things
        assert list(federation.root.glob("flwr/**/*escaped*"))
        assert not holding(federation.root / "sites")
        assert not list(federation.root.glob("sites/**/*escaped*"))
        assert not list(site.rglob("*.py"))
        assert (site / "failures.jsonl").read_text().count('"error": "ConfigError"') == 2
        assert federation.alive("amsterdam")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0.0", "1/../../../escaped"])
def test_without_fedrp_site_the_same_app_runs_at_the_node(tmp_path: Path, version: str) -> None:
    """The control: Flower's own executor does unpack and import it."""
    app = hostile_app(tmp_path / "stranger", version)
    with Loopback(tmp_path / "federation", ["amsterdam"], APP) as federation:
        os.kill(federation.processes()["amsterdam"], signal.SIGTERM)
        wait_for(lambda: not federation.alive("amsterdam"))
        options = ["--root-certificates", federation.certificates.authority]
        options += ["--superlink", f"{LOOPBACK}:{federation.cables['amsterdam'].port}", "--port", free_port()]
        options += ["--auth-supernode-private-key", federation.node_key("amsterdam")]
        federation._spawn("amsterdam", "flower-supernode", *options)
        with federation.running({}, app) as lines:
            log = "\n".join(lines)
        assert (tmp_path / "stranger" / "marker").exists(), log
        assert holding(federation.root / "flwr" / "amsterdam") or holding(federation.root / "flwr")


def model_of(federation: Loopback, name: str) -> np.ndarray:
    tensors = load_file(federation.status(name)["model"])
    return np.concatenate([tensors[part].ravel() for part in layout_of(TinyNet()).names])


def test_a_site_that_is_killed_at_work_resumes_and_one_that_is_stopped_ends_in_order(tmp_path: Path) -> None:
    logs: list[str] = []
    with Loopback(tmp_path, ["amsterdam", "bergen"], APP) as federation:

        def run() -> None:
            settings = {"clients": 2, "rounds": 2, "quorum": 1.0, "app-slow": 4.0, "store": str(tmp_path / "store")}
            with federation.running(settings) as lines:
                logs.append("\n".join(lines))

        def at_work() -> bool:
            status = tmp_path / "store" / "status.json"
            begun = status.exists() and json.loads(status.read_text())["round"] >= 1
            return begun and "/2]" in federation.log_file("bergen").read_text()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(at_work)
        main_process = psutil.Process(federation.processes()["bergen"])
        (node,) = main_process.children()
        os.kill(main_process.pid, signal.SIGKILL)
        wait_for(lambda: not node.is_running(), 30)  # it notices, says goodbye to the SuperLink and ends
        assert "SuperNode terminated gracefully" in federation.log_file("bergen").read_text()
        federation.start_site("bergen")
        thread.join(timeout=180)
        assert "finished after 2 rounds; 2 sites have the model" in logs[0], logs[0]
        expected = simulate(tiny_config("fedrp-subspace", clients=2, rounds=2, projection="sign"), tiny_task())
        for name in federation.names:
            assert np.array_equal(model_of(federation, name), expected.model)

        last = psutil.Process(federation.processes()["amsterdam"])
        (node,) = last.children()
        os.kill(last.pid, signal.SIGTERM)
        wait_for(lambda: not federation.alive("amsterdam"), 30)
        assert not node.is_running()
        assert federation._processes["amsterdam"].returncode == 0
        assert "Traceback" not in federation.log_file("amsterdam").read_text()
        assert not (federation.site_state("amsterdam") / "flwr" / "executor.secret").exists()


@pytest.mark.slow
def test_a_site_ends_with_its_supernode_and_says_so(tmp_path: Path) -> None:
    with Loopback(tmp_path, ["amsterdam"], APP) as federation:
        process = psutil.Process(federation.processes()["amsterdam"])
        wait_for(process.children)
        process.children()[0].kill()
        wait_for(lambda: not federation.alive("amsterdam"), 30)
        assert federation._processes["amsterdam"].returncode == SiteError.exit_code
        assert "fedrp: the SuperNode has ended with code -9" in federation.log_file("amsterdam").read_text()
