"""What every bound says of a projection, on the terminal."""

from rich.box import SIMPLE
from rich.table import Table

from fedrp.privacy.bounds import MEANINGS
from fedrp.privacy.report import ProjectionReport
from fedrp.reporting.statements import upwards


def bound_table(report: ProjectionReport) -> Table:
    """What every bound says of one projected vector, in one round and in all."""
    title = f"one vector, m = {report.dim:,}, alpha {report.alpha:.3g}, delta {report.delta:g}: epsilon at most"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("bound")
    once = {
        "paper": report.paper_epsilon,
        "exact": report.exact_epsilon,
        "renyi": report.renyi_epsilon,
        "pld": report.pld_epsilon,
    }
    columns = {"1 round": once}
    if report.rounds > 1:
        columns[f"{report.rounds:,} rounds"] = report.composed
    for heading in columns:
        table.add_column(heading, justify="right")
    table.add_column("what it is", overflow="fold")
    for name, meaning in MEANINGS.items():
        found = [column.get(name) for column in columns.values()]
        if any(epsilon is not None for epsilon in found):
            table.add_row(name, *("" if epsilon is None else upwards(epsilon) for epsilon in found), meaning)
    return table
