"""The tiles of `conv.hopper.tile_mma`: where they apply, and on a Hopper GPU their results."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from triton_kernels.conv import fused as conv_fused
from triton_kernels.conv.fused import FORWARD
from triton_kernels.conv.hopper.tiles import tile_mma
from triton_kernels.conv.plain.by_tma.tma_boxes import boxes_of_image
from triton_kernels.conv.plain.fused_tiles import box_of
from triton_kernels.registry.choose import listed
from triton_kernels.tf32 import rounded_to_tf32

from .chips import HOPPER
from .compile_only import SHARED_LIMIT
from .conv_fused_cases import (
    ROUNDING,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    check_padded,
    check_stats,
    extra_case,
    forward_case,
    forward_reference,
    grad_case,
    grad_reference,
    needs_tma,  # noqa: F401  a fixture for every test here
    relative,
)
from .masks import dropped, stored
from .test_conv_hopper import gpu, repeatedly, spec_of

TILES = list(tile_mma.TILES)
CONFIGS = TILES
HALVES = list(tile_mma.HALVES)
QUARTERS = list(tile_mma.QUARTERS)
# One program with one tile, programs with several and an odd number of them, one warpgroup with
# nothing to do, more blocks of channels than one, tiles that are not whole images, that are not
# whole rows, and that are a rectangle of each of several images; last blocks of 8 to 56 channels,
# also where there is no other.
SHAPES = {
    "a tile": Shape(1, 8, 32, 64, 64),
    "32x32": Shape(21, 32, 32, 128, 192),
    "rows of 32": Shape(37, 24, 32, 64, 128),
    "16x16": Shape(37, 16, 16, 192, 320),
    "a few of 16x16": Shape(3, 16, 16, 320, 64),
    "64x64": Shape(13, 64, 64, 64, 192),
    "8x8": Shape(135, 8, 8, 256, 192),
    "an image of 8x8": Shape(1, 8, 8, 64, 64),
    "4x4": Shape(135, 4, 4, 256, 192),
    "3 of 4x4": Shape(3, 4, 4, 64, 128),
    "3 of 8x16": Shape(3, 8, 16, 64, 128),
    "3 of 2x64": Shape(3, 2, 64, 64, 64),
    "rows of 128": Shape(5, 16, 128, 64, 192),
    "48x48": Shape(7, 48, 48, 128, 64),
    "24x40": Shape(7, 24, 40, 64, 128),
    "channels that fill no block": Shape(13, 16, 16, 72, 136),
    "48x48 of 96": Shape(7, 48, 48, 96, 160),
    "8x8 of few": Shape(65, 8, 8, 16, 200),
    "40x40": Shape(7, 40, 40, 160, 96),
    "20x20": Shape(37, 20, 20, 128, 64),
    "20x20 of 88": Shape(13, 20, 20, 88, 40),
    "12x28": Shape(21, 12, 28, 120, 224),
    "10x32": Shape(11, 10, 32, 64, 64),
    "30x48": Shape(9, 30, 48, 32, 80),
    "4x128": Shape(5, 4, 128, 64, 64),
    "64x20": Shape(5, 64, 20, 64, 64),
    "32x28": Shape(5, 32, 28, 64, 72),
    "16x12": Shape(9, 16, 12, 64, 64),
    "32x4": Shape(5, 32, 4, 64, 64),
}
# 16 channels that are multiplied, or 8 of them, and as many of the result, of which filters have 3.
FEW = {
    "32x32": (Shape(21, 32, 32, 16, 192), Shape(21, 32, 32, 128, 3)),
    "8x8": (Shape(135, 8, 8, 8, 40), Shape(135, 8, 8, 72, 6)),
    "48x48": (Shape(7, 48, 48, 16, 96), Shape(7, 48, 48, 96, 3)),
    "28x28": (Shape(9, 28, 28, 16, 64), Shape(9, 28, 28, 64, 1)),
    "20x20": (Shape(13, 20, 20, 16, 128), Shape(13, 20, 20, 40, 16)),
}

CASES = [(name, torch.bfloat16) for name in SHAPES]
CASES += [(name, torch.float16) for name in ("32x32", "8x8")]
CASES += [(name, torch.float32) for name in SHAPES]  # in TF32
WIDE = [torch.bfloat16, torch.float32]


def skip_uncut(name: str, config: tile_mma.TileMma) -> None:
    """Rows are fetched in pairs, and those of all images are multiples of 8 pixels; 16 pixels of an
    image are the fewest of a tile."""
    shape = SHAPES[name] if name in SHAPES else FEW[name][0]
    if tile_mma.box_of(config, shape.h, shape.w) is None:
        pytest.skip("images are not cut into such tiles")


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
    def test_forward(self, name, dtype, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_forward(SHAPES[name], dtype, device, config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_forward_of_the_product_alone(self, config, device):
        shape = SHAPES["16x16"]
        x, weight, bias, emb, residual = forward_case(shape, torch.bfloat16, device)
        y, partials = conv_fused.conv_forward(x, weight, bias, config=config)
        exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
        assert partials is None
        assert relative(y, exact) <= ROUNDING[torch.bfloat16] + 1e-5

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(
        ("name", "count"),
        [
            ("32x32", 1),
            ("32x32", 2),
            ("a few of 16x16", 2),
            ("64x64", 2),
            ("8x8", 2),
            ("4x4", 2),
            ("48x48", 2),
            ("24x40", 2),
            ("20x20", 1),
        ],
    )
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_extra_pointwise_convolutions(self, dtype, name, count, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_extra(SHAPES[name], 128, 64, dtype, device, config, count))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["a few of 16x16", "8x8", "48x48"])
    def test_what_1x1_terms_read_is_rounded_to_tf32(self, name, config, device):
        shape = SHAPES[name]
        x, weight, bias, *_ = forward_case(shape, torch.float32, device)
        pairs = extra_case(shape, 96, 40, torch.float32, device)
        rounded = [(rounded_to_tf32(other), filters) for other, filters in pairs]
        assert not torch.equal(rounded[0][0], pairs[0][0])
        got, expected = (
            conv_fused.conv_forward(x, weight, bias, extra=extra, config=config)[0]
            for extra in (pairs, rounded)
        )
        assert torch.equal(got, expected)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["32x32", "8x8", "channels that fill no block"])
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_sums_that_a_number_multiplies(self, dtype, name, config, device):
        shape = SHAPES[name]
        repeatedly(lambda: check_forward(shape, dtype, device, config, factor=0.5**0.5))
        repeatedly(lambda: check_extra(shape, 72, 24, dtype, device, config, factor=-3))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["channels that fill no block", "48x48 of 96"])
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_extra_of_channels_that_fill_no_block(self, dtype, name, config, device):
        repeatedly(lambda: check_extra(SHAPES[name], 72, 24, dtype, device, config, 2))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_input_grad_whose_second_input_fills_no_block(self, dtype, config, device):
        shape = SHAPES["48x48 of 96"]._replace(ci=288)
        repeatedly(lambda: check_grad(shape, 192, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
    def test_input_grad(self, name, dtype, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_grad(SHAPES[name], None, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(
        "name", ["32x32", "a few of 16x16", "16x16", "8x8", "4x4", "48x48", "24x40"]
    )
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_input_grad_of_two_inputs(self, dtype, name, config, device):
        shape = SHAPES[name]._replace(ci=320)
        repeatedly(lambda: check_grad(shape, 192, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("first", [8, 72, 160])
    @pytest.mark.parametrize("name", ["32x32", "a few of 16x16", "8x8", "40x40", "20x20 of 88"])
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_input_grad_of_two_inputs_in_one_block(self, dtype, name, first, config, device):
        """Some channels of a tile are of the first one, some of the second."""
        shape = SHAPES[name]._replace(ci=232)
        repeatedly(lambda: check_grad(shape, first, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(
        "name",
        [
            *("32x32", "3 of 8x16", "8x8", "3 of 4x4", "64x64", "48x48", "24x40", "20x20", "10x32"),
            *("channels that fill no block", "40x40", "20x20 of 88", "12x28"),
        ],
    )
    @pytest.mark.parametrize("dtype", WIDE, ids=str)
    def test_input_grad_behind_dropout(self, dtype, name, config, device):
        skip_uncut(name, config)
        shape = SHAPES[name]
        mask = stored(dropped(device), (shape.n, shape.h, shape.w, shape.ci))
        repeatedly(lambda: check_grad(shape, None, dtype, device, "silu", config, mask))

    @pytest.mark.parametrize("activation", ["identity", "gelu"])
    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_input_grad_of_other_activations(self, config, activation, device):
        for dtype in WIDE:
            check_grad(SHAPES["32x32"], None, dtype, device, activation, config)

    @pytest.mark.parametrize("config", HALVES, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), [c for c in CASES if c[1].itemsize == 2], ids=str)
    def test_blocks_of_64_bytes(self, name, dtype, config, device):
        skip_uncut(name, config)
        shape = SHAPES[name]
        repeatedly(lambda: check_forward(shape, dtype, device, config))
        repeatedly(lambda: check_grad(shape, None, dtype, device, config=config))

    @pytest.mark.parametrize("config", HALVES, ids=str)
    @pytest.mark.parametrize("name", ["32x32", "8x8", "48x48 of 96", "20x20 of 88", "12x28"])
    def test_terms_beside_blocks_of_64_bytes(self, name, config, device):
        shape, dtype = SHAPES[name], torch.bfloat16
        skip_uncut(name, config)
        repeatedly(lambda: check_extra(shape, 96, 24, dtype, device, config, 2))
        repeatedly(lambda: check_extra(shape, 128, 160, dtype, device, config, factor=0.5**0.5))
        wide = shape._replace(ci=232)
        mask = stored(dropped(device), (shape.n, shape.h, shape.w, 232))
        repeatedly(lambda: check_grad(wide, None, dtype, device, "silu", config, mask))
        repeatedly(lambda: check_grad(wide, 64, dtype, device, config=config))
        check_grad(wide, None, dtype, device, "gelu", config)

    @pytest.mark.parametrize("config", QUARTERS, ids=str)
    @pytest.mark.parametrize("name", FEW)
    def test_blocks_of_32_bytes(self, name, config, device):
        shape = FEW[name][0]
        skip_uncut(name, config)
        repeatedly(lambda: check_forward(shape, torch.bfloat16, device, config))
        repeatedly(lambda: check_forward(shape, torch.float16, device, config, factor=0.5**0.5))
        turned = shape._replace(ci=shape.co, co=shape.ci)
        repeatedly(lambda: check_grad(turned, None, torch.bfloat16, device, config=config))
        if turned.ci > 64:
            repeatedly(lambda: check_grad(turned, 64, torch.bfloat16, device, config=config))
        for activation in ("identity", "gelu"):
            check_grad(turned, None, torch.bfloat16, device, activation, config)
        mask = stored(dropped(device), (shape.n, shape.h, shape.w, turned.ci))
        repeatedly(lambda: check_grad(turned, None, torch.float16, device, "silu", config, mask))
        for co in {3, 6, shape.ci}:
            repeatedly(partial(check_padded_grad, turned, co, device, config))

    @pytest.mark.parametrize("config", TILES + HALVES, ids=str)
    @pytest.mark.parametrize("name", FEW)
    def test_results_with_more_channels_than_filters(self, name, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_padded(FEW[name][1], torch.bfloat16, device, config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_results_rounded_to_tf32(self, config, device):
        x, weight, bias, _, residual = forward_case(SHAPES["16x16"], torch.float32, device)
        y, _ = conv_fused.conv_forward(x, weight, bias, residual=residual, config=config)
        rounded, partials = conv_fused.conv_forward(
            x, weight, bias, residual=residual, stats=True, tf32=True, config=config
        )
        assert torch.equal(rounded, rounded_to_tf32(y))
        check_stats(rounded, partials)

    def test_what_applies(self, device):
        for name in ("16x16", "a tile", "an image of 8x8", "3 of 4x4", "48x48"):
            assert applying(SHAPES[name], torch.bfloat16, device) == TILES
        smaller = {96: HALVES, 24: HALVES, 160: HALVES, 16: QUARTERS, 8: QUARTERS, 40: [], 104: []}
        for k, tiles in smaller.items():
            shape = SHAPES["48x48"]._replace(ci=k)
            assert applying(shape, torch.bfloat16, device) == TILES + tiles
            assert applying(shape, torch.float32, device) == TILES
        for h, w in ((12, 32), (4, 128), (24, 24), (6, 16), (40, 40), (20, 20), (2, 4)):
            assert applying(Shape(1, h, w, 64, 64), torch.bfloat16, device) == TILES
        for shape in (SHAPES["64x64"], Shape(1, 16, 20, 64, 64)):
            assert applying(shape, torch.bfloat16, device) == TILES[:3]
        for shape in (
            Shape(1, 10, 10, 64, 64),
            Shape(1, 9, 13, 64, 64),
            Shape(1, 30, 50, 64, 64),
            Shape(1, 15, 16, 64, 64),
            Shape(1, 64, 20, 64, 64),
            Shape(1, 32, 32, 100, 64),
            Shape(1, 32, 32, 64, 64, 1),
        ):
            assert applying(shape, torch.bfloat16, device) == []
        assert applying(SHAPES["16x16"], torch.float32, device) == TILES
        wide = spec_of(SHAPES["16x16"], torch.float32)
        assert tile_mma.refuse(replace(wide, dtype="fp32"), HOPPER) is not None


def check_padded_grad(shape: Shape, co: int, device, config) -> list[torch.Tensor]:
    """The gradient of a convolution to `co` channels, behind which dy has zeros."""
    dy, weight, x, inputs, table = grad_case(shape, None, torch.bfloat16, device)
    dy[..., co:] = 0
    given = {"inputs": inputs, "table": table, "activation": "silu", "config": config}
    dz, partials = conv_fused.conv_input_grad(dy, weight[:co], **given)
    exact, xhat = grad_reference(dy, weight, x, table, "silu", torch.float64)
    exactness = 2**-24 * (9 * 16) ** 0.5
    assert relative(dz, exact) <= ROUNDING[torch.bfloat16] + exactness
    sums = torch.stack([exact.sum((1, 2)), (exact * xhat).sum((1, 2))], 1)
    assert relative(partials.sum(1), sums) <= 1e-5 + exactness
    return [dz, partials]


def applying(shape: Shape, dtype, device) -> list[tuple]:
    """The tiles that apply."""
    spec = spec_of(shape, dtype)
    return [c for _, c in listed(FORWARD, spec, HOPPER) if isinstance(c, tile_mma.TileMma)]


def test_channels_that_filters_lack_are_zeros():
    padded = spec_of(SHAPES["48x48"], torch.bfloat16)
    head = replace(padded, c=16, filters=(3, 128), stats=False)
    assert tile_mma.refuse(head, HOPPER) is None
    for other in (
        replace(head, stats=True),
        replace(head, dtype="tf32"),
        replace(head, filters=(3, 64)),
        replace(head, k=16, filters=(3, 128), c=64),
    ):
        assert tile_mma.refuse(other, HOPPER) is not None
    stem = replace(padded, k=16, c=128, filters=(128, 8), stats=True)
    assert tile_mma.refuse(stem, HOPPER) is None


_SIDES = (2, 4, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 84, 96, 120, 128, 192)


@pytest.mark.parametrize("tile", TILES + HALVES + QUARTERS, ids=str)
def test_as_many_tiles_as_partials(tile):
    """What allocates the sums of tiles counts them as the kernel does; tiles divide images, and
    shared memory has room for what is read while as much is written."""
    found = 0
    for h, w in product(_SIDES, _SIDES):
        if (box := tile_mma.box_of(tile, h, w)) is None:
            continue
        found += 1
        images, rows, columns = box
        assert images * rows * columns == tile.block_m
        assert h % rows == w % columns == rows % 2 == images * columns % 8 == 0
        for n in (1, 3, 64):
            counted = boxes_of_image(box_of(tile, n, h, w, even=True), h, w)
            assert counted == (h // rows) * (w // columns)
        for tf32, written in ((False, 2 * tile.block_m), (True, 0)):
            blocks, steps = tile_mma.rings(tile, images * columns, SHARED_LIMIT[90], tf32)
            pixels = blocks * (tile.block_m + 2 * images * columns) + (steps or 3 * blocks) * 64
            assert blocks >= 2 and steps != 1
            used = pixels * tile.row_bytes + written * 128
            assert used + 1024 <= SHARED_LIMIT[90]
    assert found > 200
