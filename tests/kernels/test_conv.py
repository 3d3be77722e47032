"""conv2d and its gradients against the reference in float64."""

from typing import NamedTuple

import pytest
import torch

from triton_kernels import conv, reference


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
    "one channel": Shape(1, 3, 4, 1, 1),
    "three pixel tiles": Shape(3, 7, 8, 8, 8),
    "no padding": Shape(2, 5, 7, 16, 16, padding=0),
    "padding beyond the filter": Shape(1, 3, 4, 8, 16, padding=(4, 3)),
    "stride 2": Shape(2, 6, 7, 17, 20, stride=2, padding=1),
    "stride 2, last row unused": Shape(1, 6, 8, 8, 8, stride=2, padding=0),
    "stride 2 stem": Shape(2, 5, 6, 3, 20, stride=2, padding=1),
    "stride 2, 4x4": Shape(1, 6, 6, 8, 8, (4, 4), stride=2, padding=1),
    "stride 3, 2x4": Shape(1, 7, 9, 8, 8, (2, 4), stride=3, padding=2),
    "1-D, 5 taps": Shape(3, 1, 17, 20, 24, (1, 5)),
    "1-D, 3 taps, stride 2": Shape(3, 1, 17, 20, 24, (1, 3), stride=2, padding=(0, 1)),
    "1-D, 4 taps, stride 2": Shape(3, 1, 16, 16, 16, (1, 4), stride=2, padding=(0, 1)),
    "1x1": Shape(2, 5, 7, 40, 72, (1, 1)),
    "1x1 stride 2": Shape(2, 5, 6, 20, 20, (1, 1), stride=2),
    "linear": Shape(5, 1, 1, 72, 40, (1, 1)),
    "linear, one sample": Shape(1, 1, 1, 16, 17, (1, 1)),
    "empty batch": Shape(0, 5, 7, 8, 16),
}

DTYPES = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}

# Relative error that a result may have however exact the low-precision reference came out: rounding
# of float32 sums; one rounding to the output dtype. TF32 drops the last 13 bits of both operands,
# in the mean 2^-11 of each, and twice that of a product.
FLOOR = {"fp32": 1e-6, "tf32": 2**-10, "fp16": 2**-11, "bf16": 2**-8}


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


def check(got, exact, low, precision: str):
    """Error at most twice that of PyTorch in the same precision."""
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias"), got, exact, low, strict=True):
        assert a.shape == b.shape, name
        error, budget = relative(a, b), 2 * relative(c, b) + FLOOR[precision]
        assert error <= budget, f"{name}: relative error {error:.2e}, budget {budget:.2e}"


@pytest.fixture
def poison(monkeypatch):
    """Memory that a kernel forgets to write holds NaN."""

    def empty(*args, **kwargs):
        return torch.full(args[0] if isinstance(args[0], tuple) else args, float("nan"), **kwargs)

    monkeypatch.setattr(conv, "_empty", empty)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", SMALL)
def test_matches_reference(name, precision, device):
    dtype, tf32 = DTYPES[precision]
    x, weight, bias, dy = make(SMALL[name], dtype, device)
    got = run(conv.conv2d, SMALL[name], x, weight, bias, dy, allow_tf32=tf32)
    exact, low = references(SMALL[name], x, weight, bias, dy)
    check(got, exact, low, precision)
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32, torch.float32]
    assert got[2].stride() == weight.stride()


def test_without_bias_and_without_gradients(device):
    x, weight, _, _ = make(SMALL["3x3"], torch.float32, device)
    y = conv.conv2d(x, weight)
    assert relative(y, reference.conv2d(x.double(), weight.double())) < 1e-6
    (dw,) = torch.autograd.grad(conv.conv2d(x, weight.requires_grad_()).sum(), weight)
    assert dw.shape == weight.shape


def test_weight_may_be_a_view_into_a_flat_buffer(device):
    x, weight, bias, _ = make(SMALL["3x3"], torch.float32, device)
    co, ci, r, s = weight.shape
    flat = torch.full((weight.numel() + 12,), float("nan"), device=device)
    view = flat[4 : 4 + weight.numel()].view(co, r, s, ci).permute(0, 3, 1, 2)
    view.copy_(weight)
    assert torch.equal(conv.conv2d(x, view, bias), conv.conv2d(x, weight, bias))


def test_is_linear_and_shifts_with_its_input(device):
    x, weight, _, _ = make(Shape(1, 7, 8, 8, 8), torch.float32, device)
    y = conv.conv2d(x, weight, padding=0)
    torch.testing.assert_close(conv.conv2d(2 * x, weight, padding=0), 2 * y, rtol=0, atol=0)
    shifted = conv.conv2d(x.roll(1, dims=2).contiguous(), weight, padding=0)
    torch.testing.assert_close(shifted[:, :, 1:], y[:, :, :-1], rtol=1e-6, atol=1e-6)


def _channels_first(weight):
    return weight.contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b: (x.permute(0, 3, 1, 2), w, b), "expected contiguous NHWC"),
        (lambda x, w, b: (x.double(), w, b), "expected float32, float16 or bfloat16"),
        (lambda x, w, b: (x, _channels_first(w), b), "memory_format=torch.channels_last"),
        (lambda x, w, b: (x, w[:, :8], b), r"expected \[CO, 24, R, S\]"),
        (lambda x, w, b: (x, w, b[:5]), r"bias has shape \(5,\); expected \(72,\)"),
        (lambda x, w, b: (x[:, :0].contiguous(), w, b), "smaller than the 3x3 filter"),
    ],
    ids=["x strided", "x float64", "weight NCHW", "channels", "bias", "no rows"],
)
def test_refuses(change, message, device):
    x, weight, bias, _ = make(SMALL["3x3"], torch.float32, device)
    with pytest.raises(ValueError, match=message):
        conv.conv2d(*change(x, weight, bias))
