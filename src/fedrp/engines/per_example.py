"""Per-example gradients: the gradient of each example's own loss, as rows in the order of the layout.

An example's own loss is that of a batch that holds nothing else, so it does not matter how the loss sums up a batch.
There are three ways to the same rows; none has rules for single layers here:

- `func`, torch.func: `vmap` over `grad`. The default, because it takes any layer that `vmap` takes, no example can
  reach the row of another, and it was faster than Opacus with each microbatch that was tried
  (`benchmarks/per_example.py`; LeNet-5 is fastest with 64). Its first use in a process loads 75 MB of torch's own code.
- `opacus`, its `GradSampleModule`: a second opinion by other code. Only for layers that it has rules for; right where
  each of them sees the examples in its first dimension, and images in torch's usual memory order (1.6 takes others
  wrongly without a word).
- `loop`, one example after the other: for models that `vmap` cannot take, and many times slower.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fedrp.config.checks import require, require_choice
from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.learning.layout import Layout, trainable
from fedrp.learning.objective import Examples
from fedrp.learning.pixels import Inputs, Pixels
from fedrp.learning.trainer import LocalModel, batch_input
from fedrp.rng import RunSeed

_log = logging.getLogger(__name__)

FUNC, OPACUS, LOOP = "func", "opacus", "loop"
_OPACUS_ROWS = "grad_sample"  # where Opacus leaves them at a parameter
Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # (weights, x, y, into)


class Block(NamedTuple):
    """Rows of a fixed number of places, of which the first `used` hold an example's gradient each.

    What is done with rows is done with all of them, so that shapes, and with them rounding, stay the same.
    """

    rows: torch.Tensor
    used: int


@dataclass(frozen=True)
class PerExample:
    """What gives the gradients of a model's loss example by example."""

    model: LocalModel
    way: str
    rows: Rows

    def gradients(self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, places: int, seed: int) -> Iterator[Block]:
        """The gradients of all examples, the last block first: each is computed in `places` rows (of n).

        Guarantees: operations have the same shapes in every block, whose free places hold an example of zeros. So a row
        is a function of its example, its place and the weights, as long as no kernel mixes rows: not of other examples,
        nor of how many there are. What layers draw, such as dropout, depends on `seed`, block and place alone. An
        example that model or loss raise an error for has a row of zeros, and what they say of it is not told to anyone.

        Rows are overwritten by those after them: use them or copy them first.

        Args:
            weights: the model (n,), to be read only; of the type that the rows are wanted in.
            x: inputs of the examples.
            y: their targets, where the model is.
            places: rows in memory. It takes about twice that, and so many examples' activations.
            seed: a seed for this step alone.

        Raises:
            ConfigError: the model or its loss cannot be taken example by example: that of zeros fails, too.
        """
        require(places >= 1, "microbatch", places, "a whole number of at least 1")
        into = weights.new_empty(places, self.model.layout.size)
        self.model.module.train()
        failures: set[str] = set()
        last = len(y) // places * places  # of its places at least one is free: whether zeros fail shows in every step
        for first in range(last, -1, -places):
            part = Examples(x[first : first + places], y[first : first + places])
            step = _Step(self, weights, RunSeed(seed).integer("examples", first), into)
            try:
                step.take(part)
            except Exception:  # model and loss are the user's code
                if first == last:
                    step.require_zeros(part)
                failures |= step.take_one_by_one(part)
            if len(part.y):
                yield Block(into, len(part.y))
        if failures:  # their kind alone: texts may quote data
            _log.warning("model or loss raised %s for some examples, which count as zero", ", ".join(sorted(failures)))


class _Step(NamedTuple):
    """A block that is computed."""

    own: PerExample
    weights: torch.Tensor
    seed: int
    into: torch.Tensor

    def take(self, part: Examples, place: int = 0) -> None:
        """Write the rows of examples in the places from `place` on, and of zeros in all others."""
        device = self.own.model.device
        x, y = _inputs_in_places(part.x, len(self.into), place), _in_places(part.y, len(self.into), place)
        with torch.random.fork_rng(devices=[]):  # dropout and its like only know torch's global generator
            torch.random.manual_seed(self.seed)
            self.own.rows(self.weights, batch_input(x, device), y, self.into)

    def take_one_by_one(self, part: Examples) -> set[str]:
        """The same rows, but for zeros where an example makes model or loss raise an error: of which kinds."""
        rows, failures = torch.zeros_like(self.into), set()
        for place in range(len(part.y)):
            try:
                self.take(Examples(part.x[place : place + 1], part.y[place : place + 1]), place)
                rows[place] = self.into[place]
            except Exception as error:  # again the user's code
                failures.add(type(error).__name__)
        self.into.copy_(rows)
        return failures

    def require_zeros(self, like: Examples) -> None:
        """Refuse a model that fails whatever the examples are."""
        try:
            self.take(Examples(like.x[:0], like.y[:0]))
        except FedRPError:
            raise
        except Exception as error:
            raise ConfigError(
                f"per-example gradients of this model fail by '{self.own.way}', even for an example of zeros: "
                f"{first_line(error)}; '{LOOP}' takes any model"
            ) from error


def _inputs_in_places(values: Inputs, places: int, first: int) -> Inputs:
    if isinstance(values, Pixels):
        return Pixels(_in_places(values.raw, places, first), values.scale)
    return _in_places(values, places, first)


def _in_places(values: torch.Tensor, places: int, first: int) -> torch.Tensor:
    """Values in new memory, from place `first` on, among zeros: their address can change rounding, too."""
    full = values.new_zeros(places, *values.shape[1:])
    full[first : first + len(values)] = values
    return full


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
    return PerExample(model, way, _WAYS[way](model))


# --- torch.func ------------------------------------------------------------------------------------------------------


def _func_rows(model: LocalModel) -> Rows:
    layout, places = model.layout, _places(model.module)

    def own_loss(parameters: tuple[torch.Tensor, ...], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        named = {name: value for names, value in zip(places, parameters, strict=True) for name in names}
        output = torch.func.functional_call(model.module, named, (x[None],), tie_weights=False)
        return model.loss(output, y[None])

    each = torch.func.vmap(torch.func.grad(own_loss), in_dims=(None, 0, 0), randomness="different")

    def rows(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, into: torch.Tensor) -> None:
        found = each(tuple(layout.views(weights)), x, y)
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
