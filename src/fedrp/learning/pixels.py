"""Images as bytes: kept as they were given, and turned into numbers batch by batch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Scale(NamedTuple):
    """What pixels in [0, 1] are centred and divided by, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Pixels:
    """uint8 inputs (N, C, ...) that stand for (x / 255 - mean) / std in float32, in a quarter of the memory.

    What is taken out of it by an index is `Pixels` again; `floats` makes numbers of it. No tensor, so that nobody takes
    bytes for numbers.
    """

    raw: torch.Tensor
    scale: Scale

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: slice | torch.Tensor) -> "Pixels":
        return Pixels(self.raw[index], self.scale)

    @property
    def shape(self) -> torch.Size:
        """As tensors have it."""
        return self.raw.shape

    @property
    def ndim(self) -> int:
        """As tensors have it."""
        return self.raw.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept."""
        return self.raw.dtype

    def to(self, device: torch.device) -> "Pixels":
        """The same on a device."""
        return Pixels(self.raw.to(device), self.scale)

    def floats(self) -> torch.Tensor:
        """The numbers, in the order of operations of `fedrp.learning.data.Dataset.normalised`: the same bits."""
        by_channel = (-1, *[1] * (self.raw.ndim - 2))
        mean, std = (torch.tensor(each, device=self.raw.device).view(by_channel) for each in self.scale)
        return self.raw.float().div_(255.0).sub_(mean).div_(std)


Inputs = torch.Tensor | Pixels


def floats(x: Inputs) -> torch.Tensor:
    """Inputs as a model takes them."""
    return x.floats() if isinstance(x, Pixels) else x
