"""What clients hold, sent to worker processes in few tensors: they map the memory, nothing is copied per client.

Sent one by one, the tensors of ten thousand clients would take twenty thousand file descriptors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fedrp.learning.objective import Examples
from fedrp.learning.pixels import Pixels, Scale

_MOST_BLOCKS = 16  # that are sent as they are


class _Place(NamedTuple):
    """Where a tensor lies in a flat one."""

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Blocks:
    """Flat tensors, and where in them the tensors of each client lie."""

    def __init__(self, data: Mapping[int, Examples], joined: bool) -> None:
        tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._scales: dict[int, Scale] = {}  # of clients whose inputs are bytes
        for client, part in data.items():
            if isinstance(part.x, Pixels):
                self._scales[client] = part.x.scale
            tensors[client, 0] = part.x.raw if isinstance(part.x, Pixels) else part.x
            tensors[client, 1] = part.y
        self._flat, self._places = _mapped(_joined(tensors) if joined else tensors)
        if len(self._flat) > _MOST_BLOCKS:
            self._flat, self._places = _mapped(_joined(tensors))

    def examples(self, client: int) -> Examples:
        """What a client holds, as views."""
        x, y = (self._view(self._places[client, field]) for field in range(2))
        return Examples(Pixels(x, self._scales[client]) if client in self._scales else x, y)

    def _view(self, place: _Place) -> torch.Tensor:
        return self._flat[place.block].as_strided(place.shape, place.stride, place.offset)


_Tensors = Mapping[tuple[int, int], torch.Tensor]


def _mapped(tensors: _Tensors) -> tuple[list[torch.Tensor], dict[tuple[int, int], _Place]]:
    """The storages of tensors, each as one flat tensor, and where in them each one lies."""
    flat: list[torch.Tensor] = []
    known: dict[tuple[int, torch.dtype], int] = {}
    places = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        block = known.setdefault((storage.data_ptr(), tensor.dtype), len(flat))
        if block == len(flat):
            flat.append(torch.empty(0, dtype=tensor.dtype).set_(storage))
        places[name] = _Place(block, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
    return flat, places


def _joined(tensors: _Tensors) -> dict[tuple[int, int], torch.Tensor]:
    """The same tensors, those of one type in one storage."""
    joined: dict[tuple[int, int], torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        whole = torch.cat([tensor.reshape(-1) for tensor in alike.values()])
        pieces = torch.split(whole, [tensor.numel() for tensor in alike.values()])
        joined |= {n: p.view(t.shape) for (n, t), p in zip(alike.items(), pieces, strict=True)}
    return joined


class _Share(Mapping[int, Examples]):
    """The holdings of some clients, as a worker gets them."""

    def __init__(self, blocks: _Blocks, clients: Sequence[int]) -> None:
        self._blocks, self._clients = blocks, dict.fromkeys(clients)

    def __getitem__(self, client: int) -> Examples:
        if client not in self._clients:
            raise KeyError(client)
        return self._blocks.examples(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class Holdings:
    """What all clients hold, to be divided among workers."""

    def __init__(self, data: Mapping[int, Examples]) -> None:
        self._data = data
        self._blocks: _Blocks | None = None

    def near(self, clients: Sequence[int]) -> Mapping[int, Examples]:
        """What some clients hold, for a worker of this machine: it maps the memory of all."""
        if len(clients) == len(self._data):
            return self._data
        self._blocks = self._blocks or _Blocks(self._data, joined=False)
        return _Share(self._blocks, clients)

    def far(self, clients: Sequence[int]) -> Mapping[int, Examples]:
        """What some clients hold and nothing else, for a worker of another machine."""
        return _Share(_Blocks({client: self._data[client] for client in clients}, joined=True), clients)
