"""The command line: what it prints where, and one line for every mistake."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fedrp
from fedrp.algorithms.client_dp import DEFAULT_EPSILON
from fedrp.algorithms.table import ALGORITHMS, methods
from fedrp.cli import main
from fedrp.cli.common import FOREMOST, Command, as_options
from fedrp.config import GROUPS
from fedrp.learning.data import DATASETS
from fedrp.learning.zoo import MODELS
from fedrp.privacy.events import Adversary
from fedrp.projection.families import FAMILIES
from helpers import command, environment, files_up_to

KEYS = re.findall(
    r"\w+",
    """algorithm dataset model clients rounds local_epochs parameters dim projection seed accuracy accuracy_client_mean
    accuracy_client_min accuracy_client_max accuracy_average bytes_up bytes_down bytes_payload_up bytes_payload_down
    bytes_framing_up bytes_framing_down bytes_keys_up bytes_keys_down bytes_keys_per_client seconds seconds_per_round
    images_per_second peak_rss_mb history epsilon delta privacy warnings""",
)
OPTIONS = re.findall(
    r"[\w-]+",
    """algorithm dataset model clients rounds local-epochs batch-size lr momentum rho dim projection partition
    participation seed workers device data-dir out resume json""",
)
CONFIG, DATA, DIVERGED, FULL, INTERRUPTED = 2, 3, 6, 8, 130


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """The command line in this process, in an empty folder and without a data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDRP_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("COLUMNS", "200")

    def ask(*arguments: object) -> Answer:
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return Answer(code, *capsys.readouterr())

    return ask


