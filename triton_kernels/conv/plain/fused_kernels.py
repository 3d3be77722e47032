"""The kernels of `conv.fused` and of `conv2d`, which adds a bias only. A program computes one tile
of a convolution, or several tiles one below the other, and runs an epilogue on each.

An accumulator is [channels, pixels], so a thread holds runs of pixels of a few channels: sums over
pixels are nearly free, and an image of the tile is a slice [channels, image, pixels].

`conv.plain.products` has the main loops.
"""

import triton
import triton.language as tl

from ...activations import activate_affine_grad
from ...noise.dropout import kept
from ...norm.coefficients import load_table
from ...runtime.dependent_launch import await_inputs
from ...tf32 import as_operand
from .output_tiles import OutputTiles, store_partials, tile_origin, zero_outside
from .products import (
    Taps,
    multiply,
    multiply_parity,
    multiply_pointwise,
    multiply_rows,
    steps_of_part,
    whole_sum,
    zero_sums,
)
from .shared_sums import leave_part, sum_of_parts

# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _convolve(
    x_desc,  # this and the next as in `multiply`
    x_small_desc,
    w_desc,
    w_small_desc,
    at,
    CI,
    taps,  # Taps
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    start=0,
    end=None,
):
    """Accumulators of tiles one below the other, and the second sum of "ieee"."""
    accs = zero_sums(ROWS, BLOCK_C, BLOCK_M)
    small = accs[0]
    if ROWS == 1:
        acc, small = multiply(
            accs[0], small, x_desc, x_small_desc, w_desc, w_small_desc, at, CI, start, end,
            taps, PRECISION, BLOCK_K,
        )  # fmt: skip
        accs = (acc,)
    else:
        tl.static_assert(PRECISION != "ieee" and taps.STRIDE == 1)
        accs = multiply_rows(accs, x_desc, w_desc, at, CI, taps, PRECISION, ROWS, BLOCK_K)
    return accs, small


@triton.jit
def _add_pointwise(
    accs,
    small,
    x_desc,
    w_desc,
    at,
    C,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    start=0,  # first step over C
    end=None,  # the step after the last; None: all steps
):
    """Add a 1x1 convolution to the accumulators."""
    if PRECISION == "ieee":
        acc, small = multiply(
            accs[0], small, x_desc, None, w_desc, None, at, C, start, end,
            Taps(1, 1, 0, 0, 1, False), PRECISION, BLOCK_K,
        )  # fmt: skip
        accs = (acc,)
    else:
        first = start * BLOCK_K
        last = C if end is None else end * BLOCK_K
        accs = multiply_pointwise(accs, x_desc, w_desc, at, first, last, PRECISION, ROWS, BLOCK_K)
    return accs, small


@triton.jit
def _store_part(
    parts_ptr,  # float32 [parts, N, CO, P * Q]
    acc,  # [BLOCK_C, BLOCK_M]
    at,
    tiles,  # OutputTiles
):
    n0, h0, w0, c0 = at
    N, P, Q, CO = tiles.N, tiles.P, tiles.Q, tiles.C
    PIXELS: tl.constexpr = tiles.TILE_H * tiles.TILE_W
    offs_m = tl.arange(0, tiles.TILE_N * PIXELS)
    n = n0 + offs_m // PIXELS
    h = h0 + offs_m % PIXELS // tiles.TILE_W
    w = w0 + offs_m % tiles.TILE_W
    offs_c = c0 + tl.arange(0, tiles.BLOCK_C)
    mask = (offs_c < CO)[:, None] & ((n < N) & (h < P) & (w < Q))[None, :]
    pixel = (tl.program_id(1) * N + n).to(tl.int64) * (CO * P * Q) + h * Q + w
    tl.store(parts_ptr + pixel[None, :] + offs_c[:, None] * (P * Q), acc, mask=mask)


