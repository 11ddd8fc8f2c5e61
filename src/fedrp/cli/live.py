"""The page about runs that go on (`--live`)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def watched(out: Path, live: bool) -> Iterator[None]:
    """With --live, a page about the runs that go on inside; what it shows at the end stays in the folder."""
    if not live:
        yield
        return
    from fedrp.reporting.live import runs_below, served
    from fedrp.reporting.page import write_report
    from fedrp.reporting.runs import read_runs

    page = out / "report.html"
    with served(runs_below(out), f"ended; see {out}") as address:
        print(f"live: {address}", file=sys.stderr, flush=True)
        yield
        write_report(read_runs([out]), page)
    print(f"report: {page}", file=sys.stderr)
