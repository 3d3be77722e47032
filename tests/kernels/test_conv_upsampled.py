"""Convolutions behind nearest upsampling whose products are made on the small image."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import upsampled as conv_upsampled, upsampled_filters
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import describe

from .chips import HOPPER
from .compile_only import SHARED_LIMIT
from .conv_fused_cases import ROUNDING, relative
from .test_conv_hopper import gpu, repeatedly

TILES = [conv_upsampled.Tile(pixels) for pixels in conv_upsampled.gluon_upsampled.TILES]
# The large image: N, H, W, C1, CO, and C2. A tile, programs with several and an odd number of them,
# one warpgroup with nothing to do, images that share a tile, the layers of the model.
SHAPES = {
    "a tile": (1, 16, 64, 64, 64, 64),
    "64x64": (13, 64, 64, 128, 64, 64),
    "rows of 64": (5, 48, 64, 64, 128, 128),
    "32x32": (21, 32, 32, 192, 128, 128),
    "16x16": (37, 16, 16, 256, 192, 192),
    "3 of 16x16": (3, 16, 16, 64, 64, 128),
    "3 of 8x16": (3, 8, 16, 64, 64, 64),
}


def filters_of(c1: int, c2: int, co: int, device) -> torch.Tensor:
    """Float32, in channels_last memory."""
    weight = torch.randn(co, 3, 3, c1 + c2, generator=torch.Generator().manual_seed(0))
    return (weight / (9 * (c1 + c2)) ** 0.5).to(device).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("c1", [64, 24])
def test_filters(c1, dtype, device):
    weight = filters_of(c1, 88, 3, device)
    got = upsampled_filters.upsampled_filters(weight, c1, dtype)
    want = fused_reference.upsampled_filters(weight.double(), c1, torch.float64)
    assert got.others.permute(0, 2, 3, 1).is_contiguous()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=ROUNDING[dtype], atol=3 * 2**-24)


def test_filters_of_rounded_parameters(device):
    """A user's module in 16 bits: its filters are summed in float32 all the same."""
    weight = filters_of(24, 8, 3, device).half()
    got = upsampled_filters.upsampled_filters(weight, 24, torch.float16)
    want = upsampled_filters.upsampled_filters(weight.float(), 24, torch.float16)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_the_reference_is_the_convolution_of_what_was_upsampled():
    """And so are its gradients."""
    small, others = torch.randn(2, 3, 6, 4).double(), torch.randn(2, 6, 12, 5).double()
    weight = filters_of(4, 5, 7, "cpu").double()
    a = torch.cat((reference.upsample_nearest2d(small), others), 3)
    filters = fused_reference.upsampled_filters(weight, 4, torch.float64)
    bias, emb, dy = torch.randn(7), torch.randn(2, 7), torch.randn(2, 6, 12, 7).double()
    y, _ = fused_reference.conv_upsampled(a, filters, bias, emb=emb)
    want, _ = fused_reference.conv_forward(a, weight, bias, emb=emb)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)

    table = torch.rand(2, 4, 9).double() + 0.5
    x = torch.cat((reference.upsample_nearest2d(small), others), 3)
    want, sums = fused_reference.conv_input_grad(
        dy, weight, inputs=(x,), table=table, activation="silu"
    )
    dz1, dz2, partials = fused_reference.conv_upsampled_input_grad(
        dy, filters, inputs=(small, others), tables=(table, table[..., 4:]), activation="silu"
    )
    torch.testing.assert_close(dz1, 4 * reference.avg_pool2d(want[..., :4].contiguous()))
    torch.testing.assert_close(dz2, want[..., 4:])
    torch.testing.assert_close(partials.sum(1), sums.sum(1))


