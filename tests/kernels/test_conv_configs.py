"""Every tile that conv2d may take, against the reference; on a GPU several times, at shapes where
tiles of another kind raced, and past 2^31 elements."""

import itertools
from functools import lru_cache

import pytest
import torch

from triton_kernels.conv import conv2d as conv
from triton_kernels.conv.configs import WgradOperands
from triton_kernels.conv.hopper.weight_grads import fp16_split_wgrad, mma_wgrad
from triton_kernels.conv.plain import (
    gather as conv_gather,
    gather_wgrad,
    pointwise_wgrad,
    tf32x3 as conv_tf32x3,
)
from triton_kernels.conv.plain.by_tma import (
    tma as conv_tma,
    tma_boxes,
    tma_stride as conv_stride,
    tma_wgrad as conv_tma_wgrad,
)
from triton_kernels.conv.weight_grad import weight_grad_spec
from triton_kernels.runtime.device import describe

from .conv_cases import (
    DTYPES,
    ROUNDING,
    Shape,
    check_each,
    make,
    make_scaled,
    padding_of,
    references,
    relative,
)
from .distinct import distinct


def one_pass(which: str, shape: Shape, x, weight, bias, dy, tf32: bool, config):
    """y, dx or dweight by the tile `config`."""
    options = (shape.stride, padding_of(shape), tf32, config)
    low = weight.to(x.dtype)
    if which == "forward":
        return conv._conv2d_fwd(x, low, bias, *options)
    if which == "input gradient":
        return conv.conv2d_input_grad(dy, low, x.shape[1:3], *options)
    return conv._conv2d_wgrad(x, dy, weight, *options)


PASSES = {"forward": 0, "input gradient": 1, "weight gradient": 2}
FWD_CONFIGS = [
    *conv_gather.FWD_CONFIGS,
    *conv_tma.FWD_CONFIGS,
    *conv_stride.FWD_CONFIGS,
    *conv_tf32x3.FWD_CONFIGS,
]
WGRAD_CONFIGS = [
    *gather_wgrad.WGRAD_CONFIGS,
    *conv_tma_wgrad.WGRAD_CONFIGS,
    *conv_stride.WGRAD_CONFIGS,
]
CONFIGS = [
    pytest.param(
        which, config, id=f"{which}-{type(config).__module__[20:]}-{'x'.join(map(str, config))}"
    )
    for which in PASSES
    for config in distinct(WGRAD_CONFIGS if which == "weight gradient" else FWD_CONFIGS)
]


def is_tma(config) -> bool:
    return not isinstance(config, conv_gather.Config | gather_wgrad.WgradConfig)


def is_wide(config) -> bool:
    """For float32 alone: forward and input gradient not in TF32."""
    return isinstance(config, conv_tf32x3.Config)


def is_strided(config) -> bool:
    return isinstance(config, conv_stride.Config | conv_stride.WgradConfig)


