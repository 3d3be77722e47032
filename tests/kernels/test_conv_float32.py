"""conv2d in float32 on tensor cores: TF32, and three products of it."""

import pytest
import torch
import torch.nn.functional as F

from triton_kernels import reference
from triton_kernels.conv import conv2d as conv
from triton_kernels.conv.plain import (
    fp16_split,
    gather as conv_gather,
    gather_wgrad,
    im2col_wgrad,
    tf32x3 as conv_tf32x3,
)
from triton_kernels.conv.plain.by_tma import tma as conv_tma
from triton_kernels.conv.plain.linear_tf32x3 import LINEAR
from triton_kernels.conv.weight_grad import weight_grad_spec
from triton_kernels.runtime.device import describe

from .conv_cases import (
    ROUNDING,
    SMALL,
    Shape,
    check,
    check_each,
    make,
    make_scaled,
    padding_of,
    references,
    relative,
    run,
)

TENSOR_CORES = {
    **{
        name: SMALL[name]
        for name in (
            "whole rows a tile",
            "no padding",
            "padding beyond the filter",
            "1-D, 5 taps",
            "1x1",
            "1x1 with padding",
            "stride 2 by TMA",
            "stride 2 by TMA, 4x4",
        )
    },
    "odd": Shape(2, 5, 7, 32, 40),
    "more in than out": Shape(3, 4, 6, 72, 36),
    "wide, no padding": Shape(2, 5, 7, 32, 32, padding=0),
    "wide, padding beyond the filter": Shape(1, 3, 4, 36, 32, padding=(4, 3)),
    "wide, 2x4 filter": Shape(2, 5, 6, 32, 36, (2, 4), padding=(1, 2)),
    "wide, 1-D, 5 taps": Shape(2, 1, 17, 36, 32, (1, 5)),
    "wide, 1x1 with padding": Shape(2, 3, 5, 32, 36, (1, 1), padding=1),
}


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products in float32 take the paths of large ones."""
    monkeypatch.setattr(conv_tma, "_TRANSPOSE_FROM", 0)
    for module in (conv_gather, gather_wgrad):  # which are slow
        monkeypatch.setattr(module, "of_products", lambda *_: 1e9)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_float32_on_tensor_cores(name, precision, device, monkeypatch):
    shape, tf32 = TENSOR_CORES[name], precision == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    data = make(shape, torch.float32, device)
    got = run(conv.conv2d, shape, *data, allow_tf32=tf32)
    check(got, *references(shape, *data), shape, precision)


SCALED = {
    "3x3": Shape(2, 3, 8, 64, 64),
    "1x1": Shape(2, 3, 5, 32, 36, (1, 1)),
}
GPU_SCALED = {
    "64x64": Shape(4, 64, 64, 64, 64),
    "16x16": Shape(8, 16, 16, 128, 192),
    "8x8": Shape(5, 8, 8, 256, 128),
    "12x20": Shape(3, 12, 20, 40, 96),
    "1x1, 16x16": Shape(4, 16, 16, 192, 320, (1, 1)),
    "linear": Shape(64, 1, 1, 256, 256, (1, 1)),
    "stride 2": Shape(4, 16, 16, 64, 64, stride=2),
    "stem": Shape(8, 32, 32, 3, 64),
}


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(
    "name", [*SCALED, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_SCALED)]
)
def test_a_scale_a_channel(name, precision, device):
    """What is small in a large channel's company is as exact as if it were alone."""
    shape = {**SCALED, **GPU_SCALED}[name]
    data = make_scaled(shape, device)
    results = run(conv.conv2d, shape, *data, allow_tf32=precision == "tf32")
    for each, got in zip(("y", "dx", "dweight"), results, strict=False):
        used = check_each(each, got, shape, data, precision)
        print(f"{name} {precision} {each}: {used:.3f} of the budget")


