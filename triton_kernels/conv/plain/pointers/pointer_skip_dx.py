"""`conv.skip_dx` on GPUs without a TMA unit: a norm's dx pass as the epilogue of the product with
the filters of a 1x1 skip, through pointers (`conv.plain.pointer_products`).

The coefficients are those of `norm_grad_table`; they are not made here.
"""

import math

import triton
import triton.language as tl

from ....norm.coefficients import load_coefficients
from ....registry.cost import AMPERE, Work
from ....registry.kernel import Kernel
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ....tf32 import as_operand
from ..by_tma import tma_skip_dx
from ..by_tma.tma_boxes import is_ragged, tile_sizes
from ..fused_tiles import programs
from ..output_tiles import OutputTiles, tile_origin
from ..products import zero_sums
from ..skip_dx_tiles import SkipOperands, box_of, fitting
from . import pointer_tiles
from .pointer_products import Filters, multiply, tile_pixels
from .pointer_tiles import FEW, OF_FMAS, PointerTile

TILES = [
    PointerTile(64, 64, 32, 4, 4),
    PointerTile(64, 64, 64, 4, 3),
    PointerTile(64, 128, 32, 4, 4),
    PointerTile(64, 128, 64, 4, 3),
    PointerTile(64, 128, 32, 8, 4),
    PointerTile(128, 64, 32, 4, 4),
    PointerTile(128, 128, 32, 8, 4),
    PointerTile(128, 64, 32, 8, 4),
    PointerTile(64, 64, 16, 4, 4),  # few channels of y
]


