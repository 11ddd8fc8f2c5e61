"""Stacked values: what passes between the layers of k models that are computed together.

A value has one of two forms. In *rows* the models come first, (k, *shape), and any operation on a model's own tensor is
the same operation one dimension further on. In *image* form the models lie side by side in the channels, (batch, k * C,
*space): grouped convolutions want that, in the memory order in which they are fastest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Dropping = Sequence[torch.Generator]  # one stream of randomness for each model


class NotStackableError(Exception):
    """A model cannot be computed in stacks; the message names the part of it that cannot."""


@dataclass(frozen=True)
class Stacked:
    """One tensor of each of k models."""

    tensor: torch.Tensor
    models: int
    is_image: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of one model's tensor."""
        if not self.is_image:
            return self.tensor.shape[1:]
        batch, channels, *space = self.tensor.shape
        return torch.Size((batch, channels // self.models, *space))

    def rows(self) -> torch.Tensor:
        """(k, *shape); of an image a view, no copy."""
        return split(self.tensor, 1, self.models).transpose(0, 1) if self.is_image else self.tensor

    def image(self) -> torch.Tensor:
        """(batch, k * C, *space), channels last where there are two dimensions of space."""
        if self.is_image:
            return self.tensor
        if self.tensor.ndim < 3:
            raise NotStackableError(f"a layer for channels gets values of shape {tuple(self.shape)}")
        side_by_side = self.tensor.transpose(0, 1).flatten(1, 2)
        return side_by_side.contiguous(memory_format=torch.channels_last) if side_by_side.ndim == 4 else side_by_side

    def with_rows(self, tensor: torch.Tensor) -> "Stacked":
        """Another value of these models, as rows."""
        return Stacked(tensor, self.models)

    def with_image(self, tensor: torch.Tensor) -> "Stacked":
        """Another value of these models, as an image."""
        return Stacked(tensor, self.models, True)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Stacked":
        """The value that an elementwise function makes, in the same form."""
        return Stacked(function(self.tensor), self.models, self.is_image)

    def axis(self, dim: int) -> int:
        """Where a dimension of one model's tensor is in the rows; refuses that of the batch, which would be mixed."""
        place = dim % len(self.shape)
        if place == 0:
            raise NotStackableError("an operation goes over the examples of a batch")
        return place + 1


@dataclass(frozen=True)
class Pass:
    """One forward pass of k models.

    Args:
        parameters: (k, *shape) for each trained parameter of the module, by the parameter's id.
        sizes: how many examples of each model's batch are real; those after them are padding.
        dropping: the models' streams for dropout; None for no dropout.
    """

    models: int
    parameters: Mapping[int, torch.Tensor]
    sizes: Sequence[int]
    dropping: Dropping | None = None

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """All models' values of a layer's parameter, (k, *shape); a frozen one is the same for all."""
        trained = self.parameters.get(id(parameter))
        return parameter.detach().expand(self.models, *parameter.shape) if trained is None else trained

    def dropped(self, value: Stacked, p: float, features: bool = False) -> Stacked:
        """Dropout, with the draws that each model would make if it were alone; of whole channels with `features`."""
        if self.dropping is None or p == 0:
            return value
        batch, *rest = value.shape
        rest = [*rest[:1], *(1 for _ in rest[1:])] if features else rest
        keep = value.tensor.new_ones(self.models, batch, *rest)
        layout = torch.channels_last if value.is_image and len(rest) == 3 else torch.contiguous_format
        for kept, size, stream in zip(keep, self.sizes, self.dropping, strict=True):
            noise = torch.empty(size, *rest, dtype=keep.dtype, device=keep.device, memory_format=layout)
            kept[:size] = noise.bernoulli_(1 - p, generator=stream)
        scaled = value.with_rows(keep.mul_(1 / (1 - p) if p < 1 else 0.0))
        if value.is_image:
            return value.with_image(value.tensor * scaled.image())
        return value.with_rows(value.tensor * scaled.tensor)


def split(tensor: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """A dimension as two, the first of them `parts` long; a view."""
    dim %= tensor.ndim
    return tensor.view(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


def aligned(values: Sequence[object]) -> tuple[int, list[object]]:
    """Stacked operands as rows that broadcast as one model's tensors would; and how many models they are of."""
    rank = max(len(v.shape) for v in values if isinstance(v, Stacked | torch.Tensor))
    models = next(v.models for v in values if isinstance(v, Stacked))
    return models, [filled(v, rank) if isinstance(v, Stacked) else v for v in values]


def filled(value: Stacked, rank: int) -> torch.Tensor:
    """Rows of tensors of a higher rank, as broadcasting makes them."""
    rows = value.rows()
    return rows.reshape(value.models, *(1 for _ in range(rank - len(value.shape))), *value.shape)