@pytest.fixture
def small(images: Path) -> list[object]:
    """A run of a second."""
    return [f"--dataset=npz:{images}", "--clients=3", "--rounds=2", "--dim=20", "--batch-size=16", "--workers=1"]


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--algorithm=fedagv"], CONFIG, "unknown algorithm 'fedagv', did you mean 'fedavg'"),
        (["--dim=0"], CONFIG, "dim=0 is not valid"),
        (["--dim=61707", "--algorithm=fedrp"], CONFIG, "dim=61707 is not valid: the model has 61706 parameters"),
        (["--dim=99999", "--algorithm=fedrp-subspace"], CONFIG, "dim=99999 is not valid"),
        (["--clients=10001"], DATA, "clients=10001 cannot share 10000 examples"),
        (["--clients=0"], CONFIG, "clients=0"),
        (["--rounds=-1"], CONFIG, "rounds=-1"),
        (["--rounds=two"], CONFIG, "'two' is not a valid integer"),
        (["--lr=nan"], CONFIG, "lr=nan"),
        (["--momentum=1"], CONFIG, "momentum=1.0"),
        (["--clip=1e300", "--noise-multiplier=1"], CONFIG, "clip=1e+300 is not valid: expected a number up to 1e+12"),
        (["--noise-multiplier=1e300"], CONFIG, "noise_multiplier=1e+300 is not valid: expected a number from 0 to"),
        (["--proximal=1e300"], CONFIG, "proximal=1e+300"),
        (["--grad-clip=1e300"], CONFIG, "grad_clip=1e+300"),
        (["--rho=1000", "--algorithm=fedrp"], CONFIG, "rho=1000 is not stable"),
        (["--dataset=mnist"], DATA, "fedrp data fetch mnist"),
        (["--dataset=cifar10", "--data-dir=/nowhere"], DATA, "/nowhere"),
        (["--dataset=mnits"], CONFIG, "did you mean"),
        (["--dataset=npz:/nowhere.npz"], DATA, "/nowhere.npz"),
        (["--dataset=idx:/nowhere"], DATA, "/nowhere"),
        (["--model=lenet"], CONFIG, "did you mean 'lenet5'"),
        (["--projection=gauss", "--algorithm=fedrp"], CONFIG, "unknown projection 'gauss'"),
        (["--partition=by-name"], CONFIG, "by-name"),
        (["--partition=shards:9999"], DATA, "shards"),
        (["--device=cuda:7"], CONFIG, "device 'cuda:7' is not available here"),
        (["--device=toaster"], CONFIG, "device 'toaster' is not available here"),
        (["--device=meta"], CONFIG, "device 'meta' is not available here"),
        (["--workers=0"], CONFIG, "workers=0"),
        (["--participation=0"], CONFIG, "participation=0.0"),
        (["--seed=-5"], CONFIG, "seed=-5"),
        (["--secure-aggregation", "--algorithm=fwc"], CONFIG, "secure_aggregation=True does nothing with algorithm"),
        (["--dropout=0.2", "--algorithm=fwc"], CONFIG, "dropout=0.2 does nothing with algorithm 'fwc': leave it out"),
        (["--quorum=1", "--algorithm=fwc"], CONFIG, "quorum=1.0 does nothing with algorithm 'fwc'"),
        (["--weighting=samples", "--algorithm=fwc"], CONFIG, "weighting=samples does nothing with algorithm 'fwc'"),
        (["--aggregation=trimmed:0.6"], CONFIG, "aggregation=trimmed:0.6 is not valid: expected mean, median or trim"),
        (["--aggregation=median", "--algorithm=fwc"], CONFIG, "aggregation=median does nothing with algorithm 'fwc'"),
        (["--aggregation=median", "--secure-aggregation"], CONFIG, "leave it out, or use --no-secure-aggregation"),
        (
            ["--aggregation=median", "--dp-epsilon=5", "--algorithm=fedrp-subspace"],
            CONFIG,
            "aggregation=median does not go with noise",
        ),
        (["--aggregation=median", "--weighting=samples"], CONFIG, "aggregation=median counts every client once"),
        (["--aggregation=trimmed:0.05"], CONFIG, "aggregation=trimmed:0.05 cuts nothing off 10 uploads a round"),
        (
            ["--secure-range=9"],
            CONFIG,
            "secure_range=9.0 does nothing with algorithm 'fedrp-subspace': leave it out, or use --sec",
        ),
        (["--sealing=hybrid", "--algorithm=fedavg"], CONFIG, "sealing=hybrid does nothing with algorithm 'fedavg'"),
        (["--clip=0.1", "--algorithm=fedavg"], CONFIG, "clip=0.1 does nothing with algorithm 'fedavg': leave it out"),
        (["--secure-aggregation", "--clients=2"], CONFIG, "2 participants a round are too few"),
        (["--sealing=rot13"], CONFIG, "unknown sealing 'rot13'"),
        (["--resume"], CONFIG, "--resume needs --out"),
        (["--out=/proc/nothing/here"], CONFIG, "cannot write to /proc/nothing/here"),
        (["nowhere.toml"], CONFIG, "cannot read the config file nowhere.toml"),
        (["."], CONFIG, "cannot read the config file"),
        (["--no-such-option"], CONFIG, "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments: list[str], code: int, told: str, ask: Ask) -> None:
    answer = ask("run", *([] if "--workers=0" in arguments else ["--workers=1"]), *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert told in answer.err
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("fedrp: ")
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clinets = 3", "unknown key 'clinets', did you mean 'clients'"),
        ("clients = ", "is not valid TOML"),
        ('clients = "many"', "clients='many' is not valid: expected int"),
        ("clients = true", "clients=True"),
        ("out = 5", "out=5 is not valid"),
        ("data_dir = [1]", "data_dir=[1] is not valid"),
        ("[run]\nclinets = 3", "unknown key 'clinets', did you mean 'clients'"),
        ("clients = 3\n[run]\nclients = 3", "'clients' is there twice: leave one out"),
        ("[training]\nclients = 3", "unknown key 'training'"),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line(text: str, told: str, ask: Ask) -> None:
    Path("config.toml").write_text(text)
    answer = ask("run", "config.toml")
    assert (answer.code, answer.out) == (CONFIG, "")
    assert told in answer.err
    assert answer.err.count("\n") == 1


def test_an_unreadable_config_file_is_one_line(ask: Ask) -> None:
    Path("config.toml").write_bytes(b"\xff\xfe\x00")
    answer = ask("run", "config.toml")
    assert answer.code == CONFIG
    assert answer.err == "fedrp: cannot read the config file config.toml: it is not UTF-8 text\n"


@pytest.mark.parametrize("part", ["x_train", "y_test"])
def test_a_damaged_data_file_is_one_line_that_names_it(part: str, ask: Ask, images: Path, small: list[object]) -> None:
    with np.load(images) as arrays:
        np.savez("damaged.npz", **{name: array for name, array in arrays.items() if name != part})
    answer = ask("run", *small, "--dataset=npz:damaged.npz")
    assert (answer.code, answer.err.count("\n")) == (DATA, 1)
    assert "damaged.npz" in answer.err


def test_a_table_called_run_is_read_like_the_keys_themselves(ask: Ask, small: list[object]) -> None:
    Path("flat.toml").write_text("algorithm = 'fedavg'\nlr = 0.05\n")
    Path("table.toml").write_text("algorithm = 'fedavg'\n[run]\nlr = 0.05\n")
    for name in ("flat", "table"):
        assert ask("run", f"{name}.toml", *small, f"--out={name}").code == 0
    assert Path("flat/model.safetensors").read_bytes() == Path("table/model.safetensors").read_bytes()
    assert json.loads(Path("table/config.json").read_text())["lr"] == 0.05


def test_without_options_the_recommended_mode_trains_on_the_bundled_data(ask: Ask) -> None:
    answer = ask("run", "--rounds=1", "--train-examples=40", "--clients=2", "--json", "--out=run")
    result = json.loads(answer.out)
    assert (result["algorithm"], result["dataset"], result["dim"]) == ("fedrp-subspace", "mnist-mini", 32_736)
    assert 4096 <= result["bytes_up"] < 4096 + 64
    config = json.loads(Path("run/config.json").read_text())
    assert (config["bits"], config["bits_down"], config["bytes"]) == (1.0, 1.0, None)


def test_algorithm_is_not_for_a_comparison(ask: Ask, small: list[object]) -> None:
    answer = ask("compare", *small, "--algorithm=fedavg", "--algorithms=fedrp,fwc")
    told = "--algorithm fedavg is for 'fedrp run': name it in --algorithms, by commas"
    assert (answer.code, answer.out, answer.err) == (CONFIG, "", f"fedrp: {told}\n")


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.array(["cat", "dog", "eel"]), "labels are text, e.g. cat: add --relabel (relabel=True)"),
        (np.array([1, 2, 3]), "labels are 1 to 3, none is 0: add --relabel (relabel=True)"),
        (np.array([10, 20, 40]), "labels are 10 to 40, none is 0: add --relabel (relabel=True)"),
    ],
)
def test_labels_are_numbered_anew_only_where_that_is_asked_for(
    labels: np.ndarray, told: str, ask: Ask, images: Path, small: list[object]
) -> None:
    with np.load(images) as arrays:
        named = {name: labels[array] if name.startswith("y") else array for name, array in arrays.items()}
        named["y_train"] = named["y_train"][:, None]  # a column will do
        np.savez("named.npz", **named)
        np.savez("own.npz", **arrays)
    given = [option for option in small if "dataset" not in str(option)]
    answer = ask("run", *given, "--dataset=npz:named.npz")
    assert (answer.code, answer.err.count("\n")) == (DATA, 1)
    assert told in answer.err
    for name, more in (("named", ["--relabel"]), ("own", [])):
        assert ask("run", *given, f"--dataset=npz:{name}.npz", f"--out={name}", *more).code == 0
    assert Path("named/model.safetensors").read_bytes() == Path("own/model.safetensors").read_bytes()


