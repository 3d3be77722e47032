"""Fused convolutions and their gradients beside the reference in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from triton_kernels import reference
from triton_kernels.conv.fused import conv_forward, conv_input_grad
from triton_kernels.conv.plain import gather as conv_gather, gather_wgrad
from triton_kernels.conv.plain.by_tma import tma as conv_tma
from triton_kernels.conv.plain.by_tma.tma_boxes import (
    boxes_of_image,
    covering_box,
    image_box,
    row_box,
)
from triton_kernels.conv.weight_grad import conv_weight_grad
from triton_kernels.runtime.device import describe


class Shape(NamedTuple):
    n: int
    h: int
    w: int
    ci: int
    co: int
    kernel: int = 3


SMALL = {
    "3x3": Shape(2, 8, 8, 72, 40),
    "wide": Shape(1, 8, 24, 8, 72),
    "images of 16 pixels": Shape(5, 4, 4, 16, 24),
    "rows of 12": Shape(3, 12, 12, 8, 16),
    "1x1": Shape(3, 8, 8, 40, 72, 1),
    "empty batch": Shape(0, 8, 8, 8, 16),
}

# Where no tile of a power of two divides the images
RAGGED = {
    "7x7": Shape(3, 7, 7, 24, 40),
    "14x10": Shape(2, 14, 10, 16, 24),
    "6x6": Shape(5, 6, 6, 16, 72),
    "2x2": Shape(5, 2, 2, 16, 24),
    "single pixels": Shape(3, 1, 1, 16, 24),
    "1x1": Shape(3, 5, 7, 40, 72, 1),
}

# The relative error of rounding once to the dtype. Float32 is multiplied in TF32, which drops the
# last 13 bits of both operands: in the mean 2^-11 of each, so products are 2^-10 too small.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-9, torch.float32: 1.5 * 2**-10}


def relative(got: Tensor, exact: Tensor) -> float:
    assert got.shape == exact.shape
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def randn(*shape: int, seed: int, device, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def make_weight(shape: Shape, dtype, device) -> Tensor:
    """A view into a flat buffer, as in the optimizer's 16-bit copy of the parameters."""
    k = shape.kernel
    w = randn(shape.co, k, k, shape.ci, seed=1, device=device) / (k * k * shape.ci) ** 0.5
    flat = torch.full((w.numel() + 32,), float("nan"), device=device, dtype=dtype)
    view = flat[16 : 16 + w.numel()].view(w.shape)
    view.copy_(w)
    return view.permute(0, 3, 1, 2)


def tiles(x: Tensor, box: tuple[int, int, int]) -> Tensor:
    """[N, H, W, C] as [N, K, pixels of a tile that are inside, C]."""
    _, h, w, _ = x.shape
    _, th, tw = box
    corners = [(i, j) for i in range(0, h, th) for j in range(0, w, tw)]
    return torch.stack([x[:, i : i + th, j : j + tw].flatten(1, 2) for i, j in corners], dim=1)


def forward_case(shape: Shape, dtype, device):
    """Arguments of conv_forward; emb is a column slice, as of one matrix for all blocks."""
    n, h, w, ci, co, _ = shape
    emb = randn(n, co + 24, seed=3, device=device)[:, 16 : 16 + co]
    x = randn(n, h, w, ci, seed=0, device=device, dtype=dtype)
    residual = randn(n, h, w, co, seed=4, device=device, dtype=dtype) + 3
    bias = randn(co, seed=2, device=device)
    return x, make_weight(shape, dtype, device), bias, emb, residual


def forward_reference(x, weight, bias, emb, residual, dtype):
    x, weight, bias, emb, residual = (t.to(dtype) for t in (x, weight, bias, emb, residual))
    return reference.conv2d(x, weight, bias) + emb[:, None, None, :] + residual


