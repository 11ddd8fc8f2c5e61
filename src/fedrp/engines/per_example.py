"""Per-example gradients: the gradient of each example's own loss, as rows in the order of the layout.

An example's own loss is that of a batch that holds nothing else, so it does not matter how the loss sums up a batch.
There are three ways to the same rows; none has rules for single layers here:

- `func`, torch.func: `vmap` over `grad`. The default: it takes any layer that `vmap` takes, no example can reach the
  row of another, and it was at least as fast as Opacus for all bundled models (`benchmarks/per_example.py`). Its
  first use in a process loads 75 MB of torch's own code.
- `opacus`, its `GradSampleModule`: a second opinion by other code. Only for layers that it has rules for; right where
  each of them sees the examples in its first dimension, and images in torch's usual memory order (1.6 takes others
  wrongly without a word).
- `loop`, one example after the other: for models that `vmap` cannot take, and many times slower.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fedrp.config.checks import require, require_choice
from fedrp.errors import ConfigError, first_line
from fedrp.learning.layout import Layout, trainable
from fedrp.learning.pixels import Inputs
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.rng import RunSeed

FUNC, OPACUS, LOOP = "func", "opacus", "loop"
_OPACUS_ROWS = "grad_sample"  # where Opacus leaves them at a parameter
Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # (weights, x, y, into)


@dataclass(frozen=True)
class PerExample:
    """What gives the gradients of a model's loss example by example."""

    model: LocalModel
    rows: Rows

    def gradients(
        self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, microbatch: int, seed: int
    ) -> Iterator[torch.Tensor]:
        """The gradients of all examples in their order, at most `microbatch` rows (of n) at a time.

        Rows are overwritten by those after them: use them or copy them first. What layers draw, such as dropout, comes
        from `seed` and depends on `microbatch` and on the way to the rows, never on the examples.

        Args:
            weights: the model (n,), to be read only; of the type that the rows are wanted in.
            x: inputs of the examples.
            y: their targets, where the model is.
            microbatch: rows in memory. It takes about twice that, and so many examples' activations.
            seed: a seed for this step alone.

        Raises:
            ConfigError: the model or its loss cannot be taken example by example.
        """
        require(microbatch >= 1, "microbatch", microbatch, "a whole number of at least 1")
        into = weights.new_empty(min(microbatch, len(y)), self.model.layout.size)
        self.model.module.train()
        for first in range(0, len(y), microbatch):
            part = slice(first, first + microbatch)
            targets = y[part]
            rows = into[: len(targets)]
            inputs = batch_input(x[part], self.model.device)
            with torch.random.fork_rng(devices=[]):  # dropout and its like only know torch's global generator
                torch.random.manual_seed(RunSeed(seed).integer("examples", first))
                self.rows(weights, inputs, targets, rows)
            yield rows


def per_example(model: LocalModel, way: str = FUNC) -> PerExample:
    """The gradients of a model example by example.

    Raises:
        ConfigError: the way is unknown or does not know a layer, Opacus is missing, or the model mixes examples.
    """
    require_choice("way", way, _WAYS)
    for name, layer in model.module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"layer '{name}' ({type(layer).__name__}) mixes the examples of a batch, so none has a gradient of "
                "its own: use GroupNorm, or wrap your model in fedrp.replace_batchnorm(model)"
            )
    return PerExample(model, _WAYS[way](model))


# --- torch.func ------------------------------------------------------------------------------------------------------


