"""A small problem that every algorithm can learn: three clouds of points and a net of 83 parameters."""

import numpy as np
import torch
from torch import nn

FEATURES, CLASSES = 6, 3


class TinyNet(nn.Module):
    """83 parameters, none of them constant at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.output(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


def blobs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three clouds of points, and which cloud each point is from."""
    rng = np.random.Generator(np.random.PCG64(seed))
    labels = np.arange(count) % CLASSES
    centres = np.random.Generator(np.random.PCG64(99)).normal(0, 1.5, (CLASSES, FEATURES))
    points = centres[labels] + rng.normal(0, 1, (count, FEATURES))
    return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels)
