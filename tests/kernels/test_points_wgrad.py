"""Weight gradients of 1x1 convolutions and linear layers, one or several in one launch."""

import pytest
import torch

from triton_kernels.conv.hopper.weight_grads import points_wgrad
from triton_kernels.conv.hopper.weight_grads.points_wgrad import TILES, count_blocks, pixel_tiles
from triton_kernels.reductions.long_sums import MOST_PRODUCTS
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import ConvSpec, WeightGradsSpec

from .conv_fused_cases import needs_tma  # noqa: F401  a fixture for every test here
from .test_conv_hopper import gpu
from .test_wgrad_group import Group, check

H200 = CHIPS["h200"].gpu
GROUPS = {
    "one": Group(3, 16, 16, 1, ((64, 128),)),
    "odd sizes": Group(5, 7, 3, 1, ((200, 72),)),
    "few pixels": Group(1, 1, 5, 1, ((136, 328), (8, 8))),
    "rows apart": Group(4, 24, 24, 1, ((320, 640), (640, 320)), apart=64),
    "four": Group(16, 8, 8, 1, ((1280, 1280), (768, 320), (640, 640), (8, 136))),
    "many blocks": Group(2, 16, 16, 1, ((1280, 5120), (1280, 3840))),
    "long sums": Group(4, 128, 128, 1, ((320, 320), (64, 320))),
}


def spec_of(pixels, *channels):
    """Of gradients [CO, CI] over so many pixels."""
    convs = [
        ConvSpec(1, "bf16", 1, pixels, ci, co, 1, 1, p=1, q=pixels, filters=(co, ci))
        for co, ci in channels
    ]
    return WeightGradsSpec(1, "bf16", tuple(convs))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("pixels", [5, 1024, 65_536, 2_000_000])
def test_how_blocks_are_cut(pixels, share):
    """Whole blocks fill the GPU or are all; no sum is longer than it may be; a block has parts of
    its own, or pieces that are no longer than a block."""
    for channels in ([(1280, 1280)], [(8, 8)], [(2560, 320), (320, 1280), (320, 320)]):
        spec = spec_of(pixels, *channels)
        found = points_wgrad.configs(spec, H200)
        assert {c[:-1] for c in found} == {tile[:-1] for tile in TILES}
        for config in found:
            whole, pieces, programs = points_wgrad.cut(spec, H200, config, share)
            slots = 132 * config.programs
            blocks, tiles = (f(spec, config) for f in (count_blocks, pixel_tiles))
            rest = blocks - whole
            assert whole == blocks or whole % slots == 0
            assert pieces == 0 if rest == 0 else rest <= pieces <= rest * tiles
            assert programs == min(whole + pieces, slots) or share < 1
            longest = tiles if whole else -(-rest * tiles // pieces)
            assert longest * config.steps * 64 / 16 <= MOST_PRODUCTS + config.steps * 4


def test_what_it_refuses():
    assert points_wgrad.refuse(spec_of(64, (8, 8)), H200) is None
    assert points_wgrad.refuse(spec_of(64, *[(8, 8)] * 5), H200).startswith("5 gradients")
    assert points_wgrad.refuse(spec_of(64, (12, 8)), H200) == (
        "12 channels are no multiple of 16 bytes, which the TMA unit wants"
    )
    assert "compute capability 9" in points_wgrad.refuse(spec_of(64, (8, 8)), CHIPS["a100"].gpu)
    mixed = WeightGradsSpec(1, "bf16", (*spec_of(64, (8, 8)).convs, *spec_of(72, (8, 8)).convs))
    assert points_wgrad.refuse(mixed, H200) == "images or filters are not of one size"


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize("splits", [0, 1, 3])
    @pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile[:-1])))
    @pytest.mark.parametrize("name", GROUPS)
    def test_points(self, name, tile, splits, accumulate, device):
        group = GROUPS[name]
        pixels = group.n * group.h * group.w
        fewest = 2 if name == "long sums" else 1
        if splits and not fewest <= splits <= -(-pixels // (64 * tile.steps)):
            pytest.skip("never listed")
        plan = tile._replace(splits=splits)
        dtype = torch.bfloat16 if splits else torch.float16
        first = check(group, dtype, device, accumulate, plan, parts=fewest)
        for _ in range(2):
            again = check(group, dtype, device, accumulate, plan, parts=fewest)
            assert all(map(torch.equal, again, first))
        check(group, dtype, device, accumulate, plan, share=0.5, parts=fewest)
