"""Layers that torch computes slowly on a CPU where channels are last in memory: pooling and group normalisation.

Compiled (`fedrp.compiled`). Images here are arrays (examples, height, width,
channels); the innermost loops go over the channels, which lie side by side. One example after the other: it stays in
the cache between the passes over it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from fedrp.compiled import compiled

Array = npt.NDArray[Any]


_NOWHERE = np.uint8(4)  # of four places: the gradient goes to none


def suits(image: torch.Tensor) -> bool:
    """Whether an image (examples, channels, height, width) can be computed here."""
    known = image.device.type == "cpu" and image.dtype in (torch.float32, torch.float64)
    return known and image.ndim == 4 and image.is_contiguous(memory_format=torch.channels_last) and image.numel() > 0


def _array(image: torch.Tensor) -> Array:
    return image.detach().permute(0, 2, 3, 1).numpy()


def _rows(image: Array) -> Array:
    return image.reshape(*image.shape[:2], -1)


def _last(image: torch.Tensor) -> torch.Tensor:
    return image.contiguous(memory_format=torch.channels_last)


# --- max-pooling of squares of four ----------------------------------------------------------------------------------


class HalvingMaxPool(torch.autograd.Function):
    """`max_pool2d(image, 2)`, with a ReLU after it if wanted; of equal values the first has the gradient."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, relu: bool) -> torch.Tensor:
        """The largest of each square; which one it was is kept in a byte."""
        examples, channels, height, width = image.shape
        out = image.new_empty(examples, height // 2, width // 2, channels)
        ctx.places = np.empty(out.shape, np.uint8)
        ctx.shape = (examples, height, width, channels)
        _pool(_array(image), relu, out.numpy(), ctx.places)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient at the places of the largest, zero elsewhere."""
        out = gradient.new_empty(ctx.shape)
        _unpool(_array(_last(gradient)), ctx.places, out.numpy())
        return out.permute(0, 3, 1, 2), None


@compiled
def _pool(image: Array, relu: bool, out: Array, places: Array) -> None:
    least = image.dtype.type(0 if relu else -np.inf)
    for n in range(out.shape[0]):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                a, b = image[n, 2 * i, 2 * j], image[n, 2 * i, 2 * j + 1]
                c, d = image[n, 2 * i + 1, 2 * j], image[n, 2 * i + 1, 2 * j + 1]
                for k in range(out.shape[3]):
                    best, place = a[k], np.uint8(0)
                    # What is no number wins, as in torch, and shows.
                    better = (b[k] > best) | (b[k] != b[k])
                    best, place = (b[k] if better else best), (np.uint8(1) if better else place)
                    better = (c[k] > best) | (c[k] != c[k])
                    best, place = (c[k] if better else best), (np.uint8(2) if better else place)
                    better = (d[k] > best) | (d[k] != d[k])
                    best, place = (d[k] if better else best), (np.uint8(3) if better else place)
                    cut = relu and best <= least
                    out[n, i, j, k] = least if cut else best
                    places[n, i, j, k] = _NOWHERE if cut else place


@compiled
def _unpool(gradient: Array, places: Array, out: Array) -> None:
    zero = gradient.dtype.type(0)
    for n in range(gradient.shape[0]):
        for i in range(gradient.shape[1]):
            for j in range(gradient.shape[2]):
                own, place = gradient[n, i, j], places[n, i, j]
                for corner in range(4):
                    into = out[n, 2 * i + corner // 2, 2 * j + corner % 2]
                    wanted = np.uint8(corner)
                    for k in range(into.size):
                        into[k] = own[k] if np.uint8(place[k] ^ wanted) == np.uint8(0) else zero
        out[n, 2 * gradient.shape[1] :] = zero  # what is left over of an odd size
        out[n, :, 2 * gradient.shape[2] :] = zero


# --- group normalisation ---------------------------------------------------------------------------------------------


class GroupNorm(torch.autograd.Function):
    """`group_norm(image, groups, weight, bias, eps)`, with a ReLU after it if wanted."""

    @staticmethod
    def forward(
        ctx: Any, image: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float, relu: bool
    ) -> torch.Tensor:
        """Keeps the image and, for each example and channel, its mean and the inverse of its deviation."""
        examples, channels, height, width = image.shape
        out = image.new_empty(examples, height, width, channels)
        ctx.means, ctx.inverses = (np.empty((examples, channels), out.numpy().dtype) for _ in range(2))
        ctx.groups, ctx.relu = groups, relu
        ctx.save_for_backward(image, weight, bias)
        affine = weight.detach().numpy(), bias.detach().numpy()
        _normalise(_rows(_array(image)), groups, *affine, eps, relu, _rows(out.numpy()), ctx.means, ctx.inverses)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the image, the weight and the bias."""
        image, weight, bias = ctx.saved_tensors
        out = gradient.new_empty(_array(image).shape)
        sums = np.zeros((2, len(weight)))
        affine = weight.detach().numpy(), bias.detach().numpy()
        arrays = _rows(_array(_last(gradient))), _rows(_array(image))
        _denormalise(*arrays, ctx.groups, *affine, ctx.means, ctx.inverses, ctx.relu, _rows(out.numpy()), sums)
        of_weight, of_bias = torch.from_numpy(sums).to(weight.dtype)
        return out.permute(0, 3, 1, 2), None, of_weight, of_bias, None, None


# An image is (examples, rows, width * channels) below: long loops. What belongs to a channel is repeated for a row.


@compiled
def _add(total: Array, values: Array) -> None:
    for k in range(total.size):
        total[k] += values[k]


@compiled
def _add_squares(total: Array, values: Array, means: Array) -> None:
    for k in range(total.size):
        difference = values[k] - means[k]
        total[k] += difference * difference


@compiled
def _add_products(total: Array, gradient: Array, values: Array, means: Array) -> None:
    for k in range(total.size):
        total[k] += gradient[k] * (values[k] - means[k])


@compiled
def _scale(out: Array, values: Array, scale: Array, shift: Array, least: Any) -> None:
    for k in range(out.size):
        value = values[k] * scale[k] + shift[k]
        out[k] = least if value <= least else value


@compiled
def _pass_positive(out: Array, gradient: Array, values: Array, scale: Array, shift: Array) -> None:
    zero = out.dtype.type(0)
    for k in range(out.size):
        out[k] = zero if values[k] * scale[k] + shift[k] <= zero else gradient[k]


@compiled
def _combine(out: Array, values: Array, scale: Array, slope: Array, constant: Array) -> None:
    for k in range(out.size):
        out[k] = out[k] * scale[k] + values[k] * slope[k] + constant[k]


@compiled
def _repeat(out: Array, values: Array) -> None:
    for k in range(0, out.size, values.size):
        out[k : k + values.size] = values


@compiled
def _by_channel(total: Array, row: Array) -> None:
    total[:] = 0
    for k in range(0, row.size, total.size):
        _add(total, row[k : k + total.size])


@compiled
def _by_group(sums: Array, groups: int) -> None:
    """Each channel gets the sum of its group."""
    size = sums.size // groups
    for g in range(groups):
        sums[g * size : (g + 1) * size] = sums[g * size : (g + 1) * size].sum()


@compiled
def _normalise(
    image: Array,
    groups: int,
    weight: Array,
    bias: Array,
    eps: float,
    relu: bool,
    out: Array,
    means: Array,
    inverses: Array,
) -> None:
    examples, height, length = image.shape
    count = height * length // groups
    total, row, first, second = (
        np.empty(weight.size),
        np.empty(length, weight.dtype),
        np.empty(length, weight.dtype),
        np.empty(length, weight.dtype),
    )
    least = weight.dtype.type(0 if relu else -np.inf)
    for n in range(examples):
        row[:] = 0
        for i in range(height):
            _add(row, image[n, i])
        _by_channel(total, row)
        _by_group(total, groups)
        means[n] = total / count
        _repeat(first, means[n])
        row[:] = 0
        for i in range(height):
            _add_squares(row, image[n, i], first)
        _by_channel(total, row)
        _by_group(total, groups)
        inverses[n] = 1 / np.sqrt(total / count + eps)
        scale = inverses[n] * weight
        _repeat(first, scale)
        _repeat(second, bias - means[n] * scale)
        for i in range(height):
            _scale(out[n, i], image[n, i], first, second, least)


@compiled
def _denormalise(
    gradient: Array,
    image: Array,
    groups: int,
    weight: Array,
    bias: Array,
    means: Array,
    inverses: Array,
    relu: bool,
    out: Array,
    sums: Array,
) -> None:
    examples, height, length = image.shape
    count = height * length // groups
    totals, rows = np.empty((2, weight.size)), np.empty((2, length), weight.dtype)
    first, second, third = np.empty_like(rows[0]), np.empty_like(rows[0]), np.empty_like(rows[0])
    for n in range(examples):
        mean, inverse = means[n], inverses[n]
        scale = inverse * weight
        _repeat(first, scale)
        _repeat(second, bias - mean * scale)
        _repeat(third, mean)
        rows[:] = 0
        for i in range(height):
            if relu:
                _pass_positive(out[n, i], gradient[n, i], image[n, i], first, second)
            else:
                out[n, i] = gradient[n, i]
            _add_products(rows[0], out[n, i], image[n, i], third)
            _add(rows[1], out[n, i])
        _by_channel(totals[0], rows[0])
        _by_channel(totals[1], rows[1])
        totals[0] *= inverse
        _add(sums[0], totals[0])
        _add(sums[1], totals[1])
        totals *= weight
        _by_group(totals[0], groups)
        _by_group(totals[1], groups)
        slope = -totals[0] * inverse * inverse / count
        _repeat(second, slope.astype(weight.dtype))
        _repeat(third, (-totals[1] * inverse / count - slope * mean).astype(weight.dtype))
        for i in range(height):
            _combine(out[n, i], image[n, i], first, second, third)
