"""Models, and the one flat float32 vector that everything after them sees.

`Layout` ties a `torch.nn.Module` to rows of a matrix: parameters (and gradients) become views into a row, so a model
is loaded, trained and read without a copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError, FedRPError, first_line
from fedrp.rng import RunSeed
from fedrp.types import Vector

State = dict[str, torch.Tensor]  # as `state_dict` names it
ModelFactory = Callable[[], nn.Module]
InputShape = tuple[int, ...]  # (channels, height, width), or (features,)

_PACKED_DTYPES = (torch.float32,)


# --- a module and its vector ---------------------------------------------------------------------------------------


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

    def bind(self, module: nn.Module, weights: torch.Tensor, gradients: torch.Tensor | None = None) -> None:
        """Let the module live in `weights` (n,), and its gradients accumulate into `gradients` (n,)."""
        parameters = _trainable(module)
        for parameter, view in zip(parameters, self.views(weights), strict=True):
            parameter.data = view
        if gradients is not None:
            for parameter, view in zip(parameters, self.views(gradients), strict=True):
                parameter.grad = view

    def flatten(self, module: nn.Module) -> Vector:
        """A copy of the module's parameters as one vector."""
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in _trainable(module)])
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
    parameters = _trainable(module)
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


def _trainable(module: nn.Module) -> list[nn.Parameter]:
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


# --- initial values ------------------------------------------------------------------------------------------------


def public_initial(factory: ModelFactory, seed: RunSeed) -> Vector:
    """The model's own initialisation, drawn from the public run seed."""
    module = _seeded(factory, seed)
    return layout_of(module).flatten(module)


def _seeded(factory: ModelFactory, seed: RunSeed) -> nn.Module:
    def draw() -> nn.Module:
        torch.random.manual_seed(seed.integer("initial-model"))
        return factory()

    return built(draw)


def secret_initial(factory: ModelFactory, key: SecretKey) -> Vector:
    """An initial model of which only holders of `key` know what the factory draws at random.

    Tensors that the factory draws at random are drawn anew from the key's stream with their own mean and standard
    deviation (a single number with those of two draws). A tensor that it gives alike under two seeds of torch was not
    drawn but given, and stays as it is: constants (zero biases, unit gains), pretrained weights, and all of a factory
    that seeds torch itself. Given tensors are known to whoever has them, perhaps the server too: docs/threat-model.md
    says what that costs. The template comes from a public seed, so every client computes the same vector.
    """
    return drawn_initial(*initial_laws(factory), key)


def drawn_initial(template: Vector, laws: Sequence["TensorLaw"], key: SecretKey) -> Vector:
    """The secret initial model, for laws that are at hand."""
    normals = key.derive("initial-model").normals(template.size)
    result = np.empty_like(template)
    for part, mean, spread in laws:
        result[part] = mean + spread * normals[part] if spread > 0 else template[part]
    return result


class TensorLaw(NamedTuple):
    """The law that one tensor of a secret initial model is drawn from, entry by entry; spread 0: as in the template."""

    part: slice  # of the flat vector
    mean: np.float32
    spread: np.float32


def initial_laws(factory: ModelFactory) -> tuple[Vector, list[TensorLaw]]:
    """The public template of `secret_initial` and the law of each of its tensors.

    Raises:
        ConfigError: the factory builds models of different shapes, or hands out the same parameters again.
    """
    module = _seeded(factory, RunSeed(0))
    layout = layout_of(module)
    drawn_again = _drawn_again(factory, module, layout)
    template = layout.flatten(module)
    laws = []
    start = 0
    for shape, again in zip(layout.shapes, drawn_again, strict=True):
        part = slice(start, start + prod(shape))
        laws.append(TensorLaw(part, np.float32(0), np.float32(0)) if again is None else _law(part, template, again))
        start = part.stop
    return template, laws


