"""Convolutions, norms and attention of shapes that nobody chose, on a GPU: every kernel that says
it can, with one of its configurations, and the kernel that is chosen, beside float64.

A seed is a shape, done by the kernels of the GPU and by those of one without a TMA unit. Sides are
powers of two, multiples of 4 and any numbers, channels mostly multiples of 8, as a network of a
user might have them.
"""

import random
from contextlib import nullcontext

import pytest
import torch

import triton_kernels
from triton_kernels import reference
from triton_kernels.conv.fused import FORWARD, INPUT_GRAD, conv_forward
from triton_kernels.conv.weight_grad import WEIGHT_GRAD, conv_weight_grad, weight_grad_spec
from triton_kernels.registry.choose import listed
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.spec import Spec
from triton_kernels.runtime.device import describe

from .conv_fused_cases import (
    ROUNDING,
    Shape,
    check_grad,
    forward_case,
    forward_reference,
    relative,
    weight_grad_reference,
)
from .other_chip import other_chip
from .test_conv_hopper import spec_of

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["native", 89], autouse=True)
def chip(request):
    """The GPU's own kernels, or those of compute capability 8.9."""
    with nullcontext() if request.param == "native" else other_chip(request.param):
        yield


_MOST = 2**22  # numbers of a tensor, for float64 beside it