def test_a_label_of_the_test_part_alone_cannot_be_numbered(ask: Ask, images: Path, small: list[object]) -> None:
    with np.load(images) as arrays:
        names = np.array(["cat", "dog", "eel"])
        np.savez(
            "named.npz", **{**arrays, "y_train": names[arrays["y_train"]], "y_test": ["yak"] * len(arrays["y_test"])}
        )
    answer = ask("run", *small[1:], "--dataset=npz:named.npz", "--relabel")
    assert answer.code == DATA
    assert "has the label 'yak', which" in answer.err


def test_feature_vectors_are_for_python(ask: Ask) -> None:
    x, y = np.zeros((12, 5), np.float32), np.arange(12) % 3
    np.savez("features.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    answer = ask("run", "--dataset=npz:features.npz", "--clients=2")
    assert (answer.code, answer.err.count("\n")) == (CONFIG, 1)
    assert "takes images" in answer.err
    assert "shape (5,): for a model of your own use fedrp.Task in Python" in answer.err


def test_the_default_epsilon_is_told(ask: Ask) -> None:
    shown = "".join(ask("run", "--help").out.split())  # lines are cut at hyphens, too
    assert f"fedavg-dp:default{DEFAULT_EPSILON:g}" in shown


def test_divergence_has_its_own_exit_code(ask: Ask, small: list[object]) -> None:
    answer = ask("run", *small, "--algorithm=fedavg", "--lr=1e38", "--out=run", "--grad-clip=0")
    assert answer.code == DIVERGED
    assert answer.err.splitlines()[-1].startswith("fedrp: training diverged: client 0")


def test_a_mistake_as_a_user_meets_it() -> None:
    """The one case in a process of its own, to show that nothing else is printed."""
    done = subprocess.run(command("run", "--algorithm=nope"), capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (CONFIG, "")
    assert re.fullmatch(r"fedrp: unknown algorithm 'nope'; known: [^\n]*\n", done.stderr)


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_without_a_command_the_help_is_shown_as_it_is(arguments: list[str], ask: Ask) -> None:
    answer = ask(*arguments)
    assert "Commands:\n" in answer.out + answer.err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["compare", "-h"], ["data", "fetch", "-h"], ["--version"]]
)
def test_help_and_version(arguments: list[str], ask: Ask) -> None:
    answer = ask(*arguments)
    assert (answer.code, answer.err) == (0, "")
    assert "fedrp" in answer.out or "Usage" in answer.out


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        (["-m", "fedrp", "--help"], {}),
        (["-m", "fedrp", "--version"], {}),
        (["-m", "fedrp"], {"_FEDRP_COMPLETE": "bash_complete", "COMP_WORDS": "fedrp run --alg", "COMP_CWORD": "2"}),
        (["-c", "import fedrp; print(fedrp.RunConfig, dir(fedrp))"], {}),
    ],
    ids=["help", "version", "completion", "import"],
)
def test_what_needs_no_torch_does_not_wait_for_it(program: list[str], variables: dict[str, str]) -> None:
    started = [sys.executable, "-X", "importtime", *program]
    done = subprocess.run(started, capture_output=True, text=True, env=environment() | variables)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, "fedrp" in imported) == (0, True)
    assert "fedrp" in done.stdout or "--algorithm" in done.stdout
    assert not imported & {"torch", "scipy", "numba", "rich"}


