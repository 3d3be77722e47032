"""The kernels of `norm.tables`, where the formulas are.

A program has BLOCK_G groups of CG = C/G channels in BLOCK_J >= CG lanes each; GB programs make a
sample. What is kept of a channel is [BLOCK_G, BLOCK_J], so that the sum over a group is a sum over
rows. These kernels are latency and nothing else: few lanes a program, all loads at its beginning.
"""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from .coefficients import affine, load_table
from .statistics import moments_of_partials, store_affine_grads, sum_tiles


@triton.jit
def _lanes(pid, C, GB, CG: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr):
    """The channels of a program and which of them there are, both [BLOCK_G, BLOCK_J]."""
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    offs_c = (pid % GB * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]) * CG + offs_j
    return offs_c, (offs_j < CG) & (offs_c < C)


@triton.jit
def norm_table_kernel(
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C - C1] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    table_ptr,  # float32 [N, 4, C]
    second_ptr,  # float32 [N, 4, C - C1] or None
    mean_ptr,  # float32 [N, G] or None
    rstd_ptr,  # likewise
    stride_scale,
    stride_shift,
    pixels1,
    pixels2,
    C1,
    C,
    GB,
    eps,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_c, mask_c = _lanes(pid, C, GB, CG, BLOCK_G, BLOCK_J)
    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )

    # most programs have channels of one half only, and read no other; zeros stand for the rest
    c0 = pid % GB * (BLOCK_G * CG)
    in_first = True if partial2_ptr is None else c0 < C1
    mean = tl.zeros(offs_c.shape, tl.float32)
    var = mean
    if in_first:
        half_ptr = partial1_ptr + n * (K1 * 2) * C1
        mask = mask_c & (offs_c < C1)
        mean, var = moments_of_partials(half_ptr, pixels1, C1, offs_c, mask, K1, BLOCK_K1)
    if partial2_ptr is not None:
        if c0 + BLOCK_G * CG > C1:
            C2 = C - C1
            half_ptr = partial2_ptr + n * (K2 * 2) * C2
            mask = mask_c & (offs_c >= C1)
            mean2, var2 = moments_of_partials(
                half_ptr, pixels2, C2, offs_c - C1, mask, K2, BLOCK_K2
            )
            mean += mean2
            var += var2

    # each channel of a group has as many pixels as the others, so that all weigh the same
    group_mean = tl.sum(tl.where(mask_c, mean, 0.0), 1, keep_dims=True) / CG
    delta = tl.where(mask_c, mean - group_mean, 0.0)
    group_mean += tl.sum(delta, 1, keep_dims=True) / CG
    group_var = tl.sum(tl.where(mask_c, var + delta * delta, 0.0), 1, keep_dims=True) / CG
    rstd = 1.0 / tl.sqrt(group_var + eps)

    out_ptr = table_ptr + n * 4 * C + offs_c
    tl.store(out_ptr, group_mean + tl.zeros_like(mean), mask=mask_c)
    tl.store(out_ptr + C, rstd + tl.zeros_like(mean), mask=mask_c)
    tl.store(out_ptr + 2 * C, g, mask=mask_c)
    tl.store(out_ptr + 3 * C, b, mask=mask_c)
    if second_ptr is not None:
        half = C - C1
        mask_c &= offs_c >= C1
        out_ptr = second_ptr + n * 4 * half + offs_c - C1
        tl.store(out_ptr, group_mean + tl.zeros_like(mean), mask=mask_c)
        tl.store(out_ptr + half, rstd + tl.zeros_like(mean), mask=mask_c)
        tl.store(out_ptr + 2 * half, g, mask=mask_c)
        tl.store(out_ptr + 3 * half, b, mask=mask_c)
    if mean_ptr is not None:
        offs_g = pid % GB * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
        there = offs_g * CG < C
        offs_g += n * (C // CG)
        tl.store(mean_ptr + offs_g, group_mean, mask=there)
        tl.store(rstd_ptr + offs_g, rstd, mask=there)


@triton.jit
def norm_grad_table_kernel(
    partial_ptr,  # float32 [N, K, 2, C]: of dz
    input_partial_ptr,  # float32 [N, KX, 2, C]: of x, or None: no sums of dx
    table_ptr,  # float32 [N, 4, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    coeff_ptr,  # float32 [N, 3, C]
    rows_ptr,  # float32 [N, ROWS, C]: (1 + scale) E, (1 + scale) D and the sum of dx
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    d_emb_ptr,  # [N, C] or None: the sum of dx
    stride_scale,
    stride_dscale,
    stride_dshift,
    stride_demb,
    pixels,
    C,
    GB,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,  # r is for dx = p dz + q (x - mean) + r
    K: tl.constexpr,
    KX: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_KX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_c, mask_c = _lanes(pid, C, GB, CG, BLOCK_G, BLOCK_J)
    mean, rstd, g, _ = load_table(table_ptr + n * 4 * C + offs_c, C, mask_c)
    one_scale, _ = affine(None, None, scale_ptr, None, stride_scale, 0, n, offs_c, mask_c)

    d = sum_tiles(partial_ptr + n * (K * 2) * C, C, None, offs_c, mask_c, K, BLOCK_K)
    e = sum_tiles(partial_ptr + n * (K * 2) * C + C, C, None, offs_c, mask_c, K, BLOCK_K)
    if input_partial_ptr is not None:
        # of x - mean: q (sum of x) and r H W would cancel when the mean is large
        per_tile = (pixels // KX) * 1.0 * mean
        sum_x = sum_tiles(
            input_partial_ptr + n * (KX * 2) * C, C, per_tile, offs_c, mask_c, KX, BLOCK_KX
        )

    total = pixels * 1.0 * CG
    m1 = tl.sum(g * d, 1, keep_dims=True) / total
    m2 = tl.sum(g * e, 1, keep_dims=True) / total
    p = rstd * g
    q = -rstd * rstd * m2
    out_ptr = coeff_ptr + n * 3 * C + offs_c
    tl.store(out_ptr, p, mask=mask_c)
    tl.store(out_ptr + C, q, mask=mask_c)
    tl.store(out_ptr + 2 * C, -rstd * m1 if CENTRED else -rstd * m1 - q * mean, mask=mask_c)

    out_ptr = rows_ptr + n * (ROWS * C) + offs_c
    store_affine_grads(
        d, e, one_scale, out_ptr, weight_ptr, bias_ptr, d_scale_ptr, d_shift_ptr,
        stride_dscale, stride_dshift, n, offs_c, mask_c, C,
    )  # fmt: skip
    if input_partial_ptr is not None:
        dx_sum = p * d + q * sum_x - rstd * m1 * pixels
        tl.store(out_ptr + 2 * C, dx_sum, mask=mask_c)
        if d_emb_ptr is not None:
            d_emb = dx_sum.to(d_emb_ptr.dtype.element_ty)
            tl.store(d_emb_ptr + n * stride_demb + offs_c, d_emb, mask=mask_c)
