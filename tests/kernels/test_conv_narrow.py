"""The tiles of `conv.hopper` to 16 channels, and weight gradients where one side has 16: where they
apply, and their results on Hopper."""

import dataclasses

import pytest
import torch

from triton_kernels.conv.fused import FORWARD
from triton_kernels.conv.hopper import narrow_output
from triton_kernels.conv.hopper.weight_grads import row_wgrad
from triton_kernels.conv.weight_grad import conv_weight_grad, weight_grad_spec
from triton_kernels.registry.choose import listed
from triton_kernels.runtime.device import describe

from .chips import HOPPER
from .compile_only import SHARED_LIMIT
from .conv_fused_cases import (
    Shape,
    check_padded,
    needs_tma,  # noqa: F401  a fixture for every test here
    randn,
    relative,
    weight_grad_reference,
)
from .test_conv_hopper import gpu, repeatedly, spec_of

OUT = narrow_output.OUT_TILE
WGRAD = row_wgrad.NARROW_TILE
# One tile, half a tile at the end of an image, fewer tiles than programs and many more, all of the
# 16 channels and some.
OUT_SHAPES = {
    "a tile": Shape(1, 2, 64, 64, 3),
    "a row": Shape(2, 1, 64, 64, 3),
    "an odd number of rows": Shape(3, 13, 64, 64, 6),
    "an image": Shape(1, 64, 64, 64, 3),
    "many tiles": Shape(37, 64, 64, 64, 3),
    "many odd images": Shape(61, 27, 64, 64, 16),
    "128x128": Shape(5, 128, 128, 64, 3),
    "odd images of 128": Shape(3, 33, 128, 64, 16),
    "128 channels": Shape(5, 64, 64, 128, 3),
    "128 channels of odd images": Shape(37, 33, 64, 128, 16),
    "32x32": Shape(131, 32, 32, 128, 3),
    "odd images of 32": Shape(3, 33, 32, 64, 16),
}
# Either side narrow; rows of any width, several blocks of 64 channels.
WGRAD_SHAPES = {
    "of an image": Shape(37, 64, 64, 3, 64),
    "to an image": Shape(37, 64, 64, 64, 3),
    "to 16": Shape(2, 12, 64, 192, 16),
    "of 16": Shape(2, 12, 64, 16, 128),
    "of 32x32": Shape(5, 32, 32, 3, 128),
    "to 16x16": Shape(5, 16, 16, 128, 6),
    "of 32 channels": Shape(5, 64, 64, 3, 32),
    "to 72 channels": Shape(3, 16, 16, 72, 3),
    "to 8x8": Shape(37, 8, 8, 136, 6),
    "of 96x96": Shape(2, 96, 96, 3, 128),
    "to 28x28": Shape(7, 28, 28, 64, 1),
    "of 20x20": Shape(5, 20, 20, 16, 40),
    "of 3 to 16": Shape(5, 32, 32, 3, 16),
    "of 16 to 16": Shape(5, 32, 32, 16, 16),
    "to 7x12": Shape(9, 7, 12, 24, 16),
    "of 50x75": Shape(3, 50, 75, 3, 200),
}


def check_wgrad(shape: Shape, dtype, device, accumulate: bool) -> list[torch.Tensor]:
    """Of a convolution one side of which is padded to 16 channels, with anything."""
    n, h, w, ci, co, _ = shape
    x = randn(n, h, w, max(ci, 16), seed=0, device=device, dtype=dtype)
    dy = randn(n, h, w, max(co, 16), seed=6, device=device, dtype=dtype)
    out = randn(co, 3, 3, ci, seed=7, device=device).permute(0, 3, 1, 2)
    exact = weight_grad_reference(x[..., :ci], dy[..., :co], 3)
    exact += out.double() if accumulate else 0
    conv_weight_grad(x, dy, out, accumulate=accumulate, config=WGRAD)
    assert relative(out, exact) <= 2**-24 * (n * h * w) ** 0.5 + 1e-6
    return [out]


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", OUT_SHAPES)
    def test_few_output_channels(self, name, dtype, device):
        repeatedly(lambda: check_padded(OUT_SHAPES[name], dtype, device, OUT))

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", WGRAD_SHAPES)
    def test_weight_grad(self, name, dtype, accumulate, device):
        shape = WGRAD_SHAPES[name]
        repeatedly(lambda: check_wgrad(shape, dtype, device, accumulate))

    def test_where_the_weight_grad_applies(self, device):
        def tile(*shape: int) -> tuple | None:
            n, h, w, ci, co = shape
            x, dy = (
                torch.empty(n, h, w, max(c, 16), dtype=torch.half, device=device) for c in (ci, co)
            )
            weight = torch.empty(co, ci, 3, 3, dtype=torch.half, device=device)
            spec, gpu = weight_grad_spec(x, dy, weight.float(), 1, (1, 1), "tf32"), describe(device)
            kernel = row_wgrad.WEIGHT_GRAD
            return None if kernel.refuse(spec, gpu) else kernel.configs(spec, gpu)[0].tile

        for shape in WGRAD_SHAPES.values():
            assert tile(*shape[:5]) == row_wgrad.NARROW_TILE
        assert tile(2, 64, 64, 64, 64) == row_wgrad.TILE
        assert tile(2, 64, 64, 24, 40) == row_wgrad.TILE
        for shape in ((2, 64, 64, 16, 3), (2, 64, 64, 3, 68), (1, 4, 64, 3, 64)):
            assert tile(*shape) is None

    def test_what_applies(self, device):
        for shape in OUT_SHAPES.values():
            assert applying(shape, torch.bfloat16, device) == [narrow_output.OUT_TILE]
        for shape in (
            Shape(1, 64, 16, 64, 3),
            Shape(1, 64, 64, 192, 3),
            Shape(1, 64, 128, 128, 3),
            Shape(1, 64, 64, 64, 17),
            Shape(1, 64, 64, 64, 3, 1),
        ):
            assert applying(shape, torch.bfloat16, device) == []
        assert applying(OUT_SHAPES["an image"], torch.float32, device) == []


def applying(shape: Shape, dtype, device) -> list[tuple]:
    """The tiles that apply."""
    spec = dataclasses.replace(spec_of(shape, dtype), c=-(-shape.co // 16) * 16)
    return [c for _, c in listed(FORWARD, spec, HOPPER) if c.kernel == "narrow_output"]


@pytest.mark.parametrize(("width", "channels"), narrow_output._ROWS)
def test_rings_fit(width, channels):
    """Two pairs of rows are read while another is written."""
    pairs = narrow_output.pairs(width, channels, SHARED_LIMIT[90])
    pixels = channels // 64 * (2 * pairs * (width + 8) + 8 + 9 * 16)
    used = pixels * 128 + 2 * 64 * 16 * 2 + 256
    assert pairs >= 3
    assert narrow_output.programs(width, channels) * (used + 1024) <= SHARED_LIMIT[90] + 1024
