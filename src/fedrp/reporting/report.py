"""How results look: the table on the terminal and the plot of accuracy per round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fedrp.errors import ConfigError
from fedrp.files import writing
from fedrp.privacy.certificate import CERTIFICATE_CONFIDENCE
from fedrp.reporting.statements import quote


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line per run: what was reached, what it cost on the wire, how long it took."""
    first = results[0]
    title = f"{first['dataset']}, {first['model']} ({first['parameters']:,} parameters), {first['clients']} clients"
    table = Table(title=f"{title}, {first['rounds']} rounds", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.title_justify = "left"
    table.add_column("algorithm", no_wrap=True)
    for name in ("m", "acc %", "avg %", "sent B", "recv B", "eps", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            *(result["algorithm"], "" if result["dim"] is None else f"{result['dim']:,}"),
            *(f"{result['accuracy']:.2f}", f"{result['accuracy_average']:.2f}"),
            *(f"{result['bytes_up']:,}", f"{result['bytes_down']:,}"),
            "none" if result["epsilon"] is None else f"{result['epsilon']:.2f}",
            f"{result['seconds']:.1f}",
        )
    return table


def result_details(result: dict[str, Any]) -> list[str]:
    """What a table has no room for: all clients' models, and who is protected from whom."""
    low, high = result["accuracy_client_min"], result["accuracy_client_max"]
    lines = [f"clients' own models: {low:.2f} to {high:.2f} %, mean {result['accuracy_client_mean']:.2f} %"]
    if result["consensus_bound"] is not None:
        confident = f"at confidence {CERTIFICATE_CONFIDENCE:.0%}, from the uploads of the last round"
        lines.append(f"any two clients' models are within {result['consensus_bound']:.3g} of each other ({confident})")
    return [*lines, *privacy_lines(result)]


def privacy_lines(result: dict[str, Any]) -> list[str]:
    """Against whom which epsilon holds, a line per adversary, and what to beware of."""
    return [*map(quote, result["privacy"]), *(f"warning: {text}" for text in result["warnings"])]


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """The table on standard output."""
    Console().print(result_table(results))
    print("eps: the largest epsilon over the adversaries below; none if one of them has no guarantee")
    print("acc: test accuracy of the delivered model; avg: of the average of all clients' models")
    print("sent, recv: bytes per client and round as encoded, without the sealed round keys")


def plot_accuracy(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy of the delivered model against the round, one line per run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedrp[report]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        scored = [record for record in result["history"] if record["accuracy"] is not None]
        rounds = [record["round"] for record in scored]
        line = axes.plot(rounds, [record["accuracy"] for record in scored], marker=".", label=_name(result))
        averages = [record["accuracy_average"] for record in scored]
        if averages[-1] != result["accuracy"]:
            axes.plot(
                rounds, averages, linestyle=":", color=line[0].get_color(), label=f"{_name(result)}, average model"
            )
    first = results[0]
    axes.set_title(f"{first['dataset']}, {first['model']}, {first['clients']} clients, seed {first['seed']}")
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")  # beside the curves, which may be anywhere
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _name(result: dict[str, Any]) -> str:
    return result["algorithm"] if result["dim"] is None else f"{result['algorithm']} (m={result['dim']})"
