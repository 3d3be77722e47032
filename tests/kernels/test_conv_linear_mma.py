"""The tiles of `conv.hopper.linear_mma`: where they apply, and on a Hopper GPU their results."""

from itertools import product

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import conv2d as conv, fused as conv_fused
from triton_kernels.conv.hopper import linear_mma
from triton_kernels.conv.hopper.linear_mma import TILES
from triton_kernels.conv.plain.by_tma.tma_boxes import boxes_of_image
from triton_kernels.conv.plain.fused_tiles import box_of
from triton_kernels.registry.spec import ConvSpec

from .chips import HOPPER
from .compile_only import SHARED_LIMIT
from .conv_fused_cases import (
    ROUNDING,
    Shape,
    check_forward,
    check_grad,
    forward_case,
    forward_reference,
    needs_tma,  # noqa: F401  a fixture for every test here
    randn,
    relative,
)
from .test_conv_hopper import gpu, repeatedly

# One tile, less than one, and many, also an odd number of them; one warpgroup with nothing to do,
# or with no channels; sums that are shorter than the ring and longer; blocks of 8 to 56 channels.
SHAPES = {
    "a tile": Shape(1, 16, 16, 64, 64, 1),
    "32x32": Shape(21, 32, 32, 128, 320, 1),
    "16x16": Shape(37, 16, 16, 192, 576, 1),
    "8x8": Shape(135, 8, 8, 256, 768, 1),
    "an image of 8x8": Shape(1, 8, 8, 1280, 192, 1),
    "rows of a network": Shape(16, 32, 32, 640, 640, 1),
    "3 of 4x4": Shape(3, 4, 4, 64, 128, 1),
    "48x32": Shape(7, 48, 32, 320, 192, 1),
    "channels that fill no block": Shape(13, 16, 16, 72, 136, 1),
    "8x8 of few": Shape(65, 8, 8, 16, 200, 1),
    "few of many": Shape(5, 16, 16, 1288, 40, 1),
}
# of which no tile takes equally many pixels of its images
ODD = {
    "a pixel": Shape(1, 1, 1, 64, 64, 1),
    "odd": Shape(3, 5, 7, 72, 40, 1),
    "many tiles": Shape(33, 64, 61, 128, 64, 1),
    "rows": Shape(1, 1, 1232, 768, 1280, 1),
    "five blocks": Shape(17, 31, 32, 320, 328, 1),
}
CASES = [(name, torch.bfloat16) for name in SHAPES]
CASES += [(name, torch.float16) for name in ("32x32", "8x8")]