@pytest.mark.parametrize(("which", "config"), CONFIGS)
def test_every_config(which, config, device, monkeypatch):
    if is_tma(config) and not describe(device).tma:
        pytest.skip("no TMA unit")
    shape = Shape(3, 6, 8, 128, 40, stride=2) if is_strided(config) else Shape(3, 6, 8, 72, 40)
    if config.block_m <= 32:  # several tiles all the same
        shape = Shape(2, 3, 6, 72, 40)
    precision = "fp32" if is_wide(config) else "fp16"
    data = make(shape, DTYPES[precision][0], device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
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


@pytest.mark.parametrize("even", [True, False], ids=["even", ""])
@pytest.mark.parametrize("n", [1, 5])
def test_boxes_over_the_edges(n, even):
    """Some box is there for every image. Its powers of two cover it, and even ones have as many
    pixels of an image as one another."""
    sides = (1, 2, 3, 6, 7, 10, 14, 25, 48, 66, 130, 257)
    for p, q in itertools.product(sides, sides):
        found = {m: tma_boxes.covering_box(m, n, p, q, even) for m in (16, 64, 128, 256)}
        assert found[64] or found[128], (p, q)
        for block, box in found.items():
            if box is None:
                assert even
                continue
            assert box[0] * box[1] * box[2] == block
            heights, widths = (
                {min(size, side - start) for start in range(0, side, size)}
                for side, size in ((p, box[1]), (q, box[2]))
            )
            assert not even or len(heights) == len(widths) == 1


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


@pytest.mark.gpu
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
            if precision != "fp32":
                pytest.skip("of another dtype")
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


POINTWISE = {
    "16x16": Shape(32, 16, 16, 192, 192, (1, 1)),
    "ragged": Shape(5, 13, 21, 200, 136, (1, 1)),
    "few pixels": Shape(33, 1, 1, 72, 256, (1, 1)),
}
POINTWISE_CONFIGS = [
    *((c, precision) for precision in ("tf32", "fp32") for c in pointwise_wgrad.TILES),
    *((c, "bf16") for c in conv_tma_wgrad.WGRAD_CONFIGS if c.taps == 1),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("config", distinct(pointwise_wgrad.TILES), ids=str)
def test_every_config_of_points(config, precision, monkeypatch, device):
    if is_tma(config) and not describe(device).tma:
        pytest.skip("no TMA unit")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    for ci, co in ((72, 40), (40, 264)):
        check_weight_grad(Shape(3, 6, 8, ci, co, (1, 1)), precision, config, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "precision"), POINTWISE_CONFIGS, ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_every_pointwise_config_repeatedly(name, config, precision, monkeypatch, device):
    if not describe(device).tma:
        pytest.skip("no TMA unit")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    check_weight_grad(POINTWISE[name], precision, config, device, times=10)


MMA = {
    "1x1, ragged": POINTWISE["ragged"],
    "3x3, 16x16": Shape(32, 16, 16, 192, 192),
    "3x3, 64x64": Shape(4, 64, 64, 64, 64),
    "2x4, padding beyond the filter": Shape(3, 5, 6, 36, 72, (2, 4), padding=(4, 3)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("config", mma_wgrad.TILES, ids=str)
@pytest.mark.parametrize("name", MMA)
def test_every_config_of_mma_repeatedly(name, config, precision, monkeypatch, device):
    skip_unless_mma_takes(config, MMA[name], precision, device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    check_weight_grad(MMA[name], precision, config, device, times=10)


HALVES = {
    "64x64": Shape(4, 64, 64, 64, 64),
    "32x32": Shape(13, 32, 32, 128, 64),
    "16x16": Shape(32, 16, 16, 192, 192),
    "8x8, a group of images that is not full": Shape(21, 8, 8, 128, 256),
    "a tile": Shape(1, 2, 64, 64, 128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_repeatedly(name, precision, monkeypatch, device):
    shape = HALVES[name]
    x, weight, _, dy = make(shape, torch.float32, device)
    if reason := refused(fp16_split_wgrad, shape, precision, device):
        pytest.skip(reason)
    tf32 = precision == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    config = fp16_split_wgrad.TILE
    check_weight_grad(shape, precision, config, device, times=10)
    exact = conv._conv2d_wgrad(x, dy, weight, 1, (1, 1), tf32, config)
    for one, other in ((2.0**-70, 2.0**60), (2.0**90, 2.0**-100)):  # the same bits times 2^-10
        got = conv._conv2d_wgrad(x * one, dy * other, weight, 1, (1, 1), tf32, config)
        assert torch.equal(got * 2.0**10, exact)
    g = torch.Generator().manual_seed(0)
    of_x, of_dy = (  # a power of four a channel: the same bits again
        4.0 ** torch.randint(-25, 25, (c,), generator=g).to(device) for c in (shape.ci, shape.co)
    )
    got = conv._conv2d_wgrad(x * of_x, dy * of_dy, weight, 1, (1, 1), tf32, config)
    assert torch.equal(got, exact * of_x[None, :, None, None] * of_dy[:, None, None, None])
    # in TF32 tensor cores add up all steps of 16 pixels, and round towards zero
    pixels = shape.n * shape.h * shape.w
    budget = 2.0**-23 * pixels / 16 if tf32 else 2.0**-24 * pixels**0.5
    for splits in (1, 2, 5):  # tiles may be fewer
        parts = x.new_full((splits, weight.numel()), float("nan"))
        operands = WgradOperands(x, dy, weight, 1, (1, 1), "tf32" if tf32 else "ieee", parts)
        fp16_split_wgrad.launch_split(fp16_split_wgrad.TILE, splits, operands)
        got = parts.sum(0).as_strided(weight.shape, weight.stride())
        assert relative(got, exact.double()) < budget


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_halves_of_channels_that_are_not_finite(precision, device):
    """A channel of zeros, of infinities, of NaNs: all others have the bits that they would have."""
    shape, tf32 = HALVES["16x16"], precision == "tf32"
    x, weight, _, dy = make(shape, torch.float32, device)
    if reason := refused(fp16_split_wgrad, shape, precision, device):
        pytest.skip(reason)

    def gradient(x, dy):
        return conv._conv2d_wgrad(x, dy, weight, 1, (1, 1), tf32, fp16_split_wgrad.TILE)

    finite = gradient(x, dy)
    x[..., 7], x[..., 70], x[3, 2, 1, 130], dy[..., 9] = 0, float("inf"), float("nan"), 0
    dy[5, 5, 5, 100], dy[..., 60] = float("-inf"), 3e38
    got = gradient(x, dy)
    assert not got[:, 7].isfinite().logical_and(got[:, 7] != 0).any()  # 0, or inf * 0
    assert not got[:, 70].isfinite().any() and not got[:, 130].isfinite().all()
    assert not got[100].isfinite().all()
    for_sure = torch.ones_like(got, dtype=torch.bool)
    for_sure[:, [7, 70, 130]] = False
    for_sure[[9, 100, 60]] = False
    assert torch.equal(got[for_sure], finite[for_sure])
    for_sure = [c for c in range(shape.ci) if c not in (70, 130)]
    assert not got[9, for_sure].any()


BY_CHANNEL = [
    *(("weight gradient", c) for c in mma_wgrad.TILES),
    ("weight gradient", fp16_split_wgrad.TILE),
    *(("forward", c) for c in conv_tf32x3.FWD_CONFIGS),
    *(("input gradient", c) for c in conv_tf32x3.FWD_CONFIGS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize(("which", "config"), BY_CHANNEL, ids=str)
def test_a_scale_a_channel_by_every_config(which, config, precision, device):
    """A channel of any scale is as exact as if it were alone."""
    shape, tf32 = Shape(8, 16, 16, 128, 192), precision == "tf32"
    data = make_scaled(shape, device)
    x, weight, _, dy = data
    if which != "weight gradient":
        if tf32:
            pytest.skip("float32 alone")
    elif config == fp16_split_wgrad.TILE:
        if reason := refused(fp16_split_wgrad, shape, precision, device):
            pytest.skip(reason)
    else:
        skip_unless_mma_takes(config, shape, precision, device)
    got = one_pass(which, shape, *data, tf32, config)
    name = {"forward": "y", "input gradient": "dx", "weight gradient": "dweight"}[which]
    print(f"{config} {check_each(name, got, shape, data, precision):.3f} of the budget")


def test_halves_need_a_hopper_gpu():
    for shape in HALVES.values():
        assert refused(fp16_split_wgrad, shape, "fp32", torch.device("cpu"))


def spec_of(shape: Shape, precision: str, device):
    x, weight, _, dy = make(shape, torch.float32, device)
    of_products = "ieee" if precision == "fp32" else "tf32"
    return weight_grad_spec(x, dy, weight, 1, padding_of(shape), of_products)


def refused(module, shape: Shape, precision: str, device) -> str | None:
    """Why a kernel does not take it, if it does not."""
    return module.WEIGHT_GRAD.refuse(spec_of(shape, precision, device), describe(device))


def skip_unless_mma_takes(config, shape: Shape, precision: str, device) -> None:
    if reason := refused(mma_wgrad, shape, precision, device):
        pytest.skip(reason)
    if config not in mma_wgrad.tiles(spec_of(shape, precision, device), describe(device)):
        pytest.skip("three products find no room, or there is one")


def check_weight_grad(shape: Shape, precision: str, config, device, times: int = 0):
    """Against the references, and so many times more against itself."""
    dtype, tf32 = DTYPES[precision]
    data = make(shape, dtype, device)
    exact, low = (results[2] for results in references(shape, *data))
    first = one_pass("weight gradient", shape, *data, tf32, config)
    terms = shape.n * shape.h * shape.w
    budget = 2 * relative(low, exact) + ROUNDING[precision] + 2**-24 * terms**0.5
    assert relative(first, exact) <= budget
    for _ in range(times):
        assert torch.equal(one_pass("weight gradient", shape, *data, tf32, config), first)


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
