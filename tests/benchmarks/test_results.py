"""What is published is what was kept: one file for each table, an index, and pages that are rendered from them."""

import functools
import importlib
import json
import re
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
    others = {
        *results.OWN_SCRIPTS,
        "attacks",
        "few-bits-cost",
        "growth",
        "memory",
        "peers",
        "per-example",
        "privacy",
        "profile",
        "simulator",
    }
    index = kept.read_index()
    assert {table for digest, table in index.items() if digest not in runs} <= others
    assert set(index.values()) <= {*results.EXPERIMENTS, *others}


def test_the_page_of_results_is_rendered_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: ModuleType
) -> None:
    page = results.PAGE.read_text()
    emptied, count = re.subn(r"(<!-- table (\S+) -->\n).*?(?=<!-- end \2 -->)", r"\1", page, flags=re.DOTALL)
    assert count > 9
    (tmp_path / "results.md").write_text(emptied)
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "FIGURE_MAKERS", {})
    measured = re.search(r"<!-- table paper-table2 -->\n\n(.*?)\n\n<!-- end", page, re.DOTALL)
    assert measured
    monkeypatch.setitem(results.TABLES, "paper-table2", lambda: measured[1])  # it encodes VGG-16: see test_paper.py
    results.render()
    assert results.PAGE.read_text() == page


# --- tables ----------------------------------------------------------------------------------------------------------


def run_of(options: str, seed: int, accuracy: float, nbytes: int = 1000) -> tuple[str, dict[str, object]]:
    own = ("", "_client_mean", "_client_min", "_client_max", "_average")
    result = {
        **{f"accuracy{which}": accuracy for which in own},
        **{"seed": seed, "rounds": 30, "bytes_up": nbytes, "bytes_down": nbytes + 30, "origin": {"commit": "abc"}},
    }
    return f"{options} --seed {seed}", result


def keep(monkeypatch: pytest.MonkeyPatch, tables: ModuleType, *runs: tuple[str, dict[str, object]]) -> None:
    """These runs, and no others, are kept."""
    monkeypatch.setattr(tables.kept, "read_index", lambda: {"hash": "mnist"})
    monkeypatch.setattr(tables.kept, "read", lambda _table: dict(runs))
    kept_runs = importlib.import_module("kept_runs")
    kept_runs.everything.cache_clear()
    monkeypatch.setattr(kept_runs, "everything", functools.cache(kept_runs.everything.__wrapped__))
    monkeypatch.setattr(importlib.import_module("comparison"), "everything", kept_runs.everything)


@pytest.fixture
def tables(results: ModuleType) -> ModuleType:
    return importlib.import_module("tables")


def test_a_table_has_columns_for_what_differs_and_a_command_for_the_rest(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tables.EXPERIMENTS["mnist"]._replace(
        title="Some runs",
        base="--dataset mnist --clients 5",
        runs={
            "a": "--algorithm fedavg --lr 0.1",
            "b": "--algorithm fedrp --dim 10 --lr 0.2",
            "c": "--algorithm fedrp --dim 20 --lr 0.2 --secure-aggregation",
            "d": "--algorithm fedrp --dim 30 --lr 0.2",
        },
    )
    monkeypatch.setitem(tables.EXPERIMENTS, "some", experiment)
    b, c = (f"{experiment.base} {experiment.runs[name]}" for name in "bc")
    keep(
        monkeypatch,
        tables,
        run_of(f"{experiment.base} {experiment.runs['a']}", 0, 90.0, 4000),
        *(run_of(b, seed, accuracy) for seed, accuracy in enumerate((80.0, 81.0, 82.0))),
        run_of(c, 0, 85.0, 2000),
    )
    assert tables.show(tables.Shown(("some",))).splitlines() == [
        r"**Some runs.** Accuracy %; seeds 0, 1, 2; \*: one seed.",
        "",
        "| algorithm | dim | secure-aggregation | accuracy % | B each way |",
        "|---|---:|---:|---:|---:|",
        "| fedavg | - | - | 90.00* | 4,000 |",
        "| fedrp | 10 | - | 81.00 ± 1.00 | 1,000 |",
        "| fedrp | 20 | yes | 85.00* | 2,000 |",
        "",
        "```sh",
        "# commits abc",
        "fedrp run --dataset mnist --clients 5 --seed SEED ...",
        "# --algorithm fedavg --lr 0.1",
        "# --algorithm fedrp --lr 0.2",
        "```",
    ]
    across = tables.show(tables.Shown(("some",), across=("lr",)))
    assert "| algorithm | dim | secure-aggregation | lr 0.1 | lr 0.2 | B each way |" in across
    assert "| fedrp | 10 | - | - | 81.00 ± 1.00 | 1,000 |" in across


def test_defaults_and_the_best_are_found_among_all_kept_runs(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given or not; the best of those with the most seeds; runs of other tasks do not count."""
    setting = tables.SETTINGS[0]
    runs = {
        "--algorithm fedavg --lr 0.4": (97.0, 98.0, 99.0),
        "--algorithm fedavg --lr 0.2 --engine stacked:4": (98.0, 98.5, 99.0),
        "--algorithm fedavg --lr 0.3": (99.9,),
        "--algorithm fedadmm": (95.0,),
        "--algorithm fedavg --lr 0.5 --partition shards:2": (99.9, 99.9, 99.9),
        "--algorithm fedavg --lr 0.5 --dp-epsilon 5": (99.9, 99.9, 99.9),
    }
    every = [
        run_of(f"{setting.base} {options}", seed, accuracy)
        for options, accuracies in runs.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    keep(monkeypatch, tables, *every)
    rows = {tuple(line.split(" | ")[:2]): line.split(" | ")[2] for line in tables.comparison_table().splitlines()[2:12]}
    assert rows["| fedavg", "default"] == "98.00 ± 1.00"
    assert rows["| fedavg", "best"] == "98.50 ± 0.50"
    assert rows["| fedadmm", "default"] == rows["| fedadmm", "best"] == "95.00*"
    assert rows["| fedrp-subspace", "best"] == "-"
    assert "# fedavg: default --lr 0.4 (1,000 B); best of 3 --lr 0.2 (1,000 B)" in tables.comparison_table()


def test_commands_are_broken_between_options() -> None:
    page = importlib.import_module("page")
    line = "fedrp run " + " ".join(f"--option-{number} value" for number in range(20))
    broken = page.command(line)
    assert max(map(len, broken.splitlines())) <= 100
    assert broken.replace(" \\\n ", "") == line
    assert all(part.strip().startswith("--") for part in broken.splitlines()[1:])


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
