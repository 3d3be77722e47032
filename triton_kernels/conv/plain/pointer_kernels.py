"""The kernels of `conv.plain.pointer`: implicit GEMM through pointers, with what surrounds it.

An accumulator is [pixels, channels], the order in which mma.sync takes x as it lies in memory. The
places of a tile's pixels are computed once, relative to its first one, with a word for each that
has a bit for every tap: whether that tap is inside the image. A step of the loop adds one number to
all of them, and looks at one bit.

A program of several rows has an accumulator for each: of the tile's rows, which are so many apart,
of those below them, and so on, until the next of the tile's comes. The rows of x that it loads are
each multiplied by up to three rows of the filter, so half as much comes from the L2 cache.

Numbers of channels are given in units of UNIT, so that the compiler knows what divides them.
"""

import triton
import triton.language as tl

from ...activations import activate_affine_grad
from ...noise.dropout import kept
from ...tf32 import as_operand
from .products import tile_origin, zero_sums
from .tile_edges import store_partials


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
    image, and for each of R x S taps whether that is, as bits. int32, bool, int32 [BLOCK_M]."""
    m = tl.arange(0, TILE_N * TILE_H * TILE_W)
    n = m // (TILE_H * TILE_W)
    h = m // TILE_W % TILE_H * APART
    w = m % TILE_W
    there = n0 + n < N
    bits = tl.zeros_like(m)
    for tap in tl.static_range(R * S):
        row = h0 + h + tap // S - FIRST
        column = w0 + w + tap % S - S // 2
        inside = there & (row >= 0) & (row < P) & (column >= 0) & (column < Q)
        bits |= inside.to(tl.int32) << tap
    return (n * P + h) * Q + w, there & (h0 + h < P) & (w0 + w < Q), bits


@triton.constexpr_function
def _compiled() -> bool:
    return not triton.knobs.runtime.interpret


@triton.jit
def _rounded(v, dtype: tl.constexpr):
    """float32 in `dtype`, where the rounded numbers are read as float32 again: then the compiler
    rounds to bfloat16 one by one, an eighth as fast as two by one instruction."""
    if dtype == tl.bfloat16 and _compiled():
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [v], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return v.to(dtype)


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
        accs = (acc,)
    elif TAPS == 1:  # beside one of three rows of taps
        for k0 in range(0, KX, BLOCK_K):
            mask_k = k0 + offs_k < KX
            mask_f = k0 + offs_k < (K if TRANSPOSED else KX)
            w = _load_w(w_ptr + k0 * to_k + offs_w, mask_w, mask_f, TRANSPOSED, EXACT)
            x_ptrs = x_ptr + k0 + offs_x
            sums = ()
            for i in tl.static_range(ROWS):
                x = _load_x(x_ptrs + i * Q * KX, bits, 3 * i + 4, mask_k, EXACT, ROUND)
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
                x = _load_x(x_ptrs + i * Q * KX, bits, s + 3 * i, mask_k, EXACT, ROUND)
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
        BLOCK_C, BLOCK_K,
    )  # fmt: skip
    return accs, n0, h0, w0, c0, at, pixels, inside, bits


# --- forward --------------------------------------------------------------------------------------


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
    accs, n0, h0, w0, c0, at, pixels, inside, bits = convolve(
        x_ptr, w_ptr, K, KX, C, CY, stride_w, N, P, Q, R, S, TRANSPOSED, ROWS, EXACT, PRECISION,
        TILE_N, TILE_H, TILE_W, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    own = bits if ROWS > 1 else inside.to(tl.int32)
    if extra1_ptr is not None:
        C1 *= UNIT
        stride_w1 *= UNIT
        accs = multiply(
            accs, extra1_ptr + at * C1, extra1_w_ptr, pixels, own, c0, C1, C1, C, CY, stride_w1, Q,
            1, 1, False, ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C, BLOCK_K,
        )  # fmt: skip
    if extra2_ptr is not None:
        C2 *= UNIT
        stride_w2 *= UNIT
        accs = multiply(
            accs, extra2_ptr + at * C2, extra2_w_ptr, pixels, own, c0, C2, C2, C, CY, stride_w2, Q,
            1, 1, False, ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C, BLOCK_K,
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
    PIXELS: tl.constexpr = TILE_H * TILE_W
    places = (pixels * CY)[:, None] + offs_c[None, :]
    mask = inside[:, None] & (offs_c < CY)[None, :]
    # a row is loaded before the one above it is done: no load is moved across the barriers between
    residual = None
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at * CY + places, mask=mask, other=0.0)
    ys = ()
    for row in tl.static_range(ROWS):
        below = (at + row * Q) * CY
        ahead = residual
        if residual_ptr is not None and row + 1 < ROWS:
            ahead = tl.load(residual_ptr + below + Q * CY + places, mask=mask, other=0.0)
        y = accs[row] + bias[None, :]
        if emb is not None:
            y = (y.reshape(TILE_N, PIXELS, BLOCK_C) + emb[:, None, :]).reshape(BLOCK_M, BLOCK_C)
        if residual_ptr is not None:
            y += residual.to(tl.float32)
        residual = ahead
        y = _rounded(y, y_ptr.dtype.element_ty)
        tl.store(y_ptr + below + places, y, mask=mask)
        if partial_ptr is not None:
            y = y.to(tl.float32)
            ys = ys + ((tl.where(inside[:, None], y, 0.0) if RAGGED else y),)
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel; of all rows
        # together, number by number, before anything is added across threads
        total = ys[0]
        for row in tl.static_range(1, ROWS):
            total += ys[row]
        total = tl.sum(total.reshape(TILE_N, PIXELS, BLOCK_C), axis=1)
        count = ROWS * PIXELS
        if RAGGED:
            count = tl.minimum(P, TILE_H) * tl.minimum(Q, TILE_W)  # inside of any tile
        mean = (total / count)[:, None, :]
        squares = tl.zeros([TILE_N, PIXELS, BLOCK_C], dtype=tl.float32)
        for row in tl.static_range(ROWS):
            v = ys[row].reshape(TILE_N, PIXELS, BLOCK_C) - mean
            if RAGGED:
                v = tl.where(inside.reshape(TILE_N, PIXELS)[:, :, None], v, 0.0)
            squares += v * v
        store_partials(
            partial_ptr, total, tl.sum(squares, axis=1), (n0, h0, w0, c0), N, P, Q, C,
            TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C, True, False,
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
    accs, n0, h0, w0, c0, at, pixels, inside, _ = convolve(
        dy_ptr, w_ptr, CO, KX, CI, CI, None, N, P, Q, R, S, True, ROWS, EXACT, PRECISION,
        TILE_N, TILE_H, TILE_W, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    # a row is loaded before the one above it is done: no load is moved across the barriers between
    x = _load_either(x1_ptr, x2_ptr, at, pixels, inside, c0, C1, CI, STRADDLING, BLOCK_C)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    of_images = (offs_n < N)[:, None] & (offs_c < CI)[None, :]
    ptrs = table_ptr + offs_n.to(tl.int64)[:, None] * 4 * CI + offs_c[None, :]
    mean = tl.load(ptrs, mask=of_images, other=0.0)[:, None, :]
    rstd = tl.load(ptrs + CI, mask=of_images, other=0.0)[:, None, :]
    g = tl.load(ptrs + 2 * CI, mask=of_images, other=0.0)[:, None, :] * rstd
    b = tl.load(ptrs + 3 * CI, mask=of_images, other=0.0)[:, None, :]
    SOME: tl.constexpr = 16 if PIXELS > 16 else PIXELS  # sums of pixels that a thread has anyway
    first_sum = tl.zeros([TILE_N, SOME, BLOCK_C], dtype=tl.float32)
    second_sum = first_sum
    for row in tl.static_range(ROWS):
        acc = accs[row]
        place = at + row * Q
        ahead = x
        if row + 1 < ROWS:
            ahead = _load_either(
                x1_ptr, x2_ptr, place + Q, pixels, inside, c0, C1, CI, STRADDLING, BLOCK_C
            )
        centered = x.to(tl.float32).reshape(TILE_N, PIXELS, BLOCK_C) - mean
        if rng_ptr is not None:
            m = tl.arange(0, BLOCK_M)
            pixel = (h0 + row + m // TILE_W % TILE_H * ROWS) * Q + w0 + m % TILE_W
            quad = (pixel[:, None] * CI + c0) // 4 + tl.arange(0, BLOCK_C // 4)[None, :]
            sample = first + n0 + m // PIXELS
            keep = kept(rng_ptr, sample[:, None], quad, stream, drop)
            acc = tl.where(keep, acc * (1.0 / (1.0 - drop)), 0.0)
        dz = acc.reshape(TILE_N, PIXELS, BLOCK_C) * activate_affine_grad(centered, g, b, ACT)
        if RAGGED:
            within = inside.reshape(TILE_N, PIXELS)[:, :, None]
            dz = tl.where(within, dz, 0.0)
            centered = tl.where(within, centered, 0.0)
        first_sum += tl.sum(dz.reshape(TILE_N, PIXELS // SOME, SOME, BLOCK_C), axis=1)
        second_sum += tl.sum((dz * centered).reshape(TILE_N, PIXELS // SOME, SOME, BLOCK_C), axis=1)
        dz = dz.reshape(BLOCK_M, BLOCK_C).to(dz_ptr.dtype.element_ty)
        mask = inside[:, None] & (offs_c < CI)[None, :]
        tl.store(dz_ptr + place * CI + ((pixels * CI)[:, None] + offs_c[None, :]), dz, mask=mask)
        x = ahead
    store_partials(
        partial_ptr, tl.sum(first_sum, axis=1), tl.sum(second_sum * rstd, axis=1),
        (n0, h0, w0, c0), N, P, Q, CI, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C, True, False,
    )  # fmt: skip