def check_forward(shape: Shape, dtype, device, config=None, factor=None):
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    terms = {"emb": emb, "residual": residual, "factor": factor}
    y, partials = conv_forward(x, weight, bias, **terms, stats=True, config=config)
    exact = forward_reference(x, weight, bias, emb, residual, torch.float64)
    exact = exact if factor is None else factor * exact
    assert y.dtype == dtype
    terms = shape.kernel**2 * shape.ci
    assert relative(y, exact) <= ROUNDING[dtype] + 2**-24 * terms**0.5
    if shape.n:
        check_stats(y, partials)
    return y, partials


def check_padded(shape: Shape, dtype, device, config) -> list[Tensor]:
    """A result of 16 channels, of which the filters have fewer: the others are zeros."""
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    y, partials = conv_forward(x, weight, bias, width=16, config=config)
    exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
    assert partials is None and y.dtype == dtype
    assert relative(y[..., : shape.co], exact) <= ROUNDING[dtype] + 2**-24 * (9 * shape.ci) ** 0.5
    assert not y[..., shape.co :].any()
    return [y]


def check_stats(y: Tensor, partials: Tensor):
    """The statistics describe what was stored, to the precision of float32."""
    n, h, w, co = y.shape
    k = partials.shape[1]
    assert partials.shape == (n, k, 2, co) and h * w % k == 0
    sizes = (16, 32, 64, 128, 256)
    boxes = [image_box(m, n, h, w) for m in sizes]
    boxes = [box for box in boxes + [covering_box(m, n, h, w, True) for m in sizes] if box]
    boxes += [box for m in (64, 128) if (box := row_box(m, 2, h, w))]
    boxes += [  # of all rows of a program
        (box[0], rows, box[2]) for rows in (2, 4) for m in sizes if (box := row_box(m, rows, h, w))
    ]
    wide = [(1, m // c, c) for m in sizes for c in (8, 16, 32) if w % c == 0 and m >= c]
    boxes += [box for box in wide if h % box[1] == 0]
    boxes = [box for box in boxes if boxes_of_image(box, h, w) == k]
    values = min(
        (tiles(y.double(), box) for box in boxes),
        key=lambda values: relative(partials[:, :, 0], values.sum(2)),
    )
    assert relative(partials[:, :, 0], values.sum(2)) < 1e-6
    m2 = (values - values.mean(2, keepdim=True)).square().sum(2)
    assert relative(partials[:, :, 1], m2) < 1e-5


DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def extra_case(shape: Shape, c1: int, c2: int, dtype, device):
    """Two tensors, and the columns of one 1x1 filter for their concatenation."""
    n, h, w, _, co, _ = shape
    weight = randn(co, c1 + c2, seed=8, device=device, dtype=dtype) / (c1 + c2) ** 0.5
    x1 = randn(n, h, w, c1, seed=9, device=device, dtype=dtype)
    x2 = randn(n, h, w, c2, seed=10, device=device, dtype=dtype)
    return (x1, weight[:, :c1]), (x2, weight[:, c1:])


def check_extra(shape: Shape, c1: int, c2: int, dtype, device, config=None, count=2, factor=None):
    extra = extra_case(shape, c1, c2, dtype, device)[:count]
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    extra_bias = randn(shape.co, seed=11, device=device)
    added = {"emb": emb, "extra": extra, "extra_bias": extra_bias, "factor": factor}
    y, partials = conv_forward(x, weight, bias, **added, stats=True, config=config)
    exact = forward_reference(x, weight, bias + extra_bias, emb, residual * 0, torch.float64)
    exact = exact + sum(x.double() @ w.double().T for x, w in extra)
    exact = exact if factor is None else factor * exact
    terms = shape.kernel**2 * shape.ci + c1 + c2
    assert relative(y, exact) <= ROUNDING[dtype] + 2**-24 * terms**0.5
    check_stats(y, partials)
    return y, partials


def grad_case(shape: Shape, c1: int | None, dtype, device):
    """Arguments of conv_input_grad; a table as of a norm, with every entry different."""
    n, h, w, ci, co, _ = shape
    x = randn(n, h, w, ci, seed=0, device=device, dtype=dtype)
    inputs = (x,) if c1 is None else (x[..., :c1].contiguous(), x[..., c1:].contiguous())
    table = randn(n, 4, ci, seed=5, device=device)
    table[:, 1] = table[:, 1].abs() + 0.5
    dy = randn(n, h, w, co, seed=6, device=device, dtype=dtype)
    return dy, make_weight(shape, dtype, device), x, inputs, table


def grad_reference(dy, weight, x, table, activation, dtype, mask=None):
    """dz and xhat, by autograd."""
    mean, rstd, g, b = table.to(dtype)[:, :, None, None, :].unbind(1)
    xhat = (x.to(dtype) - mean) * rstd
    z = (xhat * g + b).requires_grad_()
    a = reference.ACTIVATION_FUNCTIONS[activation](z)
    if mask is not None:
        a = reference.dropout(a, mask.p, mask.rng, layer=mask.layer, first=mask.first)
    (dz,) = torch.autograd.grad(reference.conv2d(a, weight.to(dtype)), z, dy.to(dtype))
    return dz, xhat


def check_grad(shape: Shape, c1, dtype, device, activation="silu", config=None, mask=None):
    dy, weight, x, inputs, table = grad_case(shape, c1, dtype, device)
    dz, partials = conv_input_grad(
        dy, weight, inputs=inputs, table=table, activation=activation, mask=mask, config=config
    )
    exact, xhat = grad_reference(dy, weight, x, table, activation, torch.float64, mask)
    assert dz.dtype == dtype
    terms = shape.kernel**2 * shape.co
    exactness = 2**-24 * terms**0.5 + (ROUNDING[dtype] if dtype == torch.float32 else 0)
    assert relative(dz, exact) <= ROUNDING[dtype] + exactness
    n, k = shape.n, partials.shape[1]
    assert partials.shape == (n, k, 2, shape.ci) and shape.h * shape.w % k == 0
    if n:
        # over whole images, since a tile's place in `partials` is the kernel's own affair
        d, e = exact.sum((1, 2)), (exact * xhat).sum((1, 2))
        assert relative(partials[:, :, 0].sum(1), d) <= 1e-5 + exactness
        assert relative(partials[:, :, 1].sum(1), e) <= 1e-5 + exactness
    return dz, partials


def weight_grad_reference(x, dy, kernel: int) -> Tensor:
    ci, co = x.shape[3], dy.shape[3]
    w = torch.zeros(co, ci, kernel, kernel, dtype=torch.float64, device=x.device)
    w = w.requires_grad_()
    return torch.autograd.grad(reference.conv2d(x.double(), w), w, dy.double())[0]


def check_weight_grad(shape: Shape, dtype, device, accumulate=False, config=None, beside=0):
    """`out` is a column view, with `beside` channels of somebody else on either side."""
    n, h, w, ci, co, kernel = shape
    x = randn(n, h, w, ci, seed=0, device=device, dtype=dtype)
    dy = randn(n, h, w, co, seed=6, device=device, dtype=dtype)
    flat = randn(co, kernel, kernel, ci + 2 * beside, seed=7, device=device)
    before = flat.clone()
    out = flat[..., beside : beside + ci].permute(0, 3, 1, 2)
    old = out.double()
    conv_weight_grad(x, dy, out, accumulate=accumulate, config=config)
    exact = weight_grad_reference(x, dy, kernel) + (old if accumulate else 0)
    floor = 2**-24 * (n * h * w) ** 0.5 + 1e-6
    assert relative(out, exact) <= floor + (ROUNDING[dtype] if dtype == torch.float32 else 0)
    for columns in (slice(0, beside), slice(beside + ci, None)):
        assert torch.equal(flat[..., columns], before[..., columns])
    return out


@pytest.fixture(autouse=True)
def needs_tma(device):
    if not describe(device).tma:
        pytest.skip("no TMA unit")


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products in float32 take the paths of large ones."""
    monkeypatch.setattr(conv_tma, "_TRANSPOSE_FROM", 0)
    for module in (conv_gather, gather_wgrad):  # which are slow
        monkeypatch.setattr(module, "of_products", lambda *_: 1e9)
