"""Convolutions with fused epilogues against plain compositions in float64."""

import pytest
import torch

from triton_kernels.conv.fused import conv_forward, conv_plain_input_grad
from triton_kernels.conv.plain import fused_launch, fused_tiles as conv_tiles
from triton_kernels.conv.plain.by_tma import tma_wgrad as conv_tma_wgrad

from .conv_cases import MODEL
from .conv_fused_cases import (
    DTYPES,
    RAGGED,
    ROUNDING,
    SMALL,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    check_stats,
    check_weight_grad,
    forward_case,
    forward_reference,
    grad_case,
    grad_reference,
    needs_tma,  # noqa: F401  a fixture for every test here
    relative,
    tensor_cores,  # noqa: F401  a fixture for every test here
)
from .distinct import distinct
from .masks import dropped

ALL_CONFIGS = (fused_launch.FWD_CONFIGS, fused_launch.DGRAD_CONFIGS, conv_tma_wgrad.WGRAD_CONFIGS)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_extra_pointwise_convolutions(count, dtype, device):
    check_extra(SMALL["3x3"], 72, 24, dtype, device, count=count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["3x3", "images of 16 pixels", "1x1", "empty batch"])
def test_sums_that_a_number_multiplies(name, dtype, device):
    check_forward(SMALL[name], dtype, device, factor=-(0.5**0.5))
    check_extra(SMALL[name], 72, 24, dtype, device, factor=3)
    rows = next(c for c in fused_launch.FWD_CONFIGS if c.rows > 1)
    check_forward(Shape(3, 8, 16, 72, 136), dtype, device, rows, factor=0.1)


def test_statistics_do_not_cancel(device):
    """Values of 1000 and more with a spread of about 1, in the three digits that fp16 then has."""
    shape = SMALL["3x3"]
    x, weight, bias, _, _ = forward_case(shape, torch.float16, device)
    check_stats(*conv_forward(x, weight, bias + 1000, stats=True))


@pytest.mark.parametrize("config", distinct(fused_launch.FWD_CONFIGS), ids=str)
def test_every_forward_config(config, device):
    check_forward(Shape(3, 8, 16, 72, 136), torch.float16, device, config)
    if config.rows == 1:
        check_forward(Shape(3, 8, 8, 40, 24), torch.float16, device, config)
        check_forward(Shape(3, 7, 6, 40, 24), torch.float16, device, config)
    check_extra(Shape(3, 8, 16, 72, 24), 40, 72, torch.float16, device, config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED)
def test_input_grad(name, dtype, device):
    check_grad((SMALL | RAGGED)[name], None, dtype, device)


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


@pytest.mark.parametrize("config", distinct(fused_launch.DGRAD_CONFIGS), ids=str)
def test_every_input_grad_config(config, device):
    check_grad(Shape(3, 8, 16, 136, 72), None, torch.float16, device, config=config)
    if config.rows == 1:
        check_grad(Shape(3, 8, 8, 136, 40), 128, torch.float16, device, config=config)
    for ragged in (Shape(3, 7, 6, 72, 24), Shape(1, 4, 30, 72, 24)):
        if conv_tiles.serves(config, 2, 3, ragged[:3], even=True, grad=True):
            check_grad(ragged, 48, torch.float16, device, config=config)
            break


@pytest.mark.parametrize("config", [None, *fused_launch.DGRAD_CONFIGS[4::3]], ids=str)
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
        for configs, grad in ((fused_launch.FWD_CONFIGS, False), (fused_launch.DGRAD_CONFIGS, True))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(fused_launch.FWD_CONFIGS)))
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