def skip_uncut(name: str, config: linear_mma.LinearMma) -> None:
    if linear_mma.box_of(config, SHAPES[name].h * SHAPES[name].w, True) is None:
        pytest.skip("images are not cut into such tiles")


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("config", TILES, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
    def test_forward(self, name, dtype, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_forward(SHAPES[name], dtype, device, config))

    @pytest.mark.parametrize("config", TILES, ids=str)
    @pytest.mark.parametrize("name", ["32x32", "8x8", "channels that fill no block"])
    def test_sums_that_a_number_multiplies(self, name, config, device):
        skip_uncut(name, config)
        shape, dtype = SHAPES[name], torch.bfloat16
        repeatedly(lambda: check_forward(shape, dtype, device, config, factor=0.5**0.5))

    @pytest.mark.parametrize("config", TILES, ids=str)
    @pytest.mark.parametrize("name", [*SHAPES, *ODD])
    def test_forward_without_sums(self, name, config, device):
        """Tiles are rows of any images."""
        shape = (SHAPES | ODD)[name]
        x, weight, bias, emb, residual = forward_case(shape, torch.bfloat16, device)
        for beside in (None, residual):

            def run(beside=beside):
                y, partials = conv_fused.conv_forward(
                    x, weight, bias, residual=beside, config=config
                )
                added = residual * 0 if beside is None else beside
                exact = forward_reference(x, weight, bias, emb * 0, added, torch.float64)
                assert partials is None
                assert relative(y, exact) <= ROUNDING[torch.bfloat16] + 1e-5
                return (y,)

            repeatedly(run)

    @pytest.mark.parametrize("config", TILES, ids=str)
    @pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
    def test_input_grad(self, name, dtype, config, device):
        skip_uncut(name, config)
        repeatedly(lambda: check_grad(SHAPES[name], None, dtype, device, config=config))

    @pytest.mark.parametrize("activation", ["identity", "gelu"])
    @pytest.mark.parametrize("config", TILES, ids=str)
    def test_input_grad_of_other_activations(self, config, activation, device):
        check_grad(SHAPES["32x32"], None, torch.bfloat16, device, activation, config)

    @pytest.mark.parametrize("config", TILES, ids=str)
    @pytest.mark.parametrize("name", [*SHAPES, *ODD])
    def test_public(self, name, config, device):
        """`conv2d` with and without a bias, and its input gradient."""
        shape = (SHAPES | ODD)[name]
        x, weight, bias, _, _ = forward_case(shape, torch.bfloat16, device)
        dy = randn(*x.shape[:3], shape.co, seed=6, device=device, dtype=x.dtype)
        exact = reference.conv2d(x.double(), weight.double())
        grad = dy.double() @ weight.double()[:, :, 0, 0]
        low = bias.to(x.dtype)
        options = (1, (0, 0), False, config)
        runs = [
            (lambda: conv._conv2d_fwd(x, weight, None, *options), exact),
            (lambda: conv._conv2d_fwd(x, weight, low, *options), exact + low.double()),
            (lambda: conv.conv2d_input_grad(dy, weight, x.shape[1:3], *options), grad),
        ]
        for run, right in runs:
            first = run()
            assert relative(first, right) <= ROUNDING[torch.bfloat16] + 1e-5
            for _ in range(4):
                assert torch.equal(run(), first)


_SIDES = (1, 2, 4, 8, 10, 12, 16, 20, 24, 31, 32, 48, 64, 96, 128)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_as_many_tiles_as_partials(tile):
    """What allocates the sums of tiles counts them as the kernel does."""
    found = 0
    for h, w in product(_SIDES, _SIDES):
        if (box := linear_mma.box_of(tile, h * w, by_image=True)) is None:
            continue
        found += 1
        rows, images = box
        assert rows * images == tile.block_m and h * w % rows == 0
        for n in (1, 3, 5, 64):
            assert boxes_of_image(box_of(tile, n, h, w, even=True), h, w) == h * w // rows
    assert found > 20


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_memory_has_room(tile, beside):
    blocks = linear_mma.slots(tile, SHARED_LIMIT[90], beside) * (tile.block_m + tile.block_c)
    assert blocks >= 3 * (tile.block_m + tile.block_c)
    pieces = 2 * linear_mma.held(tile, beside)
    assert (blocks + 64 * pieces) * 128 + 1024 <= SHARED_LIMIT[90]


def test_what_applies():
    def refused(**given) -> str | None:
        spec = ConvSpec(**{"n": 3, "dtype": "bf16", "h": 16, "w": 16, "k": 64, "c": 72} | given)
        return linear_mma.refuse(spec, HOPPER)

    pointwise = {"r": 1, "s": 1}
    assert refused(**pointwise) is None
    assert refused(**pointwise, stats=True) is None
    assert refused(**pointwise, h=5, w=7) is None
    assert "equally many pixels" in refused(**pointwise, h=5, w=7, stats=True)
    assert "1x1" in refused()
    assert "1x1" in refused(**pointwise, stride=2)
    assert "two tensors" in refused(**pointwise, first=32, activation="silu")
    assert "filters of" in refused(**pointwise, filters=(70, 64))
    assert "16 bytes" in refused(**pointwise, k=60)
    assert refused(**pointwise, dtype="tf32") is not None
