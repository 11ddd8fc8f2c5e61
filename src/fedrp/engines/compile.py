"""Compile all kernels into the cache: `python -m fedrp.engines.compile`, a step of setting up."""

import functools

import numpy as np
import torch
from torch import nn

from fedrp.compiled import cache_folder
from fedrp.compression import trellis
from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.learning.objective import Examples, LocalSGD
from fedrp.learning.zoo import MODELS
from fedrp.projection.families import FAMILIES, make_projection
from fedrp.projection.rotation import ROTATIONS, make_rotation
from fedrp.rng import RunSeed

_COLUMNS, _ROWS = 1000, 64
_STACKED = {"lenet5": (1, 28, 28), "cnn": (3, 32, 32)}  # pooling; pooling and group normalisation
_CLASSES = 10
_WINDOW, _BITS = 8, (1, 2)


def compile_projections() -> None:
    """Apply a small matrix of each family and kind in all the ways that runs do: to one vector and to several."""
    for family in FAMILIES:
        for memory in (0, 2**30):  # a gaussian matrix is streamed, or kept
            projection = make_projection(family, SecretKey(bytes(32)), _COLUMNS, _ROWS, memory)
            for shape in ((), (2,)):
                projection.forward(np.ones((*shape, _COLUMNS), np.float32))
                projection.adjoint(np.ones((*shape, _ROWS), np.float32))
    for kind in ROTATIONS:
        rotation = make_rotation(kind, SecretKey(bytes(32)), _ROWS)
        rotation.adjoint(rotation.forward(np.ones((2, _ROWS), np.float32)))


def compile_training() -> None:
    """Train the models that have layers of our own for a step."""
    for name, shape in _STACKED.items():
        model = functools.partial(MODELS[name].build, shape, _CLASSES)
        trainer = make_trainer(model, nn.CrossEntropyLoss(), torch.device("cpu"), RunSeed(0), "stacked:2")
        data = [Examples(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long))] * 2
        start = np.zeros((2, trainer.model.layout.size), np.float32)
        trainer.train(start, data, [0, 1], 1, LocalSGD(0.1, 0.0, 2, 1))


def compile_search() -> None:
    """Search for the codes of a short vector."""
    for bits in _BITS:
        trellis.search(np.zeros(4, np.float32), _WINDOW, bits)


if __name__ == "__main__":
    compile_projections()
    compile_training()
    compile_search()
    print(f"compiled kernels are in {cache_folder()}")
