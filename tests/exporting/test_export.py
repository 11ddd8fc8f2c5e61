"""Exported models give the same numbers elsewhere, without fedrp; predictions are those that the run was scored by."""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedrp
from fedrp.cli import main
from fedrp.errors import ConfigError
from fedrp.exporting.delivered import Delivered, of_run
from fedrp.exporting.formats import write_model
from fedrp.learning.pixels import Scale
from fedrp.learning.zoo import MODELS
from fedrp.testing.problems import FEATURES
from helpers import DropoutNet, FrozenNet, TinyNet, environment, tiny_config, tiny_task

CIFAR = (3, 32, 32)
SUFFIXES = (".safetensors", ".pt2", ".onnx")


def randoms(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def by_onnxruntime(path: Path, inputs: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    return session.run(["outputs"], {"inputs": inputs.numpy()})[0]


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] * (m == "vgg16")) for m in MODELS])
def test_programs_of_every_model_give_what_torch_gives(name: str, tmp_path: Path) -> None:
    """For batches of sizes that they were not made from, pixels in [0, 1] in, and with the scaling inside."""
    scale = Scale((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    module = MODELS[name].build(CIFAR, 10).eval()
    delivered = Delivered(module, "any", name, CIFAR, False, scale, True, True)
    for suffix in (".pt2", ".onnx"):
        write_model(delivered, tmp_path / f"model{suffix}")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 5):
        pixels = randoms(size, *CIFAR)
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in scale)
        with torch.inference_mode():
            expected = module((pixels - mean) / std).numpy()
            np.testing.assert_allclose(program(pixels).numpy(), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(by_onnxruntime(tmp_path / "model.onnx", pixels), expected, rtol=0, atol=1e-5)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    about = {item.key: item.value for item in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert (json.loads(about["shape"]), json.loads(about["std"])) == (list(CIFAR), [0.2, 0.3, 0.4])


# --- in Python -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TinyNet, DropoutNet, FrozenNet])
def test_a_result_of_an_own_model_is_exported(model: type[nn.Module], tmp_path: Path) -> None:
    """Also one with dropout, frozen layers, random buffers and a layer under two names."""
    task = dataclasses.replace(tiny_task(), model=model)
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1), task)
    for suffix in SUFFIXES:
        assert fedrp.export(result, task, tmp_path / "new" / f"model{suffix}").stat().st_size
    module = model().eval()
    module.load_state_dict(result.state)
    inputs = task.test[0]
    with torch.inference_mode():
        expected = module(inputs).numpy()
        program = torch.export.load(tmp_path / "new" / "model.pt2").module()
        np.testing.assert_allclose(program(inputs).numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(by_onnxruntime(tmp_path / "new" / "model.onnx", inputs), expected, rtol=0, atol=1e-5)
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118 - it is no dict
            name: tensor.tolist() for name, tensor in result.state.items()
        }


class Tokens(nn.Module):
    """Whole numbers in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


def test_whole_inputs_stay_whole(tmp_path: Path) -> None:
    x, y = torch.arange(80).view(20, 4) % 9, torch.arange(20) % 3
    task = fedrp.Task(Tokens, (x, y), (x, y))
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1, clients=2), task)
    fedrp.export(result, task, tmp_path / "model.onnx")
    module = Tokens()
    module.load_state_dict(result.state)
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(by_onnxruntime(tmp_path / "model.onnx", x), expected, rtol=0, atol=1e-5)


class Undecided(TinyNet):
    """Looks at values to decide what to compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_a_model_that_is_no_program_keeps_its_weights(tmp_path: Path) -> None:
    task = dataclasses.replace(tiny_task(), model=Undecided)
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1), task)
    for suffix in (".pt2", ".onnx"):
        with pytest.raises(ConfigError, match=r"cannot be made .*weights can, as \.safetensors") as caught:
            fedrp.export(result, task, tmp_path / f"model{suffix}")
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    fedrp.export(result, task, tmp_path / "model.safetensors")


def test_another_model_than_was_trained_is_refused(tmp_path: Path) -> None:
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1), tiny_task())
    other = dataclasses.replace(tiny_task(), model=lambda: nn.Linear(FEATURES, 3))
    with pytest.raises(ConfigError, match=r"holds another model than is built here: 'bias' is missing there, \(3,\)"):
        fedrp.export(result, other, tmp_path / "model.pt2")


