"""The program `fedrp`, also `python -m fedrp`. It takes over Ctrl-C before it imports anything that takes long."""

import os
import signal
import sys
from types import FrameType

from fedrp.errors import INTERRUPTED

_IMPORTING = "<frozen importlib._bootstrap>"


def _interrupted(_number: int, frame: FrameType | None) -> None:
    """Ctrl-C is `KeyboardInterrupt`, but in the middle of an import the end: extension modules make other errors of it.

    Nothing is lost then: what a run has done is always on the disk.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            os.write(2, b"fedrp: stopped\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: a user's mistake is one line and an exit code, Ctrl-C at any time one line."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background of a shell
    if heard:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from fedrp.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # where it hit none of the commands
        sys.stderr.write("fedrp: stopped\n")
        sys.exit(INTERRUPTED)
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left is the interpreter's own end


if __name__ == "__main__":
    main()
