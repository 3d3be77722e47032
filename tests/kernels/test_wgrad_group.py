"""Several weight gradients, in one launch or one after the other."""

import math
from typing import NamedTuple

import pytest
import torch

from triton_kernels.conv import wgrad_group as weight_grads, wgrad_parts
from triton_kernels.conv.hopper.weight_grads import group_wgrad, rounds_wgrad, row_wgrad
from triton_kernels.conv.hopper.weight_grads.group_wgrad import Tile
from triton_kernels.conv.hopper.weight_grads.rounds_wgrad import Rounds
from triton_kernels.conv.wgrad_group import conv_weight_grads
from triton_kernels.conv.wgrad_parts import Gradient
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ConvSpec, WeightGradsSpec
from triton_kernels.runtime.device import describe

from .conv_fused_cases import (
    needs_tma,  # noqa: F401  a fixture for every test here
    randn,
    relative,
    weight_grad_reference,
)
from .test_conv_hopper import gpu

CUT_OFF = 2.5e-8  # of a sum, for each product of 16 pixels: see `reductions.long_sums`


class Group(NamedTuple):
    """Convolutions of images [N, H, W] and filters of one size."""

    n: int
    h: int
    w: int
    kernel: int
    channels: tuple[tuple[int, int], ...]  # CI, CO
    apart: int = 0  # numbers between the rows of the filters


SMALL = {
    "one": Group(2, 8, 8, 3, ((16, 24),)),
    "two of 3x3": Group(2, 8, 8, 3, ((16, 24), (24, 8))),
    "three of 3x3": Group(2, 8, 8, 3, ((16, 24), (24, 8), (8, 8))),
    "four of 1x1": Group(2, 5, 8, 1, ((16, 24), (24, 8), (8, 16), (8, 8)), apart=8),
    "empty batch": Group(0, 8, 8, 1, ((16, 24), (24, 8))),
}


def gradients(group: Group, dtype, device) -> list[Gradient]:
    """Random ones, with random numbers in the gradients."""
    n, h, w, r = group[:4]
    made = []
    for seed, (ci, co) in enumerate(group.channels):
        x = randn(n, h, w, ci, seed=seed, device=device, dtype=dtype)
        dy = randn(n, h, w, co, seed=seed + 4, device=device, dtype=dtype)
        rows = randn(co, ci * r * r + group.apart, seed=seed + 8, device=device)
        out = rows[:, : ci * r * r].unflatten(1, (r, r, ci)).permute(0, 3, 1, 2)
        made.append(Gradient(x, dy, out))
    return made


def check(
    group: Group, dtype, device, accumulate: bool, plan=None, share: float = 1.0, parts: int = 0
) -> list[torch.Tensor]:
    """The gradients, which have to be right. `parts`: of a sum; 0: so many that what tensor cores
    cut off of each (`reductions.long_sums`) is less than the rounding."""
    made = gradients(group, dtype, device)
    before = [g.out.double() for g in made]
    conv_weight_grads(*made, accumulate=accumulate, share=share, config=plan)
    pixels = group.n * group.h * group.w
    floor = 2**-24 * pixels**0.5 + 1e-6
    if parts:
        floor += CUT_OFF * pixels / 16 / parts
    for g, old in zip(made, before, strict=True):
        exact = weight_grad_reference(g.x, g.dy, group.kernel) + accumulate * old
        assert relative(g.out, exact) <= floor
    return [g.out for g in made]


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("name", SMALL)
def test_some(name, accumulate, device):
    check(SMALL[name], torch.float16, device, accumulate)


