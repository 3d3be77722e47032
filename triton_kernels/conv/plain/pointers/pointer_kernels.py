"""The kernels of `conv.plain.pointer`: the main loop of `conv.plain.pointer_products`, and an
epilogue.

Numbers of channels are given in units of UNIT, so that the compiler knows that UNIT divides them.
"""

import triton
import triton.language as tl

from ....activations import activate_affine_grad, compiled
from ....noise.dropout import kept
from ....tf32 import as_operand
from ..output_tiles import OutputTiles, store_partials
from ..products import steps_of_part
from .pointer_products import Filters, convolve, multiply

# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _rounded(v, dtype: tl.constexpr):
    """float32 numbers rounded to `dtype`, two by one instruction. Where the rounded numbers are
    converted to float32 again, the compiler rounds to bfloat16 one by one, an eighth as fast."""
    if dtype == tl.bfloat16 and compiled():
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [v], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return v.to(dtype)


@triton.jit(do_not_specialize=["N", "P", "Q", "steps"])
def conv_pointer_forward_kernel(
    x_ptr,  # [N, P, Q, KX]
    w_ptr,  # [CO, R * S, CI]
    y_ptr,  # [N, P, Q, CY]; in parts: float32 [parts, N, C, P * Q]
    bias_ptr,  # float32 [C] or None; so is the next
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
    K,  # channels of x that have filters: CI, or CO if TRANSPOSED
    KX,  # channels of x, in units
    C,  # channels of the result that have filters
    CY,  # channels of the result, in units
    C1,
    C2,
    stride_w,
    stride_w1,
    stride_w2,
    stride_emb,
    steps,  # of each part; None: y is not split into parts
    factor,  # multiplies the sum; or None
    R: tl.constexpr,
    S: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,  # tiles one below the other
    EXACT: tl.constexpr,
    RAGGED: tl.constexpr,
    PADDED: tl.constexpr,  # some channels have no filters
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read y
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    KX *= UNIT
    CY *= UNIT
    if not PADDED:  # then the compiler knows what divides K and C
        K = KX
        C = CY
    stride_w *= UNIT
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    start, start1, start2 = 0, 0, 0  # first step of each convolution
    end, end1, end2 = None, None, None  # the step after the last; None: all steps
    if steps is not None:
        start, end, start1, end1, start2, end2 = steps_of_part(
            steps,
            R * S * tl.cdiv(KX, BLOCK_K),
            tl.cdiv(C1 * UNIT, BLOCK_K),
            tl.cdiv(C2 * UNIT, BLOCK_K),
        )
    accs, origin, at, pixels, inside, bits = convolve(
        x_ptr, KX, Filters(w_ptr, stride_w, K, C, R, S, TRANSPOSED),
        OutputTiles(N, P, Q, CY, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
        ROWS, EXACT, PRECISION, BLOCK_K, start, end,
    )  # fmt: skip
    n0, h0, w0, c0 = origin
    own = bits if ROWS > 1 else inside.to(tl.int32)
    if extra1_ptr is not None:
        C1 *= UNIT
        stride_w1 *= UNIT
        accs = multiply(
            accs, extra1_ptr + at * C1, C1, pixels, own, c0, CY, Q,
            Filters(extra1_w_ptr, stride_w1, C1, C, 1, 1, False),
            ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C, BLOCK_K, start1, end1,
        )  # fmt: skip
    if extra2_ptr is not None:
        C2 *= UNIT
        stride_w2 *= UNIT
        accs = multiply(
            accs, extra2_ptr + at * C2, C2, pixels, own, c0, CY, Q,
            Filters(extra2_w_ptr, stride_w2, C2, C, 1, 1, False),
            ROWS, EXACT, PRECISION == "tf32", PRECISION, BLOCK_C, BLOCK_K, start2, end2,
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
    if steps is None:
        places = (pixels * CY)[:, None] + offs_c[None, :]
    else:
        m = tl.arange(0, BLOCK_M)
        image = (tl.program_id(1) * N + n0 + m // PIXELS).to(tl.int64) * (C * P * Q)
        place = (h0 + m % PIXELS // TILE_W) * Q + w0 + m % TILE_W
        places = (image + place)[:, None] + offs_c[None, :] * (P * Q)
    mask = inside[:, None] & (offs_c < CY)[None, :]
    # load a row before the row above is done: the compiler moves no load across barriers
    residual = None
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at * CY + places, mask=mask, other=0.0)
    ys = ()
    for row in tl.static_range(ROWS):
        below = (at + row * Q) * CY if steps is None else 0
        ahead = residual
        if residual_ptr is not None and row + 1 < ROWS:
            ahead = tl.load(residual_ptr + below + Q * CY + places, mask=mask, other=0.0)
        y = accs[row] + bias[None, :]
        if emb is not None:
            y = (y.reshape(TILE_N, PIXELS, BLOCK_C) + emb[:, None, :]).reshape(BLOCK_M, BLOCK_C)
        if residual_ptr is not None:
            y += residual.to(tl.float32)
        if factor is not None:
            y *= factor
        residual = ahead
        if TF32:
            y = as_operand(y, y_ptr.dtype.element_ty, True)
        else:
            y = _rounded(y, y_ptr.dtype.element_ty)
        tl.store(y_ptr + below + places, y, mask=mask)
        if partial_ptr is not None:
            y = y.to(tl.float32)
            ys = ys + ((tl.where(inside[:, None], y, 0.0) if RAGGED else y),)
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel. Add the rows
        # number by number first, so that threads exchange sums once
        total = ys[0]
        for row in tl.static_range(1, ROWS):
            total += ys[row]
        total = tl.sum(total.reshape(TILE_N, PIXELS, BLOCK_C), axis=1)
        count = ROWS * PIXELS
        if RAGGED:
            # every tile has as many pixels inside of the image
            count = tl.minimum(P, TILE_H) * tl.minimum(Q, TILE_W)
        mean = (total / count)[:, None, :]
        squares = tl.zeros([TILE_N, PIXELS, BLOCK_C], dtype=tl.float32)
        for row in tl.static_range(ROWS):
            v = ys[row].reshape(TILE_N, PIXELS, BLOCK_C) - mean
            if RAGGED:
                v = tl.where(inside.reshape(TILE_N, PIXELS)[:, :, None], v, 0.0)
            squares += v * v
        store_partials(
            partial_ptr, total, tl.sum(squares, axis=1), origin,
            OutputTiles(N, P, Q, C, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C, True), False,
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
    """A tile [BLOCK_M, BLOCK_C] of one tensor, or of the concatenation of two."""
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
    CO,  # channels of dy that have filters
    KX,  # channels of dy, in units; so are the next two
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
    accs, origin, at, pixels, inside, _ = convolve(
        dy_ptr, KX, Filters(w_ptr, None, CO, CI, R, S, True),
        OutputTiles(N, P, Q, CI, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
        ROWS, EXACT, PRECISION, BLOCK_K,
    )  # fmt: skip
    n0, h0, w0, c0 = origin
    # load a row before the row above is done: the compiler moves no load across barriers
    x = _load_either(x1_ptr, x2_ptr, at, pixels, inside, c0, C1, CI, STRADDLING, BLOCK_C)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    of_images = (offs_n < N)[:, None] & (offs_c < CI)[None, :]
    ptrs = table_ptr + offs_n.to(tl.int64)[:, None] * 4 * CI + offs_c[None, :]
    mean = tl.load(ptrs, mask=of_images, other=0.0)[:, None, :]
    rstd = tl.load(ptrs + CI, mask=of_images, other=0.0)[:, None, :]
    g = tl.load(ptrs + 2 * CI, mask=of_images, other=0.0)[:, None, :] * rstd
    b = tl.load(ptrs + 3 * CI, mask=of_images, other=0.0)[:, None, :]
    SOME: tl.constexpr = 16 if PIXELS > 16 else PIXELS  # a thread has all pixels of such a sum
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
        partial_ptr, tl.sum(first_sum, axis=1), tl.sum(second_sum * rstd, axis=1), origin,
        OutputTiles(N, P, Q, CI, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C, True), False,
    )  # fmt: skip
