"""The Gluon path of conv2d: where it applies, and on a Hopper GPU its results."""

import math

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import conv2d as conv
from triton_kernels.conv.configs import ConvOperands
from triton_kernels.conv.forward import FORWARD, INPUT_GRAD, spec_of
from triton_kernels.conv.hopper.tiles import tile_mma
from triton_kernels.conv.hopper.unfused import unfused_1x1
from triton_kernels.conv.plain.by_tma import tma as conv_tma
from triton_kernels.hopper.descriptors import SUPPORTED
from triton_kernels.registry.choose import listed
from triton_kernels.runtime.device import describe

from .conv_cases import ROUNDING, Shape, make, padding_of, references, relative

HOPPER = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")).hopper
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"),
    pytest.mark.skipif(not SUPPORTED, reason="another version of Triton"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

ROWS = {
    "a tile": Shape(1, 4, 64, 64, 64),
    "rows of channels": Shape(3, 12, 64, 128, 192),
    "many tiles": Shape(37, 64, 64, 64, 64),
    "many channels": Shape(21, 64, 64, 192, 64),
    "a tile of 32": Shape(1, 8, 32, 64, 64),
    "rows of 32": Shape(29, 32, 32, 128, 192),
    "rows of 16": Shape(23, 16, 16, 192, 128),
    "half a tile of 16": Shape(3, 24, 16, 64, 64),
    "rows of 8": Shape(7, 8, 8, 256, 192),
    "an image": Shape(1, 8, 8, 64, 128),
    "images of four rows": Shape(9, 4, 8, 128, 64),
    "many tiles of images": Shape(139, 8, 8, 64, 128),
}
# Which tiles of rows of pixels alone do not do, nor those of 64 channels.
RECTANGLES = {
    "rectangles": Shape(3, 48, 24, 64, 64),
    "a part of a block": Shape(5, 16, 16, 72, 136),
}
# Less than a tile, tiles that end outside, many an odd number of tiles, channels that are no
# multiple of 64 and none of what a program does, and more of them than its filters have room for.
POINTS = {
    "a pixel": Shape(1, 1, 1, 64, 64, (1, 1)),
    "odd": Shape(3, 5, 7, 72, 40, (1, 1)),
    "qkv": Shape(5, 16, 16, 192, 576, (1, 1)),
    "many tiles": Shape(33, 64, 61, 128, 64, (1, 1)),
    "many input channels": Shape(9, 16, 15, 768, 256, (1, 1)),
    "five blocks": Shape(17, 31, 32, 320, 320, (1, 1)),
    "seven blocks": Shape(3, 16, 15, 448, 448, (1, 1)),
}
SHAPES = {f"3x3, {k}": v for k, v in (ROWS | RECTANGLES).items()} | {
    f"1x1, {k}": v for k, v in POINTS.items()
}


RUNS = [
    *((name, "bf16") for name in SHAPES),
    *((name, "fp16") for name in ("3x3, a tile", "3x3, rows of 8", "1x1, odd")),
]


def applying(shape: Shape, dtype, device, dgrad: bool) -> list[tuple]:
    """The configurations for a shape."""
    n, h, w, ci, co = shape[:5]
    pixels = (1, 1, n * h * w) if shape.kernel == (1, 1) else (n, h, w)
    x, y = (torch.empty((*pixels, c), dtype=dtype, device=device) for c in (ci, co))
    weight = torch.empty((co, ci, *shape.kernel), dtype=dtype, device=device)
    x, y = (y, x) if dgrad else (x, y)
    return unfused_configs(x, weight, y, padding_of(shape), dgrad)


def unfused_configs(x, weight, y, padding, dgrad: bool) -> list[tuple]:
    """Of the kernels of `tile_mma` and `unfused_1x1`; float32 is in TF32."""
    operands = ConvOperands(x, weight, None, y, 1, padding, "tf32", dgrad)
    found = listed(INPUT_GRAD if dgrad else FORWARD, spec_of(operands), describe(x.device))
    names = ("tile_mma", "unfused")
    return [config for kernel, config in found if kernel.name.startswith(names)]


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(("name", "dtype"), RUNS)
    def test_every_configuration_repeatedly(self, name, dtype, device):
        """A race shows as a wrong result, or one that changes."""
        shape = SHAPES[name]
        data = x, weight, bias, dy = make(shape, DTYPES[dtype], device)
        low = weight.to(x.dtype)
        exact, other = references(shape, *data)
        floor = ROUNDING[dtype] + 2**-24 * (math.prod(shape.kernel) * max(shape[3:5])) ** 0.5
        options = (1, padding_of(shape), False)
        forward = applying(shape, x.dtype, device, dgrad=False)
        backward = applying(shape, x.dtype, device, dgrad=True)
        assert forward and backward
        runs = [(0, lambda c=c: conv._conv2d_fwd(x, low, bias, *options, c)) for c in forward]
        runs += [
            (1, lambda c=c: conv.conv2d_input_grad(dy, low, x.shape[1:3], *options, c))
            for c in backward
        ]
        for i, run in runs:
            first = run()
            assert relative(first, exact[i]) <= 2 * relative(other[i], exact[i]) + floor
            for _ in range(4):
                assert torch.equal(run(), first)

    @pytest.mark.parametrize("name", ROWS | RECTANGLES)
    def test_every_tile_in_tf32_repeatedly(self, name, monkeypatch, device):
        monkeypatch.setattr(conv_tma, "_TRANSPOSE_FROM", 0)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        shape = (ROWS | RECTANGLES)[name]
        x, weight, bias, dy = data = make(shape, torch.float32, device)
        exact, other = references(shape, *data)
        configs = applying(shape, x.dtype, device, dgrad=False)
        low = applying(shape, torch.bfloat16, device, dgrad=False)
        assert configs and {c.block_m for c in configs} <= {c.block_m for c in low}
        options = (1, padding_of(shape), True)
        runs = [(0, lambda c=c: conv._conv2d_fwd(x, weight, bias, *options, c)) for c in configs]
        turned = INPUT_GRAD.kernel("transpose_first").config()  # and then it is a forward pass
        runs.append((1, lambda: conv.conv2d_input_grad(dy, weight, x.shape[1:3], *options, turned)))
        for i, run in runs:
            first = run()
            budget = 2 * relative(other[i], exact[i]) + ROUNDING["tf32"]
            assert relative(first, exact[i]) <= budget
            for _ in range(4):
                assert torch.equal(run(), first)

    @pytest.mark.parametrize("name", ["3x3, a tile", "1x1, odd"])
    def test_without_bias(self, name, device):
        shape = SHAPES[name]
        x, weight, _, _ = make(shape, torch.bfloat16, device)
        low = weight.to(x.dtype)
        exact = reference.conv2d(x.double(), low.double())
        for c in applying(shape, x.dtype, device, dgrad=False):
            y = conv._conv2d_fwd(x, low, None, 1, padding_of(shape), False, c)
            assert relative(y, exact) <= ROUNDING["bf16"] + 1e-5

    @pytest.mark.parametrize("name", POINTS)
    def test_input_gradients_that_turn_their_filters(self, name, monkeypatch, device):
        """In TF32, every configuration several times."""
        monkeypatch.setattr(conv_tma, "_TRANSPOSE_FROM", 0)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        shape = POINTS[name]
        x, weight, bias, dy = make(shape, torch.float32, device)
        exact, other = references(shape, x, weight, bias, dy)
        budget = 2 * relative(other[1], exact[1]) + ROUNDING["tf32"]
        configs = unfused_configs(dy, weight, x, (0, 0), dgrad=True)
        assert configs
        for c in configs:
            options = (x.shape[1:3], 1, (0, 0), True, c)
            first = conv.conv2d_input_grad(dy, weight, *options)
            assert relative(first, exact[1]) <= budget
            for _ in range(4):
                assert torch.equal(conv.conv2d_input_grad(dy, weight, *options), first)

    def test_what_applies(self, device):
        bf16 = torch.bfloat16
        assert set(applying(ROWS["a tile"], bf16, device, dgrad=True)) == set(tile_mma.TILES[:3])
        assert set(applying(ROWS["an image"], bf16, device, True)) == set(tile_mma.TILES)
        channels = {c.block_c for c in applying(POINTS["qkv"], bf16, device, dgrad=False)}
        assert channels == {64, 128, 192}
        assert {c.block_c for c in applying(POINTS["a pixel"], bf16, device, dgrad=False)} == {64}
        # the filters of 192 channels by 576 do not fit into shared memory, but for a part of a sum
        backward = applying(POINTS["qkv"], bf16, device, dgrad=True)

        def blocks(kind: type) -> set[int]:
            return {c.block_c for c in backward if isinstance(c, kind)}

        assert blocks(unfused_1x1.UnfusedPointwise) == {64, 128}
        assert blocks(unfused_1x1.UnfusedSingleTile) == {64, 128, 192}
        # all at once fits beside a second program, or does not, or not even alone

        def programs(name: str, *size: int) -> list[int]:
            found = applying(POINTS[name], bf16, device, False)
            kind = unfused_1x1.UnfusedSingleTile
            return [c.programs for c in found if isinstance(c, kind) and c[:2] == size]

        assert programs("a pixel", 64, 64) == [2]
        assert programs("five blocks", 64, 128) == [1, 2]
        for shape in (
            Shape(1, 64, 64, 100, 64),
            Shape(1, 30, 50, 64, 64),
            Shape(1, 64, 64, 64, 64, padding=2),
            Shape(4, 1, 64, 64, 64, (1, 3)),
            Shape(4, 1, 64, 2048, 64, (1, 1)),
        ):
            assert applying(shape, bf16, device, dgrad=False) == []
        assert applying(POINTS["qkv"], torch.float32, device, dgrad=False) == []
        # float32 filters of an input gradient are turned first
        assert applying(ROWS["a tile"], torch.float32, device, dgrad=True) == []
        tf32 = applying(Shape(1, 64, 64, 96, 64), torch.float32, device, dgrad=False)
        assert tf32 == list(tile_mma.TILES[:3])


def test_nothing_applies_without_a_hopper_gpu():
    for shape in SHAPES.values():
        for dtype in (torch.bfloat16, torch.float32):
            assert applying(shape, dtype, torch.device("cpu"), dgrad=False) == []
