"""A site's own budget: whatever run ids a server invents and whenever a process dies, it releases what it agreed to."""

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import methods
from fedrp.cli import cli
from fedrp.errors import ConfigError, FedRPError, PrivacyError, SiteError
from fedrp.files import write_atomically
from fedrp.flower import client_app
from fedrp.flower.messages import HELLO, ROUND, RefusedError, packet_of, question
from fedrp.privacy import Adversary, gaussian_epsilon
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.storage import ledger
from fedrp.storage.budget import budgets
from fedrp.storage.ledger import Caps, begin, read_caps, read_ledger, rebuild
from fedrp.storage.site import SiteFolder, Terms
from fedrp.testing.local import local_run
from flower_helpers import FIRST_NODE, FlowerFederation, in_child, tiny_load
from helpers import tiny_config

DELTA = 1e-5
NOISE = 4.0
NO_CAPS = Caps()


def run_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def terms(name: str = "fedavg-dp", /, data: str = "default", **changes: object) -> Terms:
    noisy = {"noise_multiplier": NOISE, "dp_noise": "local"} if name == "fedavg-dp" else {}
    return Terms.of(resolved(tiny_config(name, **{**noisy, **changes}), 83), 1, data)


def ask(state: Path, number: int, caps: Caps = NO_CAPS, asked: Terms | None = None) -> None:
    begin(SiteFolder(state, run_id(number)), 0, asked or terms(), caps)


def spent(rounds: int) -> float:
    return gaussian_epsilon(NOISE, DELTA, rounds)


def listed(state: Path) -> list[int]:
    return [int(entry.run, 16) for entry in read_ledger(state).entries]


# --- the attack: a run id is the server's to invent ------------------------------------------------------------------


AGREED = f"""
algorithm = "fedavg-dp"
clients = 4
rounds = 1
dim = 12
clip = 1.0
noise_multiplier = {NOISE}
dp_noise = "local"
secure_aggregation = false
"""


class LyingServer:
    """Asks one real ClientApp, with an agreement in force, for the first round of a run that it has just invented."""

    def __init__(self, root: Path, *caps: str) -> None:
        noise = {"noise_multiplier": NOISE, "dp_noise": "local", "rounds": 1}
        self.run = FlowerFederation(root, tiny_config("fedavg-dp", **noise))
        self.run.app = client_app(tiny_load)
        (root / "agreed.toml").write_text("\n".join([AGREED, *caps]))
        self.run.node_configs[FIRST_NODE]["agreed"] = str(root / "agreed.toml")
        self.state = root / "sites" / "site-0"

    def asks(self, run: bytes, kind: str = ROUND) -> bytes:
        call = wire.encode([wire.Message(Kind.ROUND, wire.context_of(run, 0), 1, wire.SERVER, wire.EMPTY, 4)])
        with local_run():
            return packet_of(self.run.answer(0, question(call, FIRST_NODE, kind, run, 1)))

    def told(self) -> str:
        return str(json.loads((self.state / "failures.jsonl").read_text().splitlines()[-1])["reason"])


def test_a_site_that_agreed_to_a_run_answers_one_run_whatever_ids_it_is_asked_for(tmp_path: Path) -> None:
    server = LyingServer(tmp_path)
    reply = server.asks(run_id(1))
    for number in range(2, 6):
        for kind in (HELLO, ROUND):
            with pytest.raises(RefusedError, match=r"^PrivacyError$"):
                server.asks(run_id(number), kind)
    assert server.told() == (
        f"run {run_id(5).hex()} is refused, and nothing was sent: total_runs=1 on data 'default' by "
        f"{tmp_path / 'agreed.toml'}: 1 spent, this run would add 1"
    )
    assert [folder.name for folder in server.state.glob("*/")] == [run_id(1).hex()]  # nothing is kept of the others
    assert server.asks(run_id(1)) == reply  # which goes on


def test_all_runs_together_stay_within_the_agreed_epsilon(tmp_path: Path) -> None:
    server = LyingServer(tmp_path, "total_epsilon = 2.0")
    answered = 0
    with contextlib.suppress(RefusedError):
        for number in range(100):
            server.asks(run_id(number))
            answered += 1
    assert spent(answered) <= 2.0 < spent(answered + 1)
    assert (
        f"{spent(answered):.4g} spent, this run would add {spent(answered + 1) - spent(answered):.4g}" in server.told()
    )
    assert "total_epsilon=2 on data 'default'" in server.told()
    (budget,) = budgets(server.state)
    assert [item.epsilon for item in budget.totals] == [pytest.approx(spent(answered))] * 4


