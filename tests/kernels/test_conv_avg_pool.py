"""A convolution and the 2x2 means of its result in one launch, on a Hopper GPU."""

import pytest
import torch

from triton_kernels.conv import conv_avg_pool as fused_conv_means
from triton_kernels.conv import norm_conv as fused_norm_conv
from triton_kernels.conv.conv_avg_pool import CONV_MEANS, conv_means
from triton_kernels.conv.fused import conv_forward
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.hopper import row_mma as gluon_rows
from triton_kernels.conv.hopper import tile_mma
from triton_kernels.conv.hopper.single_tile import conv_single_tile
from triton_kernels.conv.norm_conv import norm_conv
from triton_kernels.registry.chips import chip
from triton_kernels.resample.op import gather
from triton_kernels.runtime.device import describe

from .chips import HOPPER
from .poison import poison_outputs
from .test_conv_fused import Shape, extra_case, forward_case, relative
from .test_conv_hopper import gpu, repeatedly
from .test_norm_conv import sums_of, use_form

CONFIGS = list(tile_mma.TILES)
SHAPES = {
    "images of several programs": Shape(3, 32, 32, 64, 128),
    "many tiles": Shape(37, 32, 32, 128, 128),
    "tiles of an image": Shape(9, 16, 16, 64, 192),
    "high images": Shape(2, 64, 8, 64, 64),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_outputs(monkeypatch, fused_conv_means, fused_norm_conv)


def check_means(y, means):
    """Those that a pass over y makes, to the bit, and their sums over successive pixels."""
    values, sums = means
    assert torch.equal(values, gather(y, 0.25))
    n, p, q, c = values.shape
    tiles = values.double().view(n, sums.shape[1], -1, c)
    assert relative(sums[:, :, 0], tiles.sum(2)) < 1e-6
    squares = (tiles - tiles.mean(2, keepdim=True)).square().sum(2)
    assert relative(sums[:, :, 1], squares) < 1e-5


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
    @pytest.mark.parametrize(
        ("name", "count", "offset", "dtype"),
        [
            ("images of several programs", 0, 0.0, torch.float16),
            ("many tiles", 0, 1000.0, torch.bfloat16),
            ("many tiles", 2, 0.0, torch.bfloat16),
            ("tiles of an image", 1, 0.0, torch.bfloat16),
            ("high images", 0, 0.0, torch.bfloat16),
        ],
    )
    def test_of_tiles(self, name, count, offset, dtype, config, device):
        """y and its partials as without means, to the bit."""
        shape = SHAPES[name]
        x, weight, bias, emb, residual = forward_case(shape, dtype, device)
        terms = {"emb": emb, "residual": residual}
        if count:
            extra = extra_case(shape, 128, 64, dtype, device)[:count]
            terms = {"extra": extra, "extra_bias": torch.randn(shape.co, device=device)}
        if config is not None and not tile_mma.makes_means(config, shape.h, shape.w):
            pytest.skip("a tile of several images")
        spec = forward_spec(x, weight, extra=[other for other, _ in terms.get("extra", ())])
        assert CONV_MEANS.refuse(spec, describe(device)) is None
        tile = config or CONV_MEANS.kernels[0].configs(spec, describe(device))[0]

        def check():
            y, sums, means = conv_means(x, weight, bias + offset, **terms, config=config)
            exact = conv_forward(x, weight, bias + offset, **terms, stats=True, config=tile)
            assert torch.equal(y, exact[0]) and torch.equal(sums, exact[1])
            check_means(y, means)
            return means

        repeatedly(check, 10)

    @pytest.mark.parametrize("alone", [False, True])
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            (Shape(41, 16, 16, 192, 192, 1), torch.bfloat16),
            (Shape(3, 8, 8, 64, 128, 1), torch.float16),
            (Shape(2, 32, 32, 512, 64, 1), torch.bfloat16),
        ],
        ids=str,
    )
    def test_of_1x1_filters(self, shape, dtype, alone, device):
        x, weight, bias, _, residual = forward_case(shape, dtype, device)
        residual = None if alone else residual
        assert CONV_MEANS.refuse(forward_spec(x, weight), describe(device)) is None
        exact = conv_single_tile(x, weight, bias, residual=residual, stats=True)

        def check():
            y, sums, means = conv_means(x, weight, bias, residual=residual)
            assert torch.equal(y, exact[0]) and torch.equal(sums, exact[1])
            check_means(y, means)
            return means

        repeatedly(check, 10)

    @pytest.mark.parametrize("form", ["between, table", "one", "two, table"])
    @pytest.mark.parametrize("terms", ["residual", "1x1"])
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            (Shape(151, 8, 64, 64, 64), torch.bfloat16),
            (Shape(3, 64, 64, 64, 128), torch.float16),
            (Shape(22, 64, 64, 64, 64), torch.bfloat16),
        ],
        ids=str,
    )
    def test_where_the_norm_is_on_the_way(self, shape, dtype, terms, form, monkeypatch, device):
        use_form(monkeypatch, form)
        x, weight, bias, _, residual = forward_case(shape, dtype, device)
        x = x * 2 + 1
        given = {"residual": residual}
        if terms == "1x1":
            extra = extra_case(shape, 64, 64, dtype, device)
            given = {"extra": extra, "extra_bias": torch.randn(shape.co, device=device)}
        norm = *sums_of(x, 32), "silu"
        config = gluon_rows.RESIDENT_TILE
        exact = norm_conv(x, *norm, weight, bias, **given, config=config)

        def check():
            y, sums, means = norm_conv(x, *norm, weight, bias, **given, means=True)
            assert torch.equal(y, exact[0]) and torch.equal(sums, exact[1])
            check_means(y, means)
            return means

        repeatedly(check, 10)


def applies(shape: Shape, dtype=torch.bfloat16, gpu=HOPPER) -> bool:
    n, h, w, ci, co, kernel = shape
    x = torch.empty((n, h, w, ci), dtype=dtype, device="meta")
    return CONV_MEANS.refuse(forward_spec(x, x.new_empty((co, ci, kernel, kernel))), gpu) is None


def test_what_applies():
    assert all(applies(shape) for shape in SHAPES.values())
    shape = SHAPES["many tiles"]
    assert not applies(shape._replace(n=0))
    assert not applies(shape._replace(kernel=5))
    assert not applies(shape._replace(ci=96))
    assert applies(shape._replace(kernel=1, n=2))
    assert not applies(shape._replace(kernel=1, n=64))  # too many tiles of 64 pixels
    assert not applies(shape._replace(kernel=1, n=2, h=64, w=64))
    assert not applies(shape._replace(h=36, w=36))
    assert not applies(shape._replace(h=64, w=64))  # pieces of a row
    assert not applies(shape._replace(h=4, w=8))  # tiles of several images
    assert not applies(shape, torch.float32)
    assert not applies(shape, gpu=chip("a100").gpu)
