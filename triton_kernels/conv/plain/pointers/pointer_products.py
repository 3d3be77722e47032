"""The main loop of `conv.plain.pointer`: implicit GEMM through pointers.

An accumulator is [pixels, channels], so mma.sync takes x in the order of memory. The offsets of a
tile's pixels are computed once, relative to the first pixel. Each pixel also has a word with one
bit per tap, which says whether the tap is inside the image. A step of the loop adds one number to
all offsets, and tests one bit.

A program may compute ROWS output rows for each row of its tile. The rows of a tile are then ROWS
apart; accumulator i has the output rows i below them. The program multiplies each row of x that it
loads by up to three rows of the filter, so half as much comes from the L2 cache.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....tf32 import as_operand
from ..output_tiles import tile_origin
from ..products import zero_sums


class Filters(NamedTuple):
    """The filters of a convolution of stride 1, or of its input gradient; made as `OutputTiles`
    are."""

    ptr: tl.tensor  # [CO, R * S, CI]
    stride: tl.tensor  # from one CO to the next; None: R * S * C
    K: tl.tensor  # channels of x that have filters
    C: tl.tensor  # channels of the result that have filters
    R: tl.constexpr
    S: tl.constexpr
    TRANSPOSED: tl.constexpr  # an input gradient: x's channels are CO, and taps count backwards


@triton.jit
def tile_pixels(
    n0,
    h0,
    w0,
    N,
    P,
    Q,
    FIRST: tl.constexpr,  # the first tap is this many rows above a pixel
    R: tl.constexpr,
    S: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    APART: tl.constexpr = 1,  # distance between rows of the tile
):
    """For each pixel of a tile: its distance from the first pixel, whether it is inside of an
    image, and a word that says which of R x S taps are inside. All [BLOCK_M]. Up to 32 taps have a
    bit each in an int32. With more taps, an int64 has a bit per column of taps, and from bit 32 on,
    a bit per row."""
    m = tl.arange(0, TILE_N * TILE_H * TILE_W)
    n = m // (TILE_H * TILE_W)
    h = m // TILE_W % TILE_H * APART
    w = m % TILE_W
    there = n0 + n < N
    bits = tl.zeros_like(m)
    if R * S <= 32:
        for tap in tl.static_range(R * S):
            row = h0 + h + tap // S - FIRST
            column = w0 + w + tap % S - S // 2
            inside = there & (row >= 0) & (row < P) & (column >= 0) & (column < Q)
            bits |= inside.to(tl.int32) << tap
    else:
        bits = bits.to(tl.int64)
        for r in tl.static_range(R):
            row = h0 + h + r - FIRST
            bits |= (there & (row >= 0) & (row < P)).to(tl.int64) << (32 + r)
        for s in tl.static_range(S):
            column = w0 + w + s - S // 2
            bits |= ((column >= 0) & (column < Q)).to(tl.int64) << s
    return (n * P + h) * Q + w, there & (h0 + h < P) & (w0 + w < Q), bits


@triton.jit
def _load_x(x_ptrs, bits, tap, mask_k, S: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr):
    if bits.dtype == tl.int64:
        inside = ((bits >> (32 + tap // S)) & (bits >> (tap % S)) & 1) != 0
    else:
        inside = ((bits >> tap) & 1) != 0
    inside = inside[:, None]
    x = tl.load(x_ptrs, mask=inside if EXACT else inside & mask_k[None, :], other=0.0)
    return as_operand(x, x.dtype, ROUND)


@triton.jit
def _load_w(w_ptrs, mask_w, mask_k, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr):
    """The filters of one tap, [BLOCK_K, BLOCK_C]."""
    if EXACT:
        w = tl.load(w_ptrs)
    else:
        also = mask_k[:, None] if TRANSPOSED else mask_k[None, :]
        w = tl.load(w_ptrs, mask=mask_w & also, other=0.0)
    return w if TRANSPOSED else tl.trans(w)


@triton.jit
def multiply(
    accs,  # ROWS of float32 [BLOCK_M, BLOCK_C]
    x_ptr,  # [.., KX] at the tile's first pixel
    KX,
    pixels,  # of `tile_pixels`, with R + ROWS - 1 rows of taps
    bits,
    c0,
    CY,  # channels of the result
    Q,
    filters,  # Filters
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,  # blocks divide the channels, and every channel has filters
    ROUND: tl.constexpr,  # x is not rounded to TF32 yet
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    first=0,  # first step, with one row
    last=None,  # the step after the last; None: all steps
):
    """Add the convolution, or its input gradient, to the accumulators."""
    w_ptr, stride_w, K, C = filters.ptr, filters.stride, filters.K, filters.C
    S: tl.constexpr = filters.S
    TAPS: tl.constexpr = filters.R * S
    if stride_w is None:
        stride_w = TAPS * C
    TRANSPOSED: tl.constexpr = filters.TRANSPOSED
    offs_k = tl.arange(0, BLOCK_K)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_x = (pixels * KX)[:, None] + offs_k[None, :]
    if TRANSPOSED:
        offs_w = (offs_k * stride_w)[:, None] + offs_c[None, :]
        mask_w = (offs_c < C)[None, :]
        to_tap = CY
        to_k = stride_w
    else:
        offs_w = (offs_c * stride_w)[:, None] + offs_k[None, :]
        mask_w = (offs_c < C)[:, None]
        to_tap = KX
        to_k = 1
    if ROWS == 1:
        acc = accs[0]
        for step in range(first, TAPS * tl.cdiv(KX, BLOCK_K) if last is None else last):
            tap = step % TAPS
            k0 = step // TAPS * BLOCK_K
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            place = ((tap // S - filters.R // 2) * Q + tap % S - S // 2) * KX + k0
            x = _load_x(x_ptr + place + offs_x, bits, tap, mask_k, S, EXACT, ROUND)
            w_tap = TAPS - 1 - tap if TRANSPOSED else tap
            w_ptrs = w_ptr + (w_tap * to_tap + k0 * to_k) + offs_w
            w = _load_w(w_ptrs, mask_w, mask_f, TRANSPOSED, EXACT)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        accs = (acc,)
    elif TAPS == 1:  # the words of `bits` are of 3 x 3 taps
        for k0 in range(0, KX, BLOCK_K):
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            w = _load_w(w_ptr + k0 * to_k + offs_w, mask_w, mask_f, TRANSPOSED, EXACT)
            x_ptrs = x_ptr + k0 + offs_x
            sums = ()
            for i in tl.static_range(ROWS):
                x = _load_x(x_ptrs + i * Q * KX, bits, 3 * i + 4, mask_k, S, EXACT, ROUND)
                sums = sums + (tl.dot(x, w, accs[i], input_precision=PRECISION),)
            accs = sums
    else:
        tl.static_assert(filters.R == 3 and S == 3)
        for step in range(3 * tl.cdiv(KX, BLOCK_K)):
            s = step % 3
            k0 = step // 3 * BLOCK_K
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            w_ptrs = w_ptr + ((8 - s if TRANSPOSED else s) * to_tap + k0 * to_k) + offs_w
            x_ptrs = x_ptr + (s - 1 - Q) * KX + k0 + offs_x
            xs = ()
            for i in tl.static_range(ROWS + 2):
                x = _load_x(x_ptrs + i * Q * KX, bits, s + 3 * i, mask_k, S, EXACT, ROUND)
                xs = xs + (x,)
            for r in tl.static_range(3):  # one row of the filter has fewer fragments than one of x
                down = (-3 * r if TRANSPOSED else 3 * r) * to_tap
                w = _load_w(w_ptrs + down, mask_w, mask_f, TRANSPOSED, EXACT)
                sums = ()
                for row in tl.static_range(ROWS):
                    sums = sums + (tl.dot(xs[row + r], w, accs[row], input_precision=PRECISION),)
                accs = sums
    return accs


@triton.jit
def convolve(
    x_ptr,  # [N, P, Q, KX]
    KX,
    filters,  # Filters
    tiles,  # OutputTiles
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    first=0,  # as in `multiply`
    last=None,
):
    """Compute this program's tile. Returns the accumulators; the tile's first image, row, column
    and channel; the offset of its first pixel, in pixels; and what `tile_pixels` returns."""
    R: tl.constexpr = filters.R
    n0, h0, w0, c0 = tile_origin(
        tiles.P, tiles.Q, tiles.C, tiles.TILE_N, ROWS * tiles.TILE_H, tiles.TILE_W, tiles.BLOCK_C
    )
    pixels, inside, bits = tile_pixels(
        n0, h0, w0, tiles.N, tiles.P, tiles.Q, R // 2, R + ROWS - 1, filters.S,
        tiles.TILE_N, tiles.TILE_H, tiles.TILE_W, ROWS,
    )  # fmt: skip
    at = (n0.to(tl.int64) * tiles.P + h0) * tiles.Q + w0
    BLOCK_M: tl.constexpr = tiles.TILE_N * tiles.TILE_H * tiles.TILE_W
    accs = multiply(
        zero_sums(ROWS, BLOCK_M, tiles.BLOCK_C), x_ptr + at * KX, KX, pixels, bits, c0, tiles.C,
        tiles.Q, filters, ROWS, EXACT, False, PRECISION, tiles.BLOCK_C, BLOCK_K, first, last,
    )  # fmt: skip
    return accs, (n0, h0, w0, c0), at, pixels, inside, bits
