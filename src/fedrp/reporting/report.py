"""How results look: the table on the terminal and the plot of the headline metric per round."""

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

_ACCURACY = "accuracy"  # in percent; other measures are as their functions give them


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line per run: what was reached, what it cost on the wire, how long it took."""
    first = results[0]
    title = f"{first['dataset']}, {first['model']} ({first['parameters']:,} parameters), {first['clients']} clients"
    table = Table(title=f"{title}, {first['rounds']} rounds", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.title_justify = "left"
    table.add_column("algorithm", no_wrap=True)
    headline, *others = _measures(first)
    short = "acc %" if headline == _ACCURACY else headline
    names = (short, "avg %" if headline == _ACCURACY else f"avg {headline}", *others)
    for name in ("m", *names, "sent B", "recv B", "eps", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            *(result["algorithm"], "" if result["dim"] is None else f"{result['dim']:,}"),
            *(_number(headline, result[headline]), _number(headline, result[f"{headline}_average"])),
            *(_number(name, result[name]) for name in others),
            *(f"{result['bytes_up']:,}", f"{result['bytes_down']:,}"),
            "none" if result["epsilon"] is None else f"{result['epsilon']:.2f}",
            f"{result['seconds']:.1f}",
        )
    return table


def result_details(result: dict[str, Any]) -> list[str]:
    """What a table has no room for: bytes by use, all clients' models, and who is protected from whom."""
    name, lines = result["headline"], []
    low, high, mean = (result[f"{name}_client_{end}"] for end in ("min", "max", "mean"))
    if low is not None:  # of a round before the last, not all clients' models are scored
        unit = " %" if name == _ACCURACY else ""
        spread = f"{_number(name, low)} to {_number(name, high)}{unit}, mean {_number(name, mean)}{unit}"
        lines.append(f"clients' own models: {'' if unit else name + ' '}{spread}")
    if result["delivered_round"] != result["rounds_done"]:
        lines.append(f"delivered: the best model, of round {result['delivered_round']} of {result['rounds_done']}")
    if result["bytes_up"]:
        lines.append(f"bytes per client and round: sent {_bytes(result, 'up')}; received {_bytes(result, 'down')}")
    if result.get("delivery_participants") is not None:
        sizes = [result[f"bytes_delivery_{way}"] + result[f"bytes_delivery_keys_{way}"] for way in ("up", "down")]
        models = f"the mean of the models of {result['delivery_participants']} clients"
        lines.append(f"delivered: {models}, for {sizes[0]:,} bytes sent and {sizes[1]:,} received by each, once")
    if result["consensus_bound"] is not None:
        confident = f"at confidence {CERTIFICATE_CONFIDENCE:.0%}, from the uploads of the last round"
        lines.append(f"any two clients' models are within {result['consensus_bound']:.3g} of each other ({confident})")
    return [*lines, *privacy_lines(result)]


def _measures(result: dict[str, Any]) -> list[str]:
    """The names of what was measured on the test set: the headline first, the loss only if it is that."""
    names = [name.removesuffix("_average") for name in result if name.endswith("_average")]
    return [result["headline"], *(name for name in names if name not in (result["headline"], "loss"))]


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.2f}" if name == _ACCURACY else f"{value:.4g}"


def _bytes(result: dict[str, Any], way: str) -> str:
    return ", ".join(f"{result[f'bytes_{use}_{way}']:,} {use}" for use in ("payload", "framing", "keys"))


def privacy_lines(result: dict[str, Any]) -> list[str]:
    """Against whom which epsilon holds, a line per adversary, and what to beware of."""
    return [*map(quote, result["privacy"]), *(f"warning: {text}" for text in result["warnings"])]


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """The table on standard output."""
    Console().print(result_table(results))
    print("eps: the largest epsilon over the adversaries below; none if one of them has no guarantee")
    name = results[0]["headline"]
    short, what = ("acc", "test accuracy") if name == _ACCURACY else (name, f"{name} on the test set")
    print(f"{short}: {what} of the delivered model; avg: of the average of all clients' models")
    print("sent, recv: bytes per client and round as encoded, payload and framing, without keys")


def plot_headline(results: Sequence[dict[str, Any]], path: Path) -> None:
    """What runs are judged by, of the delivered model, against the round and against all bytes of a client so far."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedrp[report]'") from None
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes, by_bytes = figure.subplots(1, 2, sharey=True)
    name = results[0]["headline"]
    for result in results:
        scored = [record for record in result["history"] if record.get(name) is not None]
        rounds = [record["round"] for record in scored]
        line = axes.plot(rounds, [record[name] for record in scored], marker=".", label=_name(result))
        sent = sum(result[f"bytes_{use}"] for use in ("up", "down", "keys_up", "keys_down"))
        if sent:
            values = [record[name] for record in scored]
            by_bytes.plot([sent * number for number in rounds], values, marker=".", color=line[0].get_color())
        averages = [record[f"{name}_average"] for record in scored]
        if averages[-1:] != [record[name] for record in scored[-1:]]:
            axes.plot(
                rounds, averages, linestyle=":", color=line[0].get_color(), label=f"{_name(result)}, average model"
            )
    first = results[0]
    figure.suptitle(f"{first['dataset']}, {first['model']}, {first['clients']} clients, seed {first['seed']}")
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy %" if name == _ACCURACY else f"test {name}")
    by_bytes.set_xscale("log")
    by_bytes.set_xlabel("bytes of a client so far: up, down and keys")
    axes.grid(alpha=0.3)
    by_bytes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")  # beside the curves, which may be anywhere
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _name(result: dict[str, Any]) -> str:
    return result["algorithm"] if result["dim"] is None else f"{result['algorithm']} (m={result['dim']})"