def test_a_hello_opens_the_account(tmp_path: Path) -> None:
    server = LyingServer(tmp_path)
    server.asks(run_id(1), HELLO)
    assert listed(server.state) == [1]
    assert (server.state / run_id(1).hex() / "state.safetensors").exists()


def test_more_records_do_not_open_a_new_account_and_the_servers_words_do_not_either(tmp_path: Path) -> None:
    server = LyingServer(tmp_path, 'app-data = "first"')
    server.run.run_config["app-data"] = "first"
    server.asks(run_id(1))
    grown = tiny_load

    def more(context: object) -> object:
        task = grown(context)  # type: ignore[arg-type]
        x, y = task.train
        return type(task)(task.model, (x.repeat(2, 1), y.repeat(2)), task.test)

    server.run.app = client_app(more)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="PrivacyError"):
        server.asks(run_id(2))
    server.run.run_config["app-data"] = "second"
    with pytest.raises(RefusedError, match="ConfigError"):
        server.asks(run_id(2))


def test_the_site_names_its_data_sets_and_each_has_an_account(tmp_path: Path) -> None:
    server = LyingServer(tmp_path)
    for number, name in enumerate(["cohort-1", "cohort-2"]):
        server.run.node_configs[FIRST_NODE]["data"] = name
        server.asks(run_id(number))
    with pytest.raises(RefusedError, match="PrivacyError"):
        server.asks(run_id(9))
    with pytest.raises(RefusedError, match="ConfigError"):  # a run stays with the data that it began on
        server.asks(run_id(0))
    assert "began on data 'cohort-1' here, not 'cohort-2'" in server.told()
    server.run.node_configs[FIRST_NODE]["data"] = ""
    with pytest.raises(RefusedError, match="ConfigError"):
        server.asks(run_id(0))
    assert "data='' in the node config is not valid" in server.told()


# --- caps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "told"),
    [
        (Caps(total_runs=2, source="F"), "total_runs=2 on data 'default' by F: 2 spent, this run would add 1"),
        (Caps(total_rounds=8, source="F"), "total_rounds=8 on data 'default' by F: 6 spent, this run would add 3"),
        (
            Caps(total_epsilon=3.0, source="F"),
            f"total_epsilon=3 on data 'default' by F: {spent(6):.4g} spent, this run would add "
            f"{spent(9) - spent(6):.4g} (delta 1e-05, against the server alone",
        ),
    ],
)
def test_a_cap_is_named_with_what_is_spent_and_what_the_run_would_add(caps: Caps, told: str, tmp_path: Path) -> None:
    for number in (1, 2):
        ask(tmp_path, number, caps)
    with pytest.raises(PrivacyError) as caught:
        ask(tmp_path, 3, caps)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listed(tmp_path) == [1, 2]
    ask(tmp_path, 2, caps)  # is not charged twice
    ask(tmp_path, 3, caps, terms(data="other"))
    assert listed(tmp_path) == [1, 2, 3]


def test_a_run_without_an_epsilon_is_refused_where_epsilon_is_capped(tmp_path: Path) -> None:
    masked = terms("fedavg-dp", dp_noise="shared", quorum=1.0)  # shares of noise, and the server sees single uploads
    with pytest.raises(PrivacyError, match=r"there is none against the server alone.* leave that adversary out"):
        ask(tmp_path, 1, Caps(total_epsilon=10.0), masked)
    others = (Adversary.CLIENTS, Adversary.MODEL_HOLDER)
    ask(tmp_path, 1, Caps(total_epsilon=10.0, total_against=others), masked)
    with pytest.raises(PrivacyError, match=r"there is none against the other clients"):
        ask(tmp_path, 2, Caps(total_epsilon=10.0, total_against=others), terms("fedavg"))


