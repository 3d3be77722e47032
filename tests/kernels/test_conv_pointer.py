"""Convolutions with fused epilogues on GPUs without a TMA unit, against the references of
`test_conv_fused`."""

import pytest
import torch

from triton_kernels.conv import fused as conv_fused, weight_grad
from triton_kernels.conv.fused import conv_forward, conv_plain_input_grad
from triton_kernels.conv.plain.by_tma.tma_boxes import spread_row_box
from triton_kernels.conv.plain.pointers import pointer, pointer_wgrad
from triton_kernels.conv.plain.pointers.pointer_tiles import TILES

from .conv_fused_cases import (
    DTYPES,
    RAGGED,
    ROUNDING,
    SMALL,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    check_weight_grad,
    forward_case,
    forward_reference,
    grad_case,
    grad_reference,
    randn,
    relative,
    weight_grad_reference,
)
from .distinct import distinct
from .masks import dropped
from .other_chip import _as_crowded

# Channels that are no multiple of 8, as no descriptor of a TMA unit could have them
ODD = {
    "odd channels": Shape(2, 5, 7, 19, 33),
    "multiples of 4": Shape(2, 6, 4, 20, 12),
    "few": Shape(2, 8, 8, 3, 10),
    "more taps than an int32 has bits": Shape(2, 9, 8, 5, 12, 7),
}


@pytest.fixture(autouse=True)
def pointers(no_tma):
    """Nothing is fetched by TMA."""


