"""A cable that can be measured and cut: relays TCP connections on this machine and counts what passes."""

import socket
import threading
import time
from contextlib import suppress

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
_PATIENCE = 60.0  # seconds that a connection waits for the target


class Relay:
    """Listens on a port of its own and passes every connection on to `target`, until it is cut or closed."""

    def __init__(self, target: int) -> None:
        self.bytes_up = 0  # towards the target
        self.bytes_down = 0
        self._target = target
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self.port = 0
        self.mend()

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._listener.close()
        self._hang_up()

    def mend(self) -> None:
        """Take connections, on the same port as before."""
        self._listener = socket.create_server((_HOST, self.port))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """End it."""
        self.cut()

    def _hang_up(self) -> None:
        with self._guard:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        """Join a connection with the target; while that is down, wait: an end in a TLS handshake stops a SuperNode."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                far = socket.create_connection((_HOST, self._target))
                break
            except OSError:
                if time.monotonic() > end:
                    near.close()
                    return
                time.sleep(0.2)
        with self._guard:
            self._open |= {near, far}
        threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
        threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                with self._guard:  # before it is passed on: who has received it finds it counted
                    if up:
                        self.bytes_up += len(data)
                    else:
                        self.bytes_down += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with self._guard:
                self._open.discard(end)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