def test_a_name_that_the_front_door_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedrp' has no attribute 'simulat'"):
        _ = fedrp.simulat


# --- run -----------------------------------------------------------------------------------------------------------


def test_every_setting_of_the_issue_is_an_option(ask: Ask) -> None:
    shown = ask("run", "--help").out
    assert all(f"--{option}" in shown for option in OPTIONS)


@pytest.mark.parametrize("name", ["run", "compare"])
def test_help_shows_each_setting_once_under_the_heading_of_its_group_and_ten_first(name: str, ask: Ask) -> None:
    _, first, *sections = re.split(r"^(?=\S.*:$)", ask(name, "--help").out, flags=re.MULTILINE)
    shown = {section.split(":")[0]: re.findall(r"^  .*?--([\w-]+)", section, re.MULTILINE) for section in sections}
    assert len(re.findall(r"^  --", first, re.MULTILINE)) == 10
    for group in GROUPS:
        assert set(shown.pop(group.heading)) == {
            name.replace("_", "-") for name in group.settings if name not in FOREMOST
        }
    assert shown.pop("Speed") == [field.name.replace("_", "-") for field in dataclasses.fields(fedrp.Speed)]
    assert {"out", "resume", "json", "help"} <= set(shown.pop("Command"))
    assert not shown


@pytest.mark.parametrize(
    ("arguments", "tables"),
    [
        (["run"], (ALGORITHMS, DATASETS, MODELS, FAMILIES)),
        (["sensitivity"], (ALGORITHMS, DATASETS, MODELS)),
        (["bench", "projection"], (FAMILIES,)),
        (["attack", "inversion"], (FAMILIES, MODELS)),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_help_names_what_is_in_the_tables(
    arguments: list[str], tables: tuple[dict[str, object], ...], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in tables:
        monkeypatch.setitem(table, f"another-{id(table)}", next(iter(table.values())))
    words = ask(*arguments, "--help").out.split()
    for table in tables:
        assert {f"{name}," for name in list(table)[:-1]} <= {f"{word.rstrip(',;')}," for word in words}
        assert f"another-{id(table)}" in " ".join(words)


@pytest.mark.parametrize("name", methods())
def test_json_is_one_object_on_stdout_with_all_keys(name: str, ask: Ask, small: list[object]) -> None:
    answer = ask("run", *small, f"--algorithm={name}", "--json", "--out=run")
    assert answer.code == 0
    assert answer.out.count("\n") == 1
    result = json.loads(answer.out)
    assert set(KEYS) <= set(result)
    assert result["algorithm"] == name
    assert result["parameters"] == 61_111  # LeNet-5 with three outputs instead of ten
    assert [line["round"] for line in result["history"]] == [1, 2]
    assert all(0 <= result[key] <= 100 for key in KEYS if key.startswith("accuracy"))
    assert result["accuracy_client_min"] <= result["accuracy_client_mean"] <= result["accuracy_client_max"]
    secret = name in ALGORITHMS and ALGORITHMS[name].server.round_keys
    assert result["dim"] == (20 if secret else None)
    assert result["projection"] in (FAMILIES if secret else (None,))
    assert all(result[key] > 0 for key in ("seconds", "seconds_per_round", "images_per_second", "peak_rss_mb"))
    assert (result["bytes_up"] > 0) == (name in ALGORITHMS)
    assert result["epsilon"] is None  # there is always someone against whom nothing is guaranteed
    claimed = bool(result["noise_multiplier"]) or name not in ALGORITHMS
    assert any(item["epsilon"] is not None for item in result["privacy"]) == claimed
    assert [line.split(":")[0] for line in answer.err.splitlines()] == [f"{name} round {i}/2" for i in (1, 2)]


def test_masks_are_switched_on_and_off_like_every_other_setting(ask: Ask, small: list[object]) -> None:
    Path("masked.toml").write_text("secure-aggregation = true\nalgorithm = 'fedrp-subspace'\n")
    for options, on in [((), True), (("--no-secure-aggregation",), False), (("--secure-aggregation",), True)]:
        answer = ask("run", "masked.toml", *small, *options, "--json")
        assert json.loads(answer.out)["secure_aggregation"] is on
    answer = ask(
        "compare", "masked.toml", *small, "--algorithms=fedavg,fwc", "--json"
    )  # what sends nothing is not masked
    assert [run["secure_aggregation"] for run in json.loads(answer.out)["runs"]] == [True, False]


def test_bytes_of_the_published_settings(ask: Ask, small: list[object], images: Path) -> None:
    """FedRP with m = 1,000 sends at most 4,100 bytes a round, FedAvg with LeNet-5 at most 247,000."""
    for name, limit in [("fedrp", 4_100), ("fedavg", 247_000)]:
        answer = ask("run", *small, f"--algorithm={name}", "--dim=1000", "--rounds=1", "--json", f"--out={name}")
        result = json.loads(answer.out)
        ten_classes = 61_706 - result["parameters"]
        assert result["bytes_up"] + (4 * ten_classes if name == "fedavg" else 0) <= limit


def test_without_json_a_table_is_shown_and_the_folder_named(ask: Ask, small: list[object]) -> None:
    answer = ask("run", *small, "--algorithm=fedavg")
    assert answer.code == 0
    assert "fedavg" in answer.out
    folder = Path(re.search(r"run folder: (\S+)", answer.out).group(1))
    assert (folder / "result.json").is_file()
    again = ask("run", *small, "--algorithm=fedavg")
    assert f"run folder: {folder}\n" not in again.out  # a new run gets a new folder


def test_an_option_wins_over_the_config_file(ask: Ask, small: list[object], images: Path) -> None:
    Path("config.toml").write_text(
        f'algorithm = "fwc"\ndataset = "npz:{images}"\nclients = 2\nrounds = 2\nworkers = 1\nout = "here"'
    )
    result = json.loads(ask("run", "config.toml", "--clients=3", "--json").out)
    assert (result["algorithm"], result["clients"], result["rounds"]) == ("fwc", 3, 2)
    assert Path("here/result.json").is_file()


def test_resume_goes_on_and_an_existing_folder_is_refused(ask: Ask, small: list[object]) -> None:
    assert ask("run", *small, "--out=run").code == 0
    answer = ask("run", *small, "--out=run")
    assert (answer.code, answer.err.count("\n")) == (CONFIG, 1)
    assert "run already holds a run: go on with --resume, or give another folder, --out ...\n" in answer.err
    answer = ask("run", *small, "--out=run", "--resume", "--seed=3")
    assert (answer.code, answer.err.count("\n")) == (CONFIG, 1)
    assert "was started with seed=0, not 3" in answer.err
    assert ask("run", *small, "--out=run", "--resume").code == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm=fedrp-subspace", "--seed=5", "--lr=0.02"],
        ["--algorithm=fedavg-dp", "--dp-epsilon=8", "--local-epochs=2"],
        ["--algorithm=fedrp", "--clients=1", "--ball=0.5"],
    ],
    ids=lambda options: options[0],
)
def test_what_is_not_given_again_is_taken_from_the_folder(options: list[str], ask: Ask, small: list[object]) -> None:
    first = json.loads(ask("run", *small, *options, "--out=run", "--json").out)
    model = Path("run/model.safetensors").read_bytes()
    config = Path("run/config.json").read_bytes()
    for given in ([], options, options[-1:]):  # nothing, all of it, some of it
        answer = ask("run", "--out=run", "--resume", "--workers=1", "--json", *given)
        assert answer.code == 0, answer.err
        again = json.loads(answer.out)
        assert [again[name] for name in ("accuracy", "seed", "lr")] == [
            first[name] for name in ("accuracy", "seed", "lr")
        ]
    Path("some.toml").write_text('out = "run"\nresume = true\nrounds = 2\n')
    assert ask("run", "some.toml", "--workers=1").code == 0
    assert (Path("run/model.safetensors").read_bytes(), Path("run/config.json").read_bytes()) == (model, config)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--rounds=3", "run was started with rounds=2, and its epsilon holds for these alone"),
        ("--rounds=1", "run was started with rounds=2, not 1: resume with the same"),
        ("--algorithm=fwc", "run was started with algorithm=fedavg-dp, not fwc"),
        ("--dp-epsilon=9", "run was started with noise_multiplier="),
        ("--dataset=mnist", "run was started with dataset=npz:"),
    ],
)
def test_what_is_given_again_must_be_the_same(given: str, told: str, ask: Ask, small: list[object]) -> None:
    assert ask("run", *small, "--algorithm=fedavg-dp", "--dp-epsilon=8", "--out=run").code == 0
    Path("some.toml").write_text(given.removeprefix("--").replace("=", ' = "') + '"\n')
    answers = [ask("run", "--out=run", "--resume", "--workers=1", given)]
    if given.split("=")[0] in ("--algorithm", "--dataset"):
        answers.append(ask("run", "some.toml", "--out=run", "--resume", "--workers=1"))
    for answer in answers:
        assert (answer.code, answer.out, answer.err.count("\n")) == (CONFIG, "", 1)
        assert told in answer.err