def tile(block_c: int, block_m: int, rows: int = 1) -> pointer.PointerTile:
    return next(c for c in TILES if (c.block_c, c.block_m, c.rows) == (block_c, block_m, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED | ODD)
def test_forward(name, dtype, device):
    check_forward((SMALL | RAGGED | ODD)[name], dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED | ODD)
def test_input_grad(name, dtype, device):
    check_grad((SMALL | RAGGED | ODD)[name], None, dtype, device)


@pytest.mark.parametrize("name", SMALL | ODD)
def test_plain_input_grad(name, device):
    shape = (SMALL | ODD)[name]
    dy, weight, x, _, table = grad_case(shape, None, torch.float16, device)
    table = torch.tensor([0.0, 1, 1, 0], device=device)[None, :, None].expand(table.shape)
    exact, _ = grad_reference(dy, weight, x, table, "identity", torch.float64)
    assert relative(conv_plain_input_grad(dy, weight), exact) <= ROUNDING[torch.float16] + 1e-6


@pytest.mark.slow  # in the interpreter
@pytest.mark.parametrize("config", distinct(TILES), ids=str)
def test_every_tile(config, device):
    rows = config.rows
    check_forward(Shape(3, 8, 16, 72, 136), torch.float16, device, config)
    check_extra(Shape(3, 8, 16, 40, 24), 40, 72, torch.float16, device, config)
    check_grad(Shape(3, 8, 16, 136, 40), 48, torch.float16, device, config=config)
    if rows == 1:
        check_forward(Shape(3, 7, 6, 40, 24), torch.float16, device, config)
        check_grad(Shape(3, 7, 6, 72, 24), 48, torch.float16, device, config=config)
    check_grad(
        Shape(3, 8, 16, 40, 24), None, torch.float16, device, config=config, mask=dropped(device)
    )


@pytest.mark.parametrize("config", [tile(64, 128), tile(64, 64, 4)], ids=str)
def test_blocks_that_divide_all_channels(config, device):
    """Nothing is masked then but pixels."""
    check_forward(Shape(2, 4, 16, 64, 128), torch.float16, device, config)
    check_extra(Shape(2, 4, 16, 64, 64), 64, 32, torch.float16, device, config)
    check_grad(Shape(2, 4, 16, 128, 64), 64, torch.float16, device, config=config)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extra_pointwise_convolutions(count, dtype, device):
    check_extra(SMALL["3x3"], 72, 24, dtype, device, count=count)
    check_extra(ODD["odd channels"], 7, 24, dtype, device, count=count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["3x3", "7x7", "1x1", "odd channels"])
def test_sums_that_a_number_multiplies(name, dtype, device):
    shape = (SMALL | RAGGED | ODD)[name]
    check_forward(shape, dtype, device, factor=-(0.5**0.5))
    check_extra(shape, 72, 24, dtype, device, factor=3)
    check_forward(Shape(2, 4, 16, 64, 128), dtype, device, tile(64, 64, 4), factor=0.1)


def test_no_term_but_the_bias(device):
    shape = Shape(3, 5, 7, 16, 24)
    x, weight, bias, emb, residual = forward_case(shape, torch.float16, device)
    y, partials = conv_forward(x, weight, bias)
    exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
    assert partials is None
    assert relative(y, exact) <= ROUNDING[torch.float16] + 1e-6


def test_few_channels_of_more(device):
    """The head: y has zeros behind its channels, and what is behind those of dy does not count."""
    shape = Shape(2, 8, 6, 24, 3)
    x, weight, bias, emb, residual = forward_case(shape, torch.float16, device)
    y, _ = conv_forward(x, weight, bias, width=16)
    exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
    assert relative(y[..., :3], exact) <= ROUNDING[torch.float16] + 1e-6
    assert y.shape[3] == 16 and not y[..., 3:].any()

    dy, weight, x, inputs, table = grad_case(shape, None, torch.float16, device)
    padded = torch.full((*dy.shape[:3], 16), 7.0, dtype=dy.dtype, device=device)
    padded[..., :3] = dy
    dz, _ = conv_fused.conv_input_grad(
        padded, weight, inputs=inputs, table=table, activation="silu"
    )
    exact, _ = grad_reference(dy, weight, x, table, "silu", torch.float64)
    assert relative(dz, exact) <= ROUNDING[torch.float16] + 1e-6


@pytest.mark.parametrize("channels", [18, 24])
def test_a_gradient_without_an_epilogue_has_no_channels_beside_those_of_the_filters(
    channels, device
):
    """Kernels that count filters by the channels of dy would read what lies behind them: times
    zero that is NaN, if it is."""
    dy = torch.zeros(1, 4, 4, 16, dtype=torch.float16, device=device)
    weight = torch.zeros(3, 3, 3, channels, dtype=torch.float16, device=device)
    with pytest.raises(AssertionError, match=f"3, {channels}"):
        conv_plain_input_grad(dy, weight.permute(0, 3, 1, 2))


@pytest.mark.parametrize("c1", [8, 48, 65])
def test_two_inputs_in_one_tile_of_channels(c1, device):
    check_grad(Shape(2, 3, 5, c1 + 48, 16), c1, torch.float16, device)


@pytest.mark.parametrize("rows", [2, 4])
def test_rows_of_a_program_leave_no_gaps(rows):
    """Those of its boxes are every row of a block, or one row each of several images."""
    for p, q in ((16, 16), (8, 32), (64, 64), (12, 48), (20, 16)):
        images, high, wide = spread_row_box(64, rows, p, q)
        assert images * high * wide == 64 and q % wide == 0
        covered = sorted(rows * h + row for h in range(high) for row in range(rows))
        assert covered == list(range(rows * high)) and p % (rows * high) == 0
    assert spread_row_box(64, 4, 16, 16) == (1, 4, 16) and spread_row_box(64, 4, 4, 16)[0] == 4
    assert spread_row_box(64, 4, 16, 8) is None and spread_row_box(64, 4, 6, 16) is None


def test_a_stand_in_is_as_crowded_as_the_chip():
    """As many programs of so much shared memory as 100 KiB hold, with 1 KiB more for each."""
    assert _as_crowded(73728, 89, 90) == 232448  # one
    assert _as_crowded(36864, 89, 90) == 233472 // 2 - 1024
    assert _as_crowded(73728, 80, 90) == 233472 // 2 - 1024
    assert _as_crowded(512, 80, 90) == 512 and _as_crowded(0, 89, 90) == 0
    assert _as_crowded(200_000, 89, 90) == 200_000  # which does not fit there


# --- weight gradient ------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | RAGGED | ODD)
def test_weight_grad(name, dtype, accumulate, device):
    check_weight_grad((SMALL | RAGGED | ODD)[name], dtype, device, accumulate)


@pytest.mark.slow  # in the interpreter
@pytest.mark.parametrize("config", distinct(pointer_wgrad.TILES), ids=str)
def test_every_weight_grad_tile(config, device):
    if config.rows == 1:
        check_weight_grad(Shape(3, 6, 8, 72, 136), torch.float16, device, config=config)
    check_weight_grad(Shape(3, 4, 16, 72, 136), torch.float16, device, config=config)
    check_weight_grad(Shape(1, 4, 32, 128, 128), torch.float16, device, config=config)


@pytest.mark.parametrize("pixels", [2, 16], ids=["one split", "splits"])
def test_weight_grad_of_some_columns(pixels, device):
    shape = Shape(1, pixels, pixels, 72, 40, 1)
    check_weight_grad(shape, torch.float16, device, accumulate=True, beside=8)


@pytest.mark.parametrize("padding", [0, 1])
def test_weight_grad_of_stride_two(padding, device):
    x = randn(3, 6, 10, 24, seed=0, device=device, dtype=torch.float16)
    dy = randn(3, 3, 5, 40, seed=6, device=device, dtype=torch.float16)
    out = torch.full((40, 3, 3, 24), torch.nan, device=device).permute(0, 3, 1, 2)
    weight_grad.conv_weight_grad(x, dy, out, stride=2, padding=padding)
    w = torch.zeros(40, 24, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    image = torch.nn.functional.pad(x.double().permute(0, 3, 1, 2), [padding, 1] * 2)
    y = torch.nn.functional.conv2d(image, w, stride=2)[:, :, :3, :5]
    (exact,) = torch.autograd.grad(y, w, dy.double().permute(0, 3, 1, 2))
    assert relative(out, exact) <= 2**-24 * 45**0.5 + 1e-6


def test_weight_grad_of_padded_channels(device):
    """What is behind the channels of x and dy does not count."""
    x, dy = (
        torch.full((2, 6, 8, 16), torch.nan, dtype=torch.float16, device=device) for _ in range(2)
    )
    x[..., :3] = randn(2, 6, 8, 3, seed=0, device=device, dtype=torch.float16)
    dy[..., :5] = randn(2, 6, 8, 5, seed=6, device=device, dtype=torch.float16)
    out = torch.full((5, 3, 3, 3), torch.nan, device=device).permute(0, 3, 1, 2)
    weight_grad.conv_weight_grad(x, dy, out)
    exact = weight_grad_reference(x[..., :3], dy[..., :5], 3)
    assert relative(out, exact) <= 2**-24 * 96**0.5 + 1e-6