def _side(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.4:
        return 2 ** rng.randint(2, 6)
    return 4 * rng.randint(1, 24) if kind < 0.75 else rng.randint(1, 72)


def _channels(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.35:
        return 64 * rng.randint(1, 6)
    return 8 * rng.randint(1, 40) if kind < 0.9 else rng.randint(1, 100)


def _dtype(rng: random.Random) -> torch.dtype:
    return rng.choices((torch.bfloat16, torch.float16, torch.float32), (6, 2, 2))[0]


def _convolution(seed: int) -> tuple[random.Random, Shape, torch.dtype]:
    rng = random.Random(seed)
    h, ci, co = _side(rng), _channels(rng), _channels(rng)
    w = h if rng.random() < 0.4 else _side(rng)
    most = max(1, min(65, _MOST // (h * w * max(ci, co))))
    n = rng.choice((1, 3, most, rng.randint(1, most)))
    return rng, Shape(min(n, most), h, w, ci, co, rng.choice((1, 3, 3))), _dtype(rng)


def _some(op: Op, spec: Spec, device: torch.device, rng: random.Random) -> list[tuple | None]:
    """A configuration of each kernel that can do it; None: of the one that is chosen."""
    of_kernel: dict[str, list[tuple]] = {}
    for kernel, config in listed(op, spec, describe(device), untimed=True):
        of_kernel.setdefault(kernel.name, []).append(config)
    return [None, *map(rng.choice, of_kernel.values())]


def _check_moments(y: torch.Tensor, partials: torch.Tensor) -> None:
    """Mean and variance of each image and channel, whatever pixels are a tile's."""
    n, h, w, c = y.shape
    count = h * w / partials.shape[1]
    total, second = partials.double().unbind(2)
    mean = total.sum(1) / (h * w)
    var = (second + count * (total / count - mean[:, None]) ** 2).sum(1) / (h * w)
    y = y.double().reshape(n, h * w, c)
    assert relative(mean, y.mean(1)) <= 1e-6
    assert relative(var, y.var(1, correction=0)) <= 1e-5


@pytest.mark.parametrize("seed", range(16))
def test_convolution_forward(seed, device):
    rng, shape, dtype = _convolution(seed)
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    exact = forward_reference(x, weight, bias, emb, residual, torch.float64)
    budget = ROUNDING[dtype] + 2**-24 * (shape.kernel**2 * shape.ci) ** 0.5
    terms = {"emb": emb, "residual": residual, "stats": True}
    for config in _some(FORWARD, spec_of(shape, dtype, residual=True, stats=True), device, rng):
        y, partials = conv_forward(x, weight, bias, **terms, config=config)
        assert relative(y, exact) <= budget
        _check_moments(y, partials)


@pytest.mark.parametrize("seed", range(16))
def test_convolution_input_grad(seed, device):
    rng, shape, dtype = _convolution(100 + seed)
    for config in _some(INPUT_GRAD, spec_of(shape, dtype, grad=True), device, rng):
        check_grad(shape, None, dtype, device, config=config)


@pytest.mark.parametrize("seed", range(16))
def test_convolution_weight_grad(seed, device):
    rng, shape, dtype = _convolution(200 + seed)
    n, h, w, ci, co, kernel = shape
    x, dy = (torch.randn(n, h, w, c, device=device).to(dtype) for c in (ci, co))
    out = torch.empty(co, kernel, kernel, ci, device=device).permute(0, 3, 1, 2)
    exact = weight_grad_reference(x, dy, kernel)
    pixels = n * h * w
    budget = 2**-24 * pixels**0.5 + 1e-6 + 2.5e-8 * pixels / 16  # see `reductions.long_sums`
    budget += ROUNDING[dtype] if dtype == torch.float32 else 0
    spec = weight_grad_spec(x, dy, out, 1, (kernel // 2, kernel // 2), "tf32")
    for config in _some(WEIGHT_GRAD, spec, device, rng):
        conv_weight_grad(x, dy, out.fill_(float("nan")), config=config and config.tile)
        assert relative(out, exact) <= budget


@pytest.mark.parametrize("seed", range(16))
def test_public_convolution(seed, device):
    """With strides, padding and filters that networks of this framework do not have."""
    rng, shape, dtype = _convolution(300 + seed)
    n, h, w, ci, co, _ = shape
    r, s = (rng.choice((1, 2, 3, 3, 3, 4, 5, 7)) for _ in range(2))
    stride, padding = rng.choice((1, 1, 2)), rng.choice((None, 0, 1))
    if padding is not None and (h + 2 * padding < r or w + 2 * padding < s):
        padding = None
    options = {"stride": stride, "padding": padding}
    x = torch.randn(n, h, w, ci, device=device).to(dtype)
    weight = torch.randn(co, ci, r, s, device=device) / (ci * r * s) ** 0.5
    weight = weight.to(memory_format=torch.channels_last)
    bias = torch.randn(co, device=device)
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight.to(dtype), bias)]
    y, want = triton_kernels.conv2d(*given, **options), reference.conv2d(*exact, **options)
    assert relative(y.detach(), want.detach()) <= ROUNDING[dtype] + 2**-24 * (ci * r * s) ** 0.5
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.double())
    for a, b in zip(given, exact, strict=True):
        assert relative(a.grad, b.grad) <= ROUNDING[dtype] + 2**-22 * b.grad.numel() ** 0.5


@pytest.mark.parametrize("seed", range(16))
def test_group_norm(seed, device):
    rng = random.Random(400 + seed)
    h, w, groups, dtype = _side(rng), _side(rng), rng.choice((1, 4, 8, 32)), _dtype(rng)
    c = groups * rng.randint(1, 24)
    n = rng.randint(1, max(1, min(33, _MOST // (h * w * c))))
    activation = rng.choice(("identity", "silu", "gelu"))
    x = (torch.randn(n, h, w, c, device=device) * 2 + 3).to(dtype)
    affine = [torch.randn(c, device=device) for _ in range(2)]
    given = [t.detach().requires_grad_() for t in (x, *affine)]
    exact = [t.detach().double().requires_grad_() for t in (x, *affine)]
    y = triton_kernels.group_norm(given[0], groups, *given[1:], activation=activation)
    want = reference.group_norm(exact[0], groups, *exact[1:], activation=activation)
    rounding = 2**-20 if dtype == torch.float32 else ROUNDING[dtype]
    assert relative(y.detach(), want.detach()) <= rounding + 1e-6
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.double())
    for a, b in zip(given, exact, strict=True):
        assert relative(a.grad, b.grad) <= 3 * rounding + 1e-5


@pytest.mark.parametrize("seed", range(16))
def test_attention(seed, device):
    rng = random.Random(500 + seed)
    t = rng.choice((rng.randint(1, 300), 2 ** rng.randint(3, 11), rng.randint(300, 2500)))
    heads, d = rng.randint(1, 8), rng.choice((8, 16, 32, 40, 64, 72, 80, 128, rng.randint(1, 128)))
    dtype, order = _dtype(rng), rng.choice(("qkv_heads", "heads_qkv"))
    n = rng.randint(1, max(1, min(16, _MOST // (3 * t * heads * d), 2**25 // (heads * t * t))))
    qkv = torch.randn(n, t, 3 * heads * d, device=device).to(dtype).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    y = triton_kernels.attention(qkv, heads, order=order)
    want = reference.attention(exact, heads, order=order)
    rounding = 2**-18 if dtype == torch.float32 else ROUNDING[dtype]
    assert relative(y.detach(), want.detach()) <= 2 * rounding
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.double())
    assert relative(qkv.grad, exact.grad) <= 4 * rounding