def test_a_run_without_noise_is_given_more_rounds_and_keeps_its_best_model(ask: Ask, small: list[object]) -> None:
    assert ask("run", *small, "--algorithm=fedavg", "--keep=best", "--out=run").code == 0
    answer = ask("run", "--out=run", "--resume", "--workers=1", "--rounds=4", "--json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    accuracies = [line["accuracy"] for line in result["history"]]
    assert len(accuracies) == result["rounds"] == 4
    assert result["accuracy"] == max(accuracies) == accuracies[result["delivered_round"] - 1]
    assert Path("run/last.safetensors").exists()
    refused = ask("run", *small, "--keep=worst")
    assert (refused.code, refused.err) == (CONFIG, "fedrp: unknown keep 'worst'; known: last, best\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "x holds a run: go on with resume=True, or give out=...",
            "x holds a run: go on with --resume, or give --out ...",
        ),
        ("rho=9 is too much; use rho=1.5e-3", "rho=9 is too much; use --rho 1.5e-3"),
        ("masks: use secure_aggregation=False", "masks: use --no-secure-aggregation"),
        ("no: use projection='gaussian', or dim=5 at most", "no: use --projection gaussian, or --dim 5 at most"),
        ("dim=0 is not valid: expected 1", "dim=0 is not valid: expected 1"),
        ("odd: as metrics={'a': f} or app=1.", "odd: as metrics={'a': f} or app=1."),
    ],
)
def test_what_an_error_says_to_do_is_said_in_options(text: str, told: str) -> None:
    assert as_options(text) == told


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_folder_without_a_run_is_not_resumed(name: str, ask: Ask, small: list[object]) -> None:
    Path("empty").mkdir()
    for folder in ("typo", "empty"):
        answer = ask(name, *small, "--resume", f"--out={folder}")
        assert (answer.code, answer.out, answer.err.count("\n")) == (CONFIG, "", 1)
        assert re.search(f"{folder} holds no (run|comparison) to go on with: correct out", answer.err)
    assert not Path("typo").exists()
    answer = ask(name, *small, "--resume")
    assert (answer.code, answer.err) == (CONFIG, "fedrp: --resume needs --out, the folder of the run to go on with\n")


