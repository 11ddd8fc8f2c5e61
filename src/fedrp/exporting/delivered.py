"""The delivered model of a run, with what must be known of its inputs and outputs to use it."""

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fedrp.config.run import RunConfig
from fedrp.errors import ConfigError, DataError, first_line
from fedrp.learning.data import find_entry, load_dataset
from fedrp.learning.layout import ModelFactory, State, built
from fedrp.learning.pixels import Pixels, Scale
from fedrp.learning.task import Task, examples
from fedrp.learning.zoo import MODELS
from fedrp.simulation.result import RunResult
from fedrp.storage.begun import begun_config


@dataclass(frozen=True, eq=False)
class Delivered:
    """A trained model and what goes into it.

    Guarantees: `module` is in evaluation mode, on the CPU, and a module of its own.
    """

    module: nn.Module
    dataset: str
    model: str
    shape: tuple[int, ...] | None  # of an input; None where nothing says it
    whole: bool  # inputs are int64, as embeddings want them
    scale: Scale | None  # what bundled data were centred and divided by; None: inputs are as they were given
    pixels: bool  # bundled data were bytes, which count as [0, 1]
    classes: bool  # outputs choose among classes
    labels: npt.NDArray[Any] | None = None  # what class i was called before `relabel`

    def program(self) -> nn.Module:
        """The model with the scaling of its inputs in front: it takes pixels in [0, 1], other data as they are."""
        return self.module if self.scale is None else Scaled(self.module, self.scale)


class Scaled(nn.Module):
    """A model behind (inputs - mean) / std per channel, in the order of operations of `Pixels.floats`."""

    def __init__(self, model: nn.Module, scale: Scale) -> None:
        super().__init__()
        self.model = model
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", torch.tensor(scale.mean))
        self.register_buffer("std", torch.tensor(scale.std))

    def forward(self, inputs: torch.Tensor) -> Any:
        """What the model gives."""
        mean, std = (each.view(-1, *[1] * (inputs.ndim - 2)) for each in (self.mean, self.std))
        return self.model((inputs - mean) / std)


def of_result(result: RunResult, task: Task) -> Delivered:
    """The model that a run in this program delivered.

    Raises:
        ConfigError: the task builds another model.
    """
    inputs = examples(task.test, "the test set").x
    pixels = isinstance(inputs, Pixels)
    return Delivered(
        module=_loaded(task.model, result.state, "the result"),
        dataset=task.dataset,
        model=task.model_name,
        shape=tuple(inputs.shape[1:]),
        whole=not pixels and not inputs.dtype.is_floating_point,
        scale=inputs.scale if isinstance(inputs, Pixels) else None,
        pixels=pixels,
        classes="accuracy" in result.metrics,
    )


def of_run(folder: Path, model: str | None = None, data_dir: Path | None = None) -> Delivered:
    """The model in the folder of a finished run. One of your own is built by `model`, 'FILE.py:NAME' or 'module:NAME'.

    Raises:
        ConfigError: the folder holds no finished run, or `model` is missing or builds another one.
        DataError: what it holds cannot be read.
    """
    config, state = begun_config(folder), _state(folder)
    classes = "accuracy" in _result(folder)
    if model is not None:
        module = _loaded(factory_of(model), state, str(folder))
        return Delivered(module, config.dataset, config.model, None, False, None, False, classes)
    if config.model not in MODELS:
        raise ConfigError(f"{folder} is a run of a model of your own: say what builds it, model='FILE.py:NAME'")
    return _bundled(folder, config, state, data_dir)


def _bundled(folder: Path, config: RunConfig, state: State, data_dir: Path | None) -> Delivered:
    entry = find_entry(config.dataset)
    if (facts := entry.facts) is not None:
        shape, classes, scale, pixels, labels = facts.shape, facts.classes, Scale(facts.mean, facts.std), True, None
    else:  # what it was scaled by follows from the data
        data = load_dataset(config.dataset, data_dir, config.relabel)
        shape, classes, scale = data.train_x.shape[1:], data.classes, Scale(data.mean, data.std)
        pixels = data.train_x.dtype == np.uint8
        labels = np.unique(entry.read(entry.located(data_dir))[0].y) if config.relabel else None
    module = _loaded(lambda: MODELS[config.model].build(shape, classes), state, str(folder))
    return Delivered(module, config.dataset, config.model, shape, False, scale, pixels, True, labels)


def factory_of(reference: str) -> ModelFactory:
    """What builds a model, by the name that a user gave it: 'FILE.py:NAME', or 'module:NAME' of an installed module.

    Raises:
        ConfigError: it is not there, or its file fails when it is run.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"model={reference!r} is not valid: expected 'FILE.py:NAME' or 'module:NAME'")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        factory: ModelFactory = getattr(module, name)
    except Exception as error:  # it is the user's code
        raise ConfigError(f"cannot load model={reference}: {type(error).__name__}: {first_line(error)}") from error
    return factory


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))  # as for a script: it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _loaded(factory: ModelFactory, state: State, what: str) -> nn.Module:
    module = built(factory)
    wanted, found = (_shapes(part) for part in (module.state_dict(), state))
    if wanted != found:
        name = min(name for name, _ in wanted.items() ^ found.items())
        raise ConfigError(
            f"{what} holds another model than is built here: '{name}' is {found.get(name, 'missing')} there, "
            f"{wanted.get(name, 'missing')} here"
        )
    module.load_state_dict(state)
    return module.eval()


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in state.items() if isinstance(each, torch.Tensor)}


def _state(folder: Path) -> State:
    path = folder / "model.safetensors"
    try:
        return dict(load(path.read_bytes()))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no model yet: finish the run, fedrp run --resume --out {folder}") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)})") from None


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)})") from None
