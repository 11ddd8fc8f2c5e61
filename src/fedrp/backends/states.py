"""Clients' states between rounds: in memory up to a budget, the rest in files of a temporary folder."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from fedrp.config.speed import Speed

State = TypeVar("State")


def budget_of(speed: Speed) -> int:
    """Bytes that the states of one worker's clients may take in memory."""
    return speed.client_memory * 2**20 // (speed.workers or 1)


class StateStore(Generic[State]):
    """A state per client, made when it is first asked for.

    Arrays that clients share count once. What `pack` makes of a state, `read` reads again, bit for bit.
    """

    def __init__(
        self,
        make: Callable[[int], State],
        arrays: Callable[[State], Iterable[npt.NDArray[Any] | None]],
        pack: Callable[[State], bytes],
        read: Callable[[Path], State],
        budget: int,
    ) -> None:
        self._make, self._arrays, self._pack, self._read, self._budget = make, arrays, pack, read, budget
        self._here: dict[int, State] = {}  # those that were changed last are last
        self._away: dict[int, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __getitem__(self, client: int) -> State:
        if client in self._here:
            return self._here[client]
        return self._read(self._away[client]) if client in self._away else self._make(client)

    def __setitem__(self, client: int, state: State) -> None:
        self._here.pop(client, None)
        self._here[client] = state
        if path := self._away.pop(client, None):
            path.unlink()

    def settle(self) -> None:
        """Write those that were not changed for longest to disk, until the rest is within the budget."""
        users: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for state in self._here.values():
            for array in self._arrays(state):
                if array is not None:
                    users[id(array)] = users.get(id(array), 0) + 1
                    sizes[id(array)] = array.nbytes
        total = sum(sizes.values())
        for client, state in list(self._here.items()):
            if total <= self._budget:
                return
            self._put_away(client, state)
            for array in self._arrays(state):
                if array is not None:
                    users[id(array)] -= 1
                    total -= 0 if users[id(array)] else sizes[id(array)]

    def _put_away(self, client: int, state: State) -> None:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="fedrp-clients-")
        path = Path(self._folder.name) / f"{client}.safetensors"
        path.write_bytes(self._pack(state))
        del self._here[client]
        self._away[client] = path

    def close(self) -> None:
        """Remove the folder."""
        if self._folder:
            self._folder.cleanup()
            self._folder = None
