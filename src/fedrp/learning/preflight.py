"""Preflight checks of a task before round 1: does the model take the data, and what do loss and score make of it?

Mistakes in a task would otherwise show as an error of torch in the middle of a round.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.learning.evaluate import Metrics, metrics_of, predictions
from fedrp.learning.layout import ModelFactory, built
from fedrp.learning.objective import Examples, Loss, described
from fedrp.learning.pixels import floats
from fedrp.learning.trainer import batch_input

_INPUTS, _TARGETS = 0, 1  # fields of `Examples`


def require_device(name: str) -> None:
    """Refuse a device that torch does not have here."""
    try:
        torch.zeros(1, device=torch.device(name)).item()  # on "meta" there is nothing to read
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises any of them, by kind of device
        raise ConfigError(f"device '{name}' is not available here: use device='cpu'") from None


def preflight(
    factory: ModelFactory,
    loss: Loss,
    metrics: Metrics,
    train: Sequence[Examples],
    test: Examples | None,
    device: torch.device,
    owners: Sequence[str] = (),
) -> float:
    """Do on a few examples what a run does on all: a step of training, a score. Returns the loss of an untrained model.

    Metrics see the whole test set here too: some are not defined on a few examples, e.g. of one class. `owners` say in
    errors whose the parts of `train` are.

    Guarantees: works on a model of its own and draws nothing from torch's global generator, so no result changes.

    Raises:
        ConfigError: model, loss, metrics and data do not fit together, or the model is not a new one in every call.
    """
    if isinstance(loss, type):
        raise ConfigError(f"Task(loss=...) is the class {loss.__name__}: give an instance of it, {loss.__name__}()")
    for name, function in (("loss", loss), *metrics.items()):
        if not callable(function):
            raise ConfigError(f"Task: {name}={function!r} is not valid: expected a function of (outputs, targets)")
    module = built(factory)
    if built(factory) is module:
        raise ConfigError(
            "the model is the same module in every call: build a new one, e.g. with copy.deepcopy(module)"
        )
    module.to(device).train()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings(
            "error", "Using a target size"
        )  # outputs (N, 1) against targets (N,): not the loss meant
        tried = _telling(train)
        first = tried[0][1]
        losses = [_try(module, loss, batch, True, _owner(owners, number), first) for number, batch in tried]
        module.eval()
        with torch.inference_mode():
            for _, batch in [] if test is None else _telling([test]):
                _try(module, loss, batch, False, "the test data", first)
            if test is not None and metrics:
                _try_metrics(module, metrics, test, device)
    for (number, _), value in zip(tried, losses, strict=True):
        if not math.isfinite(value):
            raise ConfigError(
                f"Task(loss=...) is {value} for {_owner(owners, number)} before any training: look at the loss and at "
                "the scale of inputs and targets, no learning rate mends that"
            )
    return max(losses)


def _owner(owners: Sequence[str], number: int) -> str:
    return f"the data of {owners[number]}" if owners else "the training data"


def _try(module: nn.Module, loss: Loss, batch: Examples, training: bool, owner: str, first: Examples) -> float:
    """The loss of one batch, as in training or as in the evaluation. `first` went before it."""
    device = next(module.parameters()).device
    try:
        targets = batch.y.to(device)
        outputs = module(batch_input(batch.x, device))
        value = loss(outputs, targets)
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            got = described(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"Task(loss=...) gave {got}: expected one number, the mean loss of a batch, as a tensor")
        if training:
            value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())
    except FedRPError:
        raise
    except Exception as error:  # model and loss are the user's code
        raise ConfigError(
            f"the model or loss does not take {owner}: {first_line(error)}; inputs {described(batch.x)}, "
            f"targets {described(batch.y)}{_unlike(batch, first)}{_remedy(batch, str(error))}"
        ) from error


def _try_metrics(module: nn.Module, metrics: Metrics, test: Examples, device: torch.device) -> None:
    found = [outputs for outputs, _ in predictions(module, test, device)]
    if not isinstance(found[0], torch.Tensor):
        raise ConfigError(f"the model gives a {type(found[0]).__name__}: metrics need its outputs in one tensor")
    metrics_of(metrics, torch.cat([outputs.cpu() for outputs in found]), test.y)


def _unlike(batch: Examples, first: Examples) -> str:
    """How the examples of the first client differ, if they do."""
    told = [
        f"{name} {described(theirs)}"
        for name, ours, theirs in (("inputs", batch.x, first.x), ("targets", batch.y, first.y))
        if described(ours) != described(theirs)
    ]
    return f"; of the first client {', '.join(told)}" if told else ""


def _remedy(batch: Examples, error: str) -> str:
    """What may be done about an error of torch, where that can be told from the data."""
    targets, whole = batch.y, not batch.y.is_floating_point()
    column = targets.ndim == 2 and targets.shape[1] == 1
    remedy = ""
    if isinstance(batch.x, torch.Tensor) and not batch.x.is_floating_point():
        remedy = "whole numbers stay whole, as embeddings want them: give features as inputs.float()"
    elif whole and "out of bounds" in error:
        low, high = int(targets.min()), int(targets.max())
        remedy = f"labels {low} to {high}: number classes from 0 to one below the number of outputs"
    elif whole and ("cast" in error or "dtype Long" in error):
        remedy = "give targets.float()"
    elif whole and "class probabilities" in error:
        remedy = "give class labels, targets.argmax(1), or targets.float()"
    elif "multi-target" in error or "target dtype" in error:
        made = ("" if not column else ".squeeze(1)") + ("" if whole else ".long()")
        remedy = f"class labels are whole numbers of shape (N,): give targets{made}"
    elif "must be the same as input size" in error:
        remedy = "give targets of the shape of the outputs, e.g. targets[:, None]"
    return f" ({remedy})" if remedy else ""


def _telling(parts: Sequence[Examples]) -> list[tuple[int, Examples]]:
    """Pairs of examples that show whether all will do, with the number of their part.

    Those of the first part of every kind of shape and type, and those with the extreme class labels and embedding
    indices.
    """
    first: dict[object, int] = {}
    for number, part in enumerate(parts):
        first.setdefault(tuple((values.shape[1:], values.dtype) for values in part), number)
    chosen = {(number, _TARGETS) for number in first.values()}  # of which part, by which field
    for field in (_INPUTS, _TARGETS):
        whole = [values for part in parts if isinstance(values := part[field], torch.Tensor)]
        if whole and not any(values.is_floating_point() for values in whole):
            lows, highs = ([int(values.min()) for values in whole], [int(values.max()) for values in whole])
            chosen |= {(lows.index(min(lows)), field), (highs.index(max(highs)), field)}
    return [(number, _extremes(parts[number], field)) for number, field in sorted(chosen)]


def _extremes(part: Examples, field: int) -> Examples:
    values = floats(part[field]).reshape(len(part.y), -1)
    rows = torch.stack([values.amin(dim=1).argmin(), values.amax(dim=1).argmax()])
    return Examples(part.x[rows], part.y[rows])
