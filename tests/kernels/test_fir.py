"""Resampling by FIR filters against PyTorch in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from triton_kernels import fused_ops
from triton_kernels.reference import fused as reference
from triton_kernels.resample.fir import adjoint

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SMOOTH = ((1.0, 3.0, 3.0, 1.0), (2.0, 6.0, 6.0, 2.0), (3.0, 9.0, 9.0, 3.0), (1.0, 3.0, 3.0, 1.0))
UNEVEN = ((0.25, 0.0, -1.5), (0.0, 0.5, 2.0))
# taps, up, down, zeros above and left, and below and right
CASES = [
    (SMOOTH, 1, 2, (1, 1), (1, 1)),
    (SMOOTH, 2, 1, (2, 2), (1, 1)),
    (UNEVEN, 1, 1, (1, 0), (0, 2)),
    (UNEVEN, 3, 2, (2, 4), (0, 3)),
    (((2.0,),), 1, 3, (0, 0), (0, 0)),
]
SHAPES = [(2, 8, 8, 16), (1, 5, 7, 3), (7, 6, 9, 1), (2, 3, 4, 300)]


def _size(shape, taps, up, down, start, end):
    """Of the result, where `end` zeros are below and right of the image."""
    whole = (n * up + a + b for n, a, b in zip(shape[1:3], start, end, strict=True))
    return tuple((n - k) // down + 1 for n, k in zip(whole, (len(taps), len(taps[0])), strict=True))


def _by_definition(x, taps, up, down, start, size):
    """y[p, q] = sum of taps[i, j] z[p down + i - top, q down + j - left], number by number."""
    h, w = x.shape[1:3]
    y = x.new_zeros((x.shape[0], *size, x.shape[3]))
    for p, q in itertools.product(*map(range, size)):
        for i, row in enumerate(taps):
            for j, tap in enumerate(row):
                a, b = p * down + i - start[0], q * down + j - start[1]
                if 0 <= a < h * up and 0 <= b < w * up and a % up == b % up == 0:
                    y[:, p, q] += tap * x[:, a // up, b // up]
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("taps", "up", "down", "start", "end"), CASES)
def test_filtered(taps, up, down, start, end, shape, dtype, device):
    size = _size(shape, taps, up, down, start, end)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = drawn.to(device, dtype)
    y = fused_ops.fir(x, taps, up, down, start, size)
    z = reference.fir(x.double(), taps, up, down, start, size)
    assert y.dtype == dtype and y.shape == z.shape == (shape[0], *size, shape[3])
    torch.testing.assert_close(y.double(), z, rtol=torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize(("taps", "up", "down", "start", "end"), CASES)
def test_the_reference(taps, up, down, start, end):
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64)
    size = _size(x.shape, taps, up, down, start, end)
    y = reference.fir(x, taps, up, down, start, size)
    torch.testing.assert_close(y, _by_definition(x, taps, up, down, start, size))


@pytest.mark.parametrize(("taps", "up", "down", "start", "end"), CASES)
def test_the_adjoint(taps, up, down, start, end, device):
    """<fir(x), dy> = <x, adjoint(dy)>"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 5, 4, generator=generator).to(device)
    size = _size(x.shape, taps, up, down, start, end)
    y = fused_ops.fir(x, taps, up, down, start, size)
    dy = torch.randn(y.shape, generator=generator).to(device)
    dx = fused_ops.fir(dy, **adjoint(taps, up, down, start), size=x.shape[1:3])
    torch.testing.assert_close((y * dy).sum(), (x * dx).sum(), rtol=1e-5, atol=1e-4)


# taps, stride, pixels mirrored above, below, left and right, and pixels that a transposed
# convolution leaves out; None: the most that can be mirrored, and an ordinary convolution
MIRRORED = {
    "halved": (SMOOTH, 2, (1, 1, 1, 1), None),
    "filtered": (UNEVEN, 1, (1, 2, 0, 2), None),
    "doubled": (SMOOTH, 2, (1, 1, 1, 1), 3),
    "with others between": (UNEVEN, 3, (1, 2, 2, 0), 2),
    "copied": (((1.0,),), 1, (2, 0, 1, 2), None),
    "as far as it goes": (UNEVEN, 1, None, None),
    "as far as it goes, doubled": (UNEVEN, 2, None, 2),
}
OF_NETWORKS = pytest.param((8, 64, 64, 320), marks=pytest.mark.gpu)
MIRRORED_SHAPES = [(1, 5, 7, 3), (2, 4, 3, 1), (1, 3, 9, 260), OF_NETWORKS]


