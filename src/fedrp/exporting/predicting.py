"""What a trained model says of new data: classes and probabilities, and how often it is right where labels are there.

Data are an npz file with the array `x`, and `y` if there are labels (or `x_test` and `y_test`, as in a data set).
"""

import csv
import io
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedrp.errors import ConfigError, DataError, first_line
from fedrp.exporting.delivered import Delivered
from fedrp.files import SHARED, beginning, replace_file
from fedrp.learning.data import Part, checked
from fedrp.learning.evaluate import EVALUATION_BATCH, choose_classes, number_right
from fedrp.learning.objective import Examples
from fedrp.learning.task import examples

SUFFIXES = (".npz", ".csv")
_NAMES = (("x", "y"), ("x_test", "y_test"))
_UNREADABLE = (
    *(OSError, EOFError, TypeError, ValueError, RuntimeError, AttributeError, MemoryError),
    *(zlib.error, zipfile.BadZipFile),
)


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of each of N examples."""

    outputs: npt.NDArray[np.float32]  # as the model gives them, (N, ...)
    classes: npt.NDArray[Any] | None = None  # (N,), or (N, ...) where each example has several
    probabilities: npt.NDArray[np.float32] | None = None  # (N, C) or (N, C, ...)
    accuracy: float | None = None  # in percent, where labels were there

    def summary(self) -> dict[str, Any]:
        """What there is to say of all examples together."""
        about: dict[str, Any] = {"examples": len(self.outputs), "accuracy": self.accuracy}
        if self.classes is not None:
            counts = Counter(self.classes.ravel().tolist())
            about["classes"] = {str(name): counts[name] for name in sorted(counts)}
        return about


def read_examples(path: Path, delivered: Delivered) -> tuple[Examples, bool]:
    """The examples of a file as the model's program takes them, and whether they have labels.

    Raises:
        DataError: the file cannot be read, or its arrays are not what the model was trained on.
    """
    x, y, x_name, y_name = _arrays(path)
    labelled = y is not None
    if y is None:
        y = np.zeros(len(x) if x.ndim else 0, np.int64)
    elif delivered.labels is not None:
        y = _numbered(y, delivered.labels, y_name)
    if delivered.scale is None:
        return examples((x, y), str(path)), labelled
    fitting, targets = checked(Part(x, y, x_name, y_name), delivered.shape, None)
    inputs = fitting.astype(np.float32)
    if delivered.pixels:
        inputs = inputs / np.float32(255) if fitting.dtype == np.uint8 else _unit_range(inputs, x_name)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets)), labelled


def like(path: Path) -> tuple[tuple[int, ...], bool]:
    """The shape of an input in a file, and whether inputs are whole numbers that stay whole.

    Raises:
        DataError: the file cannot be read.
    """
    x, _, x_name, _ = _arrays(path)
    if x.ndim == 0 or x.dtype.kind not in "buif":
        raise DataError(f"{x_name}: expected numbers (N, ...), got {x.dtype} of shape {x.shape}")
    return x.shape[1:], x.dtype in (np.int32, np.int64)


def predictions(delivered: Delivered, data: Examples, labelled: bool) -> Predictions:
    """What the model says of examples.

    Raises:
        DataError: it does not take them, or gives something else than a tensor.
    """
    program, found, right = delivered.program(), [], 0.0
    judged = labelled and delivered.classes
    with torch.inference_mode():
        for start in range(0, len(data.y), EVALUATION_BATCH):
            batch = slice(start, start + EVALUATION_BATCH)
            outputs, targets = _outputs(program, data.x[batch]), data.y[batch]
            if judged and not choose_classes(outputs, targets):
                raise DataError(f"labels {tuple(targets.shape)} do not fit to outputs {tuple(outputs.shape)}")
            right += number_right(outputs, targets) if judged else 0.0
            found.append(outputs)
    whole = torch.cat(found)
    if not delivered.classes:
        return Predictions(whole.numpy())
    classes = whole.argmax(1).numpy()
    return Predictions(
        outputs=whole.numpy(),
        classes=classes if delivered.labels is None else delivered.labels[classes],
        probabilities=whole.softmax(1).numpy(),
        accuracy=100.0 * right / len(data.y) if judged else None,
    )


def require_suffix(path: Path) -> None:
    """Refuse a file of predictions that nothing can be written to, before anything is computed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot write predictions to '{path.name}': give it one of the suffixes .npz, .csv")


def write_predictions(predictions: Predictions, labels: npt.NDArray[Any] | None, path: Path) -> None:
    """Put them at `path`: as arrays, or as a table with a line per example.

    Raises:
        ConfigError: the suffix is not known, a table has no place for them, or the path cannot be written to.
    """
    require_suffix(path)
    data = _table(predictions, labels) if path.suffix == ".csv" else _npz(predictions)
    with beginning(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, SHARED)


def _arrays(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, str, str]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            names = next((pair for pair in _NAMES if pair[0] in arrays), None)
            if names is None:
                raise DataError(f"{path} has the arrays {', '.join(arrays)}: expected x, and y if there are labels")
            return arrays[names[0]], arrays.get(names[1]), f"{path}[{names[0]}]", f"{path}[{names[1]}]"
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: expected npz arrays x and, if there are labels, y ({reason})") from None


def _numbered(y: npt.NDArray[Any], labels: npt.NDArray[Any], name: str) -> npt.NDArray[np.int64]:
    """Labels as the run numbered them."""
    if strange := sorted(set(y.ravel().tolist()) - set(labels.tolist())):
        raise DataError(f"{name} has the label {strange[0]!r}, which the training data do not have")
    return np.searchsorted(labels, y)


def _unit_range(x: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float32]:
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        raise DataError(
            f"{name} has numbers from {low:.4g} to {high:.4g}, but the model was trained on pixels: "
            "give them as uint8, or as numbers from 0 to 1"
        )
    return x


def _outputs(program: torch.nn.Module, inputs: Any) -> torch.Tensor:
    try:
        outputs = program(inputs)
    except Exception as error:  # the model may be the user's
        shape = tuple(inputs.shape)
        raise DataError(f"the model does not take inputs {inputs.dtype} {shape}: {first_line(error)}") from error
    if not isinstance(outputs, torch.Tensor):
        raise DataError(f"the model gives a {type(outputs).__name__}: only tensors can be written")
    return outputs


def _npz(predictions: Predictions) -> bytes:
    file = io.BytesIO()
    if predictions.classes is None or predictions.probabilities is None:
        np.savez_compressed(file, outputs=predictions.outputs)
    else:
        np.savez_compressed(file, classes=predictions.classes, probabilities=predictions.probabilities)
    return file.getvalue()


def _table(predictions: Predictions, labels: npt.NDArray[Any] | None) -> bytes:
    classes, values = predictions.classes, predictions.probabilities
    numbers = predictions.outputs if values is None else values
    if numbers.ndim > 2:
        raise ConfigError(f"outputs {numbers.shape} are no table: write them as .npz")
    numbers = numbers.reshape(len(numbers), -1)
    names = range(numbers.shape[1]) if labels is None else labels.tolist()
    heads = ["class", *(f"p({name})" for name in names)] if classes is not None else [f"output {i}" for i in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["example", *heads])
    for index, row in enumerate(numbers.tolist()):
        first = [] if classes is None else [classes[index]]
        writer.writerow([index, *first, *(f"{value:.6g}" for value in row)])
    return text.getvalue().encode()