# --- on the command line ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line on data of one's own."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    main(["run", "--dataset", f"npz:{images}", "--clients", "2", "--rounds", "1", "--out", str(out)])
    return out


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    main([str(each) for each in arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    assert caught.value.code in (2, 3)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_predicts_as_it_was_scored(
    run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = json.loads((run_folder / "result.json").read_text())["accuracy"]
    out = tmp_path / "predictions.npz"
    told = json.loads(said(capsys, "predict", run_folder, images, "-o", out, "--json"))
    assert (told["examples"], told["accuracy"]) == (30, pytest.approx(scored))
    with np.load(images) as data, np.load(out) as predictions:
        classes, probabilities = predictions["classes"], predictions["probabilities"]
        assert 100 * np.mean(classes == data["y_test"]) == pytest.approx(scored)
        as_numbers = tmp_path / "numbers.npz"
        np.savez(as_numbers, x=data["x_test"] / 255)  # the same images, and no labels
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (probabilities.argmax(1) == classes).all()
    assert sum(told["classes"].values()) == 30
    text = said(capsys, "predict", run_folder, as_numbers, "-o", tmp_path / "predictions.csv")
    assert text.startswith("30 examples\n")
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert [int(row["class"]) for row in rows] == classes.tolist()
    assert float(rows[0]["p(0)"]) == pytest.approx(probabilities[0, 0], rel=1e-4)


def test_an_exported_run_gives_the_same_probabilities(
    run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "predict", run_folder, images, "-o", tmp_path / "predictions.npz")
    said(capsys, "export", run_folder, "--to", tmp_path / "model.onnx")
    with np.load(images) as data, np.load(tmp_path / "predictions.npz") as predictions:
        pixels = torch.from_numpy(data["x_test"][:, None].astype(np.float32) / 255)
        outputs = torch.from_numpy(by_onnxruntime(tmp_path / "model.onnx", pixels))
        np.testing.assert_allclose(outputs.softmax(1), predictions["probabilities"], rtol=0, atol=1e-5)


LOADING = {
    "model.pt2": """
import torch
model = torch.export.load("model.pt2").module()
outputs = model(inputs)
""",
    "model.safetensors": """
from safetensors.torch import load_file
model.load_state_dict(load_file("model.safetensors"))
outputs = model((inputs - mean) / std)
""",
}
CLASS = """
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 3))
"""


@pytest.mark.parametrize("name", LOADING)
def test_three_lines_load_a_file_in_plain_pytorch(
    name: str, run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/export.md has them; in a process that never imports fedrp."""
    lines = LOADING[name].strip()
    assert len(lines.splitlines()) == 3
    said(capsys, "export", run_folder, "--to", tmp_path / name)
    delivered = of_run(run_folder)
    with np.load(images) as data:
        pixels = torch.from_numpy(data["x_test"][:, None].astype(np.float32) / 255)
    torch.save({"inputs": pixels}, tmp_path / "inputs.pt")
    mean, std = delivered.scale.mean[0], delivered.scale.std[0]
    program = "\n".join(
        [
            "import sys, torch",
            f"inputs, mean, std = torch.load('inputs.pt')['inputs'], {mean!r}, {std!r}",
            CLASS if name.endswith("safetensors") else "",
            lines,
            "torch.save({'outputs': outputs.detach()}, 'outputs.pt')",
            "assert not [module for module in sys.modules if module.startswith('fedrp')]",
        ]
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True, timeout=300)
    with torch.inference_mode():
        expected = delivered.program()(pixels)
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt")["outputs"], expected, rtol=0, atol=1e-5)


BAD = {
    "not finite": ({"x": np.full((2, 28, 28), np.nan)}, "not finite"),
    "shape": ({"x": np.zeros((2, 20, 20), np.uint8)}, r"expected examples of shape (1, 28, 28), got (1, 20, 20)"),
    "single": ({"x": np.zeros((28, 28), np.uint8)}, "expected"),
    "text": ({"x": np.array(["seven"])}, "expected numbers"),
    "range": ({"x": np.full((2, 28, 28), 200.0)}, "give them as uint8, or as numbers from 0 to 1"),
    "empty": ({"x": np.zeros((0, 28, 28), np.uint8)}, "expected numbers"),
    "labels": ({"x": np.zeros((2, 28, 28), np.uint8), "y": np.zeros(3, int)}, "2 examples but"),
    "names": ({"images": np.zeros((2, 28, 28), np.uint8)}, "has the arrays images: expected x"),
    "no array": ({"x": np.uint8(3)}, "expected numbers"),
}


@pytest.mark.parametrize("kind", BAD)
def test_data_that_do_not_fit_are_refused_in_one_line(
    kind: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays, message = BAD[kind]
    np.savez(tmp_path / "data.npz", **arrays)
    assert message in refused(capsys, "predict", run_folder, tmp_path / "data.npz")


def test_files_and_folders_that_are_none_are_refused_in_one_line(
    run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    assert "expected npz arrays" in refused(capsys, "predict", run_folder, tmp_path / "text.npz")
    assert "No such file" in refused(capsys, "predict", run_folder, tmp_path / "nothing.npz")
    assert "is not the folder of a run" in refused(capsys, "predict", tmp_path, images)
    assert "one of the suffixes .safetensors, .pt2, .onnx" in refused(capsys, "export", run_folder, "--to", "m.bin")
    assert "one of the suffixes .npz, .csv" in refused(capsys, "predict", run_folder, images, "-o", "p.txt")
    assert "cannot write" in refused(capsys, "predict", run_folder, images, "-o", tmp_path / "text.npz" / "p.csv")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text((run_folder / "config.json").read_text())
    assert f"finish the run, fedrp run --resume --out {begun}" in refused(capsys, "predict", begun, images)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "pip install 'fedrp[onnx]'" in refused(capsys, "export", run_folder, "--to", tmp_path / "m.onnx")


def test_labels_are_called_as_before(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--relabel` predictions are labels of the data, and accuracy compares those."""
    names = np.array(["bee", "cat", "dog"])
    with np.load(images) as data:
        arrays = {key: names[data[key]] if key.startswith("y") else data[key] for key in data}
    np.savez(tmp_path / "named.npz", **arrays)
    out = tmp_path / "run"
    options = ["--clients", "2", "--rounds", "1", "--relabel", "--json"]
    trained = json.loads(said(capsys, "run", "--dataset", f"npz:{tmp_path}/named.npz", "--out", out, *options))
    told = json.loads(said(capsys, "predict", out, tmp_path / "named.npz", "--json"))
    assert told["accuracy"] == pytest.approx(trained["accuracy"])
    assert set(told["classes"]) <= set(names)
    np.savez(tmp_path / "other.npz", x=arrays["x_test"][:1], y=np.array(["emu"]))
    assert "has the label 'emu'" in refused(capsys, "predict", out, tmp_path / "other.npz")


FACTORY = """
from torch import nn

def build():
    return nn.Linear(6, 3)

def wrong():
    return nn.Linear(6, 2)
"""


def test_a_run_of_an_own_model_names_what_builds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    task, out = dataclasses.replace(tiny_task(), model=lambda: nn.Linear(FEATURES, 3)), tmp_path / "run"
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1), task, out=out)
    x, y = task.test
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    ask = ("predict", out, tmp_path / "data.npz", "--json")
    assert "say what builds it, --model FILE.py:NAME" in refused(capsys, *ask)
    told = json.loads(said(capsys, *ask, "--model", f"{tmp_path}/mine.py:build"))
    assert told["accuracy"] == pytest.approx(result.accuracy)
    write = ("export", out, "--model", f"{tmp_path}/mine.py:build", "--to", tmp_path / "model.onnx")
    assert "give data like those it is for, --like FILE.npz" in refused(capsys, *write)
    said(capsys, *write, "--like", tmp_path / "data.npz")
    right = (by_onnxruntime(tmp_path / "model.onnx", x).argmax(1) == y.numpy()).mean()
    assert 100 * right == pytest.approx(result.accuracy)
    for name, message in {
        f"{tmp_path}/mine.py:wrong": "holds another model",
        f"{tmp_path}/mine.py:nothing": "AttributeError",
        f"{tmp_path}/none.py:build": "there is no file",
        "no_such_module:build": "ModuleNotFoundError",
        "build": "expected 'FILE.py:NAME' or 'module:NAME'",
    }.items():
        assert message in refused(capsys, *ask, "--model", name)


def test_a_regression_gives_its_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = randoms(40, 6)
    task = fedrp.Task(lambda: nn.Linear(6, 1), (x, x.sum(1, keepdim=True)), (x, x.sum(1, keepdim=True)), nn.MSELoss())
    result = fedrp.simulate(tiny_config("fedavg", dim=None, rounds=1, clients=2), task, out=tmp_path / "run")
    (tmp_path / "mine.py").write_text(FACTORY.replace("6, 3", "6, 1"))
    np.savez(tmp_path / "data.npz", x=x.numpy())
    ask = ("predict", tmp_path / "run", tmp_path / "data.npz", "--model", f"{tmp_path}/mine.py:build")
    said(capsys, *ask, "-o", tmp_path / "out.npz")
    module = fedrp.load_vector(nn.Linear(6, 1), result.model)
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["outputs"], module(x).detach(), rtol=0, atol=1e-6)
    said(capsys, *ask, "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith("example,output 0\n0,")