@triton.jit
def _finish_forward(
    acc,  # float32 [BLOCK_C, BLOCK_M]
    bias,  # [BLOCK_C], and so is the next; either may be None
    extra_bias,
    emb,  # [BLOCK_C, TILE_N], or None
    residual_desc,
    factor,  # or None
    y_desc,
    partial_ptr,
    at,
    place,  # of the tile in y_desc
    tiles,  # OutputTiles
    TF32: tl.constexpr,
):
    """The epilogue of one tile."""
    _, h0, w0, _ = at
    P, Q = tiles.P, tiles.Q
    BLOCK_C: tl.constexpr = tiles.BLOCK_C
    TILE_N: tl.constexpr = tiles.TILE_N
    TILE_H: tl.constexpr = tiles.TILE_H
    TILE_W: tl.constexpr = tiles.TILE_W
    PIXELS: tl.constexpr = TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    if extra_bias is not None:
        acc += extra_bias[:, None]
    if bias is not None:
        acc += bias[:, None]
    if emb is not None:
        acc = acc.reshape(BLOCK_C, TILE_N, PIXELS) + emb[:, :, None]
        acc = acc.reshape(BLOCK_C, BLOCK_M)
    if residual_desc is not None:
        residual = residual_desc.load(place).reshape(BLOCK_M, BLOCK_C)
        acc += tl.trans(residual).to(tl.float32)
    if factor is not None:
        acc *= factor
    y = as_operand(acc, y_desc.dtype, TF32)
    y_desc.store(place, tl.trans(y).reshape(y_desc.block_shape))
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel
        v = y.to(tl.float32).reshape(BLOCK_C, TILE_N, PIXELS)
        if tiles.RAGGED:
            v = zero_outside(v, h0, w0, P, Q, TILE_H, TILE_W)
            total = tl.sum(v, axis=2)
            # every tile has as many pixels inside of the image
            pixels = tl.minimum(P, TILE_H) * tl.minimum(Q, TILE_W)
            v = zero_outside(v - (total / pixels)[:, :, None], h0, w0, P, Q, TILE_H, TILE_W)
        else:
            total = tl.sum(v, axis=2)
            v -= (total / PIXELS)[:, :, None]
        m2 = tl.sum(v * v, axis=2)
        store_partials(partial_ptr, total, m2, at, tiles, True)