SUMS = {
    # programs, tiles, taps, channels of a tile, channels of the gradients
    "a program a block": (3, 4, 9, (16, 16), ((16, 32), (16, 16))),
    "pieces over two blocks": (5, 4, 1, (32, 16), ((24, 40), (16, 32))),
    "many parts": (23, 13, 1, (16, 16), ((16, 16), (8, 16))),
    "four": (11, 3, 1, (16, 48), ((48, 16), (16, 16), (40, 8), (56, 16))),
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts(name, accumulate, device):
    """Every part holds the number of its tiles; parts that nobody has written hold NaN."""
    programs, tiles, taps, (tile_co, tile_ci), channels = SUMS[name]
    side = round(taps**0.5)
    outs, blocks = [], []  # of each block: its gradient and its corner
    for i, (ci, co) in enumerate(channels):
        rows = randn(co, taps * ci + 8, seed=i, device=device)[:, : taps * ci]
        outs.append(rows.unflatten(1, (side, side, ci)).permute(0, 3, 1, 2))
        blocks += [(i, c, k) for c in range(0, co, tile_co) for k in range(0, ci, tile_ci)]
    parts = torch.full((programs, 2, tile_co, taps, tile_ci), float("nan"), device=device)
    exact = [accumulate * out.double() for out in outs]
    total = len(blocks) * tiles
    for p in range(programs):
        piece = range(p * total // programs, (p + 1) * total // programs)
        for b in sorted({tile // tiles for tile in piece}):
            part = randn(tile_co, taps, tile_ci, seed=100 * p + b, device=device)
            parts[p, b - piece[0] // tiles] = part
            i, co, ci = blocks[b]
            part = part.double().unflatten(1, (side, side)).permute(0, 3, 1, 2)
            place = exact[i][co : co + tile_co, ci : ci + tile_ci]
            place += part[: place.shape[0], : place.shape[1]]
    wgrad_parts.sum_group(parts, outs, tiles, accumulate)
    assert all(relative(out, e) <= 1e-6 for out, e in zip(outs, exact, strict=True))


LARGE = {
    "64x64": Group(3, 64, 64, 3, ((192, 64), (64, 64), (64, 64), (64, 64))),
    "64x64, two": Group(2, 64, 64, 3, ((64, 64), (64, 64))),
    "32x32": Group(5, 32, 32, 3, ((128, 128), (64, 128), (192, 128))),
    "16x16": Group(13, 16, 16, 3, ((64, 128), (128, 192), (192, 64), (64, 64))),
    "8x8": Group(64, 8, 8, 3, ((256, 192), (64, 128), (256, 256), (128, 256))),
    "8x8, an odd number": Group(37, 8, 8, 3, ((64, 64), (64, 64), (64, 64))),
}


# of 132 multiprocessors: fewer blocks, one round and a rest, two; odd channels and images
ROUNDS = {
    "8x8, four": Group(64, 8, 8, 3, ((256, 192), (64, 128), (256, 256), (128, 256))),
    "8x8, rounds": Group(24, 8, 8, 3, ((576, 768), (768, 576), (576, 192), (192, 576))),
    "16x16, a round": Group(13, 16, 16, 3, ((576, 576), (576, 576))),
    "32x32": Group(5, 32, 32, 3, ((128, 128), (64, 128), (192, 128))),
    "64x64, many pixels": Group(17, 64, 64, 3, ((64, 64), (128, 64))),
    "odd channels": Group(5, 16, 16, 3, ((72, 136), (200, 88))),
    "48x48": Group(5, 48, 48, 3, ((96, 96), (192, 96), (96, 96), (96, 192))),
    "40x40": Group(3, 40, 40, 3, ((160, 96), (64, 160), (64, 64))),
    "20x20": Group(5, 20, 20, 3, ((320, 128), (128, 320))),
    "12x12": Group(7, 12, 12, 3, ((288, 480), (288, 288), (480, 288))),
    "7x4": Group(11, 7, 4, 3, ((64, 64), (64, 128))),
}


@pytest.mark.long
def test_sums_of_cut_blocks(device):
    """Of blocks behind others that are whole, of four gradients whose channels fill no blocks."""
    channels, whole, splits = ((72, 136), (64, 64), (8, 72), (136, 16)), 2, 3
    outs, blocks = [], []  # of each block: its gradient and its corner
    for i, (ci, co) in enumerate(channels):
        rows = torch.zeros(co, 9 * ci + 8, device=device)[:, : 9 * ci]
        outs.append(rows.unflatten(1, (3, 3, ci)).permute(0, 3, 1, 2))
        blocks += [(i, c, k) for c in range(0, co, 64) for k in range(0, ci, 64)]
    cut = blocks[whole:]
    parts = randn(len(cut) * splits, 1, 64, 9, 64, seed=0, device=device)
    exact = [torch.zeros_like(out, dtype=torch.float64) for out in outs]
    sums = parts.double().unflatten(0, (len(cut), splits)).sum((1, 2))
    for part, (i, co, ci) in zip(sums, cut, strict=True):
        place = exact[i][co : co + 64, ci : ci + 64]
        part = part.unflatten(1, (3, 3)).permute(0, 3, 1, 2)
        place += part[: place.shape[0], : place.shape[1]]
    for accumulate in (False, True):
        wgrad_parts.sum_group(parts, outs, 5, accumulate, whole)
        for out, e in zip(outs, exact, strict=True):
            assert relative(out, (1 + accumulate) * e) <= 1e-6


def test_rounds_are_predicted_to_be_faster_than_one_after_one():
    """Of 576 channels a gradient is 81 blocks for 132 multiprocessors: of four the last round alone
    is cut."""
    gpu = CHIPS["h200"].gpu
    conv = {"h": 16, "w": 16, "k": 576, "c": 576, "p": 16, "q": 16, "padding": (1, 1)}
    convs = tuple(ConvSpec(32, "bf16", filters=(576, 576), **conv) for _ in range(4))
    spec = WeightGradsSpec(32, "bf16", convs)
    if rounds_wgrad.refuse(spec, gpu) is not None:
        pytest.skip("no Gluon")
    choice = select(weight_grads.WEIGHT_GRADS, spec, gpu)
    assert choice.config == Rounds(2)
    assert rounds_wgrad.whole_blocks(spec, gpu, choice.config) == 2 * 132
    assert rounds_wgrad.cut_blocks(spec, gpu, choice.config) == 4 * 81 - 2 * 132
    in_turn = weight_grads.WEIGHT_GRADS.kernel("in_turn")
    slow, fast = (k.model(spec, gpu, c) for k, c in ((in_turn, ()), (choice.kernel, choice.config)))
    assert fast < 0.8 * slow


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize(
        ("name", "splits"),
        [
            pytest.param(name, splits, id=f"{name}-{splits}")
            for name, (n, h, w, *_) in ROUNDS.items()
            for splits in (1, 2, 3, 5)
            if splits <= math.prod(row_wgrad.tiles_of(n, h, w))  # others are never listed
        ],
    )
    def test_rounds(self, name, splits, accumulate, device):
        group, plan = ROUNDS[name], Rounds(splits)
        # blocks in front of the last round are in one part
        fewest = splits if sum(-(-a // 64) * -(-b // 64) for a, b in group.channels) < 132 else 1
        first = check(group, torch.bfloat16, device, accumulate, plan, parts=fewest)
        for _ in range(3):
            again = check(group, torch.bfloat16, device, accumulate, plan, parts=fewest)
            assert all(map(torch.equal, again, first))

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize(
        ("name", "tile"),
        [
            pytest.param(name, tile, id=f"{name}-{tuple(tile)}")
            for name, group in LARGE.items()
            for tile in group_wgrad.TILES
        ],
    )
    def test_one_launch(self, name, tile: Tile, accumulate, device):
        group = LARGE[name]
        spec = weight_grads.grads_spec(gradients(group, torch.bfloat16, device), True)
        gpu = describe(device)
        if group_wgrad.refuse(spec, gpu) or tile not in group_wgrad.tiles(spec, gpu):
            pytest.skip("a tile of other shapes")
        plan = Tile(*tile)
        first = check(group, torch.bfloat16, device, accumulate, plan)
        for _ in range(3):
            again = check(group, torch.bfloat16, device, accumulate, plan)
            assert all(map(torch.equal, again, first))
        check(group, torch.bfloat16, device, accumulate, plan, share=0.5)
