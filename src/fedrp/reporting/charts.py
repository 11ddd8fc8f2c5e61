"""Charts of runs, as figures for plotly: data and axes alone, colours are the page's.

Names of runs come from folders and settings of anyone: they are escaped here, as plotly takes markup in its texts.
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedrp.privacy.certificate import CERTIFICATE_CONFIDENCE
from fedrp.reporting.runs import ACCURACY, LOSS, Run, is_number

Trace = dict[str, Any]
_BYTES = {"type": "log", "tickformat": "~s", "ticksuffix": "B"}  # of an axis
_FEW = 12  # rounds, each of which has a number at the axis
_USES = {"payload": "circle", "framing": "diamond", "keys": "triangle-up"}


class Chart(NamedTuple):
    """A chart, and where in the page it belongs."""

    id: str
    section: str
    title: str
    note: str  # how to read it
    figure: dict[str, Any]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """All charts that there are numbers for; what runs are judged by first, per round and by bytes."""
    curves = list(_curves(runs))
    made = (*curves[:1], *_by_bytes(runs), *curves[1:], *_spread(runs), *_certificate(runs), *_traffic(runs))
    return [chart for chart in (*made, *_growth(runs), *_time(runs)) if chart.figure["data"]]


def title_of(name: str) -> str:
    """What a measure is called above a chart."""
    return {ACCURACY: "Test accuracy", LOSS: "Test loss"}.get(name, f"Test {name}")


def _curves(runs: Sequence[Run]) -> Iterator[Chart]:
    """A chart per measure: that of the delivered model, and dotted that of the average of all clients' models."""
    for place, name in enumerate(dict.fromkeys(name for run in runs for name in run.measures)):
        traces = []
        for number, run in enumerate(runs):
            points, average = run.points(name), run.points(f"{name}_average")
            traces.append(_line(number, run, points, _value(name)))
            if average != points:
                traces.append(_line(number, run, average, _value(name), average=True))
        both = any(trace and trace["meta"]["average"] for trace in traces)
        dotted = "; dotted, of the average of all clients' models" if both else ""
        yield Chart(
            f"measure-{place}",
            "curves",
            title_of(name),
            f"Of the delivered model{dotted}.",
            _figure(traces, "round", _unit(name)),
        )


def _by_bytes(runs: Sequence[Run]) -> Iterator[Chart]:
    names = [run.headline for run in runs if run.headline]
    if not names:
        return
    name, traces = names[0], []
    for number, run in enumerate(runs):
        sent = run.bytes_so_far()
        points = [(sent[round_], value) for round_, value in run.points(name) if sent[round_]]
        traces.append(_line(number, run, points, f"%{{x:.3s}}B: {_value(name)}"))
    note = "Sent and received since the start, keys included, on the mean over all clients; the scale is logarithmic."
    figure = _figure(traces, "bytes per client so far", _unit(name))
    figure["layout"]["xaxis"] |= _BYTES
    figure["layout"]["hovermode"] = "closest"
    yield Chart("bytes-so-far", "curves", f"{title_of(name)} against bytes", note, figure)


def _spread(runs: Sequence[Run]) -> Iterator[Chart]:
    """Only where clients' models differ at all."""
    names = [run.headline for run in runs if run.headline]
    if not names:
        return
    name, traces = names[0], []
    for number, run in enumerate(runs):
        result = run.result or {}
        low, mean, high = (result.get(f"{name}_client_{end}") for end in ("min", "mean", "max"))
        if not (is_number(low) and is_number(mean) and is_number(high)):
            continue
        width = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
        trace = _trace(number, run, [mean], [_text(run)])
        hover = f"mean {mean:.4g}, from {low:.4g} to {high:.4g}<extra>%{{fullData.name}}</extra>"
        traces.append(trace | {"mode": "markers", "error_x": width, "marker": {"size": 11}, "hovertemplate": hover})
    if all(trace["error_x"]["array"] == trace["error_x"]["arrayminus"] == [0] for trace in traces):
        return
    figure = _figure(traces, _unit(name) or name, "", rows=True)
    yield Chart(
        "spread",
        "clients",
        f"{title_of(name)} of the clients' own models",
        "Lowest, mean and highest of all clients.",
        figure,
    )


def _certificate(runs: Sequence[Run]) -> Iterator[Chart]:
    traces = [_line(number, run, run.points("consensus_bound"), "%{y:.3g}") for number, run in enumerate(runs)]
    note = f"No two clients' models were further apart, at confidence {CERTIFICATE_CONFIDENCE:.0%} in each round."
    yield Chart("certificate", "clients", "Consensus certificate", note, _figure(traces, "round", "distance at most"))


