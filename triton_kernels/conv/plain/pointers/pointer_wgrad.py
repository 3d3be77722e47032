"""The weight gradient on GPUs that have no TMA unit: products of dy and x over pixels by mma.sync.

A program has some taps of the filter side by side, which share dy, and part of the pixels. A step
takes a box of them, whose places are computed once, relative to its first one, as in
`conv.plain.pointer_products`; mma.sync transposes both operands as it reads them. Or it has taps
one below the other, and a step takes several rows of pixels: each row of x is multiplied by up to
three of dy. The parts of the sum are added up by a second launch.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ....reductions.column_sum import num_splits
from ....registry.cost import AMPERE, Work, resident
from ....registry.kernel import CLOCKS, configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ....tf32 import as_operand
from ...configs import WgradOperands, fewest_of, programs_of, split_kernel, wgrad_work
from ..by_tma.tma_boxes import as_one_row, count_boxes, is_pointwise, pixel_box, row_box, tile_sizes
from .pointer_tiles import FEW, is_shared


@configures("pointer_wgrad")
class PointerWgradTile(NamedTuple):
    """What one program computes."""

    block_co: int
    block_ci: int
    block_m: int  # pixels a step
    taps: int  # successive ones: 1, a row of the filter, or a column
    num_warps: int
    num_stages: int  # of which one is no buffer
    rows: int = 1  # of pixels one below the other a step, of 3x3 filters: taps are a column of them


TILES = [
    PointerWgradTile(64, 64, 64, 1, 4, 3),
    PointerWgradTile(64, 64, 64, 3, 4, 3),
    PointerWgradTile(128, 128, 32, 1, 4, 4),
    PointerWgradTile(128, 128, 64, 1, 4, 3),
    PointerWgradTile(128, 128, 64, 1, 8, 3),
    PointerWgradTile(64, 64, 32, 3, 4, 3, 2),
    PointerWgradTile(64, 64, 32, 3, 4, 3, 4),
    PointerWgradTile(64, 64, 16, 3, 4, 3, 4),  # with half of the shared memory
    PointerWgradTile(64, 16, 64, 3, 4, 3),  # few channels of x,
    PointerWgradTile(64, 16, 32, 3, 4, 3, 4),
    PointerWgradTile(16, 64, 64, 3, 4, 3),  # or of y
    PointerWgradTile(16, 64, 32, 3, 4, 3, 4),
]
_OF_FMAS = [  # of float32 that is not in TF32, whose products are unrolled
    PointerWgradTile(64, 64, 32, 1, 4, 3),
    PointerWgradTile(64, 16, 32, 3, 4, 3),
    PointerWgradTile(16, 64, 32, 3, 4, 3),
]


@triton.jit(do_not_specialize=["N", "H", "W", "P", "Q", "num_tiles", "tiles_per_split"])
def _conv_pointer_wgrad_kernel(
    x_ptr,  # [N, H, W, KX]
    dy_ptr,  # [N, P, Q, KY]
    dw_ptr,  # [splits, CO, taps, CI]
    N,
    H,
    W,
    P,
    Q,
    CI,  # channels of x that count
    KX,  # and how many there are, in units
    CO,
    KY,
    num_tiles,  # of pixels
    tiles_per_split,
    R: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,  # taps of this program
    ROWS: tl.constexpr,  # if several: taps are one below the other, of a 3x3 filter
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    EXACT: tl.constexpr,  # whether blocks divide KX and KY
    PADDED: tl.constexpr,  # some channels do not count
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
):
    KX *= UNIT
    KY *= UNIT
    if not PADDED:  # and the compiler knows what divides them
        CI = KX
        CO = KY
    ci_blocks = tl.cdiv(CI, BLOCK_CI)
    offs_co = tl.program_id(0) // ci_blocks * BLOCK_CO + tl.arange(0, BLOCK_CO)
    offs_ci = tl.program_id(0) % ci_blocks * BLOCK_CI + tl.arange(0, BLOCK_CI)
    tap0 = tl.program_id(1) * (GROUP if ROWS == 1 else 1)
    TO_NEXT: tl.constexpr = 1 if ROWS == 1 else 3  # tap
    split = tl.program_id(2)
    tiles_h = tl.cdiv(P, TILE_H * ROWS)
    tiles_w = tl.cdiv(Q, TILE_W)

    TF32: tl.constexpr = PRECISION == "tf32"
    m = tl.arange(0, TILE_N * TILE_H * TILE_W)
    n = m // (TILE_H * TILE_W)
    h = m // TILE_W % TILE_H
    w = m % TILE_W
    # loaded as it is multiplied: Triton does not fetch ahead what it has to transpose
    places_dy = ((n * P + h) * Q + w)[None, :] * KY + offs_co[:, None]
    places_x = ((n * H + h * STRIDE) * W + w * STRIDE)[:, None] * KX + offs_ci[None, :]

    accs = ()
    for _ in tl.static_range(GROUP):
        accs = accs + (tl.zeros([BLOCK_CO, BLOCK_CI], dtype=tl.float32),)
    start = split * tiles_per_split
    for tile in range(start, tl.minimum(start + tiles_per_split, num_tiles)):
        w0 = tile % tiles_w * TILE_W
        h0 = tile // tiles_w % tiles_h * (TILE_H * ROWS)
        n0 = tile // (tiles_w * tiles_h) * TILE_N
        inside = (n0 + n < N) & (h0 + h < P) & (w0 + w < Q)
        dy_ptrs = dy_ptr + ((n0.to(tl.int64) * P + h0) * Q + w0) * KY + places_dy
        mask_dy = inside[None, :] if EXACT else inside[None, :] & (offs_co < KY)[:, None]
        at = ((n0.to(tl.int64) * H + h0 * STRIDE) * W + w0 * STRIDE) * KX
        sums = ()
        if ROWS == 1:
            dy = tl.load(dy_ptrs, mask=mask_dy, other=0.0)
            dy = as_operand(dy, dy.dtype, TF32)
            for i in tl.static_range(GROUP):
                r = (tap0 + i) // S - PAD_H
                s = (tap0 + i) % S - PAD_W
                row = (h0 + h) * STRIDE + r
                column = (w0 + w) * STRIDE + s
                there = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
                mask_x = there[:, None] if EXACT else there[:, None] & (offs_ci < KX)[None, :]
                x = tl.load(x_ptr + (at + (r * W + s) * KX) + places_x, mask=mask_x, other=0.0)
                x = as_operand(x, x.dtype, TF32)
                sums = sums + (tl.dot(dy, x, accs[i], input_precision=PRECISION),)
        else:
            dys = ()
            for j in tl.static_range(ROWS):
                dy = tl.load(dy_ptrs + j * Q * KY, mask=mask_dy, other=0.0)
                dys = dys + (as_operand(dy, dy.dtype, TF32),)
            column = w0 + w + tap0 - 1
            there = inside & (column >= 0) & (column < W)
            sums = accs
            for i in tl.static_range(ROWS + 2):
                row = there & (h0 + i >= 1) & (h0 + i <= H)
                mask_x = row[:, None] if EXACT else row[:, None] & (offs_ci < KX)[None, :]
                shift = ((i - 1) * W + tap0 - 1) * KX
                x = tl.load(x_ptr + (at + shift) + places_x, mask=mask_x, other=0.0)
                x = as_operand(x, x.dtype, TF32)
                before = sums
                sums = ()
                for r in tl.static_range(3):
                    if i - r >= 0 and i - r < ROWS:
                        acc = tl.dot(dys[i - r], x, before[r], input_precision=PRECISION)
                        sums = sums + (acc,)
                    else:
                        sums = sums + (before[r],)
        accs = sums

    mask = (offs_co < CO)[:, None] & (offs_ci < CI)[None, :]
    row = (split.to(tl.int64) * CO + offs_co) * (R * S) + tap0
    dw_ptrs = dw_ptr + row[:, None] * CI + offs_ci[None, :]
    for i in tl.static_range(GROUP):
        tl.store(dw_ptrs + i * TO_NEXT * CI, accs[i].to(dw_ptr.dtype.element_ty), mask=mask)


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a weight gradient, or why that is left to others, or None."""
    if spec.precision == "ieee" and not spec.padded:
        return "in float32 its products are FMAs, one after the other"
    if not gpu.tma or (spec.itemsize == 4 and (spec.padded or spec.stride > 1)):
        return None  # others cannot fetch that, or do it with fewer products at a time
    if spec.itemsize == 4 or spec.stride > 1 or min(spec.k, spec.c) < FEW:
        return "of what a TMA unit could fetch it takes 16 bits, stride 1, 16 channels and more"
    if spec.k % 8 == spec.c % 8 == 0:
        return "the TMA unit of this GPU fetches such tensors"
    return None


