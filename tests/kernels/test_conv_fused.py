"""Convolutions with fused epilogues against plain compositions in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from triton_kernels import reference
from triton_kernels.conv import fused as conv_fused
from triton_kernels.conv.fused import (
    conv_forward,
    conv_input_grad,
    conv_plain_input_grad,
    conv_weight_grad,
)
from triton_kernels.conv.plain import fused_tiles as conv_tiles
from triton_kernels.conv.plain import gather as conv_gather
from triton_kernels.conv.plain import tma as conv_tma
from triton_kernels.conv.plain import tma_wgrad as conv_tma_wgrad
from triton_kernels.conv.plain.tma_boxes import boxes_of_image, covering_box, image_box, row_box
from triton_kernels.noise.dropout import Mask
from triton_kernels.runtime.device import describe

from .conv_cases import MODEL
from .distinct import distinct
from .poison import poison_outputs


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


@pytest.fixture(autouse=True)
def poison(monkeypatch, device):
    """Memory that a kernel forgets to write holds NaN."""
    if not describe(device).tma:
        pytest.skip("no TMA unit")
    poison_outputs(monkeypatch, conv_fused)


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


ALL_CONFIGS = (conv_fused._FWD_CONFIGS, conv_fused._DGRAD_CONFIGS, conv_tma_wgrad.WGRAD_CONFIGS)


# --- forward --------------------------------------------------------------------------------------


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


def check_forward(shape: Shape, dtype, device, config=None):
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    y, partials = conv_forward(
        x, weight, bias, emb=emb, residual=residual, stats=True, config=config
    )
    exact = forward_reference(x, weight, bias, emb, residual, torch.float64)
    assert y.dtype == dtype
    terms = shape.kernel**2 * shape.ci
    assert relative(y, exact) <= ROUNDING[dtype] + 2**-24 * terms**0.5
    if shape.n:
        check_stats(y, partials)
    return y, partials


def check_stats(y: Tensor, partials: Tensor):
    """The statistics describe what was stored, to the precision of float32."""
    n, h, w, co = y.shape
    k = partials.shape[1]
    assert partials.shape == (n, k, 2, co) and h * w % k == 0
    sizes = (16, 64, 128, 256)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED)
def test_forward(name, dtype, device):
    check_forward((SMALL | RAGGED)[name], dtype, device)


@pytest.mark.parametrize("with_emb", [False, True], ids=["", "emb"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_forward_in_parts(with_emb, with_residual, device):
    """Every term can be absent; without statistics tiles need not divide an image."""
    shape = Shape(3, 5, 7, 16, 24)
    x, weight, bias, emb, residual = forward_case(shape, torch.float16, device)
    y, partials = conv_forward(
        x,
        weight,
        bias,
        emb=emb if with_emb else None,
        residual=residual if with_residual else None,
    )
    exact = forward_reference(
        x, weight, bias, emb * with_emb, residual * with_residual, torch.float64
    )
    assert partials is None
    assert relative(y, exact) <= ROUNDING[torch.float16] + 1e-6


def extra_case(shape: Shape, c1: int, c2: int, dtype, device):
    """Two tensors, and the columns of one 1x1 filter for their concatenation."""
    n, h, w, _, co, _ = shape
    weight = randn(co, c1 + c2, seed=8, device=device, dtype=dtype) / (c1 + c2) ** 0.5
    x1 = randn(n, h, w, c1, seed=9, device=device, dtype=dtype)
    x2 = randn(n, h, w, c2, seed=10, device=device, dtype=dtype)
    return (x1, weight[:, :c1]), (x2, weight[:, c1:])


def check_extra(shape: Shape, c1: int, c2: int, dtype, device, config=None, count=2):
    extra = extra_case(shape, c1, c2, dtype, device)[:count]
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    extra_bias = randn(shape.co, seed=11, device=device)
    y, partials = conv_forward(
        x, weight, bias, emb=emb, extra=extra, extra_bias=extra_bias, stats=True, config=config
    )
    exact = forward_reference(x, weight, bias + extra_bias, emb, residual * 0, torch.float64)
    exact = exact + sum(x.double() @ w.double().T for x, w in extra)
    terms = shape.kernel**2 * shape.ci + c1 + c2
    assert relative(y, exact) <= ROUNDING[dtype] + 2**-24 * terms**0.5
    check_stats(y, partials)
    return y, partials


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_extra_pointwise_convolutions(count, dtype, device):
    check_extra(SMALL["3x3"], 72, 24, dtype, device, count=count)


def test_statistics_do_not_cancel(device):
    """Values of 1000 and more with a spread of about 1, in the three digits that fp16 then has."""
    shape = SMALL["3x3"]
    x, weight, bias, _, _ = forward_case(shape, torch.float16, device)
    check_stats(*conv_forward(x, weight, bias + 1000, stats=True))


@pytest.mark.parametrize("config", distinct(conv_fused._FWD_CONFIGS), ids=str)
def test_every_forward_config(config, device):
    check_forward(Shape(3, 8, 16, 72, 136), torch.float16, device, config)
    if config.rows == 1:
        check_forward(Shape(3, 8, 8, 40, 24), torch.float16, device, config)
        check_forward(Shape(3, 7, 6, 40, 24), torch.float16, device, config)
    check_extra(Shape(3, 8, 16, 72, 24), 40, 72, torch.float16, device, config)


# --- input gradient -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED)
def test_input_grad(name, dtype, device):
    check_grad((SMALL | RAGGED)[name], None, dtype, device)


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products in float32 take the paths of large ones."""
    monkeypatch.setattr(conv_tma, "_TRANSPOSE_FROM", 0)
    monkeypatch.setattr(conv_gather, "of_products", lambda *_: 1e9)  # gather is slow


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", SMALL)
def test_input_grad_of_turned_filters(name, device):
    check_grad(SMALL[name], None, torch.float32, device)


