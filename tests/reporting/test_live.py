"""The live page is for whoever has its address on this machine, and for nobody else."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from fedrp import simulate
from fedrp.cli import main
from fedrp.reporting.live import runs_below, served
from helpers import tiny_config, tiny_task

LAST = "it is over"


class Answer:
    """What the server at an address says."""

    def __init__(self, address: str, path: str | None = None, host: str | None = None, method: str = "GET") -> None:
        parts = urlsplit(address)
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        headers = {} if host is None else {"Host": host}
        self.connection.request(method, path or f"/?{parts.query}", headers=headers)
        self.response = self.connection.getresponse()
        self.status, self.headers = self.response.status, self.response.headers

    def events(self) -> Iterator[tuple[str, object]]:
        """The events that it sends, until it ends."""
        name = ""
        for raw in self.response:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def token_of(address: str) -> str:
    return parse_qs(urlsplit(address).query)["token"][0]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with served(runs_below(tmp_path), LAST) as address:
        yield address


def test_the_page_is_there_for_whoever_has_the_token(address: str) -> None:
    answer = Answer(address)
    assert answer.status == 200
    assert b"A run that begins" in answer.response.read()
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/events", "/?token=", "/?token=wrong", "/events?token=%ff", "/report.html"])
def test_without_the_token_there_is_nothing(address: str, path: str) -> None:
    answer = Answer(address, path)
    assert answer.status == 403
    assert token_of(address).encode() not in answer.response.read()


def test_tokens_are_long_and_never_the_same(address: str, tmp_path: Path) -> None:
    with served(runs_below(tmp_path), LAST) as other:
        assert token_of(other) != token_of(address)
        assert Answer(other, f"/?token={token_of(address)}").status == 403
    assert len(token_of(address)) >= 43  # 256 bits


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{port}", ""]
)
def test_a_name_that_is_made_to_lead_here_gets_nothing(address: str, host: str) -> None:
    assert Answer(address, host=host.format(port=urlsplit(address).port)).status == 403


def test_localhost_is_a_name_of_this_machine(address: str) -> None:
    assert Answer(address, host=f"localhost:{urlsplit(address).port}").status == 200


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/config.json", "/config.json", "//etc/passwd", "/events/x"]
)
def test_no_path_leads_to_a_file(address: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("a secret")
    answer = Answer(address, f"{path}?token={token_of(address)}")
    assert answer.status == 404
    assert b"secret" not in answer.response.read()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_the_page_can_only_be_read(address: str, method: str) -> None:
    assert Answer(address, method=method).status == 501


def test_only_this_machine_is_listened_to(address: str) -> None:
    port = urlsplit(address).port
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127.0.0.1"):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), timeout=5)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_page_hears_of_every_round_and_of_the_end(tmp_path: Path) -> None:
    """A real run; the server is told nothing of it, it reads its folder."""
    heard: list[tuple[str, object]] = []
    with served(runs_below(tmp_path), LAST) as address:
        stream = Answer(address, f"/events?token={token_of(address)}")
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        listener = threading.Thread(target=lambda: heard.extend(stream.events()))
        listener.start()
        result = simulate(tiny_config("fedavg"), tiny_task(), out=tmp_path)
    listener.join(timeout=20)
    assert heard[0][1]["runs"] == []
    assert heard[-1] == ("end", LAST)
    name, last = heard[-2]
    assert name == "news"
    (chart,) = [chart for chart in last["charts"] if chart["id"] == "measure-0"]
    assert chart["figure"]["data"][0]["y"] == [line["accuracy"] for line in result.history]
    assert "3 rounds" in last["parts"]["summary"]


@pytest.mark.parametrize("words", [["run", "--algorithm=fedavg"], ["compare", "--algorithms=fedavg,fwc"]])
def test_a_command_says_where_to_look_and_keeps_the_page(
    words: list[str], images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [f"--dataset=npz:{images}", "--clients=3", "--rounds=1", "--workers=1", f"--out={tmp_path / 'out'}"]
    main([*words, *small, "--live", "--json"])
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"live: http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", told[0])
    assert told[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert "connect-src &#x27;none&#x27;" in (tmp_path / "out" / "report.html").read_text()[:1000]


def test_a_folder_that_nobody_deploys_in_is_not_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--live", str(tmp_path)])
    assert "holds no run" in capsys.readouterr().err


def test_once_the_run_is_over_nothing_listens(tmp_path: Path) -> None:
    with served(runs_below(tmp_path), LAST) as address:
        pass
    with pytest.raises(OSError, match="refused"):
        Answer(address)
    assert "serve_forever" not in "".join(thread.name for thread in threading.enumerate())


def test_many_that_connect_and_say_nothing_do_not_keep_threads(address: str) -> None:
    before, port = threading.active_count(), urlsplit(address).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    assert threading.active_count() - before <= 17
    for connection in silent:
        connection.close()
