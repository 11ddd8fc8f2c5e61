"""The SuperNode of `fedrp site`, a child process of it: `python -P supernode.py PARENT_PID POLL OPTIONS...`.

Run by its path, so that it imports nothing of fedrp and no torch. It adds three things to Flower's own program:

- It ends as after SIGTERM when its parent is gone, however that ended. The SuperLink then knows at once that the node
  is offline, tells the server so, and takes the node back when it is started again; of a killed node it learns later.
- It ends when Flower's main loop ends. By itself it would stay, with a runtime API and no connection.
- It looks for messages every POLL seconds. Flower's main loop sleeps 3 s after a look in vain, and half a second while
  the client app works; it has no option for either.
"""

import os
import signal
import sys
import threading
import time
import traceback
from importlib.metadata import entry_points
from types import SimpleNamespace

from flwr.supernode import start_client_internal as main_loop

_LOOK = 0.5  # seconds between two looks for the parent
_NEAR = 0.1  # seconds between two looks for a reply of this machine's own client app


def main() -> None:
    """Run Flower's program with the options given."""
    parent, poll = int(sys.argv.pop(1)), float(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    look_every(poll)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    program = next(iter(entry_points(group="console_scripts", name="flower-supernode")))
    code = 1
    try:
        program.load()()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Flower's HTTP thread would keep the process


def look_every(poll: float) -> None:
    """Have Flower's main loop, which uses nothing but `sleep` of its module `time`, sleep no longer than it must."""

    def sleep(seconds: float) -> None:
        time.sleep(poll if seconds >= 1 else min(seconds, _NEAR))

    main_loop.__dict__["time"] = SimpleNamespace(sleep=sleep)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
