"""What the tests of convolutions share: shapes, data, the references and what an error may be."""

import math
from typing import NamedTuple

import torch

from triton_kernels import reference


class Shape(NamedTuple):
    n: int
    h: int
    w: int
    ci: int
    co: int
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    padding: int | tuple[int, int] | None = None


SMALL = {
    "3x3": Shape(2, 5, 7, 24, 72),
    "3x3 odd channels": Shape(2, 5, 7, 19, 33),
    "stem": Shape(2, 5, 6, 3, 33),
    "head": Shape(2, 5, 6, 33, 3),
    "head, 2x4 filter": Shape(3, 5, 9, 24, 3, (2, 4), padding=(1, 0)),
    "head, padding beyond the filter": Shape(1, 3, 4, 16, 5, padding=(4, 3)),
    "head, stride 2": Shape(2, 6, 7, 20, 3, stride=2),
    "one channel": Shape(1, 3, 4, 1, 1),
    "three images": Shape(3, 7, 8, 8, 8),
    "whole rows a tile": Shape(1, 8, 16, 8, 8),
    "whole images a tile": Shape(5, 4, 4, 16, 8),
    "no padding": Shape(2, 5, 7, 16, 16, padding=0),
    "padding beyond the filter": Shape(1, 3, 4, 8, 16, padding=(4, 3)),
    "stride 2": Shape(2, 6, 7, 17, 20, stride=2, padding=1),
    "stride 2, last row unused": Shape(1, 6, 8, 8, 8, stride=2, padding=0),
    "stride 2 stem": Shape(2, 5, 6, 3, 20, stride=2, padding=1),
    "stride 2, 4x4": Shape(1, 6, 6, 8, 8, (4, 4), stride=2, padding=1),
    "stride 3, 2x4": Shape(1, 7, 9, 8, 8, (2, 4), stride=3, padding=2),
    "stride 2 by TMA": Shape(3, 6, 10, 64, 24, stride=2),
    "stride 2 by TMA, no padding": Shape(2, 6, 8, 32, 40, stride=2, padding=0),
    "stride 2 by TMA, 4x4": Shape(1, 4, 6, 32, 8, (4, 4), stride=2, padding=1),
    "stride 2 by TMA, 1x1": Shape(2, 4, 6, 32, 16, (1, 1), stride=2),
    "stride 2 by TMA, padding beyond the filter": Shape(1, 4, 4, 32, 8, stride=2, padding=(4, 3)),
    "stride 2 by TMA, 1-D": Shape(3, 1, 18, 32, 24, (1, 3), stride=2, padding=(0, 1)),
    "1-D, 5 taps": Shape(3, 1, 17, 20, 24, (1, 5)),
    "1-D, 3 taps, stride 2": Shape(3, 1, 17, 20, 24, (1, 3), stride=2, padding=(0, 1)),
    "1-D, 4 taps, stride 2": Shape(3, 1, 16, 16, 16, (1, 4), stride=2, padding=(0, 1)),
    "1x1": Shape(2, 5, 7, 40, 72, (1, 1)),
    "1x1 stride 2": Shape(2, 5, 6, 20, 20, (1, 1), stride=2),
    "1x1 with padding": Shape(2, 3, 4, 16, 16, (1, 1), padding=1),
    "linear": Shape(5, 1, 1, 72, 40, (1, 1)),
    "linear, one sample": Shape(1, 1, 1, 16, 17, (1, 1)),
    "empty batch": Shape(0, 5, 7, 8, 16),
}

MODEL = {  # h, w, ci, co, kernel
    "stem": (64, 64, 3, 64, (3, 3)),
    "head": (64, 64, 64, 3, (3, 3)),
    **{
        f"3x3 {size}x{size} {ci}-{co}": (size, size, ci, co, (3, 3))
        for size, pairs in {
            64: [(64, 64), (128, 64), (192, 64)],
            32: [(64, 128), (128, 128), (192, 128), (256, 128), (320, 128)],
            16: [(128, 192), (192, 192), (320, 192), (384, 192), (448, 192)],
            8: [(192, 256), (256, 256), (448, 256), (512, 256)],
        }.items()
        for ci, co in pairs
    },
    **{
        f"1x1 {size}x{size} {ci}-{co}": (size, size, ci, co, (1, 1))
        for size, ci, co in [
            (64, 192, 64),
            (32, 320, 128),
            (16, 192, 576),
            (16, 448, 192),
            (8, 256, 768),
            (8, 256, 256),
        ]
    },
    "linear 64-256": (1, 1, 64, 256, (1, 1)),
    "linear 256-128": (1, 1, 256, 128, (1, 1)),
    "1-D 14-256": (1, 16, 14, 256, (1, 5)),
    "1-D 512-512": (1, 8, 512, 512, (1, 5)),
    "28x28": (28, 28, 32, 64, (3, 3)),
    "20x48": (20, 48, 64, 64, (3, 3)),
}

DTYPES = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}

