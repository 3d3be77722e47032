"""The kernel of `norm_conv`, where the formulas are."""

import triton
import triton.language as tl

from ..activations import activate
from ..dependent_launch import await_inputs
from ..norm.stream_kernels import affine
from .norm_table_kernels import _moments


@triton.jit
def _channels(
    partial_ptr,  # float32 [K, 2, CH]
    pixels,
    CH,
    index,  # [G, J], of channels
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_CH: tl.constexpr,
):
    """mean and variance of these channels of an image of so many pixels."""
    offs = tl.arange(0, BLOCK_CH)[None, :]
    mean, var = _moments(partial_ptr, pixels, CH, offs, offs < CH, K, BLOCK_K)
    LANES: tl.constexpr = index.shape[0] * index.shape[1]
    flat = tl.reshape(index, [LANES])
    mean = tl.gather(tl.reshape(mean, [BLOCK_CH]), flat, 0)
    var = tl.gather(tl.reshape(var, [BLOCK_CH]), flat, 0)
    return tl.reshape(mean, index.shape), tl.reshape(var, index.shape)


@triton.jit
def _table(
    partial1_ptr,
    partial2_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    stride_scale,
    stride_shift,
    n,
    pixels1,
    pixels2,
    C1,
    C2,
    eps,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK_C1: tl.constexpr,
    BLOCK_C2: tl.constexpr,
):
    """mean, rstd g and b of channel j of group i at [i BLOCK_J + j]."""
    C = C1 + C2
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    offs_c = tl.arange(0, BLOCK_G)[:, None] * CG + offs_j
    there = (offs_j < CG) & (offs_c < C)
    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, there
    )
    first = tl.minimum(offs_c, C1 - 1)
    mean, var = _channels(
        partial1_ptr + n * (K1 * 2) * C1, pixels1, C1, first, K1, BLOCK_K1, BLOCK_C1
    )
    if partial2_ptr is not None:
        second = tl.minimum(tl.maximum(offs_c - C1, 0), C2 - 1)
        mean2, var2 = _channels(
            partial2_ptr + n * (K2 * 2) * C2, pixels2, C2, second, K2, BLOCK_K2, BLOCK_C2
        )
        mean = tl.where(offs_c >= C1, mean2, mean)
        var = tl.where(offs_c >= C1, var2, var)
    group_mean = tl.sum(tl.where(there, mean, 0.0), 1, keep_dims=True) / CG
    delta = tl.where(there, mean - group_mean, 0.0)
    group_mean += tl.sum(delta, 1, keep_dims=True) / CG
    delta = tl.where(there, mean - group_mean, 0.0)
    group_var = tl.sum(tl.where(there, var + delta * delta, 0.0), 1, keep_dims=True) / CG
    slope = g / tl.sqrt(group_var + eps)
    LANES: tl.constexpr = BLOCK_G * BLOCK_J
    mean = tl.reshape(tl.broadcast_to(group_mean, [BLOCK_G, BLOCK_J]), [LANES])
    return mean, tl.reshape(slope, [LANES]), tl.reshape(b + tl.zeros_like(slope), [LANES])


