"""The kernels of `conv.plain.pointer`: implicit GEMM through pointers, with what surrounds it.

An accumulator is [pixels, channels], the order in which mma.sync takes x as it lies in memory. The
places of a tile's pixels are computed once, relative to its first one, with a word for each that
has a bit for every tap: whether that tap is inside the image. A step of the loop adds one number to
all of them, and looks at one bit.

A program of several rows has an accumulator for each. The rows of x that it loads are each
multiplied by up to three rows of the filter, so half as much comes from the L2 cache.

Numbers of channels are given in units of UNIT, so that the compiler knows what divides them.
"""

import triton
import triton.language as tl

from ...activations import activate_affine_grad
from ...noise.dropout import kept
from ...tf32 import as_operand
from .tma import tile_origin


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
):
    """Of a tile's pixels: their distance from the first one in pixels, whether each is inside of an
    image, and for each of R x S taps whether that is, as bits. int32, bool, int32 [BLOCK_M]."""
    m = tl.arange(0, TILE_N * TILE_H * TILE_W)
    n = m // (TILE_H * TILE_W)
    h = m // TILE_W % TILE_H
    w = m % TILE_W
    there = n0 + n < N
    bits = tl.zeros_like(m)
    for tap in tl.static_range(R * S):
        row = h0 + h + tap // S - FIRST
        column = w0 + w + tap % S - S // 2
        inside = there & (row >= 0) & (row < P) & (column >= 0) & (column < Q)
        bits |= inside.to(tl.int32) << tap
    return (n * P + h) * Q + w, there & (h0 + h < P) & (w0 + w < Q), bits


