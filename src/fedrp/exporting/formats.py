"""Files of a trained model that other programs read without fedrp. The suffix names the format.

| suffix | what | read by |
|---|---|---|
| `.safetensors` | the weights, named as in `state_dict` | PyTorch and the class of the model |
| `.pt2` | a program (`torch.export`), any batch size | PyTorch alone |
| `.onnx` | the same program, any batch size | ONNX Runtime and others |

A program has the scaling of bundled data inside: it takes float32 pixels in [0, 1].
"""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save as packed

from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.exporting.delivered import Delivered, of_result
from fedrp.files import SHARED, beginning, replace_file
from fedrp.learning.task import Task
from fedrp.simulation.result import RunResult

INPUTS, OUTPUTS = "inputs", "outputs"  # names in a program
_BATCH = 2  # of the example that a program is made from; with 1 it would be for single inputs


def export(result: RunResult, task: Task, path: str | Path) -> Path:
    """Write the model that a run delivered as `.safetensors`, `.pt2` or `.onnx`.

    Raises:
        ConfigError: the suffix is none of these, a package is missing, or the model cannot be made a program.
    """
    return write_model(of_result(result, task), Path(path))


def write_model(delivered: Delivered, path: Path) -> Path:
    """Put the model at `path`, completely or not at all, in the format of its suffix."""
    make = require_format(path)
    data = make(delivered)
    with beginning(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, SHARED)
    return path


def require_format(path: Path) -> Callable[[Delivered], bytes]:
    """What makes the file, if it can be made here.

    Raises:
        ConfigError: the suffix is not known, or a package is missing.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"cannot export to '{path.name}': give it one of the suffixes {', '.join(_FORMATS)}")
    if path.suffix == ".onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"ONNX needs {error.name}: pip install 'fedrp[onnx]'") from None
    return _FORMATS[path.suffix]


def described(delivered: Delivered) -> dict[str, str]:
    """What a reader of the file should know, as texts."""
    about = {"dataset": delivered.dataset, "model": delivered.model}
    if delivered.shape is not None:
        about["shape"] = json.dumps(delivered.shape)
    if delivered.scale is not None:
        about |= {name: json.dumps(each) for name, each in delivered.scale._asdict().items()}
    if delivered.labels is not None:
        about["labels"] = json.dumps(delivered.labels.tolist())
    return about


def _weights(delivered: Delivered) -> bytes:
    state = {name: tensor.clone() for name, tensor in delivered.module.state_dict().items()}  # no two in one memory
    return packed(state, {"format": "pt", **described(delivered)})


def _program(delivered: Delivered) -> bytes:
    file = io.BytesIO()
    with _quietly():
        torch.export.save(_captured(delivered), file, extra_files=described(delivered))
    return file.getvalue()


def _onnx(delivered: Delivered) -> bytes:
    captured = _captured(delivered)
    with _quietly(), _explained("ONNX"):
        program = torch.onnx.export(captured, input_names=[INPUTS], output_names=[OUTPUTS], dynamo=True, verbose=False)
        if program is None:
            raise ConfigError("torch.onnx gave no program")
        program.model.metadata_props.update(described(delivered))
        return bytes(program.model_proto.SerializeToString())


def _captured(delivered: Delivered) -> torch.export.ExportedProgram:
    """The model as a graph, for batches of any size."""
    if delivered.shape is None:
        raise ConfigError("a program needs the shape of an input: give data like those it is for, --like FILE.npz")
    example = torch.zeros(_BATCH, *delivered.shape, dtype=torch.int64 if delivered.whole else torch.float32)
    with _quietly(), _explained("a program"), torch.no_grad():
        return torch.export.export(delivered.program(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch warns of: its own inner workings."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What torch says of a model that it cannot capture, in one line."""
    try:
        yield
    except FedRPError:
        raise
    except Exception as error:  # of torch's many kinds
        raise ConfigError(
            f"the model cannot be made {what}: {first_line(error)}; its weights can, as .safetensors"
        ) from error


_FORMATS: dict[str, Callable[[Delivered], bytes]] = {".safetensors": _weights, ".pt2": _program, ".onnx": _onnx}
