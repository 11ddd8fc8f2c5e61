"""Compile all kernels into the cache: `python -m fedrp.projection.compile`, a step of setting up."""

import numpy as np

from fedrp.crypto.secret import SecretKey
from fedrp.projection.families import FAMILIES, make_projection
from fedrp.projection.kernels import cache_folder
from fedrp.projection.rotation import ROTATIONS, make_rotation

_COLUMNS, _ROWS = 1000, 64


def compile_kernels() -> None:
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


if __name__ == "__main__":
    compile_kernels()
    print(f"compiled kernels are in {cache_folder()}")
