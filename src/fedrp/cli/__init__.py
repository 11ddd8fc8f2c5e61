"""The command line: parse, call, print. No logic of its own."""

import os
import sys

import click

from fedrp.cli import (  # noqa: F401 - importing them adds their commands
    attack,
    bench,
    deploy,
    export,
    privacy,
    report,
    reproduce,
    run,
)
from fedrp.cli.common import as_options
from fedrp.cli.common import cli as cli
from fedrp.errors import INTERRUPTED, FedRPError


def main(arguments: list[str] | None = None) -> None:
    """Entry point: a user's mistake is one line and an exit code, never a traceback."""
    try:
        cli.main(args=arguments, prog_name="fedrp", standalone_mode=False)
    except FedRPError as error:
        _fail(as_options(str(error)), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("stopped", INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        os._exit(0)  # the reader of our output went away: nothing left to say


def _fail(text: str, code: int) -> None:
    one_line = " ".join(text.split())
    print(f"fedrp: {one_line}", file=sys.stderr)
    sys.exit(code)
