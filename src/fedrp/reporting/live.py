"""The report of runs that go on, served to this machine alone: http on loopback, a token in the address.

What the page is told comes from the run folders, where every round is written as it ends: the run does not know that
someone looks. Whoever has not the token gets nothing, and so does a page of another site that points its own name here
(the Host header names neither this address nor localhost).
"""

import hmac
import json
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedrp.errors import FedRPError
from fedrp.reporting.page import news, page, plotly_script
from fedrp.reporting.runs import Run, read_runs, stamps

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_EVENTS = "/events"
_EVERY = 0.5  # seconds between two looks at the folders
_BEAT = 20  # looks without news after which the connection is shown to be alive
_PATIENCE = 30.0  # seconds for a request to come in, and for a page to take what it is sent
_MOST = 16  # connections at once
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Read = Callable[[], Sequence[Run]]
Request = socket | tuple[bytes, socket]


@contextmanager
def served(read: Read, last_words: str) -> Iterator[str]:
    """A page about what `read` gives, at the address that this gives, until the end of the block.

    A page that is open then shows all there is and the last words.

    Raises:
        ConfigError: plotly is not installed.
    """
    plotly_script()  # if it is missing, that is said now
    with _Server(read, last_words) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            server.over.set()
            server.wait_for_pages()
            server.shutdown()
            thread.join()


def runs_below(folder: Path) -> Read:
    """Reads the runs in a folder, of which there may be none yet; anew only if one of their files has changed."""
    known: tuple[object, Sequence[Run]] = ((), ())

    def read() -> Sequence[Run]:
        nonlocal known
        now = stamps(folder)
        if now != known[0]:
            try:
                known = now, read_runs([folder])
            except FedRPError:  # it begins: the page is empty until there is something to show
                known = (), ()
        return known[1]

    return read


class _Server(ThreadingHTTPServer):
    """On loopback, at a port that is free."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, read: Read, last_words: str) -> None:
        super().__init__((_LOOPBACK, 0), _Handler)
        self.read, self.last_words = read, last_words
        self.over = threading.Event()
        self._token = secrets.token_urlsafe(32)
        self._slots = threading.Semaphore(_MOST)
        self._open = 0  # pages that hear of news
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_LOOPBACK}:{self.server_port}/?token={self._token}"

    @property
    def events(self) -> str:
        """Where its page hears of news."""
        return f"{_EVENTS}?token={self._token}"

    def knows(self, token: str) -> bool:
        """Whether it is the token, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def is_named(self, host: str | None) -> bool:
        """Whether a Host header means this server, not a name of someone else's that leads here."""
        return host in (f"{_LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}")

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """While a page hears of news."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._open += change
            self._changed.notify_all()

    def wait_for_pages(self) -> None:
        """Until all open pages have been told the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout=5 * _EVERY)

    def process_request(self, request: Request, client_address: Any) -> None:
        """Answer in a thread, if there are not too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Request, client_address: Any) -> None:
        """Answer."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Request, client_address: Any) -> None:  # noqa: ARG002 - its name in socketserver
        """A page that went away is no error; and none may end the run."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("the live page failed, the run goes on")


class _Handler(BaseHTTPRequestHandler):
    """Two addresses: the page and its news. Nothing of a request is ever a path of a file."""

    server: _Server
    timeout = _PATIENCE
    server_version, sys_version = "fedrp", ""

    def do_GET(self) -> None:
        """Answer who has the token."""
        asked = urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        if not self.server.is_named(self.headers.get("Host")) or not self.server.knows(given):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that fedrp printed, with its token.\n")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html", page(self.server.read(), self.server.events).encode())
        elif asked.path == _EVENTS:
            self._tell()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in _HEADERS.items():
            self.send_header(name, value)

    def _tell(self) -> None:
        """News as long as there are any; the end."""
        self._begin(HTTPStatus.OK, "text/event-stream")
        self.end_headers()
        told: Sequence[Run] | None = None
        quiet = 0
        with self.server.hearing():
            while True:
                last = self.server.over.is_set()  # before the look: what came until then is told
                now = self.server.read()
                if now is not told:
                    self._send("news", news(now))
                    told, quiet = now, 0
                if last:
                    self._send("end", json.dumps(self.server.last_words))
                    return
                quiet += 1
                if quiet % _BEAT == 0:
                    self.wfile.write(b": still here\n\n")  # fails once the page is gone
                self.server.over.wait(_EVERY)

    def _send(self, event: str, data: str) -> None:
        self.wfile.write(f"event: {event}\ndata: {data}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: addresses hold the token."""