@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_input_grad_of_other_activations(activation, device):
    check_grad(SMALL["3x3"], None, torch.float16, device, activation)


@pytest.mark.parametrize("kernel", [1, 3])
def test_input_grad_of_two_inputs(kernel, device):
    check_grad(Shape(2, 8, 8, 136, 16, kernel), 64, torch.float16, device)
    check_grad(Shape(2, 8, 8, 136, 16, kernel), 128, torch.float16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("c1", [8, 48, 72, 128])
def test_input_grad_of_two_inputs_in_one_tile_of_channels(c1, dtype, device):
    check_grad(Shape(2, 3, 5, c1 + 48, 16), c1, dtype, device)


@pytest.mark.parametrize("config", distinct(conv_fused._DGRAD_CONFIGS), ids=str)
def test_every_input_grad_config(config, device):
    check_grad(Shape(3, 8, 16, 136, 72), None, torch.float16, device, config=config)
    if config.rows == 1:
        check_grad(Shape(3, 8, 8, 136, 40), 128, torch.float16, device, config=config)
    for ragged in (Shape(3, 7, 6, 72, 24), Shape(1, 4, 30, 72, 24)):
        if conv_tiles.serves(config, 2, 3, ragged[:3], even=True, grad=True):
            check_grad(ragged, 48, torch.float16, device, config=config)
            break


def dropped(device) -> Mask:
    return Mask(0.3, torch.tensor([0x1234_5678_9ABC, 7], device=device), layer=9, first=5)


@pytest.mark.parametrize("config", [None, *conv_fused._DGRAD_CONFIGS[4::3]], ids=str)
def test_input_grad_behind_dropout(config, device):
    """Tiles of one, of a half and of several images, and of several rows."""
    check_grad(
        Shape(3, 8, 16, 136, 24), None, torch.float16, device, config=config, mask=dropped(device)
    )


def test_rows_that_no_small_tile_covers(device):
    check_forward(Shape(1, 1, 130, 8, 16, 1), torch.float16, device)


def test_ragged_input_grad_behind_dropout(device):
    check_grad(RAGGED["14x10"], None, torch.float16, device, mask=dropped(device))


# --- the other gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_plain_input_grad(name, device):
    shape = SMALL[name]
    dy, weight, x, _, table = grad_case(shape, None, torch.float16, device)
    table = torch.tensor([0.0, 1, 1, 0], device=device)[None, :, None].expand(table.shape)
    exact, _ = grad_reference(dy, weight, x, table, "identity", torch.float64)
    got = conv_plain_input_grad(dy, weight)
    assert relative(got, exact) <= ROUNDING[torch.float16] + 1e-6


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


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
def test_weight_grad_of_turned_operands(kernel, accumulate, device):
    shape, beside = Shape(2, 5, 8, 40, 32, kernel), 4 if kernel == 1 else 0
    check_weight_grad(shape, torch.float32, device, accumulate, beside=beside)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_weight_grad(name, dtype, accumulate, device):
    check_weight_grad(SMALL[name], dtype, device, accumulate)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("pixels", [2, 16], ids=["one split", "splits"])
def test_weight_grad_of_some_columns(pixels, accumulate, device):
    shape = Shape(1, pixels, pixels, 72, 40, 1)
    check_weight_grad(shape, torch.float16, device, accumulate, beside=8)


@pytest.mark.parametrize("config", conv_tma_wgrad.WGRAD_CONFIGS[:4], ids=str)
def test_weight_grad_config(config, device):
    """Of either number of taps and both sizes; test_conv_configs has every tile of this kernel."""
    check_weight_grad(Shape(3, 6, 8, 72, 136), torch.float16, device, config=config)


# --- on a GPU: the shapes of the models -----------------------------------------------------------

FUSED = {
    name: Shape(0, h, w, ci, co, kernel[0])
    for name, (h, w, ci, co, kernel) in MODEL.items()
    if kernel[0] == kernel[1]
}


def check_all(shape: Shape, dtype, device, configs=(None, None, None)):
    """Every pass, as one input and as two; the results."""
    c1 = shape.ci * 2 // 3 // 64 * 64
    forward, grad, weight = configs
    results = [
        *check_forward(shape, dtype, device, forward),
        *check_grad(shape, None, dtype, device, config=grad),
        check_weight_grad(shape, dtype, device, config=weight),
        check_weight_grad(shape, dtype, device, accumulate=True, config=weight, beside=8)
        if shape.kernel == 1
        else None,
        *check_extra(shape, shape.co, 64, dtype, device, forward),
    ]
    mask = dropped(device) if shape.ci % 4 == 0 else None  # four channels share a draw
    results += check_grad(shape, None, dtype, device, config=grad, mask=mask)
    if c1 and (grad is None or c1 % grad.block_c == 0):
        two = check_grad(shape, c1, dtype, device, config=grad)
        results += two
    return [t for t in results if t is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 32])