@triton.jit(do_not_specialize=["N", "P", "Q", "steps"])
def conv_forward_kernel(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]; STRIDE 2: by parity
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K]; DGRAD: CO and CI change places
    bias_ptr,  # [CO] or None
    emb_ptr,  # [N, CO] or None
    residual_desc,  # as the next, or None
    y_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_C]; or by parity
    partial_ptr,  # [N, K, 2, CO] or None
    parts_ptr,  # float32 [parts, N, CO, P * Q] in place of y; or as the next; or None
    counters_ptr,  # of `shared_sums`, whose parts the kernel adds itself; or None
    extra1_desc,  # [N, P, Q, C1] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K], or None
    extra1_w_desc,  # [CO, C1] in boxes [BLOCK_C, BLOCK_K]; "ieee": [1, CO, C1], likewise
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    x_small_desc,  # "ieee": second parts of x and the filters, or None: they have not been split
    w_small_desc,
    extra_bias_ptr,  # [CO] or None
    C1,
    C2,
    stride_emb,
    steps,  # of a part, or None: y is whole
    factor,  # multiplies the sum; or None
    N,
    CI,
    P,  # pixels of y; of an input gradient of stride 2, of those of one kind
    Q,
    CO,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    STRIDE: tl.constexpr,  # 2: x is seen by parity, or y is with DGRAD
    DGRAD: tl.constexpr,  # x is the gradient of a result, y that of its input
    TURNED: tl.constexpr,  # DGRAD with STRIDE 2: filters as after `transpose_weights`
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # tiles one below the other
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RAGGED: tl.constexpr,  # with sums: tiles as an even `conv.plain.tma_boxes.covering_box`
    TF32: tl.constexpr,  # products in TF32 read y
):
    await_inputs()
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    at = tile_origin(P, Q, CO, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C)
    n0, h0, w0, c0 = at
    # Load the epilogue's vectors here, so that the epilogue does not wait for them
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CO
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    extra_bias = None
    if extra_bias_ptr is not None:
        extra_bias = tl.load(extra_bias_ptr + offs_c, mask=mask_c, other=0.0)
    emb = None
    if emb_ptr is not None:
        offs_n = n0 + tl.arange(0, TILE_N)
        emb = tl.load(
            emb_ptr + offs_n.to(tl.int64)[None, :] * stride_emb + offs_c[:, None],
            mask=mask_c[:, None] & (offs_n < N)[None, :],
            other=0.0,
        )
    start, start1, start2 = 0, 0, 0  # first step of each convolution
    end, end1, end2 = None, None, None  # the step after the last; None: all steps
    if steps is not None:
        start, end, start1, end1, start2, end2 = steps_of_part(
            steps, R * S * tl.cdiv(CI, BLOCK_K), tl.cdiv(C1, BLOCK_K), tl.cdiv(C2, BLOCK_K)
        )
    if DGRAD and STRIDE == 2:
        odd_row = tl.program_id(1) // 2  # this program's kind of pixels
        odd_col = tl.program_id(1) % 2
        acc = multiply_parity(
            tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32), x_desc, w_desc, at, CI,
            odd_row, odd_col, Taps(R, S, PAD_H, PAD_W, STRIDE, DGRAD), TURNED, PRECISION, BLOCK_K,
        )  # fmt: skip
        accs = (acc,)
    else:
        accs, small = _convolve(
            x_desc, x_small_desc, w_desc, w_small_desc, at, CI,
            Taps(R, S, PAD_H, PAD_W, STRIDE, DGRAD), PRECISION, ROWS, BLOCK_M, BLOCK_C, BLOCK_K,
            start, end,
        )  # fmt: skip
    if extra1_desc is not None:
        accs, small = _add_pointwise(
            accs, small, extra1_desc, extra1_w_desc, at, C1, PRECISION, ROWS, BLOCK_K, start1, end1
        )
    if extra2_desc is not None:
        accs, small = _add_pointwise(
            accs, small, extra2_desc, extra2_w_desc, at, C2, PRECISION, ROWS, BLOCK_K, start2, end2
        )
    if PRECISION == "ieee":
        accs = (whole_sum(accs[0], small),)
    if counters_ptr is not None:
        tl.static_assert(ROWS == 1)
        if not leave_part(accs[0], parts_ptr, counters_ptr):
            return
        accs = (sum_of_parts(accs[0], parts_ptr),)
    for row in tl.static_range(ROWS):
        acc = accs[row]
        if steps is not None and counters_ptr is None:
            _store_part(
                parts_ptr, acc, at,
                OutputTiles(N, P, Q, CO, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
            )  # fmt: skip
        else:
            if DGRAD and STRIDE == 2:
                place = (n0, h0, odd_row, w0, odd_col * CO + c0)
            else:
                place = (n0, h0 + row, w0, c0)
            _finish_forward(
                acc, bias, extra_bias, emb, residual_desc, factor, y_desc, partial_ptr,
                (n0, h0 + row, w0, c0), place,
                OutputTiles(N, P, Q, CO, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED), TF32,
            )  # fmt: skip


# --- input gradient -------------------------------------------------------------------------------


@triton.jit
def _load_table(table_ptr, n0, c0, N, CI, TILE_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """mean, rstd, g and b of a tile's images and channels, [BLOCK_C, TILE_N] each."""
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    mask = (offs_c < CI)[:, None] & (offs_n < N)[None, :]
    ptrs = table_ptr + offs_n.to(tl.int64)[None, :] * 4 * CI + offs_c[:, None]
    return load_table(ptrs, CI, mask)


@triton.jit
def _finish_input_grad(
    acc,  # float32 [BLOCK_C, BLOCK_M]: da
    norm,  # mean, rstd, g and b, [BLOCK_C, TILE_N] each
    x1_desc,
    x2_desc,
    dz_desc,
    partial_ptr,
    at,
    C1,
    dropout,  # rng_ptr, or None; first sample, stream, probability
    tiles,  # OutputTiles
    ACT: tl.constexpr,
    STRADDLING: tl.constexpr,
):
    """The epilogue of one tile."""
    mean, rstd, g, b = norm
    rng_ptr, first, stream, drop = dropout
    n0, h0, w0, c0 = at
    BLOCK_C: tl.constexpr = tiles.BLOCK_C
    TILE_N: tl.constexpr = tiles.TILE_N
    TILE_W: tl.constexpr = tiles.TILE_W
    PIXELS: tl.constexpr = tiles.TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    if x2_desc is None:
        x = x1_desc.load([n0, h0, w0, c0])
    elif STRADDLING:  # TMA fetches zeros for channels that a half does not have
        x = x1_desc.load([n0, h0, w0, c0]) + x2_desc.load([n0, h0, w0, c0 - C1])
    elif c0 < C1:
        x = x1_desc.load([n0, h0, w0, c0])
    else:
        x = x2_desc.load([n0, h0, w0, c0 - C1])
    x = tl.trans(x.reshape(BLOCK_M, BLOCK_C)).reshape(BLOCK_C, TILE_N, PIXELS).to(tl.float32)
    xhat = (x - mean[:, :, None]) * rstd[:, :, None]
    if rng_ptr is not None:
        offs_m = tl.arange(0, BLOCK_M)
        pixel = (h0 + offs_m % PIXELS // TILE_W) * tiles.Q + w0 + offs_m % TILE_W
        quad = (pixel[:, None] * tiles.C + c0) // 4 + tl.arange(0, BLOCK_C // 4)[None, :]
        sample = first + n0 + offs_m // PIXELS
        keep = kept(rng_ptr, sample[:, None], quad, stream, drop)
        acc = tl.where(tl.trans(keep), acc * (1.0 / (1.0 - drop)), 0.0)
    slope = activate_affine_grad(xhat, g[:, :, None], b[:, :, None], ACT)
    dz = acc.reshape(BLOCK_C, TILE_N, PIXELS) * slope
    if tiles.RAGGED:
        dz = zero_outside(dz, h0, w0, tiles.P, tiles.Q, tiles.TILE_H, TILE_W)
    store_partials(partial_ptr, tl.sum(dz, axis=2), tl.sum(dz * xhat, axis=2), at, tiles, True)
    dz = dz.reshape(BLOCK_C, BLOCK_M).to(dz_desc.dtype)
    dz_desc.store([n0, h0, w0, c0], tl.trans(dz).reshape(TILE_N, tiles.TILE_H, TILE_W, BLOCK_C))


@triton.jit(do_not_specialize=["N", "P", "Q", "first", "stream", "steps"])
def conv_input_grad_kernel(
    dy_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_K, BLOCK_C]; TURNED: [R * S, CI, CO], backwards
    x1_desc,  # [N, P, Q, C1] in boxes [PIECE_N, PIECE_H, PIECE_W, BLOCK_C]
    x2_desc,  # [N, P, Q, CI - C1] likewise, or None
    table_ptr,  # [N, 4, CI]: mean, rstd, g, b
    dz_desc,  # [N, P, Q, CI] likewise
    dy_small_desc,  # "ieee": second parts of dy and the filters, or None: they have not been split
    w_small_desc,
    partial_ptr,  # [N, K, 2, CI]
    parts_ptr,  # this and the next two as in `conv_forward_kernel`
    counters_ptr,
    steps,
    N,
    CO,
    P,
    Q,
    CI,
    C1,
    rng_ptr,  # int64 [2] or None: no dropout between act(z) and the convolution
    first,
    stream,
    drop,  # probability
    R: tl.constexpr,
    S: tl.constexpr,
    ACT: tl.constexpr,
    TURNED: tl.constexpr,  # filters as after `transpose_weights`
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # tiles one below the other
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    PIECE_N: tl.constexpr,  # a tile, or half of one: the epilogue needs twice the registers
    PIECE_H: tl.constexpr,
    PIECE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RAGGED: tl.constexpr,  # tiles as an even `conv.plain.tma_boxes.covering_box`
    STRADDLING: tl.constexpr,  # some channels of a tile may be x1's and some x2's
):
    await_inputs()
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    at = tile_origin(P, Q, CI, TILE_N, ROWS * TILE_H, TILE_W, BLOCK_C)
    n0, h0, w0, c0 = at
    # Load the epilogue's vectors here, so that the epilogue does not wait for them. Those of a
    # second piece's images are loaded when it is its turn
    norm = _load_table(table_ptr, n0, c0, N, CI, PIECE_N, BLOCK_C)
    start, end = 0, None
    if steps is not None:
        start, end, _, _, _, _ = steps_of_part(steps, R * S * tl.cdiv(CO, BLOCK_K), 0, 0)
    accs, small = _convolve(
        dy_desc, dy_small_desc, w_desc, w_small_desc, at, CO,
        Taps(R, S, R // 2, S // 2, 1, not TURNED), PRECISION, ROWS, BLOCK_M, BLOCK_C, BLOCK_K,
        start, end,
    )  # fmt: skip
    if PRECISION == "ieee":
        accs = (whole_sum(accs[0], small),)
    if counters_ptr is not None:
        tl.static_assert(ROWS == 1)
        if not leave_part(accs[0], parts_ptr, counters_ptr):
            return
        accs = (sum_of_parts(accs[0], parts_ptr),)
    PIECES: tl.constexpr = ROWS * BLOCK_M // (PIECE_N * PIECE_H * PIECE_W)
    if PIECES > ROWS:
        accs = tl.split(accs[0].reshape(BLOCK_C, 2, BLOCK_M // 2).permute(0, 2, 1))
    for i in tl.static_range(PIECES):
        n = n0 + i * PIECE_N if PIECE_N < TILE_N else n0
        w = w0 + i * PIECE_W if PIECE_W < TILE_W else w0
        h = h0 + i * PIECE_H if PIECE_N == TILE_N and PIECE_W == TILE_W else h0
        if PIECE_N < TILE_N and i > 0:
            norm = _load_table(table_ptr, n, c0, N, CI, PIECE_N, BLOCK_C)
        _finish_input_grad(
            accs[i], norm, x1_desc, x2_desc, dz_desc, partial_ptr, (n, h, w, c0), C1,
            (rng_ptr, first, stream, drop),
            OutputTiles(N, P, Q, CI, PIECE_N, PIECE_H, PIECE_W, BLOCK_C, RAGGED), ACT, STRADDLING,
        )  # fmt: skip
