"""The report of runs as one HTML page, which needs no other file and can call nobody."""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrp.errors import ConfigError
from fedrp.files import SHARED, replace_file, writing
from fedrp.reporting.charts import Chart, charts
from fedrp.reporting.markup import Markup, element, script_json
from fedrp.reporting.runs import Run, is_number
from fedrp.reporting.sections import Section, sections

_ASSETS = Path(__file__).parents[1] / "assets"
_HOW = "Charts need JavaScript; every number is in the tables as well."


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Put the page at `path`.

    Raises:
        ConfigError: plotly is not installed.
        SiteError: the file cannot be written.
    """
    data = page(runs).encode()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, SHARED)


def page(runs: Sequence[Run], events: str | None = None) -> str:
    """The page; `events` is where it hears of what is new, if it is that of runs that go on.

    Guarantees: text of runs stays text. The page cannot load or send anything, but `events` from where it came.
    """
    script, style = plotly_script(), _asset("report.css")
    own = _asset("report.js")
    told, drawn = sections(runs), charts(runs)
    title, about = _title(runs)
    head = [
        element("meta", {"charset": "utf-8"}),
        element(
            "meta", {"http-equiv": "Content-Security-Policy", "content": policy([script, own], events is not None)}
        ),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("meta", {"name": "referrer", "content": "no-referrer"}),
        element("title", {}, f"{title} - FedRP report"),
        element("style", {}, style),
    ]
    if events is not None:
        head.append(element("noscript", {}, element("meta", {"http-equiv": "refresh", "content": "5"})))
    seen = {name for name, (_, content) in told.items() if content} | {chart.section for chart in drawn}
    hidden: dict[str, dict[str, str]] = {name: {} if name in seen else {"hidden": ""} for name in told}
    links = [element("a", {"href": f"#{name}", **hidden[name]}, told[name][0]) for name in told]
    body = [
        element("a", {"class": "skip", "href": "#summary"}, "Skip to the numbers"),
        element(
            "header",
            {},
            element("p", {"class": "kind"}, "FedRP report", element("span", {"id": "live", "role": "status"})),
            element("h1", {}, title),
            element("p", {"class": "note", "id": "about"}, about),
            element("nav", {"aria-label": "Sections"}, *links),
        ),
        element("div", {"id": "legend", "role": "group", "aria-label": "Runs shown in the charts"}),
        element("noscript", {}, element("p", {"class": "warning"}, _HOW)),
        element("main", {}, *(_section(name, part, hidden[name]) for name, part in told.items())),
        element("script", {"type": "application/json", "id": "report"}, script_json(_contents(runs, drawn, events))),
        element("script", {}, script),
        element("script", {}, own),
    ]
    page_ = element("html", {"lang": "en"}, element("head", {}, *head), element("body", {}, *body))
    return f"<!doctype html>\n{page_}\n"


def news(runs: Sequence[Run]) -> str:
    """What an open page is told of runs that went on, as JSON: its sections and its charts anew."""
    told = sections(runs)
    title, about = _title(runs)
    parts = {name: content for name, (_, content) in told.items()}
    return script_json({**_contents(runs, charts(runs), None), "parts": parts, "title": title, "about": about})


def policy(scripts: Sequence[str], live: bool) -> str:
    """The Content-Security-Policy of a page with these scripts. Plotly writes style attributes, so styles are free."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    parts = {"default-src": "'none'", "script-src": allowed, "style-src": "'unsafe-inline'", "img-src": "data: blob:"}
    parts |= {"connect-src": "'self'" if live else "'none'", "base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{name} {value}" for name, value in parts.items())


@functools.cache
def plotly_script() -> Markup:
    """The script that draws the charts, as the installed plotly brings it.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("reports need plotly: pip install 'fedrp[report]'") from None
    return _script(get_plotlyjs())


def _asset(name: str) -> Markup:
    return _script((_ASSETS / name).read_text())


def _script(text: str) -> Markup:
    """A script that can be inlined as it is."""
    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ConfigError("this version of plotly cannot be inlined: pip install 'fedrp[report]'")
    return Markup(text)


def _title(runs: Sequence[Run]) -> tuple[str, str]:
    """What the runs have in common, above them all."""
    if not runs:
        return "A run that begins", "Nothing is known of it yet."
    names = ("dataset", "model", "clients", "rounds")
    shared = {name: {str(run.config.get(name)) for run in runs} for name in names}
    one = {name: next(iter(values)) for name, values in shared.items() if len(values) == 1}
    title = ", ".join(one.get(name, f"{len(shared[name])} {name}s") for name in names[:2])
    counts = [f"{one[name]} {name}" for name in names[2:] if name in one]
    sizes = {run.result["parameters"] for run in runs if run.result and is_number(run.result.get("parameters"))}
    counts += [f"{size:,} parameters" for size in sizes if len(sizes) == 1]
    return title, ", ".join([f"{len(runs)} runs" if len(runs) > 1 else runs[0].name, *counts])


def _section(name: str, part: Section, hidden: Mapping[str, str]) -> Markup:
    heading, content = part
    return element(
        "section",
        {"id": name, "aria-labelledby": f"{name}-heading", **hidden},
        element("h2", {"id": f"{name}-heading"}, heading),
        element("div", {"class": "charts"}),
        element("div", {"class": "part"}, content),
    )


def _contents(runs: Sequence[Run], drawn: Sequence[Chart], events: str | None) -> Mapping[str, Any]:
    return {"runs": [run.name for run in runs], "charts": [chart._asdict() for chart in drawn], "events": events}