@pytest.mark.parametrize("name", ["run", "compare"])
def test_the_advice_of_ctrl_c_is_a_command_that_works(
    name: str, ask: Ask, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["--algorithms=fwc,fedavg", "--out=my run"] if name == "compare" else ["--algorithm=fwc", "--out=my run"]
    options = [*small, *chosen, "--threads=2", "--data-dir=somewhere", "--seed=4"]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("fedrp.simulation.simulate"), "measured", interrupt)
        answer = ask(name, *options)
    line = answer.err.removeprefix("fedrp: stopped; what is done is kept, go on with: ").strip()
    assert (answer.code, answer.err.count("\n")) == (INTERRUPTED, 1)
    assert "--threads 2" in line
    assert "--data-dir somewhere" in line
    again = ask(*shlex.split(line)[1:], "--json")
    alone = ask(name, *options, "--out=alone", "--json")
    assert again.code == 0, again.err
    assert histories(again) == histories(alone)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def histories(answer: Answer) -> list[object]:
    told = json.loads(answer.out)
    runs = told.get("runs", [told])
    return [[run["algorithm"], run["seed"], [line["loss"] for line in run["history"]]] for run in runs]


def test_ctrl_c_before_anything_is_written_promises_nothing(
    ask: Ask, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("fedrp.simulation.simulate"), "_setup", interrupt)
    assert ask("run", *small, "--out=run") == (INTERRUPTED, "", "fedrp: stopped before anything was done\n")


