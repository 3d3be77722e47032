"""The products of `conv.plain.pointer`: implicit GEMM through pointers.

An accumulator is [pixels, channels], the order in which mma.sync takes x as it lies in memory. The
places of a tile's pixels are computed once, relative to its first one, with a word for each that
has a bit for every tap: whether that tap is inside the image. A step of the loop adds one number to
all of them, and looks at one bit.

A program of several rows has an accumulator for each: of the tile's rows, which are so many apart,
of those below them, and so on, until the next of the tile's comes. The rows of x that it loads are
each multiplied by up to three rows of the filter, so half as much comes from the L2 cache.
"""

import triton
import triton.language as tl

from ...tf32 import as_operand
from .products import tile_origin, zero_sums


@triton.jit
def tile_pixels(
    n0,
    h0,
    w0,
    N,
    P,
    Q,
    FIRST: tl.constexpr,  # rows that the first tap is above a pixel
    R: tl.constexpr,
    S: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    APART: tl.constexpr = 1,  # rows from one of the tile to its next
):
    """Of a tile's pixels: their distance from the first one in pixels, whether each is inside of an
    image, and for each of R x S taps whether that is, as bits of an int32 if it has so many; else
    of an int64, for each row of taps, from bit 32 on, and for each column. All [BLOCK_M]."""
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
    """Filters as [BLOCK_K, BLOCK_C]."""
    if EXACT:
        w = tl.load(w_ptrs)
    else:
        also = mask_k[:, None] if TRANSPOSED else mask_k[None, :]
        w = tl.load(w_ptrs, mask=mask_w & also, other=0.0)
    return w if TRANSPOSED else tl.trans(w)


@triton.jit
def multiply(
    accs,  # float32 [BLOCK_M, BLOCK_C], of the tile and of ROWS - 1 rows below it
    x_ptr,  # [.., KX] at the tile's first pixel
    w_ptr,  # [CO, R * S, CI]
    pixels,  # as `tile_pixels` has them, with R + ROWS - 1 rows of taps,
    bits,
    c0,
    K,  # channels of x that have filters
    KX,  # and how many there are
    C,  # channels of the result that have filters
    CY,  # and how many there are
    stride_w,  # from one CO to the next
    Q,
    R: tl.constexpr,
    S: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # an input gradient: x's channels are CO, and taps count backwards
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,  # whether blocks divide K and C, and no channel is without filters
    ROUND: tl.constexpr,  # x is not rounded to TF32 yet
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    first=0,  # of the steps of one row,
    last=None,  # and the one behind them; None: all
):
    """The convolution, or its input gradient, added to the accumulators."""
    TAPS: tl.constexpr = R * S
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
            place = ((tap // S - R // 2) * Q + tap % S - S // 2) * KX + k0
            x = _load_x(x_ptr + place + offs_x, bits, tap, mask_k, S, EXACT, ROUND)
            w_tap = TAPS - 1 - tap if TRANSPOSED else tap
            w_ptrs = w_ptr + (w_tap * to_tap + k0 * to_k) + offs_w
            w = _load_w(w_ptrs, mask_w, mask_f, TRANSPOSED, EXACT)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        accs = (acc,)
    elif TAPS == 1:  # beside one of three rows of taps
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
        tl.static_assert(R == 3 and S == 3)
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
            for r in tl.static_range(3):  # a row of the filter: fewer fragments than one of x
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
    w_ptr,  # these and the next as those of `multiply`
    K,
    KX,
    C,
    CY,
    stride_w,  # None: R * S * C
    N,
    P,
    Q,
    R: tl.constexpr,
    S: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    first=0,  # as those of `multiply`
    last=None,
):
    """The accumulators of this program's tile; its first image, row, column and channel, and its
    first pixel's place; and its pixels, as `tile_pixels` has them."""
    n0, h0, w0, c0 = tile_origin(P, Q, CY, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C)
    pixels, inside, bits = tile_pixels(
        n0, h0, w0, N, P, Q, R // 2, R + ROWS - 1, S, TILE_N, TILE_H, TILE_W, ROWS
    )
    at = (n0.to(tl.int64) * P + h0) * Q + w0
    if stride_w is None:
        stride_w = R * S * C
    accs = multiply(
        zero_sums(ROWS, TILE_N * TILE_H * TILE_W, BLOCK_C), x_ptr + at * KX, w_ptr, pixels, bits,
        c0, K, KX, C, CY, stride_w, Q, R, S, TRANSPOSED, ROWS, EXACT, False, PRECISION,
        BLOCK_C, BLOCK_K, first, last,
    )  # fmt: skip
    return accs, n0, h0, w0, c0, at, pixels, inside, bits