def _by_pytorch(x, taps, stride, mirrored, left_out):
    """The padded image's convolution [N, C, P, Q], and the options of `fir` for it."""
    c, r, s = x.shape[1], len(taps), len(taps[0])
    z = F.pad(x, (*mirrored[2:], *mirrored[:2]), mode="reflect")
    filters = torch.tensor(taps).to(x).expand(c, 1, r, s)
    start = mirrored[0], mirrored[2]
    if left_out is None:
        y = F.conv2d(z, filters, stride=stride, groups=c)
        how = {"taps": taps, "up": 1, "down": stride, "start": start}
    else:
        y = F.conv_transpose2d(z, filters, stride=stride, padding=left_out, groups=c)
        before = (n - 1 - left_out + stride * a for n, a in zip((r, s), start, strict=True))
        turned = tuple(row[::-1] for row in taps[::-1])
        how = {"taps": turned, "up": stride, "down": 1, "start": tuple(before)}
    return y, how | {"border": "reflect"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MIRRORED_SHAPES, ids=str)
@pytest.mark.parametrize("name", MIRRORED)
def test_mirrored(name, shape, dtype, device):
    """And its gradient, of the reference in float64 and of the kernel."""
    taps, stride, mirrored, left_out = MIRRORED[name]
    if mirrored is None:
        mirrored = shape[1] - 1, shape[1] - 1, shape[2] - 1, shape[2] - 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    images = x.double().permute(0, 3, 1, 2).requires_grad_()
    y, how = _by_pytorch(images, taps, stride, mirrored, left_out)
    dy = torch.randn(y.permute(0, 2, 3, 1).shape, generator=generator).to(device, dtype)
    (dx,) = torch.autograd.grad(y, images, dy.double().permute(0, 3, 1, 2))
    forward = how | {"size": y.shape[2:]}
    backward = adjoint(**how) | {"size": shape[1:3]}
    for given, options, expected in ((x, forward, y), (dy, backward, dx)):
        expected = expected.detach().permute(0, 2, 3, 1)
        torch.testing.assert_close(reference.fir(given.double(), **options), expected)
        made = fused_ops.fir(given, **options)
        assert made.dtype == dtype
        summands = options | {"taps": tuple(tuple(map(abs, row)) for row in options["taps"])}
        sums = reference.fir(given.double().abs(), **summands)  # are 16 times rounded to float32
        of = torch.finfo(dtype)  # where numbers are denormal, they are no closer than that
        allowed = of.eps * expected.abs().clamp(min=of.smallest_normal) + 16 * 2**-24 * sums
        assert bool(((made.double() - expected).abs() <= allowed).all())


def test_no_images(device):
    x = torch.zeros(0, 4, 4, 8, device=device)
    assert fused_ops.fir(x, SMOOTH, 1, 2, (1, 1), (2, 2)).shape == (0, 2, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("up", [1, 2])
@pytest.mark.parametrize("shape", [(64, 32, 32, 128), (4096, 16, 16, 1), (8, 64, 64, 320)], ids=str)
def test_shapes_of_networks(shape, up, device):
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    size = tuple(n * 2 if up == 2 else n // 2 for n in shape[1:3])
    filters = torch.tensor(SMOOTH, device=device).expand(shape[3], 1, 4, 4)
    if up == 2:
        z = F.conv_transpose2d(x.float(), filters, stride=2, padding=1, groups=shape[3])
        how = adjoint(SMOOTH, 1, 2, (1, 1))
    else:
        z = F.conv2d(x.float(), filters, stride=2, padding=1, groups=shape[3])
        how = {"taps": SMOOTH, "up": 1, "down": 2, "start": (1, 1)}
    y = fused_ops.fir(x.permute(0, 2, 3, 1).contiguous(), **how, size=size)
    torch.testing.assert_close(y.permute(0, 3, 1, 2).float(), z, rtol=8e-3, atol=1e-3)