def _func_rows(model: LocalModel) -> Rows:
    layout, places = model.layout, _places(model.module)

    def own_loss(parameters: tuple[torch.Tensor, ...], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        named = {name: value for names, value in zip(places, parameters, strict=True) for name in names}
        output = torch.func.functional_call(model.module, named, (x[None],), tie_weights=False)
        return model.loss(output, y[None])

    each = torch.func.vmap(torch.func.grad(own_loss), in_dims=(None, 0, 0), randomness="different")

    def rows(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, into: torch.Tensor) -> None:
        try:
            found = each(tuple(layout.views(weights)), x, y)
        except RuntimeError as error:  # a layer or a loss that vmap cannot take
            raise ConfigError(
                f"per-example gradients of this model fail in torch.func: {first_line(error)}; '{LOOP}' takes any model"
            ) from error
        torch.cat([gradient.flatten(1) for gradient in found], dim=1, out=into)

    return rows


def _places(module: nn.Module) -> list[list[str]]:
    """Where each trainable parameter is: several names if it is tied, but one for a layer that has several.

    torch itself (`tie_weights`) would put such a layer's parameters in twice, and take them out once: a layer with two
    names was left without its parameters (2.13).
    """
    places: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in trainable(module)}
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                places[parameter].append(f"{path}.{name}" if path else name)
    return list(places.values())


# --- Opacus ----------------------------------------------------------------------------------------------------------


def _opacus_rows(model: LocalModel) -> Rows:
    try:
        from opacus import GradSampleModule
    except ImportError:
        raise ConfigError("opacus is not installed: pip install 'fedrp[records]'") from None
    _require_known(model.module, GradSampleModule.GRAD_SAMPLERS)
    module = copy.deepcopy(model.module).train()  # hooks stay on it, and others use the model
    try:
        hooked = GradSampleModule(module, loss_reduction="sum")
    except NotImplementedError as error:
        raise ConfigError(f"opacus does not take this model: {first_line(error)}; use '{FUNC}'") from error
    own_losses = torch.func.vmap(lambda output, target: model.loss(output[None], target[None]))

    def rows(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, into: torch.Tensor) -> None:
        model.layout.bind(module, weights)
        with warnings.catch_warnings():  # that inputs need no gradient, which is as it should be
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            own_losses(hooked(x.contiguous()), y).sum().backward()  # type: ignore[no-untyped-call]
        _move(module, model.layout, into)

    return rows


def _require_known(module: nn.Module, known: dict[type[nn.Module], object]) -> None:
    seen: set[nn.Parameter] = set()
    for name, layer in module.named_modules(remove_duplicate=False):
        own = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]
        if own and type(layer) not in known:
            raise ConfigError(f"opacus does not know layer '{name}' ({type(layer).__name__}): use '{FUNC}'")
        if not seen.isdisjoint(own):
            raise ConfigError(f"layer '{name}' shares its parameters with another, which opacus may miss: use '{FUNC}'")
        seen.update(own)


def _move(module: nn.Module, layout: Layout, into: torch.Tensor) -> None:
    """Take Opacus' gradients from the parameters, each freed at once."""
    parts = torch.split(into, [shape.numel() for shape in layout.shapes], dim=1)
    for name, parameter, part in zip(layout.names, trainable(module), parts, strict=True):
        found = getattr(parameter, _OPACUS_ROWS)
        if found is None and parameter.grad is None:
            part.zero_()  # a parameter without use
        elif found is None or len(found) != len(into):
            raise ConfigError(f"opacus finds no gradient of '{name}' for each example: use '{FUNC}'")
        else:
            part.copy_(found.flatten(1))
        parameter.grad = None
        setattr(parameter, _OPACUS_ROWS, None)


# --- one after the other ---------------------------------------------------------------------------------------------


def _loop_rows(model: LocalModel) -> Rows:
    def rows(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, into: torch.Tensor) -> None:
        model.layout.bind(model.module, weights)
        parameters = trainable(model.module)
        for example, row in enumerate(into):
            own = slice(example, example + 1)
            loss = model.loss(model.module(x[own]), y[own])
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for view, gradient in zip(model.layout.views(row), found, strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)

    return rows


_WAYS: dict[str, Callable[[LocalModel], Rows]] = {FUNC: _func_rows, OPACUS: _opacus_rows, LOOP: _loop_rows}