def test_linear_layers_in_chunks(device, monkeypatch):
    """More pixels than a tile, more channels than the chunks of a step."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    shape = Shape(3, 2, 3, 260, 20, (1, 1))
    x, weight, bias, dy = make(shape, torch.float32, device)
    exact, low = references(shape, x, weight, bias, dy)
    config = LINEAR.config()
    y = conv._conv2d_fwd(x, weight, bias, 1, (0, 0), False, config)
    dx = conv.conv2d_input_grad(dy, weight, x.shape[1:3], 1, (0, 0), False, config)
    for got, right, other in zip((y, dx), exact, low, strict=False):
        assert relative(got, right) <= 2 * relative(other, right) + ROUNDING["fp32"]


COLUMNS = {
    "stem": Shape(2, 5, 6, 3, 36),
    "2x4 filter, padding beyond it": Shape(2, 3, 5, 7, 40, (2, 4), padding=(4, 3)),
    "stride 2": Shape(3, 6, 7, 5, 32, stride=2, padding=1),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name, device):
    """What `unfold` gives, in the order of the filters, with zeros behind it."""
    shape = COLUMNS[name]
    x, weight, _, dy = make(shape, torch.float32, device)
    padding = padding_of(shape)
    got = im2col_wgrad.to_columns(x, dy, weight, shape.stride, padding)
    patches = F.unfold(x.permute(0, 3, 1, 2), shape.kernel, 1, padding, shape.stride)
    taps = shape.kernel[0] * shape.kernel[1]
    patches = patches.view(shape.n, shape.ci, taps, -1).permute(0, 3, 2, 1).flatten(2)
    width = taps * shape.ci
    assert torch.equal(got.view(shape.n, -1, got.shape[3])[..., :width], patches)
    assert not got[..., width:].any() and got.shape[3] < width + 4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("of_x", "of_dy", "spread"),
    [(0, 0, 0), (-38, 38, 0), (-44, 20, 0), (0, 0, 18)],
    ids=["1", "small by large", "subnormal", "a scale a channel"],
)
def test_halves(of_x, of_dy, spread, parts, device):
    """As exact as numbers of 11 bits, or of 22, but for what is far below its channel's largest."""
    g = torch.Generator().manual_seed(0)
    x, dy = torch.rand(3, 5, 9, 72, generator=g), torch.rand(3, 5, 9, 8, generator=g)
    for t, power in ((x, of_x), (dy, of_dy)):
        c = t.shape[3]
        scales = 10.0 ** (power + torch.linspace(-spread, spread, c, dtype=torch.float64))
        t.copy_(t.double() * scales[torch.randperm(c, generator=g)])
    x, dy = x.to(device), dy.to(device)
    x[..., 6], x[..., 7] = 2 - 2.0**-20, 4 - 2.0**-9  # rounded to a float16 number they are 2, 4
    x[..., 5], dy[..., 3] = 0, float("nan")  # channels without a finite number but zero
    x[0, 0, 0, 0], dy[-1, -1, -1, -1] = float("-inf"), float("nan")  # no more than these
    *halves, factors = fp16_split.in_halves(x, dy, parts)
    (a, b), ci = (half.double().sum(0) for half in halves), x.shape[3]
    assert a[0, 0, 0, 0] == float("-inf") or a[0, 0, 0, 0].isnan()
    assert b[-1, -1, -1, -1].isnan() and b[..., 3].isnan().all() and not a[..., 5].any()

    both = factors[:ci, None] * factors[None, ci:]
    assert both.dtype == torch.float32 and (both > 0).all() and both.isfinite().all()
    got = a[..., :, None] * b[..., None, :] * both.double().square()
    exact = x.double()[..., :, None] * dy.double()[..., None, :]
    errors = []
    for t in (x, dy):  # half a step of the number; or half of the least, 2^-25, where the largest
        t = t.double().abs()  # number is at least 2^14 (1 - 2^-10)
        largest = t.where(t.isfinite(), 0).amax((0, 1, 2))
        errors.append((t * 2.0 ** (-11 * parts)).maximum(largest * 2.0**-39 * (1 + 2.0**-9)))
    budget = (
        x.double().abs()[..., :, None] * errors[1][..., None, :]
        + errors[0][..., :, None] * dy.double().abs()[..., None, :]
        + errors[0][..., :, None] * errors[1][..., None, :]
    )
    finite = exact.isfinite()
    assert finite.sum() == x.numel() * 7 - 7 - 72
    assert ((got - exact).abs() <= budget)[finite].all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*COLUMNS, "64x64"])
def test_weight_gradient_of_columns(name, device, monkeypatch):
    shape = {**COLUMNS, "64x64": Shape(33, 64, 64, 3, 64)}[name]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(im2col_wgrad, "_FEWEST_PIXELS", 0)
    data = make(shape, torch.float32, device)
    x, weight, _, dy = data
    spec = weight_grad_spec(x, dy, weight, shape.stride, padding_of(shape), "ieee")
    if reason := im2col_wgrad.refuse(spec, describe(device)):
        pytest.skip(reason)
    exact, low = (results[2] for results in references(shape, *data))
    first = conv._conv2d_wgrad(x, dy, weight, shape.stride, padding_of(shape), False)
    budget = 2 * relative(low, exact) + ROUNDING["fp32"] + 2**-24 * (dy[..., 0].numel()) ** 0.5
    assert relative(first, exact) <= budget
    for _ in range(10):
        again = conv._conv2d_wgrad(x, dy, weight, shape.stride, padding_of(shape), False)
        assert torch.equal(again, first)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf * 0
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("split", ["before", "in registers", "in chunks", "gathered", "all taps"])
def test_float32_on_tensor_cores_keeps_infinities(split, device):
    """Halves of an infinity are no infinities, and the other filter's second half is zero."""
    ci = 8 if split == "gathered" else 32
    filters = (3, 1, 2, ci) if split == "all taps" else (32, 1, 1, ci)
    weight = torch.ones(filters, device=device).permute(0, 3, 1, 2)
    x = torch.ones(1, 3, 4, ci, device=device)
    tiles = {
        "before": None,
        "in registers": next(c for c in conv_tf32x3.FWD_CONFIGS if c.in_registers),
        "in chunks": LINEAR.config(),
        "gathered": None,  # where there are few channels of x,
        "all taps": None,  # and of y
    }

    def forward():
        return conv._conv2d_fwd(x, weight, None, 1, (0, 0), False, tiles[split])

    x[0, 0, 0, 0], x[0, 1, 1, 1], x[0, 2, 2, 2] = float("inf"), float("nan"), 3.4028e38
    y, exact = forward(), reference.conv2d(x.double(), weight.double(), padding=0)
    torch.testing.assert_close(y, exact.float(), rtol=1e-6, atol=0, equal_nan=True)
    assert y[0, 0, 0, 0] == float("inf") and y[0, 1, 1].isnan().all()
    weight[:, 0] = 0
    assert forward()[0, 0, 0].isnan().all()  # inf * 0
