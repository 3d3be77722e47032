"""conv2d and its gradients against the reference in float64."""

import math
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch

from triton_kernels import column_sum, reference
from triton_kernels.conv import conv2d as conv
from triton_kernels.conv import gather as conv_gather
from triton_kernels.conv import tf32x3 as conv_tf32x3
from triton_kernels.conv import tma as conv_tma
from triton_kernels.conv import tma_boxes
from triton_kernels.conv import tma_stride as conv_stride
from triton_kernels.conv import turn as conv_turn
from triton_kernels.conv import turned_wgrad as conv_turned_wgrad
from triton_kernels.device import describe


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


@pytest.fixture
def poison(monkeypatch):
    """Memory that a kernel forgets to write holds NaN."""

    def empty(shape, **kwargs):
        return torch.full(shape, float("nan"), **kwargs)

    monkeypatch.setattr(conv, "_empty", empty)
    monkeypatch.setattr(column_sum, "_empty", empty)
    monkeypatch.setattr(conv_turn, "_empty", empty)


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products in float32 take the paths of large ones."""
    monkeypatch.setattr(conv_tma, "_TURN_FROM", 0)
    monkeypatch.setattr(conv_tf32x3, "_WORTH", 0)
    monkeypatch.setattr(conv_turned_wgrad, "_WORTH", 0)


PRECISIONS = ["fp32", "tf32", "fp16", pytest.param("bf16", marks=pytest.mark.gpu)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SMALL)
def test_matches_reference(name, precision, device, monkeypatch):
    dtype, tf32 = DTYPES[precision]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    x, weight, bias, dy = make(SMALL[name], dtype, device)
    got = run(conv.conv2d, SMALL[name], x, weight, bias, dy, allow_tf32=tf32)
    exact, low = references(SMALL[name], x, weight, bias, dy)
    check(got, exact, low, SMALL[name], precision)
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32, torch.float32]
    assert got[2].stride() == weight.stride()


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


@pytest.mark.usefixtures("poison", "tensor_cores")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_float32_on_tensor_cores(name, precision, device, monkeypatch):
    shape, tf32 = TENSOR_CORES[name], precision == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    data = make(shape, torch.float32, device)
    got = run(conv.conv2d, shape, *data, allow_tf32=tf32)
    check(got, *references(shape, *data), shape, precision)


@pytest.mark.usefixtures("poison", "tensor_cores")
def test_float32_on_tensor_cores_keeps_infinities(device):
    """Halves of an infinity are no infinities, and the other filter's second half is zero."""
    x, weight = torch.ones(1, 3, 4, 32, device=device), torch.ones(32, 32, 1, 1, device=device)
    x[0, 0, 0, 0], x[0, 1, 1, 1], x[0, 2, 2, 2] = float("inf"), float("nan"), 3.4028e38
    y, exact = conv.conv2d(x, weight), reference.conv2d(x.double(), weight.double())
    torch.testing.assert_close(y, exact.float(), rtol=1e-6, atol=0, equal_nan=True)
    assert y[0, 0, 0, 0] == float("inf") and y[0, 1, 1].isnan().all()
    weight[:, 0] = 0
    assert conv.conv2d(x, weight)[0, 0, 0].isnan().all()  # inf * 0


def test_without_bias_and_without_gradients(device):
    x, weight, _, _ = make(SMALL["3x3"], torch.float32, device)
    y = conv.conv2d(x, weight)
    assert relative(y, reference.conv2d(x.double(), weight.double())) < 1e-6
    (dw,) = torch.autograd.grad(conv.conv2d(x, weight.requires_grad_()).sum(), weight)
    assert dw.shape == weight.shape


@pytest.mark.parametrize("offset", [3, 8])
def test_weight_may_be_a_view_into_a_flat_buffer(offset, device):
    """With 8 elements before it, it has the 16-byte alignment that TMA needs; with 3 it has not."""
    shape = SMALL["3x3"]
    x, weight, bias, dy = make(shape, torch.float16, device)
    co, ci, r, s = weight.shape
    flat = torch.full((weight.numel() + 16,), float("nan"), device=device, dtype=x.dtype)
    view = flat[offset : offset + weight.numel()].view(co, r, s, ci).permute(0, 3, 1, 2)
    view.copy_(weight)
    exact, low = references(shape, x, weight, bias, dy)
    check(run(conv.conv2d, shape, x, view, bias, dy), exact, low, shape, "fp16")