@triton.jit
def _pixel(n, h, w, H, W: tl.constexpr, UP: tl.constexpr):
    """Where it lies; with UP in an image of half the size, of which it is the nearest."""
    if UP:
        return (n * (H // 2) + h // 2) * (W // 2) + w // 2
    else:
        return (n * H + h) * W + w


@triton.jit
def _multiply_activated(
    acc0,  # float32 [BLOCK_C, BLOCK_M], for column 0 of the filter
    acc1,
    acc2,
    x_ptr,  # [N, H, W, CH], one half of the concatenation, or [N, H / 2, W / 2, CH] with UP
    weight_ptr,  # [CO, 9, C]
    mean,  # of `_table`
    slope,
    b,
    n,
    row,  # [BLOCK_M]
    col,
    offs_co,
    mask_co,
    border,  # first channel of this half
    CH,
    C,
    H,
    UP: tl.constexpr,
    ACT: tl.constexpr,
    CG: tl.constexpr,
    PRECISION: tl.constexpr,
    W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    offs_k = tl.arange(0, BLOCK_K)
    filters = weight_ptr + offs_co[:, None] * (9 * C) + offs_k[None, :]
    for k0 in range(0, CH, BLOCK_K):
        c = border + k0 + offs_k
        lane = c // CG * BLOCK_J + c % CG
        mean_k = tl.gather(mean, lane, 0)[None, :]
        slope_k = tl.gather(slope, lane, 0)[None, :]
        b_k = tl.gather(b, lane, 0)[None, :]
        for r in tl.static_range(3):
            h = row + (r - 1)
            inside = ((h >= 0) & (h < H))[:, None]
            pixel = _pixel(n, h, col, H, W, UP)
            x = tl.load(
                x_ptr + pixel[:, None] * CH + (k0 + offs_k)[None, :], mask=inside, other=0.0
            )
            a = activate((x.to(tl.float32) - mean_k) * slope_k + b_k, ACT)
            a = tl.trans(tl.where(inside, a, 0.0).to(x.dtype))
            w_ptrs = filters + (r * 3 * C + border + k0)
            w0 = tl.load(w_ptrs, mask=mask_co[:, None], other=0.0)
            w1 = tl.load(w_ptrs + C, mask=mask_co[:, None], other=0.0)
            w2 = tl.load(w_ptrs + 2 * C, mask=mask_co[:, None], other=0.0)
            acc0 = tl.dot(w0, a, acc0, input_precision=PRECISION)
            acc1 = tl.dot(w1, a, acc1, input_precision=PRECISION)
            acc2 = tl.dot(w2, a, acc2, input_precision=PRECISION)
    return acc0, acc1, acc2


@triton.jit
def _multiply_pointwise(
    acc,
    x_ptr,  # [N, H, W, C]
    weight_ptr,  # [CO, C], rows stride_w apart
    pixel,
    offs_co,
    mask_co,
    stride_w,
    C,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile plus a 1x1 convolution."""
    offs_k = tl.arange(0, BLOCK_K)
    for k0 in range(0, C, BLOCK_K):
        x = tl.load(x_ptr + pixel[:, None] * C + (k0 + offs_k)[None, :])
        w_ptrs = weight_ptr + offs_co[:, None] * stride_w + (k0 + offs_k)[None, :]
        w = tl.load(w_ptrs, mask=mask_co[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _norm_conv_kernel(
    x1_ptr,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with UP1
    x2_ptr,  # [N, H, W, C2] or None
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    norm_weight_ptr,  # [C1 + C2] or None, as the next three
    norm_bias_ptr,
    scale_ptr,
    shift_ptr,
    weight_ptr,  # [CO, 9, C1 + C2]
    bias_ptr,  # float32 [CO]
    extra_bias_ptr,  # float32 [CO] or None
    emb_ptr,  # float32 [N, CO] or None
    residual_ptr,  # [N, H, W, CO] or None
    extra1_ptr,  # [N, H, W, E1], or half the size with UP_E1, or None
    extra1_weight_ptr,  # [CO, E1]
    extra2_ptr,  # a second such pair, or None
    extra2_weight_ptr,
    y_ptr,  # [N, H, W, CO], out
    sums_ptr,  # float32 [N, H * W / BLOCK_M, 2, CO], out
    stride_scale,
    stride_shift,
    stride_emb,
    stride_w1,
    stride_w2,
    pixels1,  # that the partials describe
    pixels2,
    H,
    C1,
    C2,
    CO,
    eps,
    E1,
    E2,
    UP1: tl.constexpr,
    UP_E1: tl.constexpr,
    UP_E2: tl.constexpr,
    ACT: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    PRECISION: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK_C1: tl.constexpr,
    BLOCK_C2: tl.constexpr,
):
    await_inputs()
    ROWS: tl.constexpr = BLOCK_M // W
    pid = tl.program_id(0)
    blocks = tl.cdiv(CO, BLOCK_C)
    tile = pid // blocks
    n = (tile // (H // ROWS)).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    row = tile % (H // ROWS) * ROWS + offs_m // W
    col = offs_m % W
    offs_co = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_co = offs_co < CO
    C = C1 + C2

    mean, slope, b = _table(
        partial1_ptr, partial2_ptr, norm_weight_ptr, norm_bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, n, pixels1, pixels2, C1, C2, eps,
        K1, K2, CG, BLOCK_G, BLOCK_J, BLOCK_K1, BLOCK_K2, BLOCK_C1, BLOCK_C2,
    )  # fmt: skip
    acc0 = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    acc0, acc1, acc2 = _multiply_activated(
        acc0, acc1, acc2, x1_ptr, weight_ptr, mean, slope, b, n, row, col, offs_co, mask_co,
        0, C1, C, H, UP1, ACT, CG, PRECISION, W, BLOCK_K, BLOCK_J,
    )  # fmt: skip
    if x2_ptr is not None:
        acc0, acc1, acc2 = _multiply_activated(
            acc0, acc1, acc2, x2_ptr, weight_ptr, mean, slope, b, n, row, col, offs_co, mask_co,
            C1, C2, C, H, False, ACT, CG, PRECISION, W, BLOCK_K, BLOCK_J,
        )  # fmt: skip
    pixel = (n * H + row) * W + col
    if extra1_ptr is not None:
        acc1 = _multiply_pointwise(
            acc1, extra1_ptr, extra1_weight_ptr, _pixel(n, row, col, H, W, UP_E1), offs_co,
            mask_co, stride_w1, E1, PRECISION, BLOCK_K,
        )  # fmt: skip
    if extra2_ptr is not None:
        acc1 = _multiply_pointwise(
            acc1, extra2_ptr, extra2_weight_ptr, _pixel(n, row, col, H, W, UP_E2), offs_co,
            mask_co, stride_w2, E2, PRECISION, BLOCK_K,
        )  # fmt: skip

    # a pixel's sums are in three columns
    left = tl.broadcast_to(tl.maximum(offs_m - 1, 0)[None, :], [BLOCK_C, BLOCK_M])
    right = tl.broadcast_to(tl.minimum(offs_m + 1, BLOCK_M - 1)[None, :], [BLOCK_C, BLOCK_M])
    acc = acc1 + tl.where((col > 0)[None, :], tl.gather(acc0, left, 1), 0.0)
    acc += tl.where((col < W - 1)[None, :], tl.gather(acc2, right, 1), 0.0)

    terms = tl.load(bias_ptr + offs_co, mask=mask_co, other=0.0)
    if extra_bias_ptr is not None:
        terms += tl.load(extra_bias_ptr + offs_co, mask=mask_co, other=0.0)
    if emb_ptr is not None:
        terms += tl.load(emb_ptr + n * stride_emb + offs_co, mask=mask_co, other=0.0)
    acc += terms[:, None]
    offs_y = pixel[None, :] * CO + offs_co[:, None]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs_y, mask=mask_co[:, None], other=0.0)
        acc += residual.to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_y, y, mask=mask_co[:, None])
    # about the mean of the tile, since a difference of large sums would cancel
    v = y.to(tl.float32)
    total = tl.sum(v, 1)
    v -= (total / BLOCK_M)[:, None]
    sums_ptr += tile.to(tl.int64) * 2 * CO + offs_co
    tl.store(sums_ptr, total, mask=mask_co)
    tl.store(sums_ptr + CO, tl.sum(v * v, 1), mask=mask_co)
