"""Layout: a module's trainable parameters as one flat float32 vector, which is all that comes after sees.

`Layout` ties a `torch.nn.Module` to rows of a matrix: parameters become views into a row, so a model is loaded, trained
and read without a copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.types import Vector

State = dict[str, torch.Tensor]  # as `state_dict` names it
ModelFactory = Callable[[], nn.Module]

_PACKED_DTYPES = (torch.float32,)


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in the flat vector, in the order of `named_parameters()`.

    Guarantees: `bind(module, row)` makes every trainable parameter a view of `row` (no copy); `flatten` and `bind` are
    inverse to each other.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def size(self) -> int:
        """Number of parameters n."""
        return sum(map(prod, self.shapes))

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """One view per parameter into `row` (n,)."""
        parts = torch.split(row, [prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def bind(self, module: nn.Module, weights: torch.Tensor) -> None:
        """Let the module live in `weights` (n,)."""
        for parameter, view in zip(trainable(module), self.views(weights), strict=True):
            parameter.data = view

    def flatten(self, module: nn.Module) -> Vector:
        """A copy of the module's parameters as one vector."""
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in trainable(module)])
        return flat.cpu().numpy().astype(np.float32, copy=False)


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module that can be trained here.

    Raises:
        ConfigError: it has BatchNorm or the like (running statistics live outside the vector and would leak and drift),
            no trainable parameter, parameters that are not float32, or lazy layers, which have none before they see
            data.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            remedy = "use GroupNorm, or wrap your model in fedrp.replace_batchnorm(model)"
            if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
                remedy = "build it with track_running_stats=False"
            raise ConfigError(
                f"layer '{name}' ({type(layer).__name__}) keeps running statistics that are not parameters: {remedy}"
            )
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(f"parameter '{lazy}' is of a lazy layer, whose size is open: use one with its sizes given")
    parameters = trainable(module)
    if not parameters:
        raise ConfigError(f"model {type(module).__name__} has no trainable parameters")
    odd = next((p.dtype for p in parameters if p.dtype not in _PACKED_DTYPES), None)
    if odd is not None:
        raise ConfigError(f"model {type(module).__name__} has parameters of {odd}: convert it with model.float()")
    names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    return Layout(names, tuple(parameter.shape for parameter in parameters))


def built(factory: ModelFactory) -> nn.Module:
    """A new model. Layers draw initial values from torch's global generator, which is put back as it was.

    Raises:
        ConfigError: the factory is a module itself, fails, or gives something else.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(f"the model is a {type(factory).__name__}: give what builds it, e.g. the class or a function")
    with torch.random.fork_rng(devices=[]):
        try:
            module = factory()
        except FedRPError:
            raise
        except Exception as error:  # it is the user's code
            raise ConfigError(f"the model cannot be built: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the model is built as a {type(module).__name__}: expected a torch.nn.Module")
    return module


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes, in the order of the layout."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def load_vector(module: nn.Module, vector: npt.ArrayLike) -> nn.Module:
    """The module with its trainable parameters set to a flat vector, e.g. a run's delivered model.

    Frozen parameters and buffers are not in the vector and stay as they are in `module`: where a new build draws others
    than those trained with, load `RunResult.state` instead.
    """
    layout = layout_of(module)
    try:
        values = np.asarray(vector, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the vector is a {type(vector).__name__}, not numbers: {first_line(error)}") from None
    if values.shape != (layout.size,):
        raise ConfigError(f"the vector has shape {values.shape}, but the model has {layout.size} parameters")
    layout.bind(module, torch.from_numpy(values.copy()))
    return module


def replace_batchnorm(module: nn.Module, groups: int = 8) -> nn.Module:
    """The same model with each BatchNorm replaced by GroupNorm (in place for inner layers).

    The number of groups is the largest divisor of the channels that is at most `groups`.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        channels = module.num_features
        divisor = max(g for g in range(1, groups + 1) if channels % g == 0)
        return nn.GroupNorm(divisor, channels, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        setattr(module, name, replace_batchnorm(child, groups))
    return module
