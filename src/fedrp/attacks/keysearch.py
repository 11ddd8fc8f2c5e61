"""Key search: try keys until one explains what the server saw.

The test is a known plaintext. Where the initial model is public, as it is in common practice, a round of training moves
it by a few percent, so A w^0 is nearly A w. One row of A decides on most candidates; the others confirm a hit.

Common practice draws A from a seeded generator; torch's keeps 32 bits of its seed. Here keys have 256 bits, and the
initial model is secret too; the search below is nevertheless granted that model.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.projection.families import make_projection
from fedrp.types import Vector

SEED_BITS = 32  # what torch's generator on the CPU keeps of a seed
ROWS = 12  # coordinates compared: a wrong key passes each with probability 0.04, all with 2e-17
_TOLERANCE = 0.05  # of a coordinate's typical size
_GRAIN = 16  # torch draws normals in blocks of this many
_REPORT_EVERY = 256

Coordinates = npt.NDArray[np.float64]
Guess = Callable[[int], Iterator[float]]  # candidate -> the coordinates that it predicts, one after the other
OnTried = Callable[[int], None]


class Search(NamedTuple):
    """How a search went."""

    found: int | None
    tried: int
    seconds: float

    @property
    def rate(self) -> float:
        """Candidates per second."""
        return self.tried / self.seconds


def search(
    candidates: Iterable[int],
    guess: Guess,
    seen: Coordinates,
    typical: float,
    budget: float | None = None,
    on_tried: OnTried | None = None,
) -> Search:
    """The first candidate whose predictions are all near what was seen; stops after `budget` seconds."""
    began = time.monotonic()
    tried = 0
    for candidate in candidates:
        tried += 1
        near = all(abs(p - s) <= _TOLERANCE * typical for p, s in zip(guess(candidate), seen, strict=True))
        if near:
            return Search(candidate, tried, time.monotonic() - began)
        if tried % _REPORT_EVERY == 0 and on_tried:
            on_tried(tried)
        if budget is not None and time.monotonic() - began > budget:
            break
    return Search(None, tried, time.monotonic() - began)


def typical_size(model: Vector, rows: int) -> float:
    """The standard deviation of a coordinate of A w."""
    return float(np.linalg.norm(model) / np.sqrt(rows))


def seeded_matrix(seed: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """The matrix of a system that draws it from torch's generator, as much published code does."""
    generator = torch.Generator().manual_seed(seed)
    return np.asarray((torch.randn(rows, columns, generator=generator) / rows**0.5).numpy())


def seeded_guess(model: Vector, rows: int) -> Guess:
    """What a seed predicts. Rows are drawn as they are asked for: one settles 96 of 100 candidates."""
    scaled = torch.from_numpy(model / np.float32(np.sqrt(rows)))
    generator = torch.Generator()

    def guess(seed: int) -> Iterator[float]:
        for row in range(rows):
            stop = (row + 1) * model.size
            # From the start again, in whole blocks: torch draws by sixteen, and the last of a tensor in another way.
            count = stop if row == rows - 1 else -(-stop // _GRAIN) * _GRAIN
            drawn = torch.randn(count, generator=generator.manual_seed(seed))
            yield float(drawn[stop - model.size : stop] @ scaled)

    return guess


def keyed_guess(model: Vector, rows: int, family: str) -> Guess:
    """What a 256-bit key predicts. The numbers of candidates are the keys themselves."""

    def guess(number: int) -> Iterator[float]:
        key = SecretKey(number.to_bytes(KEY_BYTES, "big"))
        yield from make_projection(family, key, model.size, rows).forward(model).tolist()

    return guess
