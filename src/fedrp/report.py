"""How results look: the table on the terminal and the plot of accuracy per round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedrp.errors import ConfigError


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line per run: what was reached, what it cost on the wire, how long it took."""
    first = results[0]
    title = f"{first['dataset']}, {first['model']} ({first['parameters']:,} parameters), {first['clients']} clients"
    table = Table(title=f"{title}, {first['rounds']} rounds of {first['local_epochs']} epochs", title_justify="left")
    for name in ("algorithm", "accuracy %", "clients min..max", "average model", "sent B", "received B", "keys B"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    table.add_column("epsilon", justify="right")
    table.add_column("seconds", justify="right")
    for result in results:
        spread = f"{result['accuracy_client_min']:.1f}..{result['accuracy_client_max']:.1f}"
        table.add_row(
            _name(result),
            *(f"{result['accuracy']:.2f}", spread, f"{result['accuracy_average']:.2f}"),
            *(f"{result['bytes_up']:,}", f"{result['bytes_down']:,}"),
            f"{result['bytes_keys_up'] + result['bytes_keys_down']:,}",
            "none" if result["epsilon"] is None else f"{result['epsilon']:.2f}",
            f"{result['seconds']:.1f}",
        )
    table.caption = "accuracy: of the delivered model; sent and received: bytes per client and round, as encoded"
    return table


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """The table on standard output."""
    Console(soft_wrap=True).print(result_table(results))


def plot_accuracy(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy of the delivered model against the round, one line per run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedrp[report]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        rounds = [record["round"] for record in result["history"]]
        line = axes.plot(rounds, [record["accuracy"] for record in result["history"]], marker=".", label=_name(result))
        averages = [record["accuracy_average"] for record in result["history"]]
        if averages[-1] != result["accuracy"]:
            axes.plot(
                rounds, averages, linestyle=":", color=line[0].get_color(), label=f"{_name(result)}, average model"
            )
    first = results[0]
    axes.set_title(f"{first['dataset']}, {first['model']}, {first['clients']} clients, seed {first['seed']}")
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy %")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _name(result: dict[str, Any]) -> str:
    return result["algorithm"] if result["dim"] is None else f"{result['algorithm']} (m={result['dim']})"
