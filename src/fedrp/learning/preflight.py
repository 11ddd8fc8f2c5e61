"""Preflight checks of a task before round 1: does the model take the data, and what do loss and score make of it?

Mistakes in a task would otherwise show as an error of torch in the middle of a round, or as an accuracy of 5,600 %.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.learning.evaluate import Correct, number_right
from fedrp.learning.layout import ModelFactory, built
from fedrp.learning.objective import Examples, Loss, described
from fedrp.learning.trainer import batch_input

_INPUTS, _TARGETS = 0, 1  # fields of `Examples`


def require_device(name: str) -> None:
    """Refuse a device that torch does not have here."""
    try:
        torch.zeros(1, device=torch.device(name)).item()  # on "meta" there is nothing to read
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises any of them, by kind of device
        raise ConfigError(f"device '{name}' is not available here: use --device cpu") from None


def preflight(
    factory: ModelFactory,
    loss: Loss,
    correct: Correct,
    train: Sequence[Examples],
    test: Examples | None,
    device: torch.device,
) -> float:
    """Do on a few examples what a run does on all: a step of training, a score. Returns the loss of an untrained model.

    Guarantees: works on a model of its own and draws nothing from torch's global generator, so no result changes.

    Raises:
        ConfigError: model, loss, `correct` and data do not fit together, or the model is not a new one in every call.
    """
    if isinstance(loss, type):
        raise ConfigError(f"Task(loss=...) is the class {loss.__name__}: give an instance of it, {loss.__name__}()")
    module = built(factory)
    if built(factory) is module:
        raise ConfigError(
            "the model is the same module in every call: build a new one, e.g. with copy.deepcopy(module)"
        )
    module.to(device).train()
    with torch.random.fork_rng(devices=[]):
        losses = [_try(module, loss, None, batch) for batch in _telling(train)]
        module.eval()
        with torch.inference_mode():
            for batch in [] if test is None else _telling([test]):
                _try(module, loss, correct, batch)
    return max(losses)


def _try(module: nn.Module, loss: Loss, correct: Correct | None, batch: Examples) -> float:
    """The loss of one batch; with `correct` as in the evaluation, without as in training."""
    device = next(module.parameters()).device
    try:
        targets = batch.y.to(device)
        outputs = module(batch_input(batch.x, device))
        value = loss(outputs, targets)
        if not isinstance(value, torch.Tensor) or value.ndim != 0:
            got = described(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"Task(loss=...) gave {got}: expected one number, the mean loss of a batch, as a tensor")
        if correct is None:
            value.backward()  # type: ignore[no-untyped-call]
        else:
            number_right(correct, outputs, targets)
        return float(value.detach())
    except FedRPError:
        raise
    except Exception as error:  # model, loss and correct are the user's code
        kind = "training" if correct is None else "test"
        raise ConfigError(
            f"the model or loss does not take the {kind} data: {first_line(error)}; inputs {described(batch.x)}, "
            f"targets {described(batch.y)}"
        ) from error


def _telling(parts: Sequence[Examples]) -> list[Examples]:
    """Pairs of examples that show whether all will do: those with the extreme class labels and embedding indices."""
    chosen = {(0, _TARGETS)}  # of which part, by which field
    for field in (_INPUTS, _TARGETS):
        if not parts[0][field].is_floating_point():
            lows = [int(part[field].min()) for part in parts]
            highs = [int(part[field].max()) for part in parts]
            chosen |= {(lows.index(min(lows)), field), (highs.index(max(highs)), field)}
    return [_extremes(parts[number], field) for number, field in sorted(chosen)]


def _extremes(part: Examples, field: int) -> Examples:
    values = part[field].reshape(len(part.y), -1)
    rows = torch.stack([values.amin(dim=1).argmin(), values.amax(dim=1).argmax()])
    return Examples(part.x[rows], part.y[rows])
