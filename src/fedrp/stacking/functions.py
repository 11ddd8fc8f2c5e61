"""Functions and methods of k models at once: what a model's own `forward` may call besides layers.

To add one: a line in `FUNCTIONS` or `METHODS`. Nothing here may mix the examples of a batch.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from fedrp.stacking.layers import convolution, layer_norm, linear, max_pool
from fedrp.stacking.values import NotStackableError, Pass, Stacked, aligned, filled

Function = Callable[..., Any]  # (pass, *arguments) -> Stacked, or a plain value


def _unary(function: Callable[..., torch.Tensor]) -> Function:
    def run(_now: Pass, x: Stacked, *others: Any, **options: Any) -> Stacked:
        if any(isinstance(other, Stacked | torch.Tensor) for other in (*others, *options.values())):
            raise NotStackableError(f"{function.__name__} with several tensors")
        options.pop("inplace", None)  # the rewriter has seen that nobody else uses x
        return x.mapped(lambda tensor: function(tensor, *others, **options))

    return run


def _binary(function: Callable[..., Any]) -> Function:
    def run(_now: Pass, *values: Any) -> Any:
        stacked = [value for value in values if isinstance(value, Stacked)]
        if not stacked:  # sizes, and tensors that are the same for all
            return function(*values)
        first = stacked[0]
        numbers = all(isinstance(value, Stacked | int | float) for value in values)
        if numbers and all(s.is_image == first.is_image and s.shape == first.shape for s in stacked):
            plain = [value.tensor if isinstance(value, Stacked) else value for value in values]
            return Stacked(function(*plain), first.models, first.is_image)
        models, rows = aligned(values)
        return Stacked(function(*rows), models)

    return run


def _matmul(_now: Pass, a: Any, b: Any) -> Stacked:
    if min(len(a.shape), len(b.shape)) < 2:
        raise NotStackableError("a matrix product with a vector")
    models, rows = aligned([a, b])
    return Stacked(torch.matmul(*rows), models)  # type: ignore[arg-type]


def _in_image(function: Callable[..., torch.Tensor]) -> Function:
    def run(_now: Pass, x: Stacked, *others: Any, **options: Any) -> Stacked:
        if len(x.shape) < 3:
            raise NotStackableError(f"{function.__name__} of values of shape {tuple(x.shape)}")
        return x.with_image(function(x.image(), *others, **options))

    return run


def _max_pool(
    _now: Pass,
    x: Stacked,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    relu: bool = False,
) -> Stacked:
    if len(x.shape) < 3:
        raise NotStackableError(f"max_pool2d of values of shape {tuple(x.shape)}")
    return max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices, relu=relu)


def _pad(_now: Pass, x: Stacked, pad: Any, mode: str = "constant", value: float | None = None) -> Stacked:
    if len(pad) // 2 > len(x.shape) - 2:
        raise NotStackableError("padding of channels or examples")
    return x.with_image(F.pad(x.image(), pad, mode, value))


def _linear(_now: Pass, x: Stacked, weight: Any, bias: Any = None) -> Stacked:
    return linear(x, _own(x, weight), None if bias is None else _own(x, bias))


def _conv2d(
    _now: Pass,
    x: Stacked,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Stacked:
    bias = None if bias is None else _own(x, bias)
    return convolution(x, _own(x, weight), bias, stride, padding, dilation, groups)


def _layer_norm(
    _now: Pass, x: Stacked, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Stacked:
    weight, bias = (None if value is None else _own(x, value) for value in (weight, bias))
    return layer_norm(x, tuple(normalized_shape), weight, bias, eps)


def _own(x: Stacked, value: Any) -> torch.Tensor:
    """A weight as (k, *shape)."""
    return value.rows() if isinstance(value, Stacked) else value.expand(x.models, *value.shape)


def _dropout(now: Pass, x: Stacked, p: float = 0.5, training: bool = True, inplace: bool = False) -> Stacked:  # noqa: ARG001
    return now.dropped(x, p) if training else x


def _over(function: Callable[..., torch.Tensor], several: bool) -> Function:
    """A function over a dimension, or over several."""

    def run(_now: Pass, x: Stacked, dim: Any = None, **options: Any) -> Stacked:
        if dim is None or not (isinstance(dim, int) or several):
            raise NotStackableError(f"{function.__name__} without dim")
        axes = x.axis(dim) if isinstance(dim, int) else tuple(x.axis(d) for d in dim)
        return x.with_rows(function(x.rows(), axes, **options))

    return run


def _softmax(function: Callable[..., torch.Tensor]) -> Function:
    def run(_now: Pass, x: Stacked, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Stacked:
        if dim is None:
            raise NotStackableError("softmax without dim")
        return x.with_rows(function(x.rows(), x.axis(dim), dtype=dtype))

    return run


def _flatten(_now: Pass, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Stacked:
    return x.with_rows(x.rows().flatten(x.axis(start_dim), x.axis(end_dim)))


def _reshape(_now: Pass, x: Stacked, *shape: Any) -> Stacked:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape
    return x.with_rows(x.rows().reshape(x.models, *sizes))


def _expand(_now: Pass, x: Stacked, *sizes: int) -> Stacked:
    return x.with_rows(filled(x, len(sizes)).expand(x.models, *sizes))


def _any_axis(x: Stacked, dim: int) -> int:
    return dim % len(x.shape) + 1


def _transpose(_now: Pass, x: Stacked, dim0: int, dim1: int) -> Stacked:
    return x.with_rows(x.rows().transpose(_any_axis(x, dim0), _any_axis(x, dim1)))


def _permute(_now: Pass, x: Stacked, *dims: Any) -> Stacked:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return x.with_rows(x.rows().permute(0, *(_any_axis(x, dim) for dim in order)))


def _unsqueeze(_now: Pass, x: Stacked, dim: int) -> Stacked:
    return x.with_rows(x.rows().unsqueeze(dim % (len(x.shape) + 1) + 1))


def _squeeze(_now: Pass, x: Stacked, dim: int) -> Stacked:
    return x.with_rows(x.rows().squeeze(x.axis(dim)))


def _chunk(_now: Pass, x: Stacked, chunks: int, dim: int = 0) -> tuple[Stacked, ...]:
    return tuple(x.with_rows(part) for part in x.rows().chunk(chunks, x.axis(dim)))


def _split(_now: Pass, x: Stacked, split_size_or_sections: Any, dim: int = 0) -> tuple[Stacked, ...]:
    return tuple(x.with_rows(part) for part in torch.split(x.rows(), split_size_or_sections, x.axis(dim)))


def _cat(_now: Pass, tensors: Any, dim: int = 0) -> Stacked:
    if not all(isinstance(value, Stacked) for value in tensors):
        raise NotStackableError("cat with a tensor that is the same for all")
    first = tensors[0]
    return first.with_rows(torch.cat([value.rows() for value in tensors], first.axis(dim)))  # type: ignore[no-any-return]


def _size(_now: Pass, x: Stacked, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


def _getattr(_now: Pass, x: Any, name: str) -> Any:
    if isinstance(x, Stacked) and name != "shape":
        raise NotStackableError(f"attribute '{name}' of a tensor")
    return getattr(x, name)


def _getitem(_now: Pass, x: Any, index: Any) -> Any:
    if not isinstance(x, Stacked):
        return x[index]
    places = index if isinstance(index, tuple) else (index,)
    whole = places[0] is Ellipsis or places[0] == slice(None)
    if not whole or not all(place is None or place is Ellipsis or isinstance(place, int | slice) for place in places):
        raise NotStackableError("an index into the examples of a batch")
    return x.with_rows(x.rows()[(slice(None), *places)])


def _same(_now: Pass, x: Stacked) -> Stacked:
    return x


def _plain(function: Callable[..., Any]) -> Function:
    def run(_now: Pass, *values: Any, **options: Any) -> Any:
        if any(isinstance(value, Stacked) for value in (*values, *options.values())):
            raise NotStackableError(function.__name__)
        return function(*values, **options)

    return run


_UNARY = (
    *(torch.relu, F.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.elu, F.selu, F.leaky_relu),
    *(F.relu6, F.mish, F.hardtanh, F.hardswish, F.hardsigmoid, F.softplus, F.softsign, F.logsigmoid, torch.exp),
    *(torch.log, torch.abs, torch.sqrt, torch.rsqrt, torch.square, torch.sin, torch.cos, torch.neg, operator.neg),
    torch.clamp,
)
_BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.pow, operator.eq),
    *(operator.ne, operator.lt, operator.le, operator.gt, operator.ge, torch.add, torch.sub, torch.mul, torch.div),
    *(torch.maximum, torch.minimum, torch.pow),
)
_POOLING = (
    *(F.max_pool1d, F.avg_pool1d, F.avg_pool2d, torch.max_pool1d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
)
MAX_POOLING = (F.max_pool2d, torch.max_pool2d)
RELU = (torch.relu, F.relu)
IMAGE_FUNCTIONS: dict[Any, Function] = {function: _in_image(function) for function in _POOLING} | {
    **dict.fromkeys(MAX_POOLING, _max_pool),
    F.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    F.pad: _pad,
}
FUNCTIONS: dict[Any, Function] = {
    **{function: _unary(function) for function in _UNARY},
    **{function: _binary(function) for function in _BINARY},
    **IMAGE_FUNCTIONS,
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.dropout: _dropout,
    F.softmax: _softmax(torch.softmax),
    F.log_softmax: _softmax(torch.log_softmax),
    torch.softmax: _softmax(torch.softmax),
    torch.log_softmax: _softmax(torch.log_softmax),
    torch.matmul: _matmul,
    torch.bmm: _matmul,
    operator.matmul: _matmul,
    torch.mean: _over(torch.mean, several=True),
    torch.sum: _over(torch.sum, several=True),
    torch.amax: _over(torch.amax, several=True),
    torch.flatten: _flatten,
    torch.reshape: _reshape,
    torch.transpose: _transpose,
    torch.permute: _permute,
    torch.unsqueeze: _unsqueeze,
    torch.squeeze: _squeeze,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.cat: _cat,
    torch.arange: _plain(torch.arange),
    operator.getitem: _getitem,
    getattr: _getattr,
}
METHODS: dict[str, Function] = {
    **{name: FUNCTIONS[getattr(torch, name)] for name in ("relu", "tanh", "sigmoid", "exp", "log", "abs", "sqrt")},
    **{name: FUNCTIONS[getattr(torch, name)] for name in ("clamp", "square", "add", "sub", "mul", "div", "pow")},
    **{name: FUNCTIONS[getattr(torch, name)] for name in ("softmax", "log_softmax", "matmul", "bmm", "mean", "sum")},
    **{name: FUNCTIONS[getattr(torch, name)] for name in ("amax", "flatten", "reshape", "transpose", "permute")},
    **{name: FUNCTIONS[getattr(torch, name)] for name in ("unsqueeze", "squeeze", "chunk", "split")},
    "view": _reshape,
    "expand": _expand,
    "size": _size,
    "dim": lambda _now, x: len(x.shape),
    "float": _unary(torch.Tensor.float),
    "contiguous": _same,
}