# The relative error of rounding once to the dtype. TF32 drops the last 13 bits of both operands: in
# the mean 2^-11 of each, and twice that of a product.
ROUNDING = {"fp32": 2**-24, "tf32": 2**-10, "fp16": 2**-11, "bf16": 2**-9}


def make(shape: Shape, dtype: torch.dtype, device, seed: int = 0):
    """x, float32 master weight and bias, dy."""
    g = torch.Generator().manual_seed(seed)
    r, s = shape.kernel
    x = torch.randn(shape.n, shape.h, shape.w, shape.ci, generator=g)
    weight = torch.randn(shape.co, r, s, shape.ci, generator=g) / (r * s * shape.ci) ** 0.5
    bias = torch.randn(shape.co, generator=g)
    ph, pw = padding_of(shape)
    p = (shape.h + 2 * ph - r) // shape.stride + 1
    q = (shape.w + 2 * pw - s) // shape.stride + 1
    dy = torch.randn(shape.n, p, q, shape.co, generator=g)
    return (
        x.to(device, dtype),
        weight.to(device).permute(0, 3, 1, 2),
        bias.to(device),
        dy.to(device, dtype),
    )


def padding_of(shape: Shape) -> tuple[int, int]:
    if shape.padding is None:
        return shape.kernel[0] // 2, shape.kernel[1] // 2
    return shape.padding if isinstance(shape.padding, tuple) else (shape.padding, shape.padding)


def run(op, shape: Shape, x, weight, bias, dy, **kwargs):
    """y, dx, dweight, dbias of `op`."""
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y = op(x, weight, bias, stride=shape.stride, padding=shape.padding, **kwargs)
    return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy))


def references(shape: Shape, x, weight, bias, dy):
    """The exact result (float64; filters rounded to x.dtype, which is no error of the kernel), and
    that of plain PyTorch in x.dtype."""
    exact = run(
        reference.conv2d, shape, x.double(), weight.to(x.dtype).double(), bias.double(), dy.double()
    )
    return exact, run(reference.conv2d, shape, x, weight, bias, dy)


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check(got, exact, low, shape: Shape, precision: str):
    """The error of y, dx, dweight and dbias is at most twice that of PyTorch in the same precision,
    plus what any result may have: the rounding to the dtype, and of a float32 sum of K terms, a
    random walk."""
    taps = math.prod(shape.kernel)
    pixels = exact[0].numel() // shape.co
    terms = (taps * shape.ci, taps * shape.co, pixels, pixels)
    for name, a, b, c, k in zip(
        ("y", "dx", "dweight", "dbias"), got, exact, low, terms, strict=True
    ):
        assert a.shape == b.shape, name
        single = precision == "tf32" and k == 1  # no mean is taken: up to 2^-10 of either operand
        floor = ROUNDING[precision] * (2 if single else 1) + 2**-24 * k**0.5
        error, budget = relative(a, b), 2 * relative(c, b) + floor
        assert error <= budget, f"{name}: relative error {error:.2e}, budget {budget:.2e}"


def make_scaled(shape: Shape, device):
    """Data of `make` in float32 with a scale of its own for each channel: 1e-20 to 1e20 of x, 1e-14
    to 1e14 of y, small ones beside large ones."""
    x, weight, _, dy = make(shape, torch.float32, device)
    g = torch.Generator().manual_seed(1)

    def scales(channels: int, power: int) -> torch.Tensor:
        powers = torch.linspace(-power, power, channels)[torch.randperm(channels, generator=g)]
        return (10**powers).to(device)

    of_x, of_y = scales(shape.ci, 20), scales(shape.co, 14)
    bias = torch.zeros(shape.co, device=device)  # no part of it
    return x * of_x, weight * of_y[:, None, None, None], bias, dy * of_y


def check_each(name: str, got, shape: Shape, data, precision: str) -> float:
    """y, dx or dweight of these data, number by number against float64: its error is one of the
    sum of its products without their signs. Products of numbers in two parts are up to 2^-18 off,
    at most, where small ones are of bfloat16; TF32 drops up to 2^-10 of either number. Sums round
    like a random walk in float32; in TF32 tensor cores round every 8 terms towards zero. Returns
    the part of the budget that was used."""
    index = ("y", "dx", "dweight").index(name)
    exact, most = (
        run(reference.conv2d, shape, *tensors)[index]
        for tensors in ([t.double() for t in data], [t.double().abs() for t in data])
    )
    taps, pixels = math.prod(shape.kernel), data[3][..., 0].numel()
    terms = (taps * shape.ci, taps * shape.co, pixels)[index]
    if precision == "tf32":
        budget = 2.0**-9 + 2.0**-23 * terms / 8
    else:
        budget = 2.0**-18 + 2.0**-24 * terms**0.5
    assert got.shape == exact.shape, name
    error = ((got.double() - exact).abs() / most.clamp(min=1e-300)).max()
    assert error <= budget, f"{name}: error {error:.2e} of the terms, budget {budget:.2e}"
    return float(error) / budget
