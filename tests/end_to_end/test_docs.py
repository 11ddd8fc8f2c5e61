"""The documentation is true: its code runs, its links lead somewhere, its commands and options exist."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import fedrp
from fedrp.algorithms.table import methods
from fedrp.cli import cli
from fedrp.projection.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Every line of a shell block, and every inline code, that calls fedrp; labels of the protocol end with a bar."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
        lines += [code for code in re.findall(r"`(fedrp [^`]*[^|])`", text) if code.split()[1] not in FAMILIES]
        found += [(page.name, line.split("#")[0].strip()) for line in lines if line.startswith("fedrp ")]
    return sorted(set(found))


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out.strip().endswith("%")


def test_the_python_of_the_how_to_fine_tunes_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "how-to.md", "python"):
        exec(compile(code, "how-to.md", "exec"), names)  # noqa: S102 - our own page
    x, y = names["task"].test
    right = (names["model"](x).argmax(1) == y).double().mean().item()
    assert names["result"].accuracy == pytest.approx(100 * right)
    config = dataclasses.replace(names["config"], rounds=1, lr=1e-9)
    started = fedrp.simulate(config, names["task"]).state
    assert torch.allclose(started["0.weight"], names["weights"]["weight"], atol=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    """As `tests/protocol/test_wire.py`, without `tests/`, and with `::test_name` or the start of a name and a star."""
    for name, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(test_\w+))?\*?`", page.read_text()):
        path = ROOT / "tests" / name
        assert path.is_file(), f"{page.name} names {name}"
        assert f"def {test}" in path.read_text(), f"{page.name} names {name}::{test}"


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


# --- deployment ------------------------------------------------------------------------------------------------------

PROGRAMS = [
    ("flower-superlink",),
    ("flwr", "run"),
    ("flwr", "supernode", "register"),
]


def flower_commands() -> list[str]:
    """Every line of docs/deploy.md and of the service files that starts a Flower program."""
    lines = [line for block in blocks(ROOT / "docs" / "deploy.md", "sh") for line in block.splitlines()]
    for unit in (ROOT / "deploy").glob("*.service"):
        joined = unit.read_text().replace("\\\n", " ")
        lines += [line.removeprefix("ExecStart=/opt/fedrp/bin/") for line in joined.splitlines()]
    return [line for line in lines if line.startswith(("flower-", "flwr "))]


@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_options_of_flower_programs_exist(program: tuple[str, ...], tmp_path: Path) -> None:
    from fedrp.flower.environment import quiet_environment

    used = [line for line in flower_commands() if tuple(shlex.split(line))[: len(program)] == program]
    assert used
    arguments = [str(Path(sys.executable).parent / program[0]), *program[1:], "--help"]
    environment = {**quiet_environment(tmp_path), "COLUMNS": "200", "TERM": "dumb"}
    shown = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120).stdout
    for line in used:
        for word in shlex.split(line):
            if word.startswith("--"):
                assert word in shown, f"{' '.join(program)} has no option {word}: '{line}'"


def test_every_flower_command_of_the_docs_is_checked() -> None:
    for line in flower_commands():
        assert any(tuple(shlex.split(line))[: len(program)] == program for program in PROGRAMS), line


def test_settings_files_have_the_switches_that_keep_flower_quiet() -> None:
    from fedrp.flower.environment import quiet_environment

    switches = {
        n: v for n, v in quiet_environment(Path("/var/lib/fedrp/flwr")).items() if n.startswith(("FLWR", "RAY"))
    }
    lines = (ROOT / "deploy" / "flower.env").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if not line.startswith("#")) == switches
    container = (ROOT / "deploy" / "Containerfile").read_text()
    assert all(f"{name}={value}" in container for name, value in switches.items())


def test_the_keys_of_the_docs_are_those_of_the_example_and_the_code() -> None:
    import tomllib

    from fedrp.flower.settings import Pacing, run_settings

    app = tomllib.loads((ROOT / "examples" / "flower-app" / "pyproject.toml").read_text())
    run_settings(app["tool"]["flwr"]["app"]["config"])
    text = (ROOT / "docs" / "deploy.md").read_text()
    for name in set(Pacing.__annotations__) - {"poll"}:
        assert f"| `{name.replace('_', '-')}` |" in text


def test_every_algorithm_and_family_is_described() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in [*methods(), *FAMILIES]:
        assert name in text