def test_runs_that_start_together_choose_different_folders(ask: Ask, small: list[object], tmp_path: Path) -> None:
    folder = Command().folder
    with folder("fedrp-npz") as first, folder("fedrp-npz") as second:
        assert (first, second) == (Path("runs/fedrp-npz-1"), Path("runs/fedrp-npz-2"))
        told = ask("run", *small, "--algorithm=fedrp")
    assert told.code == 0
    assert "run folder: runs/fedrp-npz-3" in told.out
    assert os.listdir(tmp_path / "runs") == ["fedrp-npz-3"]  # where nothing was written, nothing is left


def test_where_no_new_folder_can_be_made_is_one_line(ask: Ask, small: list[object]) -> None:
    Path("runs").write_text("in the way")
    assert ask("run", *small) == (CONFIG, "", "fedrp: cannot write to runs: File exists\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_with_its_own_exit_code(workers: int, small: list[object], tmp_path: Path) -> None:
    options = [*small, "--algorithm=fedrp", f"--workers={workers}", f"--out={tmp_path / 'run'}"]
    with files_up_to(400_000):  # less than the states of two clients, more than any of their data
        done = subprocess.run(command("run", *options), capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (FULL, "")
    assert re.fullmatch(
        r"fedrp: cannot write to \S+: File too large: free space and go on with --resume\n", done.stderr
    )
    main([str(option) for option in ["run", *options, "--resume"]])
    main([str(option) for option in ["run", *options, f"--out={tmp_path / 'undisturbed'}"]])
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "undisturbed")]
    assert models[0] == models[1]


# --- compare and the lists -----------------------------------------------------------------------------------------