def _traffic(runs: Sequence[Run]) -> Iterator[Chart]:
    traces = []
    for number, run in enumerate(runs):
        for use, symbol in _USES.items():
            sizes = {way: (run.result or {}).get(f"bytes_{use}_{way}") for way in ("up", "down")}
            total = sum(size for size in sizes.values() if is_number(size))
            if total:
                trace = _trace(number, run, [total], [_text(run)])
                ways = " and ".join(f"{size:,} {way}" for way, size in sizes.items() if is_number(size))
                hover = f"{use}: {total:,} bytes ({ways})<extra>%{{fullData.name}}</extra>"
                traces.append(
                    trace | {"mode": "markers", "marker": {"size": 11, "symbol": symbol}, "hovertemplate": hover}
                )
    figure = _figure(traces, "bytes", "", rows=True)
    figure["layout"]["xaxis"] |= _BYTES
    note = "Sent and received together: payload ●, framing ◆, keys ▲; the scale is logarithmic."
    yield Chart("traffic", "bytes", "Bytes per client and round", note, figure)


def _growth(runs: Sequence[Run]) -> Iterator[Chart]:
    """While runs go on; of those that are finished the mean over all rounds is told, by use."""
    if all(run.result for run in runs):
        return
    traces = [_line(number, run, list(run.bytes_so_far().items()), "%{y:.3s}B") for number, run in enumerate(runs)]
    figure = _figure(traces, "round", "")
    figure["layout"]["yaxis"] |= {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"}
    note = "Sent and received, on the mean over all clients."
    yield Chart("growth", "bytes", "Bytes of a client so far", note, figure)


def _time(runs: Sequence[Run]) -> Iterator[Chart]:
    traces = [_line(number, run, run.points("seconds"), "%{y:.3g} s") for number, run in enumerate(runs)]
    figure = _figure(traces, "round", "s")
    yield Chart("time", "time", "Seconds per round", "Training and messages, without evaluation.", figure)
    present = [_line(number, run, run.points("participants"), "%{y:,}") for number, run in enumerate(runs)]
    if any(line.get("participants") != run.config["clients"] for run in runs for line in run.history):
        note = "Clients whose uploads were used."
        yield Chart("participants", "time", "Clients in a round", note, _figure(present, "round", "clients"))


# --- figures ---------------------------------------------------------------------------------------------------------


def _line(number: int, run: Run, points: Sequence[tuple[float, float]], value: str, average: bool = False) -> Trace:
    trace = _trace(number, run, [x for x, _ in points], [y for _, y in points], average)
    if not points:
        return {}
    mode = "lines+markers" if len(points) <= 60 else "lines"
    look = {"mode": mode, "line": {"width": 2, "dash": "dot" if average else "solid"}, "marker": {"size": 6}}
    model = ", average model" if average else ""
    return trace | look | {"hovertemplate": f"{value}<extra>%{{fullData.name}}{model}</extra>"}


def _trace(number: int, run: Run, x: Sequence[float], y: Sequence[Any], average: bool = False) -> Trace:
    """`meta` tells the page whose it is: it has the colours, and a legend for all charts."""
    return {
        "type": "scatter",
        "name": _text(run),
        "x": list(x),
        "y": list(y),
        "meta": {"run": number, "average": average},
    }


def _figure(traces: Sequence[Trace], across: str, up: str, rows: bool = False) -> dict[str, Any]:
    """`rows`: a row per run, the first on top."""
    xaxis: dict[str, Any] = {"title": {"text": html.escape(across)}}
    if across == "round":
        xaxis |= {"tickformat": "d"}
        if all(x <= _FEW for trace in traces if trace for x in trace["x"]):
            xaxis |= {"dtick": 1}
    yaxis: dict[str, Any] = {"title": {"text": html.escape(up)}}
    if rows:
        yaxis = {"autorange": "reversed", "automargin": True, "type": "category"}
    layout = {"xaxis": xaxis, "yaxis": yaxis, "hovermode": "closest" if rows else "x unified"}
    return {"data": [trace for trace in traces if trace], "layout": layout}


def _text(run: Run) -> str:
    return html.escape(run.name)


def _unit(name: str) -> str:
    return "%" if name == ACCURACY else "" if name == LOSS else name


def _value(name: str) -> str:
    return "%{y:.2f} %" if name == ACCURACY else "%{y:.4g}"