def _drawn_again(factory: ModelFactory, module: nn.Module, layout: Layout) -> list[float | None]:
    """The first number of each tensor under another seed of torch; None if the tensor does not depend on the seed.

    The second model is gone when this returns.
    """
    other = _seeded(factory, RunSeed(1))
    if layout_of(other) != layout:
        raise ConfigError(
            f"the model factory builds other layers at each call ({layout.size} parameters, then "
            f"{layout_of(other).size}): let it build the same ones"
        )
    pairs = list(zip(_trainable(module), _trainable(other), strict=True))
    shared = next((name for name, (one, two) in zip(layout.names, pairs, strict=True) if one is two), None)
    if shared is not None:  # training would change what is taken for the start
        raise ConfigError(
            f"the model factory hands out the same parameter '{shared}' at every call: "
            "let it build a new model, e.g. copy.deepcopy(model)"
        )
    return [None if torch.equal(one, two) else float(two.detach().flatten()[0]) for one, two in pairs]


def _law(part: slice, template: Vector, again: float) -> TensorLaw:
    values = template[part].astype(np.float64)
    if values.size == 1:  # one number has no spread: two draws have
        values = np.append(values, again)
    # Rounded to float32 first: a sum in another order on another machine must not change a bit.
    return TensorLaw(part, np.float32(values.mean()), np.float32(values.std()))


# --- the table -----------------------------------------------------------------------------------------------------


def lenet5(shape: InputShape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters for 28x28x1 (padded) or 32x32x1 pictures."""
    channels, height, _ = _picture("lenet5", shape, smallest=28)
    padding = 2 if height == 28 else 0
    features = nn.Sequential(
        *[nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
    )
    flat = _flat_size(features, shape)
    head = [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*features, *head)


def cnn(shape: InputShape, classes: int) -> nn.Module:
    """The paper's GroupNorm network: 846,634 parameters for 32x32x3 pictures and 10 classes."""
    channels, _, _ = _picture("cnn", shape, smallest=8)
    layers: list[nn.Module] = []
    for width, groups in ((32, 8), (64, 16), (128, 16)):
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(groups, width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    features = nn.Sequential(*layers, nn.Flatten())
    flat = _flat_size(features, shape)
    head = [nn.Linear(flat, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*features, *head)


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs), nn.ReLU()],
            *[nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs)],
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(shape: InputShape, classes: int) -> nn.Module:
    """ResNet-18 for small pictures (3x3 stem, no first pooling), GroupNorm instead of BatchNorm."""
    channels, _, _ = _picture("resnet18", shape, smallest=8)
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_ResidualBlock(width, outputs, stride), _ResidualBlock(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def vgg16(shape: InputShape, classes: int) -> nn.Module:
    """VGG-16 with its 4096-wide head: 134,301,514 parameters for 3 channels and 10 classes."""
    channels, height, _ = _picture("vgg16", shape, smallest=16)
    layers: list[nn.Module] = [nn.ZeroPad2d(max(0, (33 - height) // 2))]  # five poolings need 32 pixels
    for widths in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    layers += [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return _he_initialised(nn.Sequential(*layers, nn.Linear(4096, classes)))


def _he_initialised(module: nn.Module) -> nn.Module:
    # Without normalisation layers, torch's default gain makes 16 layers fade to nothing.
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return module


class ModelSpec(NamedTuple):
    """A row of the table."""

    build: Callable[[InputShape, int], nn.Module]
    learning_rate: float  # a default that learns on every bundled data set
    summary: str


MODELS: dict[str, ModelSpec] = {
    "lenet5": ModelSpec(lenet5, 0.1, "LeNet-5, 61,706 parameters for 28x28x1"),
    "cnn": ModelSpec(cnn, 0.1, "GroupNorm network of the paper, 846,634 parameters for 32x32x3"),
    "resnet18": ModelSpec(resnet18, 0.1, "ResNet-18 with GroupNorm, 11,173,962 parameters for 32x32x3"),
    "vgg16": ModelSpec(vgg16, 0.02, "VGG-16, 134,301,514 parameters for 32x32x3"),
}


def _picture(model: str, shape: InputShape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model '{model}' takes pictures (channels, height, width) of at least {smallest} pixels, "
            f"but the data has shape {shape}: for a model of your own use fedrp.Task in Python"
        )
    return shape[0], shape[1], shape[2]


def _flat_size(features: nn.Module, shape: InputShape) -> int:
    with torch.no_grad():
        return int(features(torch.zeros(1, *shape)).shape[1])