def test_compare_writes_a_table_and_a_plot(ask: Ask, small: list[object]) -> None:
    answer = ask("compare", *small, "--algorithms=fedavg,fwc", "--out=both")
    assert answer.code == 0
    assert re.search(r"fedavg .*\n(.*\n)*?.*fwc ", answer.out)
    assert Path("both/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "plot: both/accuracy.png" in answer.out
    for name in ("fedavg", "fwc"):
        assert (Path("both") / name / "result.json").is_file()


def test_compare_says_for_each_algorithm_against_whom_which_epsilon_holds(ask: Ask, small: list[object]) -> None:
    """The table quotes the worst one: not the epsilon that holds against those who see least."""
    noise = ["--noise-multiplier=1", "--dp-delta=0.4"]
    answer = ask("compare", *small, "--algorithms=fedavg-dp,fedrp-subspace", *noise, "--out=both")
    assert answer.code == 0, answer.err
    for name in ("fedavg-dp", "fedrp-subspace"):
        (row,) = [line for line in answer.out.splitlines() if line.strip().startswith(f"{name} ")]
        assert row.split()[-2] == "none"
        below = answer.out[answer.out.index(f"\n{name}\n") :].splitlines()[2:7]
        whom = [f"against {adversary.value}" for adversary in Adversary if adversary.real]
        assert [line.split(":")[0].strip() for line in below] == [*whom, "warning"]
        assert ["no guarantee" in line for line in below] == [True, True, False, False, False]
        assert ["epsilon" in line for line in below] == [False, False, True, True, False]


def test_a_plot_that_does_not_fit_on_the_disk_is_one_line(ask: Ask, small: list[object]) -> None:
    options = [*small, "--algorithms=fwc", "--out=both"]
    assert ask("compare", *options).code == 0
    Path("both/accuracy.png").unlink()
    Path("both/accuracy.png").symlink_to("/dev/full")
    answer = ask("compare", *options, "--resume")
    assert answer.code == FULL
    assert answer.err.endswith(
        "cannot write to both/accuracy.png: No space left on device: free space and go on with --resume\n"
    )


def test_compare_uses_the_same_split_and_can_be_resumed(ask: Ask, small: list[object]) -> None:
    first = json.loads(ask("compare", *small, "--algorithms=fedavg,fwc", "--out=both", "--json").out)
    again = json.loads(ask("compare", *small, "--algorithms=fedavg,fwc", "--out=both", "--json", "--resume").out)
    alone = json.loads(ask("run", *small, "--algorithm=fwc", "--out=alone", "--json").out)
    assert [run["algorithm"] for run in first["runs"]] == ["fedavg", "fwc"]
    for name in ("accuracy", "seconds"):
        assert [run[name] for run in again["runs"]] == [run[name] for run in first["runs"]]
    assert alone["accuracy"] == first["runs"][1]["accuracy"]


def test_a_comparison_remembers_what_it_was_asked_for(ask: Ask, small: list[object]) -> None:
    first = ask("compare", *small, "--algorithms=fwc,fedavg", "--seed=3", "--out=both", "--json")
    again = ask("compare", "--resume", "--out=both", "--workers=1", "--json")
    assert histories(again) == histories(first)
    more = ask("compare", "--resume", "--out=both", "--workers=1", "--algorithms=fwc,fedavg,fedadmm", "--json")
    assert histories(more)[:2] == histories(first)
    other = ask("compare", "--resume", "--out=both", "--workers=1", "--seed=4")
    assert (other.code, other.err.count("\n")) == (CONFIG, 1)
    assert "both was started with seed=3, not 4" in other.err
    kept = Path("both/compare.json").read_bytes()
    anew = ask("compare", *small, "--algorithms=fedavg", "--out=both")
    assert (anew.code, anew.err.count("\n")) == (CONFIG, 1)
    assert "both already holds a comparison: go on with --resume" in anew.err
    assert Path("both/compare.json").read_bytes() == kept


def test_a_comparison_of_an_earlier_version_is_resumed_with_all_options(ask: Ask, small: list[object]) -> None:
    options = [*small, "--algorithms=fwc", "--out=both"]
    assert ask("compare", *options).code == 0
    Path("both/compare.json").unlink()
    assert ask("compare", *options, "--resume").code == 0


@pytest.mark.parametrize("names", ["", "fedavg,fedavg", "fedavg,nope"])
def test_compare_finds_mistakes_before_it_runs(names: str, ask: Ask, small: list[object]) -> None:
    answer = ask("compare", *small, f"--algorithms={names}", "--out=both")
    assert (answer.code, answer.out, answer.err.count("\n")) == (CONFIG, "", 1)
    assert not Path("both").exists()


def test_compare_gives_an_option_to_the_algorithms_that_use_it(ask: Ask, small: list[object]) -> None:
    options = ["--rho=0.001", "--server-momentum=0.5", "--projection=sign", "--algorithms=fedavg,fedadmm,fwc,fedrp"]
    assert ask("compare", *small, *options, "--rounds=1", "--out=all", "--json").code == 0
    given = {}
    for name in ("fedavg", "fedadmm", "fwc", "fedrp"):
        config = json.loads((Path("all") / name / "config.json").read_text())
        given[name] = [config[setting] for setting in ("rho", "server_momentum", "projection")]
    assert given == {
        "fedavg": [None, 0.5, None],
        "fedadmm": [0.001, None, None],
        "fwc": [None, None, None],
        "fedrp": [0.001, None, "sign"],
    }
    answer = ask("compare", *small, "--clip=0.1", "--algorithms=fedavg,fwc", "--out=none")
    assert (answer.code, answer.out, answer.err.count("\n")) == (CONFIG, "", 1)
    assert (
        "clip=0.1 does nothing with algorithm 'fedavg': leave it out, or use fedrp-subspace or fedavg-dp" in answer.err
    )


def test_data_list(ask: Ask) -> None:
    answer = ask("data", "list")
    assert answer.code == 0
    rows = {line.split()[0]: line.split()[1] for line in answer.out.splitlines()}
    assert set(rows) == set(DATASETS)
    assert rows.pop("mnist-mini") == "present"
    assert set(rows.values()) == {"missing"}


def test_algorithms_are_listed(ask: Ask) -> None:
    names = [line.split()[0] for line in ask("algorithms").out.splitlines()]
    assert names == list(methods())


def test_fetching_an_unknown_data_set_is_one_line(ask: Ask) -> None:
    answer = ask("data", "fetch", "mnits")
    assert (answer.code, answer.out, answer.err.count("\n")) == (CONFIG, "", 1)
