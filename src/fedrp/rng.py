"""Reproducible randomness: a public run seed and its named streams.

A `RunSeed` decides everything that must repeat: splits, batches, sampling. It is printed in results, so nothing
that must stay hidden may come from it; that is what `fedrp.crypto.secret` is for. Neither type converts to the other.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RunSeed:
    """The public seed of a run.

    Guarantees: the stream of (purpose, indices) is a pure function of the seed; different names give unrelated streams.
    """

    value: int

    def generator(self, purpose: str, *indices: int) -> np.random.Generator:
        """A fresh NumPy generator for one named purpose, e.g. `seed.generator("batches", round, client)`."""
        return np.random.Generator(np.random.Philox(key=np.frombuffer(self._digest(purpose, indices)[:16], "<u8")))

    def integer(self, purpose: str, *indices: int) -> int:
        """A 63-bit integer for one named purpose, for libraries that only take integers."""
        return int.from_bytes(self._digest(purpose, indices)[:8], "little") >> 1

    def _digest(self, purpose: str, indices: tuple[int, ...]) -> bytes:
        name = "|".join(["fedrp-run-seed", str(self.value), purpose, *map(str, indices)])
        return hashlib.sha256(name.encode()).digest()


def public_words(place: bytes, count: int) -> npt.NDArray[np.uint64]:
    """Words that everyone knows who knows the place; those of different places are unrelated."""
    seed = int.from_bytes(hashlib.sha256(b"fedrp public randomness v1|" + place).digest()[:16], "little")
    return np.random.Philox(key=seed).random_raw(count)