def test_an_agreement_without_caps_is_to_one_run_and_one_with_any_to_as_many_as_that_allows(tmp_path: Path) -> None:
    agreed = tmp_path / "agreed.toml"
    for text, runs in [("", 1), ("total_delta = 1e-6", 1), ("total_runs = 4", 4), ("total-epsilon = 8", None)]:
        agreed.write_text('algorithm = "fedavg"\n' + text)
        assert read_caps(agreed).total_runs == runs
    agreed.write_text('total_against = ["clients", "model-holder"]\ntotal_epsilon = 8')
    assert read_caps(agreed).total_against == (Adversary.CLIENTS, Adversary.MODEL_HOLDER)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("total_epsilon = -1", "total_epsilon=-1.0 is not valid"),
        ("total_epsilon = inf", "total_epsilon=inf is not valid"),
        ("total_delta = 0", "total_delta=0.0 is not valid"),
        ('total_runs = "two"', "total_runs='two' is not valid: expected int"),
        ("total_rounds = -1", "total_rounds=-1 is not valid"),
        ("total_against = []", r"total_against=\[\] is not valid: expected some of server"),
        ('total_against = "server"', "total_against must be a list"),
        ('total_against = ["servers"]', "unknown adversary in total_against .*did you mean 'server'"),
    ],
)
def test_a_wrong_cap_is_one_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "agreed.toml").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_caps(tmp_path / "agreed.toml")
    assert "\n" not in str(caught.value)


# --- a ledger that is gone, old or damaged ---------------------------------------------------------------------------


def test_runs_without_a_ledger_are_refused_until_they_are_counted(tmp_path: Path) -> None:
    for number in (1, 2):
        ask(tmp_path, number)
    before = read_ledger(tmp_path)
    (tmp_path / "ledger.json").unlink()
    for number in (1, 3):
        with pytest.raises(SiteError, match=r"holds runs but no ledger.json .*'fedrp ledger rebuild .*'") as caught:
            ask(tmp_path, number)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ledger.json").exists()
    assert rebuild(tmp_path) == 2
    assert {entry.releases for entry in read_ledger(tmp_path).entries} == {entry.releases for entry in before.entries}
    assert rebuild(tmp_path) == 0
    with pytest.raises(PrivacyError, match="2 spent"):
        ask(tmp_path, 3, Caps(total_runs=2))


def test_runs_from_before_there_were_ledgers_are_entered_under_the_name_that_the_site_gives(tmp_path: Path) -> None:
    ask(tmp_path, 1)
    (tmp_path / "ledger.json").unlink()
    path = tmp_path / run_id(1).hex() / "run.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "data"}))
    shown = CliRunner().invoke(cli, ["ledger", "rebuild", str(tmp_path), "--data", "cohort-1"])
    assert shown.output == f"1 runs entered into {tmp_path / 'ledger.json'}\n"
    assert [entry.data for entry in read_ledger(tmp_path).entries] == ["cohort-1"]
    with pytest.raises(SiteError, match="is not a folder"):
        CliRunner().invoke(cli, ["ledger", "rebuild", str(tmp_path / "nowhere")], catch_exceptions=False)


def test_an_older_copy_of_the_ledger_does_not_forget_runs_that_have_a_folder(tmp_path: Path) -> None:
    ask(tmp_path, 1)
    old = (tmp_path / "ledger.json").read_bytes()
    ask(tmp_path, 2)
    (tmp_path / "ledger.json").write_bytes(old)
    assert "2 runs" in shown("privacy", tmp_path)
    with pytest.raises(PrivacyError, match="2 spent, this run would add 1"):
        ask(tmp_path, 3, Caps(total_runs=2))
    ask(tmp_path, 3)
    assert sorted(listed(tmp_path)) == [1, 2, 3]


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def cheaper(data: bytes) -> bytes:
    return data.replace(b'"noise_multiplier": 4.0', b'"noise_multiplier": 9.0')


