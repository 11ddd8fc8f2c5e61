"""Normal deviates from a key's stream, in tiles, on several threads."""

import numpy as np

from fedrp.crypto.secret import SecretKey
from fedrp.projection import kernels
from fedrp.projection.base import FloatArray

UNIT = 2 * kernels.PAIRS  # the deviates that are made together: widths and offsets are multiples of it
_STREAM_WORDS = 1 << 15  # the stream passes from AES to Box-Muller through the second-level cache


def fill_normals(key: SecretKey, tile: FloatArray, first: int, pitch: int, scale: float) -> None:
    """Fill a tile of whole units with deviates: row i with those of the stream's words from first + i * pitch on."""
    if tile.shape[1] == pitch:
        tile = tile.reshape(1, -1)  # whole rows are one stretch of the stream
    segments = -(-tile.shape[1] // _STREAM_WORDS)
    kernels.run(_fill, len(tile) * segments, tile.size, key, tile, first, pitch, np.float32(scale), segments)


def _fill(
    key: SecretKey, tile: FloatArray, first: int, pitch: int, scale: np.float32, segments: int, start: int, stop: int
) -> None:
    words = np.empty(min(tile.shape[1], _STREAM_WORDS), "<u4")
    for task in range(start, stop):
        i, j = task // segments, task % segments * _STREAM_WORDS
        part = tile[i, j : j + _STREAM_WORDS]
        key.keystream_into(words[: part.size], 4 * (first + i * pitch + j))
        kernels.normals(words[: part.size], scale, part)
