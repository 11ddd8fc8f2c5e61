"""What is published is what was kept: one file for each table, an index, and pages that are rendered from them."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # where a script finds its siblings
kept = importlib.import_module("kept")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return importlib.import_module("results")


def test_every_kept_line_is_found_by_the_hash_of_its_options() -> None:
    found = {}
    for path in kept.FOLDER.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            assert line["hash"] == kept.options_hash(line["options"])
            assert line["hash"] not in found, f"{line['options']} is kept twice"
            assert line["result"]["origin"]["command"]
            found[line["hash"]] = path.stem
    assert found == kept.read_index()
    assert {path.suffix for path in kept.FOLDER.iterdir()} == {".jsonl", ".json"}
    assert [path.name for path in kept.FOLDER.glob("*.json")] == ["index.json"]


def test_every_table_belongs_to_something_that_can_be_run(results: ModuleType) -> None:
    runs = {kept.options_hash(run.options) for name in results.EXPERIMENTS for run in results.runs_of(name)}
    others = {*results.OWN_SCRIPTS, "attacks", "growth", "memory", "peers", "privacy", "profile", "simulator"}
    index = kept.read_index()
    assert {table for digest, table in index.items() if digest not in runs} <= others
    assert set(index.values()) <= {*results.EXPERIMENTS, *others}


def test_the_page_of_results_is_rendered_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: ModuleType
) -> None:
    page = results.PAGE.read_text()
    assert page.count("<!-- table ") > 10
    (tmp_path / "results.md").write_text("".join(line for line in page.splitlines(True) if not line.startswith("| `")))
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "FIGURE_MAKERS", {})
    results.render()
    assert results.PAGE.read_text() == page


def test_a_run_that_two_tables_ask_for_is_kept_once_and_replaced_where_it_is(tmp_path: Path) -> None:
    kept.keep("first", {"--lr 0.1  --seed 0": {"accuracy": 1}, "--seed 1": {"accuracy": 2}}, tmp_path)
    kept.keep("second", {"--lr 0.1 --seed 0": {"accuracy": 3}, "--seed 2": {"accuracy": 4}}, tmp_path)
    assert kept.read("first", tmp_path) == {"--lr 0.1 --seed 0": {"accuracy": 3}, "--seed 1": {"accuracy": 2}}
    assert kept.read("second", tmp_path) == {"--seed 2": {"accuracy": 4}}
    assert kept.find("--lr  0.1 --seed 0", tmp_path) == {"accuracy": 3}
    assert kept.find("--seed 3", tmp_path) is None
    assert not kept.is_kept("--seed 3", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.jsonl", "index.json", "second.jsonl"]


def test_what_a_script_measured_is_kept_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: ModuleType
) -> None:
    """One line by the command alone, many by the command and what each is about."""
    about = {"study": "small", "config": {"seed": 0}, "hostile": []}
    lines = [{**about, "attack": attack, "accuracy": 1.0} for attack in ("none", "flip:3")]
    script = tmp_path / "script.py"
    script.write_text("import sys; open(sys.argv[-1], 'w').write(open(sys.argv[1]).read())")
    (tmp_path / "many").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "one").write_text('{"seconds": 2}\n')
    stored: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "WORK", tmp_path)
    monkeypatch.setattr(results.kept, "keep", lambda table, new: stored.update({table: new}))
    for name in ("one", "many"):
        results._run_script(name, f"python script.py {name}")
    assert stored["one"] == {"python script.py one": {"seconds": 2}}
    assert list(stored["many"].values()) == lines
    assert all(options.startswith("python script.py many # ") for options in stored["many"])
    monkeypatch.setattr(results.kept, "read", lambda table: stored[table])
    monkeypatch.setattr(results, "OWN_SCRIPTS", {"many": ["python script.py many", "python script.py other"]})
    assert [done for _, done, _ in results._measurements("many")] == [True, False]
