"""Depthwise convolution and its gradients against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F

from triton_kernels import fused_ops
from triton_kernels.conv.depthwise import turned_start
from triton_kernels.reference import fused as reference

from .poison import poison_outputs

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# window, zeros around, dilation
FILTERS = [
    ((3, 3), (1, 1), (1, 1)),
    ((7, 7), (3, 3), (1, 1)),
    ((1, 5), (0, 4), (1, 2)),
    ((4, 2), (0, 1), (1, 1)),
    ((3, 3), (2, 5), (2, 3)),
]
SHAPES = [(2, 8, 8, 16), (1, 5, 7, 3), (3, 9, 6, 1), (2, 7, 8, 130), (3, 20, 17, 40)]


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    poison_outputs(monkeypatch)


def drawn(shape, dtype, device, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device, dtype)


def given(shape, window, zeros, dilation, dtype, device):
    n, h, w, c = shape
    size = [
        a + 2 * b - (r - 1) * d for a, b, r, d in zip((h, w), zeros, window, dilation, strict=True)
    ]
    if min(size) < 1:
        pytest.skip("the filter is larger than the image")
    x, weight = (drawn(s, dtype, device, i) for i, s in enumerate((shape, (c, 1, *window))))
    return x, weight, drawn((c,), dtype, device, 2), drawn((n, *size, c), dtype, device, 3)


def exact(x, weight, bias, dy, zeros, dilation):
    """y, and the gradients of x and weight."""
    leaves = [t.double().requires_grad_() for t in (x.permute(0, 3, 1, 2), weight)]
    y = F.conv2d(*leaves, bias.double(), padding=zeros, dilation=dilation, groups=x.shape[3])
    dx, dw = torch.autograd.grad(y, leaves, dy.permute(0, 3, 1, 2).double())
    return y.detach().permute(0, 2, 3, 1), dx.permute(0, 2, 3, 1), dw


def close(actual, expected, terms):
    """Up to the rounding of the result and of a sum of so many terms in float32."""
    assert torch.isfinite(actual).all()
    eps, largest = torch.finfo(actual.dtype).eps, expected.abs().max().item()
    torch.testing.assert_close(
        actual.double(), expected, rtol=eps, atol=4e-8 * terms**0.5 * largest + 1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "zeros", "dilation"), FILTERS)
def test_all_three_passes(window, zeros, dilation, shape, dtype, device):
    x, weight, bias, dy = given(shape, window, zeros, dilation, dtype, device)
    y, dx, dw = exact(x, weight, bias, dy, zeros, dilation)
    taps, size = window[0] * window[1], dy.shape[1:3]
    close(fused_ops.depthwise(x, weight, bias, zeros, dilation, size), y, taps)
    start = turned_start(window, zeros, dilation)
    turned = fused_ops.depthwise(dy, weight, None, start, dilation, x.shape[1:3], turned=True)
    close(turned, dx, taps)
    got = fused_ops.depthwise_weight_grad(x, dy, window, zeros, dilation, torch.float32)
    close(got, dw, dy[..., 0].numel())
    assert got.shape == weight.shape


@pytest.mark.parametrize(("window", "zeros", "dilation"), FILTERS)
def test_the_reference(window, zeros, dilation):
    x, weight, bias, dy = given((2, 8, 7, 5), window, zeros, dilation, torch.float64, "cpu")
    y, dx, dw = exact(x, weight, bias, dy, zeros, dilation)
    back = turned_start(window, zeros, dilation), dilation, x.shape[1:3]
    found = (
        reference.depthwise(x, weight, bias, zeros, dilation, dy.shape[1:3]),
        reference.depthwise(dy, weight, None, *back, turned=True),
        reference.depthwise_weight_grad(x, dy, window, zeros, dilation, torch.float64),
    )
    for actual, expected in zip(found, (y, dx, dw), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("images", [0, 1])
def test_no_images(images, device):
    """The gradient of filters that nothing was convolved with is zero."""
    x, weight = torch.ones(images, 4, 4, 8, device=device), torch.ones(8, 1, 3, 3, device=device)
    y = fused_ops.depthwise(x, weight, None, (1, 1), (1, 1), (4, 4))
    assert y.shape == x.shape
    dw = fused_ops.depthwise_weight_grad(x, y, (3, 3), (1, 1), (1, 1), torch.float32)
    assert dw.any() == bool(images)


@pytest.mark.gpu
def test_gpu_same_bits(device):
    """Of many programs, whose sums are added in one order."""
    x, dy = (drawn((16, 64, 64, 96), torch.bfloat16, device, i) for i in range(2))
    first, *others = (
        fused_ops.depthwise_weight_grad(x, dy, (7, 7), (3, 3), (1, 1), torch.float32)
        for _ in range(4)
    )
    assert all(torch.equal(first, other) for other in others)
