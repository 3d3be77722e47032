"""Filters in another order of memory against PyTorch's copy, which is exact."""

import math

import pytest
import torch

from triton_kernels import fused_ops
from triton_kernels.conv.plain import reorder as module

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(5, 70, 3, 3), (3, 1, 5, 1), (1, 130, 7, 7), (4, 257, 5), (2, 3, 1), (6, 5, 1, 1)]


def pair(shape, dtype, out_dtype, device, back):
    """Filters of PyTorch, or with `back` in the order of kernels, and a place in the other one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    theirs, ours = x, in_order(x)
    x, like = (ours, theirs) if back else (theirs, ours)
    out = torch.empty_strided(shape, like.stride(), dtype=out_dtype, device=device)
    return x, out.fill_(float("nan"))


def in_order(x):
    order = (0, *range(2, x.ndim), 1)
    return x.permute(order).contiguous().permute(0, x.ndim - 1, *range(1, x.ndim - 1))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(shape, dtype, out_dtype, back, device):
    x, out = pair(shape, dtype, out_dtype, device, back)
    stride = out.stride()
    fused_ops.reorder(x, out)
    assert torch.equal(out, x.to(out_dtype)) and out.stride() == stride


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_a_kernel(shape, device):
    """And not by PyTorch's copy."""
    co, ci, *taps = shape
    sizes = {
        back: module._transposed(*pair(shape, torch.float32, torch.float32, device, back))
        for back in (False, True)
    }
    taps = math.prod(taps)
    assert sizes[False] == (co, ci, taps) and sizes[True] in ((co, taps, ci), (co, ci, taps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_what_pytorch_copies(dtype, device):
    """Other dtypes, three-dimensional filters, none at all, and parts of a tensor."""
    x = torch.arange(3 * 40 * 9, device=device).view(3, 40, 3, 3).to(dtype)
    given = [(x, torch.empty_like(x, memory_format=torch.channels_last))]
    y = torch.randn(2, 3, 2, 2, 2, device=device)
    given += [(y, torch.empty_like(y, memory_format=torch.channels_last_3d)), (x[:0], x[:0] + 1)]
    part = torch.randn(4, 8, 3, 3, device=device)[:, ::2]
    given += [(part, torch.empty_like(part, memory_format=torch.channels_last))]
    for x, out in given:
        fused_ops.reorder(x, out)
        assert torch.equal(out, x)


@pytest.mark.gpu
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [(1280, 640, 3, 3), (2048, 1024, 5), (64, 3, 7, 7)], ids=str)
def test_shapes_of_networks(shape, back, device):
    x, out = pair(shape, torch.float32, torch.bfloat16, device, back)
    module.reorder(x, out)
    assert torch.equal(out, x.bfloat16())