@triton.jit
def _finish(
    acc,  # float32 [BLOCK_M, BLOCK_C]: W^T dy
    x_ptr,  # [N, P, Q, CH], this half of x; UPSAMPLE: half as high and wide, and so is dx
    add_ptr,  # [N, P, Q, CH] or None
    dz_ptr,  # [N, P, Q, CZ] at this tile's first channel; SUMMED: as x
    dx_ptr,  # as x
    sums_ptr,  # float32 [N, tiles, CH] or None
    factor,  # or None
    coeff,  # p, q and r, float32 [TILE_N, BLOCK_C] each
    pixels,  # these and the next of `tile_pixels`
    inside,
    n0,
    h0,
    w0,
    offs_c,  # of this half
    CH,
    CZ,
    tiles,  # OutputTiles
    UPSAMPLE: tl.constexpr,
    SUMMED: tl.constexpr,  # dz has been added up over 2x2 pixels
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    p, q, r = coeff
    N, P, Q = tiles.N, tiles.P, tiles.Q
    TILE_N: tl.constexpr = tiles.TILE_N
    TILE_H: tl.constexpr = tiles.TILE_H
    TILE_W: tl.constexpr = tiles.TILE_W
    BLOCK_C: tl.constexpr = tiles.BLOCK_C
    PIXELS: tl.constexpr = TILE_H * TILE_W
    at = (n0.to(tl.int64) * P + h0) * Q + w0
    mask_c = (offs_c < CH)[None, :]
    mask = inside[:, None] & mask_c
    if add_ptr is not None:
        places = add_ptr + at * CH + ((pixels * CH)[:, None] + offs_c[None, :])
        acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    dx = acc.reshape(TILE_N, PIXELS, BLOCK_C)
    if not SUMMED:
        places = dz_ptr + at * CZ + ((pixels * CZ)[:, None] + offs_c[None, :])
        dz = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        dx += p[:, None, :] * dz.reshape(TILE_N, PIXELS, BLOCK_C)
    if UPSAMPLE:  # the gradient of a pixel is the sum of those of its 2x2 copies
        dx = dx.reshape(TILE_N, TILE_H // 2, 2, TILE_W // 2, 2, BLOCK_C)
        dx = tl.sum(tl.sum(dx, axis=4), axis=2).reshape(TILE_N, PIXELS // 4, BLOCK_C)
        q *= 4
        r *= 4
        pixels, inside, _ = tile_pixels(
            n0, h0 // 2, w0 // 2, N, P // 2, Q // 2, 0, 1, 1, TILE_N, TILE_H // 2, TILE_W // 2
        )
        at = (n0.to(tl.int64) * (P // 2) + h0 // 2) * (Q // 2) + w0 // 2
        mask = inside[:, None] & mask_c
        COUNT: tl.constexpr = PIXELS // 4
    else:
        COUNT: tl.constexpr = PIXELS
    places = (pixels * CH)[:, None] + offs_c[None, :]
    x = tl.load(x_ptr + at * CH + places, mask=mask, other=0.0).to(tl.float32)
    dx += q[:, None, :] * x.reshape(TILE_N, COUNT, BLOCK_C) + r[:, None, :]
    if SUMMED:
        dz = tl.load(dz_ptr + at * CH + places, mask=mask, other=0.0).to(tl.float32)
        dx += p[:, None, :] * dz.reshape(TILE_N, COUNT, BLOCK_C)
    if factor is not None:
        dx *= factor
    if sums_ptr is not None:
        tiles_w = tl.cdiv(Q, TILE_W)
        count = tl.cdiv(P, TILE_H) * tiles_w
        offs_n = n0 + tl.arange(0, TILE_N)
        row = offs_n.to(tl.int64) * count + h0 // TILE_H * tiles_w + w0 // TILE_W
        total = dx
        if tiles.RAGGED:
            total = tl.where(inside.reshape(TILE_N, COUNT)[:, :, None], dx, 0.0)
        ptrs = sums_ptr + row[:, None] * CH + offs_c[None, :]
        tl.store(ptrs, tl.sum(total, axis=1), mask=(offs_n < N)[:, None] & mask_c)
    dx = as_operand(dx.reshape(TILE_N * COUNT, BLOCK_C), dx_ptr.dtype.element_ty, TF32)
    tl.store(dx_ptr + at * CH + places, dx, mask=mask)


@triton.jit(do_not_specialize=["N", "P", "Q"])
def _skip_dx_pointer_kernel(
    dy_ptr,  # [N, P, Q, CO]
    w_ptr,  # [CO, C] with rows any distance apart
    dz_ptr,  # [N, P, Q, CZ] at this launch's first channel, or with the next as x1
    dz2_ptr,  # as x2 or None
    x1_ptr,  # [N, P, Q, C1]; UPSAMPLE: half as high and wide, and so is dx1
    x2_ptr,  # [N, P, Q, C - C1] or None
    add1_ptr,  # [N, P, Q, C1] or None
    coeff_ptr,  # float32 [N, 3, CK] at this launch's first channel
    dx1_ptr,
    dx2_ptr,
    sums_ptr,  # float32 [N, tiles, C1] or None
    factor,  # multiplies dx1; or None
    N,
    P,
    Q,
    CO,
    C,
    C1,
    CZ,
    CK,
    stride_w,
    UPSAMPLE: tl.constexpr,
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,  # tiles reach over the edges of images
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    CO *= UNIT
    C *= UNIT
    C1 *= UNIT
    CZ *= UNIT
    stride_w *= UNIT
    n0, h0, w0, c0 = tile_origin(P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C)
    pixels, inside, _ = tile_pixels(n0, h0, w0, N, P, Q, 0, 1, 1, TILE_N, TILE_H, TILE_W)
    at = (n0.to(tl.int64) * P + h0) * Q + w0
    accs = multiply(
        zero_sums(1, TILE_N * TILE_H * TILE_W, BLOCK_C), dy_ptr + at * CO, CO, pixels,
        inside.to(tl.int32), c0, C, Q, Filters(w_ptr, stride_w, CO, C, 1, 1, True),
        1, EXACT, False, PRECISION, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    acc = accs[0]
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    mask = (offs_n < N)[:, None] & (offs_c < C)[None, :]
    ptrs = coeff_ptr + offs_n.to(tl.int64)[:, None] * 3 * CK + offs_c[None, :]
    coeff = load_coefficients(ptrs, CK, mask)
    if c0 < C1:
        _finish(
            acc, x1_ptr, add1_ptr, dz_ptr, dx1_ptr, sums_ptr, factor, coeff, pixels, inside,
            n0, h0, w0, offs_c, C1, CZ,
            OutputTiles(N, P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
            UPSAMPLE, dz2_ptr is not None, PRECISION == "tf32",
        )  # fmt: skip
    elif x2_ptr is not None:
        HALVES: tl.constexpr = dz2_ptr is not None
        _finish(
            acc, x2_ptr, None, dz2_ptr if HALVES else dz_ptr + C1, dx2_ptr, None, None, coeff,
            pixels, inside, n0, h0, w0, offs_c - C1, C - C1, C - C1 if HALVES else CZ,
            OutputTiles(N, P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
            False, False, PRECISION == "tf32",
        )  # fmt: skip


def _launch(config: PointerTile, operands: SkipOperands) -> None:
    """dx1, dx2 and rows; no tile has channels of both halves."""
    *tensors, factor, upsample1, precision, box, dx1, dx2, rows = operands
    n, h, w, co = operands.dy.shape
    (_, c), c1, cz = operands.weight.shape, operands.x1.shape[3], operands.dz.stride(2)
    stride_w, ck = operands.weight.stride(0), operands.coeff.stride(1)
    unit = math.gcd(8, co, c, c1, cz, stride_w)
    _skip_dx_pointer_kernel[(programs(config, box, n, h, w, c),)](
        *tensors, dx1, dx2, rows, factor, n, h, w, co // unit, c // unit, c1 // unit, cz // unit,
        ck, stride_w // unit,
        UPSAMPLE=upsample1, EXACT=c % config.block_c == 0 and co % config.block_k == 0,
        RAGGED=is_ragged(box, h, w), UNIT=unit, PRECISION=precision, **tile_sizes(box, config),
    )  # fmt: skip


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    fetched = tma_skip_dx.refuse(spec, gpu) is None
    return "the TMA unit of this GPU fetches such tensors" if fetched else None


def _configs(spec: ConvSpec, gpu: Device) -> list[PointerTile]:
    found = [c for c in TILES if (c.block_k <= FEW) == (spec.k <= FEW)]
    exact = [c for c in found if c in OF_FMAS]
    return fitting(exact if spec.precision == "ieee" else found, spec)


def _work(spec: ConvSpec, gpu: Device, c: PointerTile) -> Work:
    box = box_of(c, spec.n, spec.h, spec.w, bool(spec.upsampled))
    return pointer_tiles.work(spec, gpu, c, box)


KERNEL = Kernel(
    "pointer",
    PointerTile,
    _refuse,
    _configs,
    launch=_launch,
    work=_work,
    fitted_by=pointer_tiles.FITTED_BY,
    borrows=AMPERE,
    adds=("residual",),
)
