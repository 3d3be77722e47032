"""Resampling by two over NHWC. F is the fine image, K the coarse one of P rows and Q columns:

    avg_pool2d          K[p, q] = (F[2p, 2q] + F[2p, 2q+1] + F[2p+1, 2q] + F[2p+1, 2q+1]) / 4
    upsample_nearest2d  F[p, q] = K[p // 2, q // 2]

Up to the factor of 1/4 each is the other's adjoint, so two kernels make both forward and backward:

    gather   coarse = factor * sum of the four     pool forward (1/4), upsample backward (1)
    spread   fine = factor * the coarse pixel      upsample forward (1), pool backward (1/4)

An odd last row or column of F has no coarse pixel: pooling drops it, and its gradient is zero.
A program gathers BLOCK_P pixels of a coarse image, of BLOCK_C channels, or spreads BLOCK_Q of one
coarse row; every element is read and written once. Behind pooling there is mostly a norm, for which
a program also leaves the sums over its pixels (`norm.sums`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norm.sums import SUM_PROGRAMS, chunks_of_image
from ..reductions.row_sums import RowSums, row_place
from ..reductions.tile_sum import sum_over_pixels
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_nhwc
from ..runtime.library import derivative, once_differentiable, op
from ..tf32 import as_operand

_TILE = 2048  # coarse elements of a program: 16 a thread, loads of 16 bytes
# Of one that leaves sums, whose pixels are many so that an image has few tiles: at most 32 a thread
_SUMMED_TILE, _SUMMED_CHANNELS = 8192, 32


@triton.jit
def _gather_kernel(
    fine_ptr,  # [N, H, W, C]
    coarse_ptr,  # [N, P, Q, C]
    partial_ptr,  # float32 [N, K, 2, C], of tiles of equal size, or None
    factor,
    H,
    W,
    C,
    P,
    Q,
    pixels,  # of a tile, of which an image has K
    K,
    CB,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    first = pid // CB % K * pixels
    n = (pid // CB // K).to(tl.int64)
    mask_c = offs_c < C
    mask = ((offs_p < pixels) & (offs_p < P * Q - first))[:, None] & mask_c[None, :]

    upper_ptr = fine_ptr + (n * H + first // Q * 2) * W * C
    lower_ptr = upper_ptr + W * C
    column = first % Q + offs_p  # of the tile's first row, or beyond it
    offs = (column // Q * W + column % Q)[:, None] * (2 * C) + offs_c[None, :]
    acc = tl.load(upper_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(upper_ptr + offs + C, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(lower_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(lower_ptr + offs + C, mask=mask, other=0.0).to(tl.float32)
    coarse = as_operand(acc * factor, coarse_ptr.dtype.element_ty, TF32)
    offs = offs_p[:, None] * C + offs_c[None, :]
    tl.store(coarse_ptr + (n * P * Q + first) * C + offs, coarse, mask=mask)
    if partial_ptr is not None:
        value = coarse.to(tl.float32)  # as its readers see it; zero outside of the mask
        total = sum_over_pixels(value, fine_ptr.dtype.element_ty)
        # about the mean of the tile, since a difference of large sums would cancel
        delta = tl.where(mask, value - (total / pixels)[None, :], 0.0)
        m2 = sum_over_pixels(delta * delta, fine_ptr.dtype.element_ty)
        partial_ptr += (pid // CB).to(tl.int64) * 2 * C
        tl.store(partial_ptr + offs_c, total, mask=mask_c)
        tl.store(partial_ptr + C + offs_c, m2, mask=mask_c)


@triton.jit
def _store_sum(fine_ptr, add_ptr, offs, value, mask, TF32: tl.constexpr):
    """fine = value + add; returns that, with zeros outside of the mask."""
    if add_ptr is not None:
        value += tl.load(add_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(fine_ptr + offs, as_operand(value, fine_ptr.dtype.element_ty, TF32), mask=mask)
    return tl.where(mask, value, 0.0)


@triton.jit
def _spread_kernel(
    coarse_ptr,  # [N, P, Q, C]
    fine_ptr,  # [N, H, W, C]; H is 2P or 2P + 1, W is 2Q or 2Q + 1
    add_ptr,  # as fine, or None
    sums_ptr,  # float32 [N rows QB, C] or None: sums over the fine pixels of a program
    factor,
    H,
    W,
    C,
    P,
    Q,
    QB,
    CB,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_q = pid // CB % QB * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = (pid // CB // QB).to(tl.int64)
    rows = (H + 1) // 2  # with the one beyond P that covers an odd last row
    n, p = row // rows, row % rows
    mask_c = (offs_c < C)[None, :]

    coarse = tl.load(
        coarse_ptr + (n * P + p) * Q * C + offs_q[:, None] * C + offs_c[None, :],
        mask=(offs_q < Q)[:, None] & mask_c & (p < P),
        other=0.0,
    )
    value = coarse.to(tl.float32) * factor
    upper = (n * H + p * 2) * W * C
    lower = upper + W * C
    offs = offs_q[:, None] * (2 * C) + offs_c[None, :]
    left = (2 * offs_q < W)[:, None] & mask_c
    right = (2 * offs_q + 1 < W)[:, None] & mask_c
    below = p * 2 + 1 < H
    total = _store_sum(fine_ptr, add_ptr, upper + offs, value, left, TF32)
    total += _store_sum(fine_ptr, add_ptr, upper + offs + C, value, right, TF32)
    total += _store_sum(fine_ptr, add_ptr, lower + offs, value, left & below, TF32)
    total += _store_sum(fine_ptr, add_ptr, lower + offs + C, value, right & below, TF32)
    if sums_ptr is not None:
        sums_ptr += (pid // CB).to(tl.int64) * C
        tl.store(sums_ptr + offs_c, tl.sum(total, 0), mask=offs_c < C)


class _Grid(NamedTuple):
    """How many blocks make a coarse row, and their size."""

    qb: int
    cb: int
    block_q: int
    block_c: int


def _cut(columns: int, c: int, tile: int = _TILE) -> _Grid:
    block_c = min(triton.next_power_of_2(max(c, 1)), 256)
    block_q = min(triton.next_power_of_2(max(columns, 1)), tile // block_c)
    return _Grid(triton.cdiv(columns, block_q), triton.cdiv(c, block_c), block_q, block_c)


def gather(
    fine: Tensor,  # [N, H, W, C]
    factor: float,
    tf32: bool = False,
) -> Tensor:  # [N, H // 2, W // 2, C]
    """factor * the sum over each 2x2 block; float32 of `tf32` is rounded to TF32."""
    return gather_sums(fine, factor, False, tf32)[0]


def gather_sums(
    fine: Tensor,  # [N, H, W, C]
    factor: float,
    sums: bool = True,
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:  # [N, P, Q, C] with P = H // 2, Q = W // 2; and its partials
    """`gather`, and for each of K tiles of P Q / K pixels the sum and that of the squares about the
    mean, float32 [N, K, 2, C], of what is written; or None."""
    n, h, w, c = fine.shape
    p, q = h // 2, w // 2
    coarse = fine.new_empty((n, p, q, c))
    k, cb, block_p, block_c = _cut(p * q, c)
    pixels, partials = block_p, None
    if sums:
        k = chunks_of_image(n, p * q, c, SUM_PROGRAMS)
        pixels = p * q // k
        block_p = triton.next_power_of_2(pixels)
        block_c = min(block_c, _SUMMED_CHANNELS, max(_SUMMED_TILE // block_p, 1))
        cb = triton.cdiv(c, block_c)
        partials = fine.new_empty((n, k, 2, c), dtype=torch.float32)
    _gather_kernel[(n * k * cb,)](
        fine, coarse, partials, factor, h, w, c, p, q, pixels, k, cb, block_p, block_c, tf32,
        num_warps=8 if block_p * block_c > _TILE else 4, **overlapping(fine.device, n * h * w),
    )  # fmt: skip
    return coarse, partials


def spread(
    coarse: Tensor,  # [N, P, Q, C]
    shape: tuple[int, ...],  # (N, H, W, C)
    factor: float,
    tf32: bool = False,
) -> Tensor:  # of that shape
    """factor * the coarse pixel that each pixel lies in; float32 of `tf32` is rounded to TF32."""
    return spread_add(coarse, shape, factor, tf32=tf32)[0]


def spread_add(
    coarse: Tensor,  # [N, P, Q, C]
    shape: tuple[int, ...],  # (N, H, W, C)
    factor: float,
    add: Tensor | None = None,  # [N, H, W, C]
    sums: RowSums | bool = False,  # True: rows in a tensor of their own; False: none
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """fine = factor * the coarse pixel + add, rounded once; and float32 [rows, C] in a place of
    `sums`, whose sum over rows is that of `fine` over samples and pixels, or None."""
    n, h, w, c = shape
    fine = coarse.new_empty(shape)
    rows = (h + 1) // 2
    grid = _cut((w + 1) // 2, c, _TILE if add is None else _TILE // 2)
    place = row_place(sums, coarse)
    partial = None if place is None else place(n * rows * grid.qb, c)
    _spread_kernel[(n * rows * grid.qb * grid.cb,)](
        coarse, fine, add, partial, factor, h, w, c, h // 2, w // 2, *grid, tf32,
        **overlapping(coarse.device, n * h * w),
    )  # fmt: skip
    return fine, partial


# --- the ops -------------------------------------------------------------------------------------


def _fake_coarse(fine):
    n, h, w, c = fine.shape
    return fine.new_empty((n, h // 2, w // 2, c))


def _fake_fine(coarse):
    n, p, q, c = coarse.shape
    return coarse.new_empty((n, 2 * p, 2 * q, c))


@op("avg_pool2d", _fake_coarse, differentiable=True)
def _avg_pool2d(x: Tensor) -> Tensor:
    return gather(x, 0.25)


@op("avg_pool2d_backward", lambda dy, h, w: dy.new_empty((dy.shape[0], h, w, dy.shape[3])))
def _avg_pool2d_backward(dy: Tensor, h: int, w: int) -> Tensor:
    return spread(dy, (dy.shape[0], h, w, dy.shape[3]), 0.25)


@op("upsample_nearest2d", _fake_fine, differentiable=True)
def _upsample_nearest2d(x: Tensor) -> Tensor:
    n, h, w, c = x.shape
    return spread(x, (n, 2 * h, 2 * w, c), 1.0)


@op("upsample_nearest2d_backward", _fake_coarse)
def _upsample_nearest2d_backward(dy: Tensor) -> Tensor:
    return gather(dy, 1.0)


@derivative(of=_avg_pool2d)
class _AvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[1:3]
        return _avg_pool2d.below_autograd(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _avg_pool2d_backward(dy.contiguous(), *ctx.size)  # dy may be an expanded gradient


@derivative(of=_upsample_nearest2d)
class _UpsampleNearest2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _upsample_nearest2d.below_autograd(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _upsample_nearest2d_backward(dy.contiguous())  # dy may be an expanded gradient


def avg_pool2d(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, H // 2, W // 2, C]
    """Mean over 2x2 windows; an odd last row or column is dropped.

    Raises ValueError for an image of less than two rows or columns, and for a wrong layout.
    """
    check_nhwc("x", x)
    if min(x.shape[1:3]) < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected at least 2 rows and 2 columns")
    return _avg_pool2d(x)


def upsample_nearest2d(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, 2H, 2W, C]
    """Each pixel becomes a 2x2 block. Raises ValueError for a wrong layout."""
    check_nhwc("x", x)
    return _upsample_nearest2d(x)
