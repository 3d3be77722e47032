"""The weight gradient of `conv2d` with tiles that are fetched by TMA, as in `conv.plain.tma`.

A program adds up products of dy and x over pixels, for one tap or for the three of a row of the
filter, which share dy. The sum is split into parts where there are too few programs otherwise.
The kernel and its launcher are of stride 2 as well, whose tiles are in `conv.plain.tma_stride`.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ....reductions.column_sum import num_splits
from ....registry.cost import Work, programs_at_a_time
from ....registry.kernel import CLOCKS, configures
from ....registry.spec import ConvSpec
from ....runtime.dependent_launch import await_inputs, overlapping
from ....runtime.device import Device
from ...configs import WgradOperands, fewest_of, programs_of, split_kernel, wgrad_work
from ...refusals import BITS_16, Only
from ..output_tiles import box_origin
from ..products import zero_sums
from .tma_boxes import (
    as_one_row,
    by_parity,
    count_boxes,
    in_boxes,
    is_pointwise,
    pixels_in_boxes,
    tile_sizes,
    wgrad_box,
)


@configures("tma_wgrad")
class WgradConfig(NamedTuple):
    """What one program of the weight gradient computes."""

    block_co: int
    block_ci: int
    block_m: int  # pixels a step
    taps: int  # neighbours in a row of the filter, which share one load of dy: 1 or 3
    num_warps: int
    num_stages: int

    @property
    def area(self) -> int:
        """Of the block of channels by channels."""
        return self.block_co * self.block_ci


_MODELLED = [  # the rule of thumb chooses from these,
    WgradConfig(64, 64, 64, 1, 4, 4),
    WgradConfig(64, 64, 64, 3, 4, 3),
    WgradConfig(128, 64, 64, 3, 8, 3),
    WgradConfig(128, 128, 64, 1, 8, 3),
]
WGRAD_CONFIGS = [  # and rows, or fitted costs, from all
    *_MODELLED,
    WgradConfig(64, 64, 128, 3, 4, 2),
    WgradConfig(64, 128, 64, 3, 8, 3),
    WgradConfig(128, 64, 128, 3, 8, 2),
    WgradConfig(128, 64, 64, 3, 8, 4),
    WgradConfig(64, 64, 128, 1, 4, 4),
    WgradConfig(128, 64, 64, 1, 4, 4),
    WgradConfig(64, 128, 64, 1, 4, 4),
    WgradConfig(128, 128, 128, 1, 8, 2),
    WgradConfig(128, 128, 64, 3, 8, 3),
    WgradConfig(128, 128, 64, 1, 4, 3),
    WgradConfig(128, 256, 64, 1, 8, 3),
    WgradConfig(256, 128, 64, 1, 8, 3),
    WgradConfig(128, 64, 64, 3, 4, 3),
    WgradConfig(64, 64, 64, 3, 4, 4),
    # pipelines of 192 KiB: the more is on its way, the faster, also if a program is alone then
    WgradConfig(64, 64, 256, 1, 4, 3),
    WgradConfig(64, 128, 128, 1, 4, 4),
    WgradConfig(128, 64, 128, 1, 4, 4),
    WgradConfig(128, 128, 128, 1, 4, 3),
    WgradConfig(64, 64, 128, 3, 4, 3),
]


@triton.jit(do_not_specialize=["P", "Q", "num_tiles", "tiles_per_split"])
def _conv2d_wgrad_tma_kernel(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_CI]; STRIDE 2: by parity
    dy_desc,  # [N, P, Q, CO] in boxes [1, 1, TILE_W, BLOCK_CO]; FLAT: [N * P * Q, CO]
    dw_ptr,  # [splits, CO, R * S, CI], each split and each CO a row, any distance apart
    CI,
    P,
    Q,
    CO,
    stride_split,
    stride_co,
    num_tiles,  # of pixels
    tiles_per_split,
    S: tl.constexpr,
    GROUP: tl.constexpr,  # taps of this program: 1 or 3; STRIDE 2: 1
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # add to what is there
    FLAT: tl.constexpr,  # a tile is BLOCK_M successive pixels of the batch: whole rows or images
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
):
    await_inputs()
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    ci_blocks = tl.cdiv(CI, BLOCK_CI)
    co0 = tl.program_id(0) // ci_blocks * BLOCK_CO
    ci0 = tl.program_id(0) % ci_blocks * BLOCK_CI
    tap = tl.program_id(1) * GROUP
    split = tl.program_id(2)
    r = tap // S - PAD_H
    s = tap % S - PAD_W
    tiles_h = tl.cdiv(P, TILE_H)
    tiles_w = tl.cdiv(Q, TILE_W)

    accs = zero_sums(GROUP, BLOCK_CO, BLOCK_CI)
    start = split * tiles_per_split
    for tile in range(start, tl.minimum(start + tiles_per_split, num_tiles)):
        n0, h0, w0 = box_origin(tile, tiles_h, tiles_w, TILE_N, TILE_H, TILE_W)
        if FLAT:
            dy = dy_desc.load([tile * BLOCK_M, co0])
        else:
            dy = dy_desc.load([n0, h0, w0, co0]).reshape(BLOCK_M, BLOCK_CO)
        dy = tl.trans(dy)
        sums = ()
        for i in tl.static_range(GROUP):
            if STRIDE == 2:
                at = [n0, h0 + (r >> 1), r & 1, w0 + (s >> 1), (s & 1) * CI + ci0]
            else:
                at = [n0, h0 + r, w0 + s + i, ci0]
            x = x_desc.load(at).reshape(BLOCK_M, BLOCK_CI)
            sums = sums + (tl.dot(dy, x, accs[i]),)
        accs = sums

    offs_co = co0 + tl.arange(0, BLOCK_CO)
    offs_ci = ci0 + tl.arange(0, BLOCK_CI)
    mask = (offs_co < CO)[:, None] & (offs_ci < CI)[None, :]
    row = split.to(tl.int64) * stride_split + offs_co * stride_co + tap * CI
    dw_ptrs = dw_ptr + row[:, None] + offs_ci[None, :]
    for i in tl.static_range(GROUP):
        value = accs[i]
        if ACCUMULATE:
            value += tl.load(dw_ptrs + i * CI, mask=mask, other=0.0).to(tl.float32)
        tl.store(dw_ptrs + i * CI, value.to(dw_ptr.dtype.element_ty), mask=mask)


def num_parts(spec: ConvSpec, gpu: Device, config: WgradConfig) -> int:
    """Parts that the sum over pixels is best split into."""
    box, _ = wgrad_box(config.block_m, *spec.pixels)
    slots = gpu.num_sms * 8 // config.num_warps
    programs = math.prod(programs_of(*spec.of_filters, spec.taps, config))
    return num_splits(programs, count_boxes(box, *spec.pixels), slots, fewest_of(spec))


def launch_wgrad(config: WgradConfig, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, stride, padding, _, partial, stride_co, accumulate = operands
    co, ci, r, s = weight.shape
    if stride == 1 and is_pointwise(weight, padding):
        x, dy = as_one_row(x), as_one_row(dy)
    n, p, q, channels = dy.shape
    box, flat = wgrad_box(config.block_m, n, p, q)
    of_dy = dy.view(n * p * q, channels) if flat else dy
    num_tiles = count_boxes(box, n, p, q)
    # with stride 2 nothing begins before the previous kernel has ended
    option = overlapping(x.device) if stride == 1 else {}
    _conv2d_wgrad_tma_kernel[(*programs_of(co, ci, r * s, config), splits)](
        pixels_in_boxes(by_parity(x) if stride == 2 else x, box, config.block_ci),
        in_boxes(of_dy, [*([math.prod(box)] if flat else box), config.block_co]),
        partial, ci, p, q, co, co * r * s * ci, r * s * ci if stride_co is None else stride_co,
        num_tiles, triton.cdiv(num_tiles, splits),
        S=s, GROUP=config.taps, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1],
        ACCUMULATE=accumulate, FLAT=flat, **tile_sizes(box, config), **option,
    )  # fmt: skip


def tiles(spec: ConvSpec, gpu: Device) -> list[WgradConfig]:
    """Those whose taps divide the filter's rows, and whose pipeline fits into shared memory."""
    return [
        c
        for c in WGRAD_CONFIGS
        if spec.s % c.taps == 0
        and gpu.holds(c.num_stages * c.block_m * (c.block_co + c.taps * c.block_ci) * 2)
    ]