def test_sums_of_both_halves(device):
    first, second = torch.randn(3, 5, 2, 72).to(device), torch.randn(3, 2, 2, 24).to(device)
    joined = conv_upsampled._join(first, second)
    want = torch.cat((first.sum(1), second.sum(1)), 2)[:, None]
    torch.testing.assert_close(joined, want)


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("name", "tile", "emb"),
        [
            *((name, tile, True) for name in SHAPES for tile in TILES),
            ("32x32", TILES[0], False),
        ],
        ids=str,
    )
    def test_forward(self, name, tile, emb, device):
        skip_where_it_does_not_fit(name, tile, device)
        n, h, w, c1, co, c2 = SHAPES[name]
        a, weight = activation_of(name, device), filters_of(c1, c2, co, device)
        filters = upsampled_filters.upsampled_filters(weight, c1, a.dtype)
        bias = torch.randn(co, device=device)
        rows = torch.randn(n, co + 8, device=device)[:, :co] if emb else None
        want, _ = fused_reference.conv_forward(a.double(), weight.double(), bias.double(), emb=rows)
        a[:, 1::2, :, :c1] = a[:, :, 1::2, :c1] = torch.nan  # what need not be there

        def check():
            y, partials = conv_upsampled.conv_upsampled(a, filters, bias, emb=rows, config=tile)
            # both are rounded once more than y: filters, by which the sum's error is as large
            assert relative(y, want) <= 1.5 * ROUNDING[a.dtype]
            assert partials.shape[1] == 4 * max(1, h * w // 4 // tile.pixels)
            table = [
                (p, (h * w,), 1, *weightless(co, device), 1e-5)
                for p in ((partials,), (fused_reference.tensor_partials(y.float()),))
            ]
            got, exact = (fused_reference.norm_table(*t) for t in table)
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
            return y, partials

        repeatedly(check)

    @pytest.mark.parametrize(
        ("name", "tile", "activation"),
        [
            *((name, tile, "silu") for name in SHAPES for tile in TILES),
            ("32x32", TILES[0], "identity"),
        ],
        ids=str,
    )
    def test_input_grad(self, name, tile, activation, device):
        skip_where_it_does_not_fit(name, tile, device)
        n, h, w, c1, co, c2 = SHAPES[name]
        weight = filters_of(c1, c2, co, device)
        filters = upsampled_filters.upsampled_filters(weight, c1, torch.bfloat16)
        a = activation_of(name, device)
        x1, x2 = a[:, ::2, ::2, :c1].contiguous(), a[..., c1:].contiguous()
        dy = torch.randn(n, h, w, co, device=device).bfloat16()
        table = torch.rand(n, 4, c1 + c2, device=device) + 0.5
        tables = table, table[..., c1:].contiguous()
        rest = {"inputs": (x1, x2), "tables": tables, "activation": activation}
        exact = {name: tuple(x.double() for x in rest[name]) for name in ("inputs", "tables")}
        exact["activation"] = activation
        exact_filters = fused_reference.upsampled_filters(weight.double(), c1, torch.float64)
        want = fused_reference.conv_upsampled_input_grad(dy.double(), exact_filters, **exact)
        scale = torch.cat(
            [(dz.double() ** 2).sum((1, 2)).sqrt() for dz in want[:2]], 1
        )  # of sums that may cancel

        def check():
            got = conv_upsampled.conv_upsampled_input_grad(dy, filters, **rest, config=tile)
            for g, e in zip(got[:2], want[:2], strict=True):
                assert relative(g, e) <= 1.5 * ROUNDING[torch.bfloat16]
            error = (got[2].double() - want[2])[:, 0, 0].abs() / scale
            assert error.max() <= 8 * ROUNDING[torch.bfloat16]
            return got

        repeatedly(check)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    @pytest.mark.parametrize("name", ["64x64", "32x32", "3 of 8x16"])
    def test_of_a_whole_image(self, name, tile, device):
        skip_where_it_does_not_fit(name, tile, device)
        n, h, w, c1, co, _ = SHAPES[name]
        weight = filters_of(c1, 0, co, device)
        filters = upsampled_filters.upsampled_filters(weight, c1, torch.bfloat16)
        x = activation_of(name, device)[:, ::2, ::2, :c1].contiguous()
        dy = torch.randn(n, h, w, co, device=device).bfloat16()
        bias = torch.randn(co, device=device)
        exact = fused_reference.upsampled_filters(weight.double(), c1, torch.float64)
        want, _ = fused_reference.conv_of_upsampled(x.double(), exact, bias.double())
        want_dx = fused_reference.conv_of_upsampled_input_grad(dy.double(), exact)

        def check():
            y, partials = conv_upsampled.conv_of_upsampled(x, filters, bias, config=tile)
            dx = conv_upsampled.conv_of_upsampled_input_grad(dy, filters, config=tile)
            assert relative(y, want) <= 1.5 * ROUNDING[x.dtype]
            assert relative(dx, want_dx) <= 1.5 * ROUNDING[x.dtype]
            sums = partials[:, :, 0].sum(1)
            torch.testing.assert_close(sums, y.float().sum((1, 2)), rtol=1e-4, atol=0.05)
            return y, partials, dx

        repeatedly(check)


def joins(n, h, w, c1, co, c2, dtype=torch.bfloat16, grad=False, gpu=HOPPER):
    small = torch.empty(n, h, w, c1, dtype=dtype, device="meta")
    op = conv_upsampled.UPSAMPLED_GRAD if grad else conv_upsampled.UPSAMPLED
    return op.why_apart(conv_upsampled.upsampled_spec(small, c1, c2, co, grad=grad), gpu) is None


def test_where_it_is_joined():
    assert joins(128, 32, 32, 128, 64, 64)
    assert joins(128, 32, 32, 128, 64, 0)
    assert not joins(128, 32, 32, 128, 64, 64, torch.float32)
    assert not joins(128, 32, 32, 96, 64, 96)
    assert not joins(8, 32, 32, 128, 64, 64)
    assert joins(16, 32, 32, 128, 64, 64)
    assert not joins(16, 32, 32, 128, 64, 64, grad=True)
    assert joins(32, 32, 32, 128, 64, 64, grad=True)
    assert not joins(16, 4, 4, 64, 64, 64)
    assert not joins(128, 14, 14, 128, 64, 64)
    assert not joins(0, 32, 32, 128, 64, 64)
    assert not joins(128, 32, 32, 128, 64, 64, gpu=chip("a100").gpu)


def weightless(c: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(c, device=device), torch.zeros(c, device=device)


def activation_of(name: str, device) -> torch.Tensor:
    """What is convolved, bfloat16."""
    n, h, w, c1, _, c2 = SHAPES[name]
    generator = torch.Generator(device).manual_seed(0)
    small = torch.randn(n, h // 2, w // 2, c1, generator=generator, device=device)
    others = torch.randn(n, h, w, c2, generator=generator, device=device)
    return torch.cat((reference.upsample_nearest2d(small), others), 3).bfloat16()


def skip_where_it_does_not_fit(name: str, tile, device) -> None:
    if not describe(device).hopper:
        pytest.skip("no Hopper GPU")
    n, h, w, c1, co, c2 = SHAPES[name]
    small = torch.empty(n, h // 2, w // 2, c1, dtype=torch.bfloat16, device=device)
    spec = conv_upsampled.upsampled_spec(small, c1, c2, co)
    reason = conv_upsampled.UPSAMPLED.refuse(spec, describe(device))
    if reason or tile not in conv_upsampled.UPSAMPLED.kernels[0].configs(spec, describe(device)):
        pytest.skip(reason or "no such tile")


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_rings_fit(tile, width):
    """A block is read while another is written."""
    blocks = conv_upsampled.gluon_upsampled.blocks_of(tile.pixels, width, SHARED_LIMIT[90])
    rows = blocks * (tile.pixels + width + 128) + 2 * tile.pixels
    assert blocks >= 3 and rows * 128 + 1024 <= SHARED_LIMIT[90]