@pytest.mark.parametrize("name", FUSED)
def test_model_shape(name, n, device):
    shape = FUSED[name]._replace(n=n)
    first = check_all(shape, torch.bfloat16, device)
    for _ in range(3):  # no atomics: the same bits each time
        again = check_all(shape, torch.bfloat16, device)
        assert all(map(torch.equal, again, first))


# Where a tile of another kind raced, and small images of which a tile takes several.
RACES = {
    "64x64": Shape(8, 64, 64, 64, 64),
    "32x32": Shape(32, 32, 32, 128, 128),
    "16x16": Shape(32, 16, 16, 192, 192),
    "8x8": Shape(37, 8, 8, 256, 192),
}
# Where tiles reach over the edges of images, and some straddle the halves of a concatenation.
RAGGED_RACES = {
    "14x14": Shape(32, 14, 14, 192, 192),
    "7x7": Shape(37, 7, 7, 272, 192),
}


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(max(map(len, ALL_CONFIGS))))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RACES)
def test_every_config_repeatedly(name, dtype, index, device):
    """A race shows as a wrong result, or one that changes. The i-th of each list together."""
    shape = RACES[name]
    *lists, weight = ALL_CONFIGS
    lists = _serving(shape, dtype)
    lists.append(weight if dtype.itemsize == 2 else [None])
    configs = [configs[index % len(configs)] for configs in lists]
    first = check_all(shape, dtype, device, configs)
    for _ in range(5):
        again = check_all(shape, dtype, device, configs)
        assert all(map(torch.equal, again, first))


def _serving(shape: Shape, dtype) -> list[list]:
    """The tiles of forward and of input gradient that can do it."""
    serves = conv_tiles.serves
    return [
        [c for c in configs if serves(c, dtype.itemsize, 3, shape[:3], even=True, grad=grad)]
        for configs, grad in ((conv_fused._FWD_CONFIGS, False), (conv_fused._DGRAD_CONFIGS, True))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(conv_fused._FWD_CONFIGS)))
@pytest.mark.parametrize("name", RAGGED_RACES)
def test_every_ragged_config_repeatedly(name, index, device):
    shape, results = RAGGED_RACES[name], []
    forward, grad = (c[index % len(c)] for c in _serving(shape, torch.bfloat16))
    for _ in range(5):
        results.append(
            [
                *check_forward(shape, torch.bfloat16, device, forward),
                *check_grad(shape, shape.ci // 16 * 8, torch.bfloat16, device, config=grad),
            ]
        )
        assert all(map(torch.equal, results[-1], results[0]))
