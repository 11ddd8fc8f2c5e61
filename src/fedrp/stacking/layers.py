"""Layers of k models at once: what each known layer of torch does to a stacked value.

To add a layer: a function and a line in `LAYERS`. A subclass of a known layer is not known: it may compute otherwise.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from fedrp.stacking.kernels import GroupNorm, HalvingMaxPool, suits
from fedrp.stacking.values import NotStackableError, Pass, Stacked, split

_HALVING = [(size, step, 0, 1, False, False) for size in (2, (2, 2)) for step in (None, 2, (2, 2))]  # of `max_pool`
Layer = Callable[..., Any]  # (pass, layer, *inputs) -> Stacked, or a tuple of what the layer returns


def linear(x: Stacked, weight: torch.Tensor, bias: torch.Tensor | None) -> Stacked:
    """X W' + b; weight (k, outputs, inputs)."""
    rows = x.rows()
    flat = rows.reshape(x.models, -1, rows.shape[-1])
    across = weight.transpose(1, 2)
    result = torch.bmm(flat, across) if bias is None else torch.baddbmm(bias[:, None], flat, across)
    return x.with_rows(result.reshape(*rows.shape[:-1], -1))


def convolution(
    x: Stacked, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Stacked:
    """A convolution over one or two dimensions of space; weight (k, outputs, inputs / groups, *kernel)."""
    if len(x.shape) != weight.ndim - 1:
        raise NotStackableError(f"a convolution gets values of shape {tuple(x.shape)}")
    operation = {4: F.conv1d, 5: F.conv2d}[weight.ndim]
    bias = None if bias is None else bias.flatten()
    groups *= x.models
    return x.with_image(operation(x.image(), weight.flatten(0, 1), bias, stride, padding, dilation, groups))


def layer_norm(x: Stacked, shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Stacked:
    """Normalised over the last dimensions, then scaled and moved by each model's own weight and bias."""
    if len(shape) >= len(x.shape):
        raise NotStackableError("an operation goes over the examples of a batch")
    result = F.layer_norm(x.rows(), shape, eps=eps)
    spread = (x.models, *(1 for _ in range(len(x.shape) - len(shape))), *shape)
    if weight is not None:
        result = result * weight.reshape(spread)
    return x.with_rows(result if bias is None else result + bias.reshape(spread))


def _linear(now: Pass, layer: nn.Linear, x: Stacked) -> Stacked:
    return linear(x, now.parameter(layer.weight), _optional(now, layer.bias))


def _convolution(now: Pass, layer: nn.Conv1d | nn.Conv2d, x: Stacked) -> Stacked:
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = x.with_image(F.pad(x.image(), layer._reversed_padding_repeated_twice, layer.padding_mode)), 0
    weight, bias = now.parameter(layer.weight), _optional(now, layer.bias)
    return convolution(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _group_norm(now: Pass, layer: nn.GroupNorm, x: Stacked, relu: bool = False) -> Stacked:
    weight, bias = (None if p is None else now.parameter(p).flatten() for p in (layer.weight, layer.bias))
    image, groups = x.image(), x.models * layer.num_groups
    if weight is not None and bias is not None and suits(image):
        return x.with_image(GroupNorm.apply(image, groups, weight, bias, layer.eps, relu))  # type: ignore[no-untyped-call]
    result = F.group_norm(image, groups, weight, bias, layer.eps)
    return x.with_image(F.relu(result) if relu else result)


def max_pool(x: Stacked, *options: Any, relu: bool = False) -> Stacked:
    """Max-pooling over two dimensions of space, and a ReLU if wanted; options as torch takes them."""
    image = x.image()
    if options in _HALVING and suits(image):
        return x.with_image(HalvingMaxPool.apply(image, relu))  # type: ignore[no-untyped-call]
    result = F.max_pool2d(image, *options)
    return x.with_image(F.relu(result) if relu else result)


def _max_pool(_now: Pass, layer: nn.MaxPool2d, x: Stacked, relu: bool = False) -> Stacked:
    window = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    return max_pool(x, *window, layer.ceil_mode, layer.return_indices, relu=relu)


def _layer_norm(now: Pass, layer: nn.LayerNorm, x: Stacked) -> Stacked:
    weight, bias = _optional(now, layer.weight), _optional(now, layer.bias)
    return layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _embedding(now: Pass, layer: nn.Embedding, x: Stacked) -> Stacked:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise NotStackableError("an Embedding with max_norm or scale_grad_by_freq")
    pairs = zip(x.rows(), now.parameter(layer.weight), strict=True)  # one by one: no copy of the tables
    return x.with_rows(torch.stack([F.embedding(index, table, layer.padding_idx) for index, table in pairs]))


def _elementwise(_now: Pass, layer: nn.Module, x: Stacked) -> Stacked:
    if isinstance(layer, nn.ReLU):
        return x.mapped(F.relu)
    return x.mapped(lambda tensor: layer(tensor.clone() if getattr(layer, "inplace", False) else tensor))


def _in_image(_now: Pass, layer: nn.Module, x: Stacked) -> Stacked:
    """A layer that treats channels alike: the models' channels are just more of them."""
    if len(x.shape) < 3:
        raise NotStackableError(f"a layer for channels gets values of shape {tuple(x.shape)}")
    return x.with_image(layer(x.image()))


def _dropout(now: Pass, layer: nn.Dropout, x: Stacked) -> Stacked:
    return now.dropped(x, layer.p)


def _channel_dropout(now: Pass, layer: nn.Dropout2d, x: Stacked) -> Stacked:
    return now.dropped(x, layer.p, features=True)


def _flatten(_now: Pass, layer: nn.Flatten, x: Stacked) -> Stacked:
    return x.with_rows(x.rows().flatten(x.axis(layer.start_dim), x.axis(layer.end_dim)))


def _unflatten(_now: Pass, layer: nn.Unflatten, x: Stacked) -> Stacked:
    place, rows = x.axis(int(layer.dim)), x.rows()
    return x.with_rows(rows.reshape(*rows.shape[:place], *layer.unflattened_size, *rows.shape[place + 1 :]))


def _softmax(_now: Pass, layer: nn.Softmax | nn.LogSoftmax, x: Stacked) -> Stacked:
    if layer.dim is None:
        raise NotStackableError("a Softmax without dim")
    operation = F.softmax if isinstance(layer, nn.Softmax) else F.log_softmax
    return x.with_rows(operation(x.rows(), x.axis(layer.dim)))


def _attention(
    now: Pass,
    layer: nn.MultiheadAttention,
    query: Stacked,
    key: Stacked,
    value: Stacked,
    key_padding_mask: Stacked | None = None,
    need_weights: bool = True,  # noqa: ARG001 - the layer's own signature
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001 - as above
    is_causal: bool = False,  # noqa: ARG001 - only ever says what the mask is like
) -> tuple[Stacked, None]:
    """Attention without its weights: a model that uses those gets None for them, and is refused when it is checked."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn or len(query.shape) != 3:
        raise NotStackableError("attention with keys of another size, added keys, or without a batch")
    if attn_mask is not None and (isinstance(attn_mask, Stacked) or attn_mask.ndim != 2):
        raise NotStackableError("attention with a mask for each example")
    weights = now.parameter(layer.in_proj_weight).chunk(3, dim=1)
    biases = [None] * 3 if layer.in_proj_bias is None else now.parameter(layer.in_proj_bias).chunk(3, dim=1)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        rows = linear(x, weight, bias).tensor
        rows = rows if layer.batch_first else rows.transpose(1, 2)
        heads.append(split(rows, 3, layer.num_heads).transpose(2, 3))  # (k, batch, heads, length, size)
    mask = None if attn_mask is None else _additive(attn_mask, heads[0])
    if key_padding_mask is not None:
        padded = _additive(key_padding_mask.rows(), heads[0])[:, :, None, None]
        mask = padded if mask is None else mask + padded
    if mask is not None and mask.ndim == 5:
        mask = mask.flatten(0, 1)
    flat = [head.flatten(0, 1) for head in heads]
    mixed = split(F.scaled_dot_product_attention(flat[0], flat[1], flat[2], attn_mask=mask), 0, query.models)
    mixed = mixed.transpose(2, 3).flatten(3)
    mixed = mixed if layer.batch_first else mixed.transpose(1, 2)
    out = layer.out_proj
    return linear(query.with_rows(mixed), now.parameter(out.weight), _optional(now, out.bias)), None


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:  # true where nothing may look
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)


def _encoder_layer(
    now: Pass,
    layer: nn.TransformerEncoderLayer,
    src: Stacked,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: Stacked | None = None,
    is_causal: bool = False,  # noqa: ARG001 - only ever says what the mask is like
) -> Stacked:
    def attend(x: Stacked) -> Stacked:
        mixed, _ = _attention(now, layer.self_attn, x, x, x, src_key_padding_mask, attn_mask=src_mask)
        return _dropout(now, layer.dropout1, mixed)

    def feed(x: Stacked) -> Stacked:
        hidden = _linear(now, layer.linear1, x).mapped(layer.activation)  # relu or gelu, or else what the check refuses
        return _dropout(now, layer.dropout2, _linear(now, layer.linear2, _dropout(now, layer.dropout, hidden)))

    def add(x: Stacked, y: Stacked) -> Stacked:
        return x.with_rows(x.rows() + y.rows())

    if layer.norm_first:
        x = add(src, attend(_layer_norm(now, layer.norm1, src)))
        return add(x, feed(_layer_norm(now, layer.norm2, x)))
    x = _layer_norm(now, layer.norm1, add(src, attend(src)))
    return _layer_norm(now, layer.norm2, add(x, feed(x)))


def _encoder(
    now: Pass,
    layer: nn.TransformerEncoder,
    src: Stacked,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: Stacked | None = None,
    is_causal: bool | None = None,  # noqa: ARG001 - as above
) -> Stacked:
    for inner in layer.layers:
        src = _known(inner)(now, inner, src, mask, src_key_padding_mask)
    return src if layer.norm is None else _known(layer.norm)(now, layer.norm, src)


def _identity(_now: Pass, _layer: nn.Module, x: Stacked) -> Stacked:
    return x


def _optional(now: Pass, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else now.parameter(parameter)


def _known(layer: nn.Module) -> Layer:
    if type(layer) not in LAYERS:
        raise NotStackableError(f"a {type(layer).__name__}")
    return LAYERS[type(layer)]


_POOLS_AND_PADDING = (
    *(nn.MaxPool1d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ConstantPad1d, nn.ConstantPad2d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d),
)
IMAGE_LAYERS: dict[type[nn.Module], Layer] = {
    **dict.fromkeys(_POOLS_AND_PADDING, _in_image),
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.MaxPool2d: _max_pool,
}
WITH_RELU = (nn.GroupNorm, nn.MaxPool2d)  # these take a ReLU with them

ACTIVATIONS: dict[type[nn.Module], Layer] = dict.fromkeys(
    (
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
        *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink),
    ),
    _elementwise,
)
LAYERS: dict[type[nn.Module], Layer] = {
    **IMAGE_LAYERS,
    **ACTIVATIONS,
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.Dropout: _dropout,
    nn.Dropout1d: _channel_dropout,
    nn.Dropout2d: _channel_dropout,
    nn.Flatten: _flatten,
    nn.Unflatten: _unflatten,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.Identity: _identity,
}
