"""A cable that can be measured and cut: relays TCP connections on this machine and counts what passes."""

import socket
import threading
from contextlib import suppress

_HOST = "127.0.0.1"
_CHUNK = 1 << 16


class Relay:
    """Listens on a port of its own and passes every connection on to `target`, until it is cut or closed."""

    def __init__(self, target: int) -> None:
        self.bytes_up = 0  # towards the target
        self.bytes_down = 0
        self._target = target
        self._whole = True
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._listener = socket.create_server((_HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections and take no new ones."""
        self._whole = False
        self._hang_up()

    def mend(self) -> None:
        """Take connections again."""
        self._whole = True

    def close(self) -> None:
        """End it."""
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._guard:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                if not self._whole:
                    raise ConnectionRefusedError
                far = socket.create_connection((_HOST, self._target))
            except OSError:
                near.close()
                continue
            with self._guard:
                self._open |= {near, far}
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                sink.sendall(data)
                with self._guard:
                    if up:
                        self.bytes_up += len(data)
                    else:
                        self.bytes_down += len(data)
        for end in (source, sink):
            with self._guard:
                self._open.discard(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