@triton.jit
def _load_x(x_ptrs, bits, tap, mask_k, EXACT: tl.constexpr, ROUND: tl.constexpr):
    inside = (((bits >> tap) & 1) != 0)[:, None]
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
    acc,  # float32 [BLOCK_M, BLOCK_C], at row h0
    acc1,  # at row h0 + 1, if ROWS > 1, ...
    acc2,
    acc3,
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
        for step in range(TAPS * tl.cdiv(KX, BLOCK_K)):
            tap = step % TAPS
            k0 = step // TAPS * BLOCK_K
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            place = ((tap // S - R // 2) * Q + tap % S - S // 2) * KX + k0
            x = _load_x(x_ptr + place + offs_x, bits, tap, mask_k, EXACT, ROUND)
            w_tap = TAPS - 1 - tap if TRANSPOSED else tap
            w_ptrs = w_ptr + (w_tap * to_tap + k0 * to_k) + offs_w
            w = _load_w(w_ptrs, mask_w, mask_f, TRANSPOSED, EXACT)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
    elif TAPS == 1:  # beside one of three rows of taps
        for k0 in range(0, KX, BLOCK_K):
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            w = _load_w(w_ptr + k0 * to_k + offs_w, mask_w, mask_f, TRANSPOSED, EXACT)
            x_ptrs = x_ptr + k0 + offs_x
            x = _load_x(x_ptrs, bits, 4, mask_k, EXACT, ROUND)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            x1 = _load_x(x_ptrs + Q * KX, bits, 7, mask_k, EXACT, ROUND)
            acc1 = tl.dot(x1, w, acc1, input_precision=PRECISION)
            if ROWS == 4:
                x2 = _load_x(x_ptrs + 2 * Q * KX, bits, 10, mask_k, EXACT, ROUND)
                acc2 = tl.dot(x2, w, acc2, input_precision=PRECISION)
                x3 = _load_x(x_ptrs + 3 * Q * KX, bits, 13, mask_k, EXACT, ROUND)
                acc3 = tl.dot(x3, w, acc3, input_precision=PRECISION)
    else:
        tl.static_assert(R == 3 and S == 3)
        for step in range(3 * tl.cdiv(KX, BLOCK_K)):
            s = step % 3
            k0 = step // 3 * BLOCK_K
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            w_ptrs = w_ptr + ((8 - s if TRANSPOSED else s) * to_tap + k0 * to_k) + offs_w
            down = (-3 if TRANSPOSED else 3) * to_tap  # the next row of the filter
            wa = _load_w(w_ptrs, mask_w, mask_f, TRANSPOSED, EXACT)
            wb = _load_w(w_ptrs + down, mask_w, mask_f, TRANSPOSED, EXACT)
            wc = _load_w(w_ptrs + 2 * down, mask_w, mask_f, TRANSPOSED, EXACT)
            x_ptrs = x_ptr + (s - 1 - Q) * KX + k0 + offs_x
            x = _load_x(x_ptrs, bits, s, mask_k, EXACT, ROUND)
            acc = tl.dot(x, wa, acc, input_precision=PRECISION)
            x = _load_x(x_ptrs + Q * KX, bits, s + 3, mask_k, EXACT, ROUND)
            acc = tl.dot(x, wb, acc, input_precision=PRECISION)
            acc1 = tl.dot(x, wa, acc1, input_precision=PRECISION)
            x = _load_x(x_ptrs + 2 * Q * KX, bits, s + 6, mask_k, EXACT, ROUND)
            acc = tl.dot(x, wc, acc, input_precision=PRECISION)
            acc1 = tl.dot(x, wb, acc1, input_precision=PRECISION)
            if ROWS == 4:
                acc2 = tl.dot(x, wa, acc2, input_precision=PRECISION)
            x = _load_x(x_ptrs + 3 * Q * KX, bits, s + 9, mask_k, EXACT, ROUND)
            acc1 = tl.dot(x, wc, acc1, input_precision=PRECISION)
            if ROWS == 4:
                acc2 = tl.dot(x, wb, acc2, input_precision=PRECISION)
                acc3 = tl.dot(x, wa, acc3, input_precision=PRECISION)
                x = _load_x(x_ptrs + 4 * Q * KX, bits, s + 12, mask_k, EXACT, ROUND)
                acc2 = tl.dot(x, wc, acc2, input_precision=PRECISION)
                acc3 = tl.dot(x, wb, acc3, input_precision=PRECISION)
                x = _load_x(x_ptrs + 5 * Q * KX, bits, s + 15, mask_k, EXACT, ROUND)
                acc3 = tl.dot(x, wc, acc3, input_precision=PRECISION)
    return acc, acc1, acc2, acc3


@triton.jit
def _store_partials(
    partial_ptr,  # [N, K, 2, C]
    first,  # [TILE_N, BLOCK_C]
    second,
    n0,
    h0,
    w0,
    c0,
    N,
    P,
    Q,
    C,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Both sums of this tile, as entry k of each of its images."""
    tiles_w = tl.cdiv(Q, TILE_W)
    k = h0 // TILE_H * tiles_w + w0 // TILE_W
    tiles = tl.cdiv(P, TILE_H) * tiles_w
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    mask = (offs_n < N)[:, None] & (offs_c < C)[None, :]
    row = (offs_n.to(tl.int64) * tiles + k) * 2
    ptrs = partial_ptr + row[:, None] * C + offs_c[None, :]
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + C, second, mask=mask)


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _finish_forward(
    acc,  # float32 [BLOCK_M, BLOCK_C]
    y_ptr,  # these two at the tile's first pixel
    residual_ptr,
    bias,  # [BLOCK_C]
    emb,  # [TILE_N, BLOCK_C] or None
    partial_ptr,
    pixels,
    inside,
    n0,
    h0,
    w0,
    c0,
    N,
    P,
    Q,
    C,
    CY,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """The epilogue of one tile."""
    PIXELS: tl.constexpr = TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    acc += bias[None, :]
    if emb is not None:
        acc = (acc.reshape(TILE_N, PIXELS, BLOCK_C) + emb[:, None, :]).reshape(BLOCK_M, BLOCK_C)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    places = (pixels * CY)[:, None] + offs_c[None, :]
    mask = inside[:, None] & (offs_c < CY)[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + places, y, mask=mask)
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel
        v = y.to(tl.float32)
        count = PIXELS
        if RAGGED:
            v = tl.where(inside[:, None], v, 0.0)
            count = tl.minimum(P, TILE_H) * tl.minimum(Q, TILE_W)  # inside of any tile
        v = v.reshape(TILE_N, PIXELS, BLOCK_C)
        total = tl.sum(v, axis=1)
        v -= (total / count)[:, None, :]
        if RAGGED:
            v = tl.where(inside.reshape(TILE_N, PIXELS)[:, :, None], v, 0.0)
        _store_partials(
            partial_ptr, total, tl.sum(v * v, axis=1), n0, h0, w0, c0, N, P, Q, C,
            TILE_N, TILE_H, TILE_W, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "P", "Q"])
def conv_pointer_forward_kernel(
    x_ptr,  # [N, P, Q, KX]
    w_ptr,  # [CO, R * S, CI]
    y_ptr,  # [N, P, Q, CY]
    bias_ptr,  # float32 [C], and so is the next; either may be None
    extra_bias_ptr,
    emb_ptr,  # float32 [N, C] or None
    residual_ptr,  # [N, P, Q, C] or None
    extra1_ptr,  # [N, P, Q, C1] or None
    extra1_w_ptr,  # [C, C1] or None
    extra2_ptr,  # a second such pair, or None
    extra2_w_ptr,
    partial_ptr,  # float32 [N, tiles, 2, C] or None
    N,
    P,
    Q,
    K,  # channels of x that have filters: CI, or CO if TRANSPOSED,
    KX,  # and how many there are, in units
    C,  # of the result,
    CY,  # likewise
    C1,
    C2,
    stride_w,
    stride_w1,
    stride_w2,
    stride_emb,
    R: tl.constexpr,
    S: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,  # tiles one below the other
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,
    PADDED: tl.constexpr,  # some channels have no filters
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    KX *= UNIT
    CY *= UNIT
    if not PADDED:  # and the compiler knows what divides them
        K = KX
        C = CY
    stride_w *= UNIT
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    n0, h0, w0, c0 = tile_origin(P, Q, CY, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C)
    pixels, inside, bits = tile_pixels(
        n0, h0, w0, N, P, Q, R // 2, R + ROWS - 1, S, TILE_N, TILE_H, TILE_W
    )
    at = (n0.to(tl.int64) * P + h0) * Q + w0
    acc0 = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    acc0, acc1, acc2, acc3 = multiply(
        acc0, acc0, acc0, acc0, x_ptr + at * KX, w_ptr, pixels, bits, c0, K, KX, C, CY, stride_w,
        Q,        R, S, TRANSPOSED, ROWS, EXACT, False, PRECISION, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    own = bits if ROWS > 1 else inside.to(tl.int32)
    if extra1_ptr is not None:
        C1 *= UNIT
        stride_w1 *= UNIT
        acc0, acc1, acc2, acc3 = multiply(
            acc0, acc1, acc2, acc3, extra1_ptr + at * C1, extra1_w_ptr, pixels, own, c0, C1, C1, C,
            CY, stride_w1, Q, 1, 1, False, ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C,
            BLOCK_K,
        )  # fmt: skip
    if extra2_ptr is not None:
        C2 *= UNIT
        stride_w2 *= UNIT
        acc0, acc1, acc2, acc3 = multiply(
            acc0, acc1, acc2, acc3, extra2_ptr + at * C2, extra2_w_ptr, pixels, own, c0, C2, C2, C,
            CY, stride_w2, Q, 1, 1, False, ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C,
            BLOCK_K,
        )  # fmt: skip
    offs_c = c0 + tl.arange(0, BLOCK_C)
    bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_c, mask=offs_c < C, other=0.0)
    if extra_bias_ptr is not None:
        bias += tl.load(extra_bias_ptr + offs_c, mask=offs_c < C, other=0.0)
    emb = None
    if emb_ptr is not None:
        offs_n = n0 + tl.arange(0, TILE_N)
        emb = tl.load(
            emb_ptr + offs_n.to(tl.int64)[:, None] * stride_emb + offs_c[None, :],
            mask=(offs_n < N)[:, None] & (offs_c < C)[None, :],
            other=0.0,
        )
    for row in tl.static_range(ROWS):
        acc = acc0 if row == 0 else acc1 if row == 1 else acc2 if row == 2 else acc3
        below = (at + row * Q) * CY
        _finish_forward(
            acc, y_ptr + below, None if residual_ptr is None else residual_ptr + below, bias, emb,
            partial_ptr, pixels, inside, n0, h0 + row, w0, c0, N, P, Q, C, CY,
            TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED,
        )  # fmt: skip


# --- input gradient -------------------------------------------------------------------------------


@triton.jit
def _load_either(
    x1_ptr,  # [.., C1] at the tile's first pixel
    x2_ptr,  # [.., C - C1], or None
    at,
    pixels,
    inside,
    c0,
    C1,
    C,
    STRADDLING: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tile [BLOCK_M, BLOCK_C] of one tensor, or of two that are a concatenation."""
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask = inside[:, None] & (offs_c < C)[None, :]
    if x2_ptr is None:
        return tl.load(x1_ptr + at * C + ((pixels * C)[:, None] + offs_c[None, :]), mask=mask)
    else:
        C2 = C - C1
        ptrs1 = x1_ptr + at * C1 + ((pixels * C1)[:, None] + offs_c[None, :])
        ptrs2 = x2_ptr + at * C2 + ((pixels * C2)[:, None] + (offs_c - C1)[None, :])
        if STRADDLING:
            x = tl.load(ptrs1, mask=mask & (offs_c < C1)[None, :], other=0.0)
            return x + tl.load(ptrs2, mask=mask & (offs_c >= C1)[None, :], other=0.0)
        else:
            if c0 < C1:
                x = tl.load(ptrs1, mask=mask)
            else:
                x = tl.load(ptrs2, mask=mask)
            return x


@triton.jit(do_not_specialize=["N", "P", "Q", "first", "stream"])
def conv_pointer_input_grad_kernel(
    dy_ptr,  # [N, P, Q, KX]
    w_ptr,  # [CO, R * S, CI]
    dz_ptr,  # [N, P, Q, CI]
    x1_ptr,  # [N, P, Q, C1]
    x2_ptr,  # [N, P, Q, CI - C1] or None
    table_ptr,  # float32 [N, 4, CI]: mean, rstd, g, b
    partial_ptr,  # float32 [N, tiles, 2, CI]
    N,
    P,
    Q,
    CO,  # channels of dy that have filters,
    KX,  # and how many there are, in units; as the next
    CI,
    C1,
    rng_ptr,  # int64 [2] or None: no dropout between act(z) and the convolution
    first,
    stream,
    drop,  # probability
    R: tl.constexpr,
    S: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,  # tiles one below the other
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,
    STRADDLING: tl.constexpr,  # some channels of a tile may be x1's and some x2's
    PADDED: tl.constexpr,  # some channels have no filters
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    KX *= UNIT
    CI *= UNIT
    C1 *= UNIT
    if not PADDED:
        CO = KX
    PIXELS: tl.constexpr = TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    n0, h0, w0, c0 = tile_origin(P, Q, CI, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C)
    pixels, inside, bits = tile_pixels(
        n0, h0, w0, N, P, Q, R // 2, R + ROWS - 1, S, TILE_N, TILE_H, TILE_W
    )
    at = (n0.to(tl.int64) * P + h0) * Q + w0
    acc0 = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    acc0, acc1, acc2, acc3 = multiply(
        acc0, acc0, acc0, acc0, dy_ptr + at * KX, w_ptr, pixels, bits, c0, CO, KX, CI, CI,
        R * S * CI, Q, R, S, True, ROWS, EXACT, False, PRECISION, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    of_images = (offs_n < N)[:, None] & (offs_c < CI)[None, :]
    ptrs = table_ptr + offs_n.to(tl.int64)[:, None] * 4 * CI + offs_c[None, :]
    mean = tl.load(ptrs, mask=of_images, other=0.0)[:, None, :]
    rstd = tl.load(ptrs + CI, mask=of_images, other=0.0)[:, None, :]
    g = tl.load(ptrs + 2 * CI, mask=of_images, other=0.0)[:, None, :]
    b = tl.load(ptrs + 3 * CI, mask=of_images, other=0.0)[:, None, :]
    for row in tl.static_range(ROWS):
        acc = acc0 if row == 0 else acc1 if row == 1 else acc2 if row == 2 else acc3
        place = at + row * Q
        x = _load_either(x1_ptr, x2_ptr, place, pixels, inside, c0, C1, CI, STRADDLING, BLOCK_C)
        xhat = (x.to(tl.float32).reshape(TILE_N, PIXELS, BLOCK_C) - mean) * rstd
        if rng_ptr is not None:
            m = tl.arange(0, BLOCK_M)
            pixel = (h0 + row + m // TILE_W % TILE_H) * Q + w0 + m % TILE_W
            quad = (pixel[:, None] * CI + c0) // 4 + tl.arange(0, BLOCK_C // 4)[None, :]
            sample = first + n0 + m // PIXELS
            keep = kept(rng_ptr, sample[:, None], quad, stream, drop)
            acc = tl.where(keep, acc * (1.0 / (1.0 - drop)), 0.0)
        dz = acc.reshape(TILE_N, PIXELS, BLOCK_C) * activate_affine_grad(xhat, g, b, ACT)
        if RAGGED:
            within = inside.reshape(TILE_N, PIXELS)[:, :, None]
            dz = tl.where(within, dz, 0.0)
            xhat = tl.where(within, xhat, 0.0)
        _store_partials(
            partial_ptr, tl.sum(dz, axis=1), tl.sum(dz * xhat, axis=1),
            n0, h0 + row, w0, c0, N, P, Q, CI, TILE_N, TILE_H, TILE_W, BLOCK_C,
        )  # fmt: skip
        dz = dz.reshape(BLOCK_M, BLOCK_C).to(dz_ptr.dtype.element_ty)
        mask = inside[:, None] & (offs_c < CI)[None, :]
        tl.store(dz_ptr + place * CI + ((pixels * CI)[:, None] + offs_c[None, :]), dz, mask=mask)
