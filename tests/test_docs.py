"""The documentation is true: its code runs, its links lead somewhere, its commands and options exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from fedrp.algorithms import ALGORITHMS
from fedrp.cli import cli
from fedrp.projection import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Every line of a shell block, and every inline code, that calls fedrp."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
        lines += [code for code in re.findall(r"`(fedrp [^`]*)`", text) if code.split()[1] not in FAMILIES]
        found += [(page.name, line.split("#")[0].strip()) for line in lines if line.startswith("fedrp ")]
    return sorted(set(found))


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip().endswith("%")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked to."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            aimed = page.parent / target if target else page
            assert heading in headings(aimed), f"{page.name} links to {target}#{heading}"


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_and_options_exist(page: str, line: str) -> None:
    group: click.Command = cli
    words = shlex.split(line.replace("...", ""))[1:]
    while isinstance(group, click.Group) and words:
        word = words.pop(0)
        if word.startswith("-"):
            break
        assert word in group.commands, f"{page}: no command '{word}' in '{line}'"
        group = group.commands[word]
    known = {option for parameter in group.params for option in parameter.opts} | {"--help", "--version"}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{page}: no option '{word}' in '{line}'"


def test_every_algorithm_and_family_is_described() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in [*ALGORITHMS, *FAMILIES]:
        assert name in text