def test_is_linear_and_shifts_with_its_input(device):
    x, weight, _, _ = make(Shape(1, 7, 8, 8, 8), torch.float32, device)
    y = conv.conv2d(x, weight, padding=0)
    torch.testing.assert_close(conv.conv2d(2 * x, weight, padding=0), 2 * y, rtol=0, atol=0)
    shifted = conv.conv2d(x.roll(1, dims=2).contiguous(), weight, padding=0)
    torch.testing.assert_close(shifted[:, :, 1:], y[:, :, :-1], rtol=1e-6, atol=1e-6)


# --- every configuration --------------------------------------------------------------------------


def one_pass(which: str, shape: Shape, x, weight, bias, dy, tf32: bool, config):
    """y, dx or dweight by the tile `config`."""
    options = (shape.stride, padding_of(shape), tf32, config)
    low = weight.to(x.dtype)
    if which == "forward":
        return conv._conv2d_fwd(x, low, bias, *options)
    if which == "input gradient":
        return conv._conv2d_dgrad(dy, low, x.shape[1:3], *options)
    return conv._conv2d_wgrad(x, dy, weight, *options)


PASSES = {"forward": 0, "input gradient": 1, "weight gradient": 2}
CONFIGS = [
    pytest.param(
        which, config, id=f"{which}-{type(config).__module__[20:]}-{'x'.join(map(str, config))}"
    )
    for which in PASSES
    for config in (conv._WGRAD_CONFIGS if which == "weight gradient" else conv._FWD_CONFIGS)
]


def is_tma(config) -> bool:
    return not isinstance(config, conv_gather.Config | conv_gather.WgradConfig)


def is_wide(config) -> bool:
    """For float32 alone: forward and input gradient not in TF32."""
    return isinstance(config, conv_tf32x3.Config | conv_turned_wgrad.WgradConfig)


def is_strided(config) -> bool:
    return isinstance(config, conv_stride.Config | conv_stride.WgradConfig)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("which", "config"), CONFIGS)
def test_every_config(which, config, device):
    if is_tma(config) and not describe(device).tma:
        pytest.skip("no TMA unit")
    shape = Shape(3, 6, 8, 128, 40, stride=2) if is_strided(config) else Shape(3, 6, 8, 72, 40)
    precision = "fp32" if is_wide(config) else "fp16"
    data = make(shape, DTYPES[precision][0], device)
    exact, low = references(shape, *data)
    got = one_pass(which, shape, *data, False, config)
    index = PASSES[which]
    floor = ROUNDING[precision]
    assert relative(got, exact[index]) <= 2 * relative(low[index], exact[index]) + floor


@pytest.mark.parametrize(
    "n, p, q", [(1, 64, 64), (3, 8, 8), (5, 4, 4), (1, 1, 70), (2, 5, 28), (2, 1, 48)]
)
def test_boxes_cover_every_pixel(n, p, q):
    """A pixel is in exactly one box, and a run of pixels is the same in both views of it."""
    for block in (16, 64, 256):
        images, rows, columns = tma_boxes.pixel_box(block, n, p, q)
        assert images * rows * columns == block
        (images, rows, columns), flat = tma_boxes.wgrad_box(block, n, p, q)
        assert images * rows * columns <= block
        assert flat or (images, rows) == (1, 1)
        pixels = torch.arange(n * p * q).view(n, p, q)
        boxes = [
            pixels[i : i + images, j : j + rows, k : k + columns].flatten()
            for i in range(0, n, images)
            for j in range(0, p, rows)
            for k in range(0, q, columns)
        ]
        assert torch.cat(boxes).sort().values.equal(pixels.flatten())
        if flat:
            assert torch.cat(boxes).equal(pixels.flatten())
            assert all(len(box) == block for box in boxes[:-1])


# --- on a GPU: the shapes of the models -----------------------------------------------------------

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


SOME = ["stem", "head", "3x3 16x16 320-192", "1x1 8x8 256-768", "linear 256-128", "28x28"]
MODEL_RUNS = [
    *((name, n, "bf16") for name in MODEL for n in (3, 32)),
    *((name, 3, precision) for name in SOME for precision in ("fp16", "tf32", "fp32")),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("name", "n", "precision"), MODEL_RUNS)
def test_model_shape(name, n, precision, monkeypatch, device):
    dtype, tf32 = DTYPES[precision]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    shape = Shape(n, *MODEL[name])
    data = make(shape, dtype, device)
    first = run(conv.conv2d, shape, *data, allow_tf32=tf32)
    check(first, *references(shape, *data), shape, precision)
    for _ in range(3):  # no atomics: the same bits each time
        again = run(conv.conv2d, shape, *data, allow_tf32=tf32)
        assert all(map(torch.equal, again, first))


