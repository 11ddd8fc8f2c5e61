"""Hook of the docs site (mkdocs.yml): pages that are made, links that leave docs/, and the list of pages.

`index.md` is README.md, `settings.md` is made of the options of `fedrp run`, `api.md` names what `fedrp` offers, for
mkdocstrings to fill in from docstrings. No page of docs/ is changed for the site's sake.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedrp
from fedrp.cli import cli
from fedrp.cli.common import FOREMOST
from fedrp.config.run import GROUPS
from fedrp.trackers import __all__ as tracker_names

ROOT = Path(__file__).resolve().parents[1]
MADE = ("index.md", "settings.md", "api.md")
_LINK = re.compile(r"(?<=\]\()(?P<inline>[^)\s]+)(?=\))|(?<=\]: )(?P<listed>\S+)$", re.MULTILINE)
_FENCE = re.compile(r"^( *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def slug(title: str, separator: str) -> str:
    """The name of a heading as GitHub has it, so that links work here and there."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    there = {path.name for path in Path(config.docs_dir).glob("*.md")} | {*MADE}
    config.nav = _without_missing(config.nav or [], there)
    more = sorted(there - {*_names(config.nav)})
    config.nav += [{"More": more}] if more else []
    return config


def _without_missing(nav: list[Any], there: set[str]) -> list[Any]:
    """The list of pages, as far as they are there."""
    kept = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            target = _without_missing(target, there)
        if target in there if isinstance(target, str) else target:
            kept.append({title: target})
    return kept


def _names(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for target in entry.values():
                yield from _names([target] if isinstance(target, str) else target)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in zip(MADE, (start(), settings(), api()), strict=True):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Send links that leave docs/ to the repository. Code stays as it is."""
    place = posixpath.dirname(f"docs/{page.file.src_uri}")

    def aimed(match: re.Match[str]) -> str:
        target = match[0]
        if re.match(r"[a-z]+:|#", target):
            return target
        path = posixpath.normpath(posixpath.join(place, target))
        return target if path.startswith("docs/") else config.extra["repository"] + path

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(aimed, part) for index, part in enumerate(parts))


# --- pages that are made ---------------------------------------------------------------------------------------------


def start() -> str:
    """README.md as if it lay in docs/."""
    text = (ROOT / "README.md").read_text()
    return _LINK.sub(lambda match: _from_docs(match[0]), text)


def _from_docs(target: str) -> str:
    if re.match(r"[a-z]+:|#", target):
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def settings() -> str:
    """All settings of a run with their defaults, as `fedrp run --help` has them."""
    command = cli.commands["run"]
    with command.make_context("run", []) as context:
        options = {option.name: option.get_help_record(context) for option in command.params}
    groups = [("The ten settings that matter most", FOREMOST), *((group.heading, group.settings) for group in GROUPS)]
    grouped = {name for _, names in groups for name in names}
    groups.append(("Speed, and the command itself", tuple(str(name) for name in options if name not in grouped)))
    intro = "Options of `fedrp run` and `fedrp compare`; in TOML and in `fedrp.RunConfig` with `_` for `-`."
    lines = ["# Settings", "", intro]
    shown: set[str] = set()
    for heading, names in groups:
        rows = [record for name in names if name not in shown and (record := options.get(name))]
        shown |= {*names}
        if rows:
            lines += ["", f"## {heading}", "", "| option | what |", "|---|---|"]
            lines += [f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return click.unstyle(text).replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_" if " " in text else "_")


def api() -> str:
    """What `import fedrp` offers."""
    homes = {name: fedrp._HOMES[name] for name in fedrp.__all__ if name in fedrp._HOMES}
    lines = ["# Python", "", "What `import fedrp` offers, and `from fedrp import trackers`.", ""]
    lines += [f"::: {_home(module, name)}.{name}" for name, module in homes.items()]
    lines += ["", "## Trackers", ""]
    for name in tracker_names:
        home = getattr(fedrp.trackers, name).__module__
        lines += [f"::: {home}.{name}", "    options: {heading_level: 3}", ""]
    return "\n".join([*lines, ""])


def _home(module: str, name: str) -> str:
    """Where it is written down, not where it is offered."""
    value = getattr(fedrp, name)
    return str(value.__module__) if callable(value) else module
