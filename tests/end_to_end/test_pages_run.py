"""Every block of code of README and docs does what it says: Python runs, commands are parsed, and run where they can.

Blocks are found here, so that a new page or a new block is tested without being named. Those of a page run in their
order, in one folder, as a reader would type them. What is not run is in `NOT_RUN`, with the reason.
"""

import contextlib
import io
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest

from fedrp.cli import cli, main
from fedrp.cli.common import read_settings
from fedrp.learning.data import load_dataset
from helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"", "python", "sh", "toml", "json", "mermaid", "text", "math", "csv"}

# Commands that are parsed, and not run: a pattern, and why.
NOT_RUN = {
    r"^fedrp site ": "needs the server's machine",
    r"/(var|etc)/": "looks at the folder of a deployment",
    r"--address ": "needs a cluster",
    r"^fedrp data fetch": "needs a network",
    r"--dataset (mnist|fashion-mnist|cifar10)( |$)": "needs data that are fetched",
    r"\.\.\.|(?<![\w=])(?!RUN_FOLDER)[A-Z]{3,}\b| m ": "leaves something to the reader",
    r"--live": "serves until it is stopped",
    r"^fedrp (report|results) runs": "reads what earlier commands made",
    r"^fedrp reproduce": "takes minutes to days",
}
MINUTES = ("audit", "attack", "sensitivity", "bench")  # commands that slow tests run, as they are printed
OTHERS = {  # programs that are not ours: those of Flower are looked at in test_docs.py
    *("openssl", "ssh-keygen", "flower-superlink", "flwr", "ray", "pip", "make", "python", "python3", "."),
    *(
        "echo",
        "cat",
        "set",
        "export",
        "git",
        "cd",
        "mkdir",
        "mv",
        "tensorboard",
        "mlflow",
        "wandb",
        "OMP_NUM_THREADS=1",
    ),
}
SMALLER = ["--rounds", "1", "--train-examples", "2000"]  # what trains is run on less


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All fenced blocks, in order, also those that are indented."""
    found, text = [], page.read_text()
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        indent, language, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        found.append(Block(language.strip(), "\n".join(lines), text.count("\n", 0, match.start()) + 1))
    return found


def commands(block: Block) -> list[str]:
    """The commands of a shell block, each in one line, without comments and what is between <<END and END."""
    text = re.sub(r"<<(\w+)\n.*?^\1$", "", block.text.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


ALL = [
    (page.name, f"{page.name}:{block.line}", line)
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh"
    for line in commands(block)
]
OURS = sorted({(name, line) for name, _, line in ALL if line.startswith("fedrp ")})


def reason_not_to_run(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), None)


def words_of(line: str) -> tuple[list[str], str | None]:
    """The arguments of a command, and the file that its output goes to."""
    filled = re.sub(r"--[\w-]+ \.\.\.|\.\.\.", "", line)
    filled = re.sub(r" (SEED|BITS|m)\b", " 1", filled)  # where numbers are left to the reader
    words = shlex.split(filled)[1:]
    if ">" not in words:
        return words, None
    return words[: words.index(">")], words[words.index(">") + 1]


def test_blocks_are_of_languages_that_are_looked_at() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: ```{block.language}"


# --- parsed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "line"), OURS)
def test_commands_are_what_the_program_takes(page: str, line: str) -> None:
    """Click reads them as typed: arguments, options, their types and choices; settings are valid together."""
    words, _ = words_of(line)
    command: click.Command = cli
    parent, name = None, "fedrp"
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        parent = click.Context(command, parent, name)
        name = words.pop(0)
        command = parent.command.commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, words, parent, help_option_names=["-h", "--help"]) as context:  # click keeps them
        if name in ("run", "compare") and not context.params.get("resume"):
            given = dict(context.params)
            config = given.pop("config")
            read_settings(config and ROOT / config, given)


@pytest.mark.parametrize(("place", "line"), sorted({(place, line) for _, place, line in ALL}))
def test_other_commands_name_what_exists(place: str, line: str) -> None:
    """Targets of make, extras of pip, scripts of python; a program that is new here must be looked at once."""
    for part in re.split(r"&&|;", line):
        words = shlex.split(part)
        if not words or words[0] == "fedrp":
            continue
        program, *rest = words
        assert program in OTHERS, f"{place}: {part}"
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in rest if not word.startswith("-") and "=" not in word} <= set(targets), place
        scripts = [word for word in rest if word.endswith(".py") and program.startswith(("python", "OMP"))]
        assert all((ROOT / script).exists() for script in scripts), place
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [name for word in rest for group in re.findall(r"fedrp\[([\w,]+)\]", word) for name in group.split(",")]
        assert set(named) <= set(extras), place


def test_no_exception_is_left_over_from_a_page_that_is_gone() -> None:
    """Those that other pages are about to have are allowed."""
    coming = {
        "--live",
        "^fedrp reproduce",
        "^fedrp data fetch",
        *(p for p in NOT_RUN if "RUN_FOLDER" in p or "dataset" in p),
    }
    assert not [p for p in NOT_RUN.keys() - coming if not any(re.search(p, line) for _, line in OURS)]


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages speak of as the reader's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    data = load_dataset("mnist-mini")
    np.savez(tmp_path / "data.npz", x=data.test_x[:50], y=data.test_y[:50])
    x = np.random.default_rng(0).normal(size=(40, 20)).astype(np.float32)
    np.savez(tmp_path / "table.npz", x=x, y=(x[:, 0] + x[:, 1] > 0).astype(int))
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(20, 2)\n")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def typed(desk: Path, line: str) -> None:
    """A command as a reader types it, in the folder `desk`; placeholders and scratch folders are filled in."""
    finished = desk / "finished"
    words, output = words_of(line.replace("/tmp/", f"{desk}/").replace("RUN_FOLDER", str(finished)))  # noqa: S108
    if str(finished) in words and not finished.exists():
        main(["run", *SMALLER, "--out", str(finished)])
    if words[:2] == ["roster", "make"]:
        for entry in words[3:]:  # those of the others
            if not Path(entry).exists():
                typed(desk, f"fedrp keys new {Path(entry).stem}.key --name {Path(entry).stem} > {entry}")
    if words[0] in ("run", "compare"):
        out = Path(words[words.index("--out") + 1]) if "--out" in words else None
        if "--resume" in words:
            if out and not out.exists():
                main([words[0], *SMALLER, "--out", str(out)])
        else:
            words += SMALLER
            if out and out.exists():  # a page may show several ways to begin
                shutil.rmtree(out)
    if output is None:
        main(words)
        return
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(words)
    Path(output).write_text(said.getvalue())


RUNNABLE = [page for page in PAGES if any(block.language in ("python", "sh") for block in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, desk: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            exec(code, names)  # noqa: S102 - our own page
        elif block.language == "sh":
            for line in commands(block):
                quick = line.startswith("fedrp ") and not line.startswith(tuple(f"fedrp {name}" for name in MINUTES))
                if quick and reason_not_to_run(line) is None:
                    typed(desk, line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line
        for line in sorted({line for _, line in OURS})
        if line.split()[1] in MINUTES and reason_not_to_run(line) is None
    ],
)
def test_commands_that_take_minutes_run(line: str, desk: Path) -> None:
    typed(desk, line)


def test_the_page_of_the_three_lines_is_the_tested_one() -> None:
    """What docs/export.md shows of plain PyTorch is what tests/exporting runs without fedrp."""
    source = (ROOT / "tests" / "exporting" / "test_export.py").read_text()
    shown = [block.text for block in blocks(ROOT / "docs" / "export.md") if not block.language]
    assert len(shown) == 2
    assert all(text in source for text in shown)