def launch_wgrad(config: PointerWgradTile, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, stride, padding, precision, partial, *_ = operands
    co, ci, r, s = weight.shape
    if stride == 1 and is_pointwise(weight, padding):
        x, dy = as_one_row(x), as_one_row(dy)
    _, h, w, kx = x.shape
    n, p, q, ky = dy.shape
    box, num_tiles = _box(config, n, p, q), _steps(config, n, p, q)
    unit = math.gcd(8, kx, ky)
    _conv_pointer_wgrad_kernel[(*programs_of(co, ci, r * s, config), splits)](
        x, dy, partial, n, h, w, p, q, ci, kx // unit, co, ky // unit, num_tiles,
        triton.cdiv(num_tiles, splits),
        R=r, S=s, GROUP=config.taps, ROWS=config.rows, STRIDE=stride, PAD_H=padding[0],
        PAD_W=padding[1], PADDED=(ci, co) != (kx, ky),
        EXACT=kx % config.block_ci == 0 and ky % config.block_co == 0, UNIT=unit,
        PRECISION=precision, **tile_sizes(box, config),
    )  # fmt: skip


def tiles(spec: ConvSpec, gpu: Device) -> list[PointerWgradTile]:
    """Those that can do it, less those that another serves better anyway."""
    co, ci = spec.of_filters
    same = spec.size == (spec.h, spec.w)
    found = [
        c
        for c in (_OF_FMAS if spec.precision == "ieee" else TILES)
        if c.taps in (1, spec.s)
        and (c.rows == 1 or ((3, 3) == (spec.r, spec.s) and same))
        and _box(c, spec.n, *spec.size) is not None
        and (c.block_ci > FEW or ci <= FEW)
        and (c.block_co > FEW or co <= FEW)
        and _shared(c, spec) <= gpu.shared_memory
    ]
    return [c for c in found if is_shared(c.num_warps, _shared(c, spec), gpu)] or found


def _shared(c: PointerWgradTile, spec: ConvSpec) -> int:
    """Bytes of a program."""
    return (c.num_stages - 1) * c.block_m * _fetched(c) * spec.itemsize


def _fetched(c: PointerWgradTile) -> int:
    """Numbers of a step, for a pixel of a row."""
    if c.rows == 1:
        return c.block_co + c.taps * c.block_ci
    return c.rows * c.block_co + (c.rows + 2) * c.block_ci


def _box(c: PointerWgradTile, n: int, p: int, q: int) -> tuple[int, int, int] | None:
    if c.rows > 1:
        return row_box(c.block_m, c.rows, p, q)
    return pixel_box(c.block_m, n, p, q)


def _steps(c: PointerWgradTile, n: int, p: int, q: int) -> int:
    images, rows, columns = _box(c, n, p, q)
    return count_boxes((images, rows * c.rows, columns), n, p, q)


def _splits(spec: ConvSpec, gpu: Device, c: PointerWgradTile) -> int:
    co, ci = spec.of_filters
    slots = gpu.num_sms * _resident(c, spec, gpu)
    programs = math.prod(programs_of(co, ci, spec.taps, c))
    return num_splits(programs, _steps(c, *spec.pixels), slots, fewest_of(spec))


def _resident(c: PointerWgradTile, spec: ConvSpec, gpu: Device) -> int:
    sums = c.block_co * c.block_ci * c.taps // (32 * c.num_warps)
    return resident(sums, _shared(c, spec), c.num_warps, gpu)


def _cost(spec: ConvSpec, gpu: Device, c: PointerWgradTile) -> float:
    """The least work of a pixel, counting padded channels: multiplying (1024 multiply-adds a clock)
    or fetching (24 bytes a clock)."""
    co, ci = spec.of_filters
    programs = math.prod(programs_of(co, ci, spec.taps, c))
    products = c.block_co * c.block_ci * c.taps / 1024
    fetched = _fetched(c) * spec.itemsize / c.rows / 24
    clocks = programs * (max(products, fetched) + min(products, fetched) / 4)
    return math.prod(spec.pixels) * clocks / gpu.num_sms / CLOCKS


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    steps = triton.cdiv(_steps(c, *spec.pixels), c.splits)
    programs = math.prod(programs_of(*spec.of_filters, spec.taps, c))
    products = c.block_co * c.block_ci * c.taps * c.rows * c.block_m
    fetched = _fetched(c) * c.block_m * spec.itemsize
    return wgrad_work(spec, c, programs, steps, products, fetched, _resident(c, spec, gpu))


WEIGHT_GRAD = split_kernel(
    PointerWgradTile,
    refuse,
    tiles,
    _splits,
    launch_wgrad,
    _cost,
    around=False,
    pads=True,
    work=_work,
    fitted_by=("num_warps", "taps", "rows"),
    borrows=AMPERE,
)
