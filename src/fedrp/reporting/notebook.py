"""A result in a notebook: the table, and where plotly is installed the report, in a frame of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrp.errors import ConfigError
from fedrp.reporting.markup import element
from fedrp.reporting.page import page
from fedrp.reporting.runs import Run
from fedrp.reporting.sections import sections


def result_html(result: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A result as HTML. The frame holds the script that draws, several megabytes: it needs no network."""
    run = Run(str(config["algorithm"]), Path(), config, result["history"], result)
    try:
        inner = page([run])
    except ConfigError:  # no plotly
        return sections([run])["summary"][1]
    style = "width: 100%; height: 42rem; border: 0; border-radius: 0.6rem"
    frame = {"srcdoc": inner, "sandbox": "allow-scripts", "title": "FedRP report", "style": style}
    return element("iframe", frame)