@pytest.mark.parametrize("damage", [halved, cheaper, lambda _: b"", lambda _: b"[]", lambda _: b"\xff{}"])
def test_a_damaged_ledger_is_refused_and_left_as_it_is(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    ask(tmp_path, 1)
    path = tmp_path / "ledger.json"
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    for work in (lambda: ask(tmp_path, 1), lambda: ask(tmp_path, 2), lambda: rebuild(tmp_path)):
        with pytest.raises(
            SiteError, match=r"ledger.json is damaged .* and was left as it is: no run is begun"
        ) as caught:
            work()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == damaged
    assert not (tmp_path / run_id(2).hex()).exists()


def test_a_run_whose_folder_is_gone_is_sat_out(tmp_path: Path) -> None:
    ask(tmp_path, 1)
    for path in (tmp_path / run_id(1).hex()).iterdir():
        path.unlink()
    (tmp_path / run_id(1).hex()).rmdir()
    with pytest.raises(SiteError, match=r"was begun here, but .*run.json is gone: let this site sit the run out"):
        ask(tmp_path, 1)


# --- crashes, and two at once ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends the work on a message at once."""


@contextlib.contextmanager
def dying_at(write: int | None, after: bool) -> Iterator[None]:
    """The process dies before or after its n-th write; None: it does not."""
    left = write

    def watched(path: Path, data: bytes) -> None:
        nonlocal left
        left = left - 1 if left is not None else None
        if left == 0 and not after:
            raise Killed
        write_atomically(path, data)
        if left == 0:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        for module in ("fedrp.storage.site", "fedrp.storage.ledger"):
            patch.setattr(f"{module}.write_atomically", watched)
        yield


messages = st.tuples(
    st.integers(1, 6),  # the run
    st.sampled_from([1, 3]),  # its rounds
    st.sampled_from([None, 1, 2, 3, 4]),  # the write at which the process dies
    st.booleans(),  # after it, not before
)


@settings(max_examples=25)
@given(st.lists(messages, max_size=12))
def test_the_ledger_is_never_below_what_was_released_and_never_above_the_cap(
    sequence: list[tuple[int, int, int | None, bool]],
) -> None:
    """A reply leaves only after `begin`; a crash may come at any write, and the server may ask again or for another."""
    caps = Caps(total_epsilon=spent(7), total_against=(Adversary.SERVER,))
    plain = {rounds: terms(rounds=rounds) for rounds in (1, 3)}
    released: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        for number, rounds, write, after in sequence:
            try:
                with dying_at(write, after):
                    ask(state, number, caps, plain[rounds])
            except (Killed, PrivacyError, ConfigError):  # the last: begun with other rounds
                pass
            else:
                assert released.setdefault(number, rounds) == rounds
            begun = {int(entry.run, 16): entry for entry in read_ledger(state).entries}
            assert len(begun) == len(read_ledger(state).entries)
            assert {run: begun[run].rounds for run in released} == released
            assert sum(released.values()) <= sum(entry.rounds for entry in begun.values()) <= 7
        for number, rounds in released.items():  # what was begun can always be gone on with
            ask(state, number, caps, plain[rounds])


class LedgerOfASite(RuleBasedStateMachine):
    """A site whose ledger is set back, lost, damaged and rebuilt, whose runs lose their folders, and that dies.

    What is in neither a ledger nor a folder is forgotten; so whoever loses both is not looked at.
    """

    cap = 6
    numbers = st.integers(1, 5)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.state = Path(self.folder.name)
        self.released: dict[int, int] = {}  # runs of which a reply may have left, and their rounds
        self.gone: set[int] = set()  # runs whose folder is lost
        self.copies: list[bytes] = []

    def teardown(self) -> None:
        self.folder.cleanup()

    @property
    def _file(self) -> Path:
        return self.state / "ledger.json"

    def _listed(self, ledger: bytes) -> set[int]:
        return {int(entry["run"], 16) for entry in json.loads(ledger)["runs"]}

    @rule(
        number=numbers,
        rounds=st.sampled_from((1, 2)),
        write=st.sampled_from((None, None, 1, 2, 3)),
        after=st.booleans(),
    )
    def begins(self, number: int, rounds: int, write: int | None, after: bool) -> None:
        readable = self._readable()
        try:
            with dying_at(write, after):
                ask(self.state, number, Caps(total_rounds=self.cap), plain_terms(rounds))
        except (Killed, PrivacyError, ConfigError):
            return
        except SiteError:
            assert not readable or number in self.gone
            return
        assert readable, "a run was begun without a ledger"
        assert number not in self.gone, "a run that lost its state was gone on with"
        assert self.released.setdefault(number, rounds) == rounds

    @rule()
    def keeps_a_copy(self) -> None:
        if self._file.exists() and self._readable():
            self.copies.append(self._file.read_bytes())

    @rule(back=st.integers(0, 3))
    def is_set_back(self, back: int) -> None:
        if self.copies:
            copy = self.copies[-1 - back % len(self.copies)]
            if self.gone <= self._listed(copy):
                self._file.write_bytes(copy)

    @rule(how=st.sampled_from(("lost", "halved")))
    def is_damaged(self, how: str) -> None:
        if self._file.exists() and not self.gone:
            damaged = halved(self._file.read_bytes())
            self._file.unlink()
            if how == "halved":
                self._file.write_bytes(damaged)

    @rule()
    def is_rebuilt(self) -> None:
        if self._file.exists() and not self._readable():
            self._file.unlink()  # moved away, as the message says
        rebuild(self.state)

    @rule(number=numbers)
    def loses_a_folder(self, number: int) -> None:
        folder = self.state / run_id(number).hex()
        if (
            folder.exists()
            and self._file.exists()
            and self._readable()
            and number in self._listed(self._file.read_bytes())
        ):
            shutil.rmtree(folder)
            self.gone.add(number)

    def _readable(self) -> bool:
        try:
            read_ledger(self.state)
        except SiteError:
            return False
        return True

    @invariant()
    def it_tells_all_that_was_released_and_no_more_than_was_allowed(self) -> None:
        if self._readable():
            charged = {int(e.run, 16): e.rounds for budget in budgets(self.state) for e in budget.entries}
            assert {run: charged.get(run) for run in self.released} == self.released
            assert sum(charged.values()) <= self.cap


@functools.lru_cache(maxsize=2)
def plain_terms(rounds: int) -> Terms:
    return terms("fedavg", rounds=rounds)


def test_no_loss_and_no_crash_brings_the_ledger_below_what_was_released() -> None:
    run_state_machine_as_test(LedgerOfASite, settings=settings(max_examples=40, stateful_step_count=15))


@pytest.mark.slow
def test_no_loss_and_no_crash_does_in_many_more_sequences() -> None:
    run_state_machine_as_test(LedgerOfASite, settings=settings(max_examples=300, stateful_step_count=25))


@pytest.mark.parametrize("left_out", ["_unlisted", "require_within"])
def test_a_ledger_that_forgets_or_allows_too_much_is_found(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not look for folders that it does not list, and one that asks nobody."""
    monkeypatch.setattr(ledger, left_out, lambda *_arguments: [])
    hunt = settings(max_examples=300, phases=(Phase.generate,), report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(LedgerOfASite, settings=hunt)


def test_a_process_that_is_killed_at_any_change_leaves_a_run_that_can_be_begun(tmp_path: Path) -> None:
    outcomes = set()
    for step in range(1, 40):
        state = tmp_path / str(step)

        def dies(step: int = step, state: Path = state) -> bool:
            left = step

            def watch(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                if event in {"os.rename", "os.mkdir", "open"} and str(state) in str(arguments[0]):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
            ask(state, 1)
            return True

        _, lived = in_child(dies)
        ask(state, 1, Caps(total_runs=1))
        assert listed(state) == [1]
        outcomes.add(lived)
    assert outcomes == {None, True}


def begun_in_child(state: Path, number: int, before_it_is_kept: Callable[[], object] = lambda: None) -> int:
    """The id of a process that begins a run under a cap of one, and ends with 0, or 7 if it is refused."""
    child = os.fork()
    if child:
        return child
    code, real = 1, SiteFolder.begin

    def watched(folder: SiteFolder, index: int, asked: Terms) -> None:
        before_it_is_kept()
        real(folder, index, asked)

    try:
        SiteFolder.begin = watched  # type: ignore[method-assign]
        ask(state, number, Caps(total_runs=1))
        code = 0
    except PrivacyError as error:
        code = error.exit_code
    finally:
        os._exit(code)


def test_of_two_runs_that_are_begun_at_once_a_cap_of_one_admits_one(tmp_path: Path) -> None:
    """The second comes when the first has seen that there is room, and is about to write that it takes it."""
    inside, go_on = os.pipe(), os.pipe()

    def wait_inside() -> None:
        os.write(inside[1], b"!")
        os.read(go_on[0], 1)

    first = begun_in_child(tmp_path, 1, wait_inside)
    os.read(inside[0], 1)
    second, ended = begun_in_child(tmp_path, 2), 0
    end = time.monotonic() + 1
    while not ended and time.monotonic() < end:  # it waits for the lock, so it does not end
        ended, status = os.waitpid(second, os.WNOHANG)
        time.sleep(0.01)
    os.write(go_on[1], b"!")
    statuses = [os.waitpid(first, 0)[1], status if ended else os.waitpid(second, 0)[1]]
    for end_of_pipe in (*inside, *go_on):
        os.close(end_of_pipe)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [0, 7]
    assert listed(tmp_path) == [1]


def test_the_lock_of_the_ledger_is_not_that_of_a_run(tmp_path: Path) -> None:
    """A run that trains for an hour does not keep others from being begun."""
    ask(tmp_path, 1)
    with SiteFolder(tmp_path, run_id(1)).lock():
        ask(tmp_path, 2)


# --- what a site is shown --------------------------------------------------------------------------------------------


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.output


def test_the_commands_show_what_is_spent_and_what_is_left(tmp_path: Path) -> None:
    server = LyingServer(tmp_path, "total_epsilon = 3.0", "total_runs = 5", "total_rounds = 9")
    for number in (1, 2):
        server.asks(run_id(number))
    one_line = f"epsilon {spent(2):.4g} ({3 - spent(2):.4g} left) at delta 1e-05"
    for command in ("privacy", "status"):
        text = shown(command, server.state)
        assert "data 'default': 2 runs (3 left), 2 rounds (7 left) in all" in text
        assert text.count(one_line) == 4
    assert text.count("\nrun ") == 2  # as without a ledger
    assert f"run {run_id(2).hex()}, begun 20" in shown("privacy", server.state)
    (budget,) = json.loads(shown("privacy", server.state, "--json"))
    assert json.loads(shown("status", server.state, "--json").splitlines()[-1]) == budget
    assert (budget["runs_spent"], budget["runs_left"], budget["rounds_spent"], budget["rounds_left"]) == (2, 3, 2, 7)
    assert [item["epsilon_left"] for item in budget["spent"]] == [pytest.approx(3 - spent(2))] * 4
    assert [run["run"] for run in budget["runs"]] == [run_id(1).hex(), run_id(2).hex()]
    (other,) = json.loads(shown("privacy", server.state, "--json", "--delta", "1e-6"))
    assert [item["epsilon"] for item in other["spent"]] == [pytest.approx(gaussian_epsilon(NOISE, 1e-6, 2))] * 4
    assert {item["epsilon_left"] for item in other["spent"]} == {None}  # the cap is about another delta


def test_another_agreement_can_be_tried_before_it_is_put_in_force(tmp_path: Path) -> None:
    ask(tmp_path / "state", 1)
    assert "(give --agreed FILE to see what is left)" in shown("privacy", tmp_path / "state")
    (tmp_path / "new.toml").write_text("total_epsilon = 1.0\ntotal_runs = 1")
    text = shown("privacy", tmp_path / "state", "--agreed", tmp_path / "new.toml")
    assert "1 runs (0 left)" in text
    assert f"epsilon {spent(3):.4g} (0 left)" in text
    with pytest.raises(ConfigError, match="cannot read"):
        shown("privacy", tmp_path / "state", "--agreed", tmp_path / "nowhere.toml")


def test_what_has_no_guarantee_is_shown_as_such(tmp_path: Path) -> None:
    ask(tmp_path, 1, asked=terms("fedavg"))
    assert shown("privacy", tmp_path).count("no guarantee: ") == 4
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(SiteError, match="holds runs but no ledger"):
        shown("privacy", tmp_path)
    with pytest.raises(FedRPError, match="not the folder of a finished run or of a site"):
        shown("privacy", tmp_path / "nowhere")


def test_every_algorithm_can_be_entered_and_read_again(tmp_path: Path) -> None:
    for number, name in enumerate(methods()):  # baselines too: earlier versions deployed them
        ask(tmp_path, number, asked=terms(name))
    before = read_ledger(tmp_path)
    assert [entry.algorithm for entry in before.entries] == list(methods())
    assert all(entry.releases for entry in before.entries)
    path = tmp_path / "ledger.json"
    assert path.stat().st_mode & 0o777 == 0o600
