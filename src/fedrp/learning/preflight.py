"""Preflight checks of a task before round 1: does the model take the data, and what do loss and score make of it?

Mistakes in a task would otherwise show as an error of torch in the middle of a round.
"""

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
) -> float:
    """Do on a few examples what a run does on all: a step of training, a score. Returns the loss of an untrained model.

    Metrics see the whole test set here too: some are not defined on a few examples, e.g. of one class.

    Guarantees: works on a model of its own and draws nothing from torch's global generator, so no result changes.

    Raises:
        ConfigError: model, loss, metrics and data do not fit together, or the model is not a new one in every call.
    """
    if isinstance(loss, type):
        raise ConfigError(f"Task(loss=...) is the class {loss.__name__}: give an instance of it, {loss.__name__}()")
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
        losses = [_try(module, loss, batch, training=True) for batch in _telling(train)]
        module.eval()
        with torch.inference_mode():
            for batch in [] if test is None else _telling([test]):
                _try(module, loss, batch, training=False)
            if test is not None and metrics:
                _try_metrics(module, metrics, test, device)
    return max(losses)


def _try(module: nn.Module, loss: Loss, batch: Examples, training: bool) -> float:
    """The loss of one batch, as in training or as in the evaluation."""
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
        kind = "training" if training else "test"
        raise ConfigError(
            f"the model or loss does not take the {kind} data: {first_line(error)}; inputs {described(batch.x)}, "
            f"targets {described(batch.y)}"
        ) from error


def _try_metrics(module: nn.Module, metrics: Metrics, test: Examples, device: torch.device) -> None:
    found = [outputs for outputs, _ in predictions(module, test, device)]
    if not isinstance(found[0], torch.Tensor):
        raise ConfigError(f"the model gives a {type(found[0]).__name__}: metrics need its outputs in one tensor")
    metrics_of(metrics, torch.cat([outputs.cpu() for outputs in found]), test.y)


def _telling(parts: Sequence[Examples]) -> list[Examples]:
    """Pairs of examples that show whether all will do: those with the extreme class labels and embedding indices."""
    chosen = {(0, _TARGETS)}  # of which part, by which field
    for field in (_INPUTS, _TARGETS):
        whole = [values for part in parts if isinstance(values := part[field], torch.Tensor)]
        if whole and not whole[0].is_floating_point():
            lows, highs = ([int(values.min()) for values in whole], [int(values.max()) for values in whole])
            chosen |= {(lows.index(min(lows)), field), (highs.index(max(highs)), field)}
    return [_extremes(parts[number], field) for number, field in sorted(chosen)]


def _extremes(part: Examples, field: int) -> Examples:
    values = floats(part[field]).reshape(len(part.y), -1)
    rows = torch.stack([values.amin(dim=1).argmin(), values.amax(dim=1).argmax()])
    return Examples(part.x[rows], part.y[rows])
