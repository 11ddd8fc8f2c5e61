"""Compiled layers of the stacked engine against torch's own."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from fedrp.stacking.kernels import GroupNorm, HalvingMaxPool, suits

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
RELU = pytest.mark.parametrize("relu", [False, True])


def image(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return values.contiguous(memory_format=torch.channels_last)


@TYPES
@RELU
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (2, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_pooling_is_torchs_to_the_bit(dtype: torch.dtype, relu: bool, size: tuple[int, int], ties: bool) -> None:
    x = image(3, 5, *size, dtype=dtype)
    x = (x.round() if ties else x).requires_grad_()
    wanted = F.max_pool2d(F.relu(x) if relu else x, 2)
    found = HalvingMaxPool.apply(x, relu)
    gradient = image(*wanted.shape, dtype=dtype, seed=1)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y, x, gradient)[0] for y in (found, wanted)))


def test_pooling_shows_what_is_no_number() -> None:
    x = torch.zeros(4, 1, 2, 2)
    for place in range(4):
        x[place].view(-1)[place] = torch.nan
    assert HalvingMaxPool.apply(x.contiguous(memory_format=torch.channels_last), True).isnan().all()


@TYPES
@RELU
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_norm_is_torchs_up_to_rounding(dtype: torch.dtype, relu: bool, groups: int) -> None:
    x = (image(4, 6, 5, 7, dtype=dtype) + 2).requires_grad_()
    weight, bias = (image(2, 6, 1, 1, dtype=dtype, seed=1)[row].flatten().requires_grad_() for row in range(2))
    wanted = F.group_norm(x, groups, weight, bias, 1e-5)
    wanted = F.relu(wanted) if relu else wanted
    found = GroupNorm.apply(x, groups, weight, bias, 1e-5, relu)
    gradient = image(*wanted.shape, dtype=dtype, seed=2)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    leaves = [x, weight, bias]
    for own, others in zip(*(torch.autograd.grad(y, leaves, gradient) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(own, others, rtol=tolerance, atol=tolerance)


def test_other_memory_orders_and_types_are_left_to_torch() -> None:
    assert suits(image(2, 3, 4, 4))
    assert not suits(image(2, 3, 4, 4).contiguous())
    assert not suits(image(2, 3, 4, 4).half())