# Where a tile of another kind raced, and a shape that is ragged in every dimension.
RACES = {
    "32x32 bf16": (Shape(32, 32, 32, 128, 128), "bf16"),
    "16x16 bf16": (Shape(32, 16, 16, 192, 192), "bf16"),
    "ragged bf16": (Shape(5, 13, 21, 200, 136), "bf16"),
    "16x16 tf32": (Shape(32, 16, 16, 192, 192), "tf32"),
    "ragged tf32": (Shape(5, 13, 21, 200, 136), "tf32"),
    "32x32 fp32": (Shape(32, 32, 32, 128, 128), "fp32"),
    "ragged fp32": (Shape(5, 13, 21, 200, 136), "fp32"),
    "stride 2 bf16": (Shape(32, 32, 32, 128, 128, stride=2), "bf16"),
    "ragged, stride 2 bf16": (Shape(5, 14, 22, 128, 136, stride=2), "bf16"),
    "stride 2 tf32": (Shape(32, 16, 16, 128, 192, stride=2), "tf32"),
}


@lru_cache(maxsize=1)
def race_case(name: str):
    """Data and both references; consecutive tests share them."""
    shape, precision = RACES[name]
    data = make(shape, DTYPES[precision][0], torch.device("cuda"))
    return data, *references(shape, *data)


def fits_float32(config) -> bool:
    if isinstance(config, conv_tf32x3.Config):
        return True
    x, weight = torch.empty(1, device="cuda"), torch.empty(1, 1, 3, 3)
    return conv_turned_wgrad._fits(config, x, weight, "ieee")


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("which", "config"), CONFIGS)
@pytest.mark.parametrize("name", RACES)
def test_every_config_repeatedly(name, which, config, monkeypatch, device):
    """A race shows as a wrong result, or one that changes."""
    shape, precision = RACES[name]
    dtype, tf32 = DTYPES[precision]
    wide = dtype == torch.float32
    if is_tma(config):
        if is_strided(config) != (shape.stride == 2):
            pytest.skip("of another stride")
        if not describe(device).tma:
            pytest.skip("no TMA unit")
        if is_wide(config):
            if not wide or (precision == "tf32" and which != "weight gradient"):
                pytest.skip("of another dtype")
            if precision == "fp32" and not fits_float32(config):
                pytest.skip("two parts of a tile do not fit")
        elif precision == "fp32" or (wide and which == "weight gradient"):
            pytest.skip("another path serves it")
        elif wide and config.block_k > 32:
            pytest.skip("a row of a box is at most 128 bytes")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    data, exact, low = race_case(name)
    index = PASSES[which]
    terms = 9 * max(shape.ci, shape.co) if index < 2 else shape.n * shape.h * shape.w
    budget = 2 * relative(low[index], exact[index]) + ROUNDING[precision] + 2**-24 * terms**0.5
    first = one_pass(which, shape, *data, tf32, config)
    assert relative(first, exact[index]) <= budget
    for _ in range(10):
        assert torch.equal(one_pass(which, shape, *data, tf32, config), first)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [conv_gather.FWD_CONFIGS[1], conv_tma.FWD_CONFIGS[2]])
def test_more_than_2_31_elements(config, device):
    """The last image of a batch past 32-bit offsets is as good as the first."""
    if torch.cuda.get_device_properties(device).total_memory < 30e9:
        pytest.skip("needs 30 GB of GPU memory")
    if is_tma(config) and not describe(device).tma:
        pytest.skip("no TMA unit")
    shape = Shape(1, 64, 64, 512, 16)
    x, weight, bias, dy = make(shape, torch.bfloat16, device)
    many = 1025
    many_x = torch.zeros(many, *x.shape[1:], dtype=x.dtype, device=device)
    many_dy = torch.zeros(many, *dy.shape[1:], dtype=x.dtype, device=device)
    many_x[-1], many_dy[-1] = x[0], dy[0]
    assert many_x.numel() > 2**31
    for which in ("forward", "input gradient"):
        one = one_pass(which, shape, x, weight, bias, dy, False, config)
        big = one_pass(which, shape, many_x, weight, bias, many_dy, False, config)
        assert torch.equal(big[-1], one[0])
    one = one_pass("weight gradient", shape, x, weight, bias, dy, False, None)
    big = one_pass("weight gradient", shape, many_x, weight, bias, many_dy, False, None)
    assert relative(big, one.double()) < 1e-5


@pytest.mark.gpu
def test_in_a_cuda_graph(device):
    shape = Shape(4, 16, 16, 64, 64)
    x, weight, bias, dy = make(shape, torch.bfloat16, device)
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]

    def step():
        return torch.autograd.grad(conv.conv2d(*inputs), inputs, dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for t in inputs:
            t.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, step()))


# --- refusals -------------------------------------------------------------------------------------


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
