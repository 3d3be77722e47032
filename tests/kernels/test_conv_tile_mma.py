"""The tiles of `conv.hopper.tile_mma`: where they apply, and on a Hopper GPU their results."""

import pytest
import torch

from triton_kernels.conv import fused as conv_fused
from triton_kernels.conv.fused import FORWARD
from triton_kernels.conv.hopper import tile_mma
from triton_kernels.conv.plain.fused_tiles import box_of
from triton_kernels.conv.plain.tma_boxes import boxes_of_image
from triton_kernels.registry.choose import listed

from .chips import HOPPER
from .compile_only import SHARED_LIMIT
from .test_conv_fused import (
    ROUNDING,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    dropped,
    forward_case,
    forward_reference,
    poison,  # noqa: F401  a fixture for every test here
    relative,
)
from .test_conv_hopper import gpu, repeatedly, spec_of

TILES = list(tile_mma.TILES)
CONFIGS = TILES
# One program with one tile, programs with several and an odd number of them, one warpgroup with
# nothing to do, more blocks of channels than one, tiles that are not whole images, and tiles that
# are not whole rows.
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
}


CASES = [(name, torch.bfloat16) for name in SHAPES]
CASES += [(name, torch.float16) for name in ("32x32", "8x8")]


def skip_uncut(name: str, config: tile_mma.TileMma) -> None:
    """Rows are fetched in pairs, and tiles divide images."""
    if tile_mma.box_of(config, SHAPES[name].h, SHAPES[name].w) is None:
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
        ],
    )
    def test_extra_pointwise_convolutions(self, name, count, config, device):
        skip_uncut(name, config)
        shape, dtype = SHAPES[name], torch.bfloat16
        repeatedly(lambda: check_extra(shape, 128, 64, dtype, device, config, count))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["channels that fill no block", "48x48 of 96"])
    def test_extra_of_channels_that_fill_no_block(self, name, config, device):
        shape, dtype = SHAPES[name], torch.bfloat16
        repeatedly(lambda: check_extra(shape, 72, 24, dtype, device, config, 2))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_input_grad_whose_second_input_fills_no_block(self, config, device):
        shape = SHAPES["48x48 of 96"]._replace(ci=288)
        repeatedly(lambda: check_grad(shape, 192, torch.bfloat16, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
    def test_input_grad(self, name, dtype, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_grad(SHAPES[name], None, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["32x32", "a few of 16x16", "16x16", "8x8", "4x4", "48x48"])
    def test_input_grad_of_two_inputs(self, name, config, device):
        shape = SHAPES[name]._replace(ci=320)
        repeatedly(lambda: check_grad(shape, 192, torch.bfloat16, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["32x32", "3 of 8x16", "8x8", "3 of 4x4", "64x64", "48x48"])
    def test_input_grad_behind_dropout(self, name, config, device):
        skip_uncut(name, config)
        mask = dropped(device)
        repeatedly(
            lambda: check_grad(SHAPES[name], None, torch.bfloat16, device, "silu", config, mask)
        )

    @pytest.mark.parametrize("activation", ["identity", "gelu"])
    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_input_grad_of_other_activations(self, config, activation, device):
        check_grad(SHAPES["32x32"], None, torch.bfloat16, device, activation, config)

    def test_what_applies(self, device):
        assert applying(SHAPES["16x16"], torch.bfloat16, device) == TILES
        assert applying(SHAPES["a tile"], torch.bfloat16, device) == TILES
        assert applying(Shape(1, 12, 32, 64, 64), torch.bfloat16, device) == TILES[1:]
        assert applying(SHAPES["an image of 8x8"], torch.bfloat16, device) == TILES
        assert applying(SHAPES["3 of 4x4"], torch.bfloat16, device) == TILES
        assert applying(SHAPES["64x64"], torch.bfloat16, device) == TILES[:3]
        assert applying(SHAPES["48x48"], torch.bfloat16, device) == TILES
        assert applying(Shape(1, 4, 128, 64, 64), torch.bfloat16, device) == TILES[1:]
        assert applying(Shape(1, 24, 24, 64, 64), torch.bfloat16, device) == TILES[3:]
        assert applying(SHAPES["48x48 of 96"], torch.bfloat16, device) == TILES
        for shape in (
            Shape(1, 6, 16, 64, 64),
            Shape(1, 16, 20, 64, 64),
            Shape(1, 32, 32, 100, 64),
            Shape(1, 32, 32, 64, 64, 1),
        ):
            assert applying(shape, torch.bfloat16, device) == []
        assert applying(SHAPES["16x16"], torch.float32, device) == []


def applying(shape: Shape, dtype, device) -> list[tuple]:
    """The tiles that apply."""
    spec = spec_of(shape, dtype)
    return [c for _, c in listed(FORWARD, spec, HOPPER) if isinstance(c, tile_mma.TileMma)]


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_rings_fit(tile, width):
    """A block is read while another is written, and so is a filter."""
    blocks, steps = tile_mma.rings(tile, width, SHARED_LIMIT[90])
    pixels = blocks * (tile.block_m + 2 * width) + (steps or 3 * blocks) * 64 + 2 * tile.block_m
    assert blocks >= 2 and steps != 1 and pixels * 128 + 1024 <= SHARED_LIMIT[90]


@pytest.mark.parametrize(
    "size", [(48, 48), (16, 128), (96, 96), (24, 40), (8, 8), (32, 32), (8, 16)]
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_as_many_tiles_as_partials(tile, size):
    """What allocates the sums of tiles counts them as the kernel does."""
    n, (h, w) = 64, size
    if box := tile_mma.box_of(tile, h, w):
        images, rows, columns = box
        counted = boxes_of_image(box_of(tile, n, h, w, even=True), h, w)
        assert images * rows * columns == tile.block_m
        assert counted == (h // rows) * (w // columns)
