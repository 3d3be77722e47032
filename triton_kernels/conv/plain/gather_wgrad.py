"""The weight gradient of `conv2d` whose operands are gathered through pointers, as in
`conv.plain.gather`: of any stride, padding and number of channels, on any GPU."""

import math
from collections.abc import Sequence

import triton
import triton.language as tl

from ...reductions.column_sum import num_splits
from ...registry.cost import Work, of_products, programs_at_a_time
from ...registry.kernel import configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ...tf32 import split_to_tf32
from ..configs import WgradOperands, WgradTile, fewest_of, split_kernel, wgrad_work


@configures("gather_wgrad")
class WgradConfig(WgradTile):
    """What one program computes."""

    __slots__ = ()


WGRAD_CONFIGS = [
    WgradConfig(64, 64, 32, 4, 3),
    WgradConfig(64, 32, 64, 4, 3),  # stem and head: nine taps of three channels
    WgradConfig(16, 64, 64, 4, 3),  # few output channels, strided
    WgradConfig(64, 32, 128, 4, 3),  # these only where they were measured to be faster
    WgradConfig(64, 32, 64, 4, 4),
    WgradConfig(64, 64, 64, 4, 3),
]


@triton.jit(do_not_specialize=["H", "W", "P", "Q", "num_pixels", "pixels_per_split"])
def _conv2d_wgrad_gather_kernel(
    x_ptr,  # [N, H, W, CI]
    dy_ptr,  # [N, P, Q, CO]
    dw_ptr,  # [splits, CO, R * S * CI]
    H,
    W,
    CI,
    P,
    Q,
    CO,
    num_pixels,  # N * P * Q
    pixels_per_split,
    S: tl.constexpr,
    TAPS: tl.constexpr,  # R * S
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLAT: tl.constexpr,  # few input channels: a column is a (tap, channel) pair, not a channel
    SWAPPED: tl.constexpr,  # x is dy and dy is x, and the taps count backwards; see `_gathers_dy`
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,  # float32: three products in TF32, whatever PRECISION says
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    split = tl.program_id(2)
    offs_co = tl.program_id(0) * BLOCK_CO + tl.arange(0, BLOCK_CO)
    mask_co = offs_co < CO
    if FLAT:
        column = tl.program_id(1) * BLOCK_CI + tl.arange(0, BLOCK_CI)
        mask_ci = column < TAPS * CI
        tap = (column // CI)[None, :]
        c = column % CI
    else:
        ci_blocks = tl.cdiv(CI, BLOCK_CI)
        tap = tl.program_id(1) // ci_blocks
        c = tl.program_id(1) % ci_blocks * BLOCK_CI + tl.arange(0, BLOCK_CI)
        mask_ci = c < CI
        column = tap * CI + c
    r = tap // S  # scalar, or [1, BLOCK_CI]
    s = tap % S

    acc = tl.zeros([BLOCK_CO, BLOCK_CI], dtype=tl.float32)
    start = split * pixels_per_split
    end = tl.minimum(start + pixels_per_split, num_pixels)
    for m in range(start, end, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < end
        n = offs_m // (P * Q)
        row = (offs_m // Q % P * STRIDE - PAD_H)[:, None] + r
        col = (offs_m % Q * STRIDE - PAD_W)[:, None] + s
        inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & mask_m[:, None]
        pixel = (n.to(tl.int64) * H * W)[:, None] + row * W + col
        x = tl.load(
            x_ptr + (pixel * CI + c[None, :]), mask=inside & mask_ci[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_CI]
        dy = tl.load(
            dy_ptr + offs_m.to(tl.int64)[:, None] * CO + offs_co[None, :],
            mask=mask_m[:, None] & mask_co[None, :],
            other=0.0,
        )  # [BLOCK_M, BLOCK_CO]
        if SPLIT:  # `dot_of_split`, of numbers that are split as they were loaded
            x, x_small = split_to_tf32(x)
            dy, dy_small = split_to_tf32(dy)
            part = tl.dot(tl.trans(dy_small), x, input_precision="tf32")
            part = tl.dot(tl.trans(dy), x_small, part, input_precision="tf32")
            acc += tl.dot(tl.trans(dy), x, part, input_precision="tf32")
        else:
            acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)

    dw_ptr += split.to(tl.int64) * (CO * TAPS * CI)
    if SWAPPED:  # [CI, TAPS, CO] in the names of this kernel
        offs_w = (c * TAPS + (TAPS - 1 - tap)) * CO + offs_co[:, None]
    else:
        offs_w = offs_co[:, None] * (TAPS * CI) + column[None, :]
    tl.store(
        dw_ptr + offs_w,
        acc.to(dw_ptr.dtype.element_ty),
        mask=mask_co[:, None] & mask_ci[None, :],
    )


def launch_wgrad(config: WgradConfig, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, stride, padding, precision, partial, *_ = operands
    _, _, r, s = weight.shape
    if swapped := _gathers_dy(weight.shape, padding, x.shape[1:3], dy.shape[1:3]):
        x, dy, stride = dy, x, 1
        padding = (r - 1 - padding[0], s - 1 - padding[1])
    _, h, w, ci = x.shape
    n, p, q, co = dy.shape
    _conv2d_wgrad_gather_kernel[(*_blocks(co, ci, r * s, config), splits)](
        x, dy, partial, h, w, ci, p, q, co, n * p * q,
        triton.cdiv(triton.cdiv(n * p * q, config.block_m), splits) * config.block_m,
        S=s, TAPS=r * s, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], FLAT=ci < 16,
        SWAPPED=swapped, PRECISION=precision,
        SPLIT=precision == "ieee" and x.itemsize == 4 and ci < 16, BLOCK_CO=config.block_co,
        BLOCK_CI=config.block_ci, BLOCK_M=config.block_m, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _gathers_dy(
    filters: Sequence[int],  # CO, CI, R, S
    padding: tuple[int, int],
    of_x: Sequence[int],  # H, W
    of_dy: Sequence[int],  # P, Q
) -> bool:
    """Whether to gather dy instead of x: where the output channels are the few, as in the head.

        dweight[co, r, s, ci] = sum_{n, h, w} x[n, h, w, ci] dy[n, h + pad - r, w + pad - s, co]

    is a weight gradient again, whose taps count backwards. Then x, the large one, is read once and
    not once a tap. With a stride most of the pixels of x would see no dy at all.
    """
    co, ci, *taps = filters
    same = all(
        q == h + 2 * pad - k + 1 for q, h, pad, k in zip(of_dy, of_x, padding, taps, strict=True)
    )
    return same and co < 16 <= ci


def _operands(spec: ConvSpec) -> tuple[int, int, int]:
    """Channels of the operand that is read once and of the one that is gathered, and pixels."""
    co, ci = spec.of_filters
    if _gathers_dy((co, ci, spec.r, spec.s), spec.pads, (spec.h, spec.w), spec.size):
        return ci, co, spec.n * spec.h * spec.w
    return co, ci, math.prod(spec.pixels)


def _blocks(co: int, ci: int, taps: int, config: WgradConfig) -> tuple[int, int]:
    if ci < 16:
        columns = triton.cdiv(taps * ci, config.block_ci)
    else:
        columns = taps * triton.cdiv(ci, config.block_ci)
    return triton.cdiv(co, config.block_co), columns


def _splits(spec: ConvSpec, gpu: Device, c: WgradConfig) -> int:
    co, ci, pixels = _operands(spec)
    blocks = math.prod(_blocks(co, ci, spec.taps, c))
    fewest = fewest_of(spec, pixels)
    return num_splits(blocks, triton.cdiv(pixels, c.block_m), 2 * gpu.num_sms, fewest)


def _tiles(spec: ConvSpec, gpu: Device) -> list[WgradConfig]:
    """In float32 products of wide layers are unrolled into FMAs: a small tile, which is the
    first."""
    co, ci, _ = _operands(spec)
    unrolled = spec.precision == "ieee" and min(co, ci) >= 16
    return [_pick(spec)] if unrolled else WGRAD_CONFIGS


def _pick(spec: ConvSpec) -> WgradConfig:
    co, ci, _ = _operands(spec)
    safe, few_columns, few_channels = WGRAD_CONFIGS[:3]
    if co <= 16:
        return few_channels
    return few_columns if (spec.taps * ci if ci < 16 else ci) <= 32 else safe


def _cost(spec: ConvSpec, gpu: Device, c: WgradConfig) -> float:
    """Of the tile for so many channels: FMAs in float32, else products of what was fetched number
    by number."""
    if c != _pick(spec):
        return math.inf
    co, ci, pixels = _operands(spec)
    flops = 2 * pixels * co * ci * spec.taps
    return of_products("gather fp32" if spec.itemsize == 4 else "gather", flops, gpu)


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work | None:
    """What its programs do; None for few channels, which are other code."""
    co, ci, pixels = _operands(spec)
    if min(co, ci) < 16:
        return None
    steps = triton.cdiv(triton.cdiv(pixels, c.block_m), c.splits)
    fetched = c.block_m * (c.block_co + c.block_ci) * spec.itemsize  # of a step
    programs = math.prod(_blocks(co, ci, spec.taps, c))
    resident = max(1, programs_at_a_time(c.num_stages * fetched, c.num_warps, gpu))
    products = c.block_co * c.block_ci * c.block_m
    work = wgrad_work(spec, c, programs, steps, products, fetched, resident)
    return work._replace(memory=pixels * (spec.k + spec.c) * spec.itemsize)


WEIGHT_GRAD = split_kernel(
    WgradConfig,
    lambda spec, gpu: None,
    _tiles,
    _splits,
    launch_wgrad,
    _cost,
    work=_work,
    alone=lambda spec, c: _operands(spec)[2] <= 32 * c.block_m,
)
