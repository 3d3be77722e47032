"""A convolution and the norm behind it in one launch, and 1x1 convolutions of one tile a program,
on a Hopper GPU."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv.conv_norm import CONV_NORM, NextNorm, conv_norm
from triton_kernels.conv.few import conv_few
from triton_kernels.conv.fused import conv_forward
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.hopper import single_tile
from triton_kernels.conv.hopper.single_tile import KERNEL as SINGLE_TILE
from triton_kernels.conv.hopper.tiles import tile_mma
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import describe

from .chips import HOPPER
from .conv_fused_cases import ROUNDING, Shape, check_stats, extra_case, forward_case, relative
from .test_conv_hopper import gpu, repeatedly

CONFIGS = list(tile_mma.TILES)
SHAPES = {
    "a tile": Shape(1, 8, 8, 64, 64),
    "8x8": Shape(135, 8, 8, 256, 192),
    "4x4": Shape(37, 4, 4, 256, 192),
    "rows of 16": Shape(3, 4, 16, 64, 128),
}
POINTS = {
    "a tile": Shape(1, 8, 8, 64, 64, 1),
    "8x8": Shape(16, 8, 8, 256, 256, 1),
    "16x16": Shape(5, 16, 16, 192, 192, 1),
    "queries, keys and values": Shape(2, 16, 16, 192, 576, 1),
    "512 channels": Shape(3, 4, 32, 512, 128, 1),
}


def check_norm(
    shape, channels, dtype, device, plain, terms, keep, config=None, offset=0.0, second=0
):
    """y as `plain` makes it, to the bit, and its sums; the norm of it beside so many channels,
    rounded once."""
    x, weight, bias, _, _ = forward_case(shape, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    c = shape.co + second
    g, b = torch.randn(2, c, device=device, generator=generator)
    activation = "silu" if offset == 0 else "identity"
    norm = NextNorm(g, b, c // channels, 1e-5, activation, keep, keep)
    others = [other for other, _ in terms.get("extra", ())]
    spec = forward_spec(x, weight, extra=others, groups=norm.num_groups, beside=second)
    assert CONV_NORM.refuse(spec, describe(x.device)) is None
    expected = both = plain(x, weight, bias + offset)
    if second:
        size = (*expected.shape[:3], second)
        x2 = torch.randn(size, device=device, generator=generator).add(offset).to(dtype)
        terms, both = terms | {"x2": x2}, torch.cat((expected, x2), dim=3)
    exact = reference.group_norm(
        both.double(), norm.num_groups, g.double(), b.double(), activation=activation
    )

    def check():
        options = {} if config is None else {"config": config}
        y, partials, a = conv_norm(x, weight, bias + offset, norm, **terms, **options)
        assert torch.equal(y, expected) if keep else y is partials is None
        if keep:
            check_stats(y, partials)
        assert relative(a, exact) <= ROUNDING[dtype] + 1e-5
        return (a,)

    repeatedly(check)


def first_tile(x, weight, extra):
    """What is taken without measurements."""
    spec = forward_spec(x, weight, extra=[other for other, _ in extra], groups=1)
    return CONV_NORM.kernels[0].configs(spec, describe(x.device))[0]


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("keep", "config"),
        [(True, None), (False, None), (True, CONFIGS[0]), (False, CONFIGS[2]), (True, CONFIGS[3])],
        ids=str,
    )
    @pytest.mark.parametrize(
        ("name", "channels", "count"),
        [("8x8", 8, 0), ("8x8", 16, 1), ("a tile", 2, 2), ("4x4", 4, 0), ("rows of 16", 1, 2)],
    )
    def test_3x3(self, name, channels, count, keep, config, device):
        """By channels of a group and 1x1 convolutions that are added."""
        shape, dtype = SHAPES[name], torch.bfloat16
        _, _, _, emb, residual = forward_case(shape, dtype, device)
        terms = {"emb": emb, "residual": residual}
        if count:
            extra = extra_case(shape, 128, 64, dtype, device)[:count]
            terms = {"extra": extra, "extra_bias": torch.randn(shape.co, device=device)}
        for offset in (0.0, 1000.0) if count == 0 else (0.0,):
            given = shape, channels, dtype, device
            x, weight, *_ = forward_case(shape, dtype, device)
            tile = config or first_tile(x, weight, terms.get("extra", ()))
            plain = lambda *args: conv_forward(*args, **terms, config=tile)[0]  # noqa: E731, B023
            check_norm(*given, plain, terms, keep, config, offset)

    @pytest.mark.parametrize(
        ("name", "channels", "second", "offset", "with_residual", "config"),
        [
            ("8x8", 16, 256, 0.0, True, None),
            ("8x8", 16, 256, 0.0, True, CONFIGS[0]),
            ("8x8", 16, 256, 0.0, True, CONFIGS[3]),
            ("8x8", 16, 256, 1000.0, False, CONFIGS[2]),
            ("a tile", 2, 64, 0.0, True, None),
            ("a tile", 2, 192, 0.0, False, None),
            ("4x4", 8, 128, 0.0, True, None),
        ],
        ids=str,
    )
    def test_a_concatenation(self, name, channels, second, offset, with_residual, config, device):
        """More tiles of it than of the result, or fewer."""
        shape, dtype = SHAPES[name], torch.bfloat16
        x, weight, _, _, residual = forward_case(shape, dtype, device)
        terms = {"residual": residual} if with_residual else {}
        tile = config or first_tile(x, weight, ())
        plain = lambda *args: conv_forward(*args, **terms, config=tile)[0]  # noqa: E731
        given = shape, channels, dtype, device
        check_norm(*given, plain, terms, True, config, offset, second)

    @pytest.mark.parametrize("config", [None, CONFIGS[0], CONFIGS[3]], ids=str)
    @pytest.mark.parametrize(
        ("name", "channels", "second", "keep"),
        [
            ("8x8", 8, 0, False),
            ("8x8", 16, 256, True),
            ("4x4", 4, 0, True),
            ("a tile", 2, 64, True),
        ],
    )
    def test_the_norm_of_a_sum_that_a_number_multiplies(
        self, name, channels, second, keep, config, device
    ):
        shape, dtype = SHAPES[name], torch.bfloat16
        x, weight, _, _, residual = forward_case(shape, dtype, device)
        terms = {"residual": residual, "factor": 0.5**0.5}
        tile = config or first_tile(x, weight, ())
        plain = lambda *args: conv_forward(*args, **terms, config=tile)[0]  # noqa: E731
        given = shape, channels, dtype, device
        check_norm(*given, plain, terms, keep, config, second=second)

    @pytest.mark.parametrize("factor", [None, -(0.5**0.5)], ids=["", "times a number"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
    @pytest.mark.parametrize("name", POINTS)
    def test_1x1_and_its_sums(self, name, with_residual, dtype, factor, device):
        x, weight, bias, _, residual = forward_case(POINTS[name], dtype, device)
        assert single_tile.refuse(forward_spec(x, weight), describe(device)) is None
        exact = reference.conv2d(x.double(), weight.double(), bias.double())
        exact = exact + residual.double() if with_residual else exact
        exact = exact if factor is None else factor * exact
        terms = {"residual": residual if with_residual else None, "factor": factor}

        def check():
            y, partials = conv_few(
                x, weight, bias, **terms, stats=True, config=SINGLE_TILE.config()
            )
            assert relative(y, exact) <= ROUNDING[dtype] + 1e-5
            check_stats(y, partials)
            return y, partials

        repeatedly(check)
        y, none = conv_few(x, weight, bias, **terms, config=SINGLE_TILE.config())
        assert none is None and torch.equal(y, check()[0])

    def test_an_empty_batch(self, device):
        shape = SHAPES["a tile"]._replace(n=0)
        x, weight, bias, _, _ = forward_case(shape, torch.bfloat16, device)
        norm = NextNorm(bias, bias, 8, 1e-5, "silu", True)
        y, _, a = conv_norm(x, weight, bias, norm)
        assert y.shape == a.shape == (0, 8, 8, 64)
        x, weight, bias, _, _ = forward_case(POINTS["a tile"]._replace(n=0), x.dtype, device)
        assert conv_few(x, weight, bias, config=SINGLE_TILE.config())[0].shape == (0, 8, 8, 64)


def applies(shape: Shape, num_groups: int, dtype=torch.bfloat16, gpu=HOPPER) -> bool:
    n, h, w, ci, co, kernel = shape
    x = torch.empty((n, h, w, ci), dtype=dtype, device="meta")
    spec = forward_spec(x, x.new_empty((co, ci, kernel, kernel)), groups=num_groups)
    return CONV_NORM.refuse(spec, gpu) is None


def test_what_applies():
    assert applies(SHAPES["8x8"], 24) and not applies(POINTS["8x8"], 32)  # 1x1 filters
    assert not applies(SHAPES["8x8"], 32)  # groups of 6
    assert not applies(SHAPES["8x8"], 6)  # of 32
    assert not applies(POINTS["16x16"], 24)
    assert not applies(Shape(1, 8, 8, 96, 64), 8)
    assert not applies(Shape(1, 2, 4, 64, 64), 8)
    assert not applies(SHAPES["8x8"], 24, torch.float32)


def test_nothing_applies_to_another_gpu():
    assert not applies(SHAPES["8x8"], 24, gpu=chip("a100").gpu)
    assert not applies(POINTS["8x8"], 32, gpu=chip("a100").gpu)