def cost(spec: ConvSpec, gpu: Device, c: WgradConfig) -> float:
    """The least work, counting padded channels, and fetching as `conv.plain.tma` does."""
    if c not in _MODELLED or c.taps != (3 if spec.s == 3 else 1):
        return math.inf
    co, ci = spec.of_filters
    padded = triton.cdiv(co, c.block_co) * c.block_co * triton.cdiv(ci, c.block_ci) * c.block_ci
    fetched = (c.block_co + c.taps * c.block_ci) / (c.block_co * c.block_ci * c.taps)
    products = math.prod(spec.pixels) * spec.taps * padded * (1 + 32 * fetched)
    return 3 + products / (1024 * gpu.num_sms) / CLOCKS


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    co, ci = spec.of_filters
    box, _ = wgrad_box(c.block_m, *spec.pixels)
    pixels, row = math.prod(box), (c.block_co + c.taps * c.block_ci) * 2
    resident = max(1, programs_at_a_time(c.num_stages * c.block_m * row, c.num_warps, gpu))
    steps = triton.cdiv(count_boxes(box, *spec.pixels), c.splits)
    programs = math.prod(programs_of(co, ci, spec.taps, c))
    products = c.block_co * c.block_ci * c.taps * pixels
    return wgrad_work(spec, c, programs, steps, products, pixels * row, resident)


WEIGHT_GRAD = split_kernel(
    WgradConfig,
    # of 32 bits wgmma does not take operands as they lie in memory, with the pixels outermost
    Only(tma=True, dtypes=BITS_16, stride=1),
    tiles,
    num_parts,
    launch_wgrad,
    cost,
    pads=True,
    in_place=True,
    work=_work,
    fitted_by=("area", "num_warps", "pointwise"),
)
