"""Augmentation: each time an image is taken for a batch it is moved a little, and perhaps mirrored.

An augmented data set holds every image in several versions, of which none is stored: version v of image i has the
number v * images + i. Batches draw such numbers, and `taken` makes the images when a batch is taken.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedrp.errors import ConfigError
from fedrp.learning.objective import Examples, described
from fedrp.learning.pixels import Inputs, Pixels

_FLIP_CROP = "flip-crop"  # of `fedrp.config.run.AUGMENTS`
_PADDING = 4  # black pixels on each side, from which an image of the old size is cut
_PLACES = 2 * _PADDING + 1  # where a cut can begin, each way
_VERSIONS = 2 * _PLACES**2


def require_images(augment: str, parts: Sequence[Examples], owners: Sequence[str] = ()) -> None:
    """Refuse augmentation of what is no image; `owners` say in the error whose the parts are.

    Raises:
        ConfigError: some inputs are not (N, channels, height, width) numbers.
    """
    for number, part in enumerate(parts) if augment == _FLIP_CROP else ():
        whole = isinstance(part.x, torch.Tensor) and not part.x.is_floating_point()
        if part.x.ndim != 4 or whole:
            owner = owners[number] if owners else "the training data"
            raise ConfigError(
                f"augment='{augment}' is for images (N, channels, height, width), but inputs of {owner} are "
                f"{described(part.x)}: use augment='none'"
            )


def versions(augment: str, images: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """What is added to the numbers of a data set's images, in any order of them, to take a random version of each."""
    return rng.integers(_VERSIONS, size=images) * images if augment == _FLIP_CROP else np.zeros(images, np.int64)


def taken(data: Examples, numbers: torch.Tensor, augment: str) -> Examples:
    """The examples of these numbers, images in the version that their number says."""
    if augment != _FLIP_CROP:
        return Examples(data.x[numbers], data.y[numbers])
    index, version = numbers % len(data.y), numbers // len(data.y)
    return Examples(_moved(data.x[index], version), data.y[index])


def _moved(images: Inputs, version: torch.Tensor) -> Inputs:
    """Images as each is seen in its version. Bytes stay bytes; memory is in the order that convolutions want."""
    if isinstance(images, Pixels):
        return Pixels(_cut(images.raw, version), images.scale)
    return _cut(images, version)


def _cut(images: torch.Tensor, version: torch.Tensor) -> torch.Tensor:
    height, width = images.shape[2:]
    mirrored, top, left = version % 2, version // 2 % _PLACES, version // 2 // _PLACES
    padded = torch.nn.functional.pad(images, [_PADDING] * 4).permute(0, 2, 3, 1)
    rows = top[:, None] + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(mirrored[:, None] > 0, width - 1 - across, across)
    image = torch.arange(len(images), device=images.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
