"""The sections of a report in plain HTML: every number that the charts show, and more."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedrp.config.run import GROUPS, RunConfig
from fedrp.privacy.certificate import CERTIFICATE_CONFIDENCE
from fedrp.reporting.charts import title_of
from fedrp.reporting.markup import Markup, element, joined, number, table
from fedrp.reporting.runs import ACCURACY, LOSS, Run, is_number
from fedrp.reporting.statements import statement_lines, upwards

_LATER = "after the last round"
_USES = ("payload", "framing", "keys")

Section = tuple[str, Markup]  # heading, content


def sections(runs: Sequence[Run]) -> dict[str, Section]:
    """What a report says, by the name of the section; one that has nothing to say is left out."""
    simulated = [run for run in runs if run.status is None]
    made: dict[str, tuple[str, Callable[[], Markup]]] = {
        "summary": ("Summary", lambda: _summary(runs)),
        "curves": ("Per round", lambda: Markup("")),
        "clients": ("Clients", lambda: _clients(simulated)),
        "privacy": ("Privacy", lambda: _privacy(runs)),
        "bytes": ("Bytes", lambda: _bytes(runs)),
        "time": ("Time and memory", lambda: _time(simulated)),
        "status": ("Status", lambda: _status([run for run in runs if run.status is not None])),
        "settings": ("Settings", lambda: _settings(runs)),
        "again": ("Run it again", lambda: _again(simulated)),
        "rounds": ("All rounds", lambda: joined(_rounds(run) for run in runs if run.history)),
    }
    return {name: (heading, content()) for name, (heading, content) in made.items()}


def measure(name: str, value: object) -> str:
    """What was measured, for people."""
    if not is_number(value):
        return number(value, "")
    return number(value, f"{value:.2f} %" if name == ACCURACY else f"{value:#.4g}".rstrip("."))


# --- summary ---------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run]) -> Markup:
    if not runs:
        return Markup("")
    tiles = _tiles(runs[0]) if len(runs) == 1 else Markup("")
    names = list(dict.fromkeys(name for run in runs for name in run.measures))
    head = ["run", "state", *(_short(name) for name in names)]
    head += [f"{_short(name)}, average" for name in names[:1]]
    head += ["sent B", "received B", "epsilon", "seconds"] if any(run.result for run in runs) else []
    rows = [_summary_row(run, names, len(head)) for run in runs]
    about = (
        "Scores are those of the delivered model on the test set; average: of the average of all clients' models. "
        "Bytes are per client and round as encoded, payload and framing, without keys. "
        "Epsilon is the largest over all adversaries, none if one of them has no guarantee."
    )
    notes = [element("p", {"class": "note"}, about)] if names else []
    warned = [f"{run.name}: {text}" for run in runs for text in (run.result or {}).get("warnings", ())]
    notes += [element("p", {"class": "warning"}, "Warning: ", text) for text in warned]
    return joined([tiles, table("Summary of all runs", head, rows, words=2), *notes])


def _summary_row(run: Run, names: Sequence[str], width: int) -> list[str]:
    line = run.result or next((line for line in reversed(run.history) if f"{LOSS}_average" in line), {})
    row = [run.name, run.state, *(measure(name, line.get(name)) for name in names)]
    row += [measure(name, line.get(f"{name}_average")) for name in names[:1]]
    if run.result:
        sizes = [run.result.get(name) for name in ("bytes_up", "bytes_down")]
        row += [*map(_general, sizes), _epsilon(run.result.get("epsilon")), _seconds(run.result.get("seconds"))]
    return row + [""] * (width - len(row))


def _tiles(run: Run) -> Markup:
    result = run.result
    if not result or run.headline is None:
        return Markup("")
    name = run.headline
    tiles = [
        (title_of(name), measure(name, result.get(name)), f"of the model of round {result.get('delivered_round')}"),
        ("Sent per client and round", _size(result.get("bytes_up")), f"received {_plain(result.get('bytes_down'))} B"),
        ("Epsilon", _epsilon(result.get("epsilon")), _delta(result)),
        (
            "Time",
            joined([_seconds(result.get("seconds")), " s"]),
            f"{_plain(result.get('seconds_per_round'))} s per round",
        ),
    ]
    made = [
        element("div", {"class": "tile"}, *(element("span", {}, text) for text in (title, value, note)))
        for title, value, note in tiles
    ]
    return element("div", {"class": "tiles"}, *made)


def _delta(result: Mapping[str, Any]) -> str:
    return "no guarantee against all" if result.get("epsilon") is None else f"at delta {_plain(result.get('delta'))}"


def _short(name: str) -> str:
    return {ACCURACY: "accuracy"}.get(name, name)


# --- clients, privacy ------------------------------------------------------------------------------------------------


def _clients(runs: Sequence[Run]) -> Markup:
    head = ["run", "measure", "least", "mean", "most"]
    rows = []
    for run in runs:
        for name in run.measures if run.result else ():
            ends = [(run.result or {}).get(f"{name}_client_{end}") for end in ("min", "mean", "max")]
            rows.append([run.name, name, *(measure(name, value) for value in ends)])
    if not rows:
        return _note(f"Clients' own models are scored {_LATER}." if runs else "")
    about = "Scores of all clients' own models; where an algorithm gives all of them one model, the three are equal."
    bounds = [(run.name, bound) for run in runs if (bound := (run.result or {}).get("consensus_bound")) is not None]
    certified = [
        element("p", {}, f"{name}: any two clients' models are within ", _general(bound), " of each other.")
        for name, bound in bounds
    ]
    told = (
        f"The consensus certificate, at confidence {CERTIFICATE_CONFIDENCE:.0%} from the uploads of the last round."
        if bounds
        else "No consensus certificate: it exists for printed FedRP with Gaussian matrices."
    )
    return joined(
        [table("Scores of the clients' own models", head, rows, words=2), _note(about), *certified, _note(told)]
    )


def _privacy(runs: Sequence[Run]) -> Markup:
    head = ["against", "unit: neighbours differ by", "epsilon at most", "delta", "bound, or why there is none"]
    made, quotes = [], []
    for run in runs:
        items = (run.result or {}).get("privacy", ())
        title = element("h3", {}, run.name)
        if items:
            stated = table(f"Privacy of {run.name}, by adversary", head, map(_statement_row, items), words=len(head))
            made += [title, stated]
        said = statement_lines(items)[1:] if items else [str(line) for line in (run.status or {}).get("privacy", ())]
        quotes += [title, *(element("p", {}, line.strip()) for line in said)] if said else []
    if not quotes:
        return _note(f"What a run may claim is stated {_LATER}." if any(run.status is None for run in runs) else "")
    return joined([*made, _details("privacy-quotes", "To quote, with all assumptions", *quotes)])


def _statement_row(item: Mapping[str, Any]) -> list[str]:
    known = item.get("epsilon") is not None
    why = item.get("bound") if known and item["epsilon"] else "nothing is seen" if known else item.get("reason")
    delta = number(item.get("delta"), f"{item.get('delta'):g}") if known else ""
    return [str(item["adversary"]), str(item["adjacency"]), _epsilon(item.get("epsilon")), delta, str(why)]


# --- bytes, time, settings -------------------------------------------------------------------------------------------


def _bytes(runs: Sequence[Run]) -> Markup:
    finished = any(run.result for run in runs)
    uses = [(use, way) for way in ("up", "down") for use in _USES] if finished else []
    rows = []
    for run in runs:
        sizes = [(run.result or {}).get(f"bytes_{use}_{way}") for use, way in uses]
        total = next(reversed(run.bytes_so_far().values()), 0.0)
        rows.append([run.name, *map(_general, sizes), number(total, f"{total:,.0f}")])
    head = ["run", *(f"{use} {'sent' if way == 'up' else 'received'}" for use, way in uses), "all of a client so far"]
    about = "Encoded bytes per client and round. " if finished else ""
    about += "All of a client so far: in all rounds, sent and received, keys included, on the mean over clients."
    if any((run.result or {}).get("delivery_participants") is not None for run in runs):
        about += " Where the models of all clients are averaged after the last round, that comes once on top: "
        once = {run.name: _delivery(run.result or {}) for run in runs}
        about += ", ".join(f"{name} {size:,.0f} B" for name, size in once.items() if size) + "."
    return joined([table("Bytes of a client", head, rows), _note(about)]) if rows else Markup("")


def _delivery(result: Mapping[str, Any]) -> float:
    """Bytes of a client in the exchange of models after the last round: sent, received, and keys."""
    sizes = [result.get(f"bytes_delivery_{use}") for use in ("up", "down", "keys_up", "keys_down")]
    return float(sum(size for size in sizes if isinstance(size, int | float)))


def _time(runs: Sequence[Run]) -> Markup:
    head = ["run", "seconds in all", "seconds per round", "images per second", "peak memory MB"]
    names = ("seconds", "seconds_per_round", "images_per_second", "peak_rss_mb")
    rows = [[run.name, *(_general(run.result.get(name)) for name in names)] for run in runs if run.result]
    return table("Time and memory", head, rows) if rows else Markup("")


def _status(runs: Sequence[Run]) -> Markup:
    made = []
    for run in runs:
        rows = [[name, str(value)] for name, value in (run.status or {}).items() if name != "privacy"]
        made += [element("h3", {}, run.name), table(f"Status of {run.name}", ["what", "value"], rows, words=2)]
    return joined(made)


def _settings(runs: Sequence[Run]) -> Markup:
    """Those that differ first; those that no run has a value of not at all."""
    if not runs:
        return Markup("")
    names = [name for group in GROUPS for name in group.settings]
    values = {name: [_setting(run.config.get(name)) for run in runs] for name in names}
    differ = [[name, *values[name]] for name in names if len(set(values[name])) > 1]
    shared = {name: values[name][0] for name in names if len(set(values[name])) == 1 and values[name][0]}
    pairs = [element("div", {}, element("dt", {}, name), element("dd", {}, value)) for name, value in shared.items()]
    listed = element("dl", {}, *pairs)
    if not differ:
        return listed
    head = ["setting", *(run.name for run in runs)]
    different = table("Settings that differ", head, differ, words=len(head))
    return joined([different, element("h3", {}, "The same in all runs"), listed])


def _setting(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _again(runs: Sequence[Run]) -> Markup:
    if not runs:
        return Markup("")
    about = (
        "The same numbers come out, if the data and the version of fedrp are the same. A run that began in Python "
        "needs its task again."
    )
    return joined([*(element("pre", {"tabindex": "0"}, again(run)) for run in runs), _note(about)])


def again(run: Run) -> str:
    """The command that makes the run again: all settings that are not the default, as they were resolved."""
    usual = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    words = ["fedrp", "run"]
    for name, default in usual.items():
        value = run.config.get(name)
        if value is None or value == default:
            continue
        option = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    return shlex.join(words + (["--engine", str(run.engine)] if run.engine else []))


def _rounds(run: Run) -> Markup:
    ends = ("", "_average", "_client_min", "_client_mean", "_client_max")
    told = {f"{name}{end}": name for name in run.measures for end in ends}
    told = {column: name for column, name in told.items() if any(line.get(column) is not None for line in run.history)}
    others = ["participants", "dropped", "seconds", "consensus_bound"]
    others = [name for name in others if any(line.get(name) is not None for line in run.history)]
    sent = run.bytes_so_far()
    rows = [
        [
            number(line["round"], str(line["round"])),
            *(measure(name, line.get(column)) for column, name in told.items()),
            *(_general(line.get(name)) for name in others),
            number(sent[line["round"]], f"{sent[line['round']]:,.0f}"),
        ]
        for line in run.history
    ]
    spoken = [name.replace("_", " ") for name in (*told, *others)]
    inner = table(f"All rounds of {run.name}", ["round", *spoken, "bytes per client so far"], rows)
    return _details(f"rounds-{run.name}", run.name, inner)


# --- parts -----------------------------------------------------------------------------------------------------------


def _details(key: str, summary: str, *content: str) -> Markup:
    return element("details", {"data-key": key}, element("summary", {}, summary), *content)


def _note(text: str) -> Markup:
    return element("p", {"class": "note"}, text) if text else Markup("")


def _plain(value: object) -> str:
    if not isinstance(value, int | float):
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _general(value: object) -> str:
    return number(value, _plain(value))


def _size(value: object) -> str:
    return joined([_general(value), " B"])


def _seconds(value: object) -> str:
    return number(value, f"{value:.1f}" if isinstance(value, float) else _plain(value))


def _epsilon(value: object) -> str:
    return number(value, upwards(value) if is_number(value) else "")
