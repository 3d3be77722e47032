"""The kernels of `norm.inline_statistics`, where the formulas are.

A program has TILES tiles of BLOCK_P pixels by BLOCK_C channels of one half of the concatenation, as
in `norm.pass_kernels`, and makes of the partial sums what it needs of `norm.tables`: the statistics
of the BLOCK_G groups that its channels belong to, of up to BLOCK_J channels each.
"""

import triton
import triton.language as tl

from ..activations import activate
from ..reductions.tile_sum import sum_over_pixels
from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .coefficients import affine, store_table
from .statistics import (
    covering_lanes,
    merge_channels,
    moments_of_partials,
    store_affine_grads,
    sum_tiles,
)


@triton.jit
def _statistics(
    partial1_ptr,  # float32 [K1, 2, C1]
    partial2_ptr,  # float32 [K2, 2, C2] or None
    pixels1,
    pixels2,
    C1,
    C2,
    lanes,
    there,
    eps,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
):
    """mean and rstd of each group of an image, [BLOCK_G]."""
    mask = there & (lanes < C1)
    mean, var = moments_of_partials(partial1_ptr, pixels1, C1, lanes, mask, K1, BLOCK_K1)
    if partial2_ptr is not None:
        second = lanes >= C1
        mask = there & second
        mean2, var2 = moments_of_partials(partial2_ptr, pixels2, C2, lanes - C1, mask, K2, BLOCK_K2)
        mean = tl.where(second, mean2, mean)
        var = tl.where(second, var2, var)
    return merge_channels(mean, var, there, eps, CG)


@triton.jit
def _apply_folded_half(
    x_ptr,  # this half: [N, HW, CH]
    partial1_ptr,
    partial2_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    table_ptr,
    a_ptr,
    stride_scale,
    stride_shift,
    pixels1,
    pixels2,
    n,
    k,
    c0,  # first channel of the program, within the half
    border,  # first channel of the half
    HW,
    CH,
    C1,
    C2,
    eps,
    ACT: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    TF32: tl.constexpr,
):
    C = C1 + C2
    offs_p = tl.arange(0, BLOCK_P)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CH
    x_ptr += n * HW * CH
    a_ptr += n * HW * C + border
    offs = offs_p[:, None] * CH + offs_c[None, :]
    p0 = k * TILES * BLOCK_P
    mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
    x = tl.load(x_ptr + p0 * CH + offs, mask=mask)  # on its way while the statistics are made

    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift,
        n, border + offs_c, mask_c,
    )  # fmt: skip
    lanes, there = covering_lanes(border + c0, C, CG, BLOCK_G, BLOCK_J)
    if partial2_ptr is not None:
        partial2_ptr += n * (K2 * 2) * C2
    group_mean, group_rstd = _statistics(
        partial1_ptr + n * (K1 * 2) * C1, partial2_ptr, pixels1, pixels2, C1, C2, lanes, there, eps,
        K1, K2, CG, BLOCK_K1, BLOCK_K2,
    )  # fmt: skip
    group = (border + offs_c) // CG - (border + c0) // CG
    mean = tl.gather(group_mean, group, 0)
    rstd = tl.gather(group_rstd, group, 0)
    if k == 0:
        row_ptrs = table_ptr + n * 4 * C + border + offs_c
        store_table(row_ptrs, C, mean, rstd, g, b, mask_c)
    slope = rstd * g
    offs_a = offs_p[:, None] * C + offs_c[None, :]
    for i in tl.static_range(TILES):
        if i > 0:
            p0 += BLOCK_P
            mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
            x = tl.load(x_ptr + p0 * CH + offs, mask=mask)
        # x - mean first: x slope + (b - mean slope) would cancel when the mean is large
        a = activate((x.to(tl.float32) - mean[None, :]) * slope[None, :] + b[None, :], ACT)
        tl.store(a_ptr + p0 * C + offs_a, as_operand(a, a_ptr.dtype.element_ty, TF32), mask=mask)


@triton.jit
def norm_apply_inline_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C2] or None
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    table_ptr,  # float32 [N, 4, C]
    a_ptr,  # [N, HW, C]
    stride_scale,
    stride_shift,
    pixels1,  # that the partials describe
    pixels2,
    HW,
    C1,
    C2,
    K,  # programs that share the pixels of an image
    CB1,
    CB,
    eps,
    ACT: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # as in apply
    pid_c = pid % CB
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    if pid_c < CB1:
        _apply_folded_half(
            x1_ptr, partial1_ptr, partial2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
            table_ptr, a_ptr, stride_scale, stride_shift, pixels1, pixels2,
            n, k, pid_c * BLOCK_C, 0, HW, C1, C1, C2, eps,
            ACT, K1, K2, CG, MASKED, TILES, BLOCK_P, BLOCK_C, BLOCK_G, BLOCK_J, BLOCK_K1, BLOCK_K2,
            TF32,
        )  # fmt: skip
    elif x2_ptr is not None:
        _apply_folded_half(
            x2_ptr, partial1_ptr, partial2_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
            table_ptr, a_ptr, stride_scale, stride_shift, pixels1, pixels2,
            n, k, (pid_c - CB1) * BLOCK_C, C1, HW, C2, C1, C2, eps,
            ACT, K1, K2, CG, MASKED, TILES, BLOCK_P, BLOCK_C, BLOCK_G, BLOCK_J, BLOCK_K1, BLOCK_K2,
            TF32,
        )  # fmt: skip


@triton.jit
def folded_coefficients(
    partial_ptr,  # float32 [N, KZ, 2, C]: of dz
    input_partial_ptr,  # float32 [N, KX, 2, C]: of x, or None: no sums of dx
    table_ptr,  # float32 [N, 4, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    rows_ptr,  # float32 [N, ROWS, C], as in `norm_grad_table_kernel`
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    d_emb_ptr,  # [N, C] or None
    stride_scale,
    stride_dscale,
    stride_dshift,
    stride_demb,
    n,  # int64
    c0,
    first_of_image,  # whether to write what is not returned
    HW,
    C,
    ROWS: tl.constexpr,
    KZ: tl.constexpr,
    KX: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_KZ: tl.constexpr,
    BLOCK_KX: tl.constexpr,
):
    """p, q and r of channels c0 .. c0 + BLOCK_C, as those of `norm_grad_table_kernel`."""
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    lanes, there = covering_lanes(c0, C, CG, BLOCK_G, BLOCK_J)
    row_ptr = table_ptr + n * 4 * C + lanes
    mean = tl.load(row_ptr, mask=there, other=0.0)
    rstd = tl.load(row_ptr + C, mask=there, other=0.0)
    g = tl.load(row_ptr + 2 * C, mask=there, other=0.0)
    partial_ptr += n * (KZ * 2) * C
    d = sum_tiles(partial_ptr, C, None, lanes, there, KZ, BLOCK_KZ)
    e = sum_tiles(partial_ptr + C, C, None, lanes, there, KZ, BLOCK_KZ)
    total = HW * 1.0 * CG
    m1 = tl.sum(g * d, 1, keep_dims=True) / total
    m2 = tl.sum(g * e, 1, keep_dims=True) / total
    q = -rstd * rstd * m2
    r = -rstd * m1 - q * mean

    # q and r are the same in all channels of a group: take them from the first
    first = tl.arange(0, BLOCK_J)[None, :] == 0
    group = offs_c // CG - c0 // CG
    q_c = tl.gather(tl.sum(tl.where(first, q, 0.0), 1), group, 0)
    r_c = tl.gather(tl.sum(tl.where(first, r, 0.0), 1), group, 0)
    row_ptr = table_ptr + n * 4 * C + offs_c
    p_c = tl.load(row_ptr + C, mask=mask_c, other=0.0)
    p_c *= tl.load(row_ptr + 2 * C, mask=mask_c, other=0.0)

    if first_of_image:
        own = there & (lanes >= c0) & (lanes < c0 + BLOCK_C)
        one_scale, _ = affine(None, None, scale_ptr, None, stride_scale, 0, n, lanes, own)
        out_ptr = rows_ptr + n * (ROWS * C) + lanes
        store_affine_grads(
            d, e, one_scale, out_ptr, weight_ptr, bias_ptr, d_scale_ptr, d_shift_ptr,
            stride_dscale, stride_dshift, n, lanes, own, C,
        )  # fmt: skip
        if input_partial_ptr is not None:
            # of x - mean: q (sum of x) and r H W would cancel when the mean is large
            less = (HW // KX) * 1.0 * mean
            input_ptr = input_partial_ptr + n * (KX * 2) * C
            sum_x = sum_tiles(input_ptr, C, less, lanes, own, KX, BLOCK_KX)
            dx_sum = rstd * g * d + q * sum_x - rstd * m1 * HW
            tl.store(out_ptr + 2 * C, dx_sum, mask=own)
            if d_emb_ptr is not None:
                d_emb = dx_sum.to(d_emb_ptr.dtype.element_ty)
                tl.store(d_emb_ptr + n * stride_demb + lanes, d_emb, mask=own)
    return p_c, q_c, r_c


@triton.jit
def norm_dx_inline_kernel(
    dz_ptr,  # [N, HW, C], as the four below
    x_ptr,
    add_ptr,  # or None
    add_second_ptr,  # or None
    dx_ptr,
    sums_ptr,  # float32 [N, K, C] or None
    partial_ptr,  # float32 [N, KZ, 2, C]: of dz
    input_partial_ptr,  # float32 [N, KX, 2, C]: of x, or None: no sums of dx
    table_ptr,  # float32 [N, 4, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    rows_ptr,  # float32 [N, ROWS, C], as in `norm_grad_table_kernel`
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    d_emb_ptr,  # [N, C] or None
    stride_scale,
    stride_dscale,
    stride_dshift,
    stride_demb,
    HW,
    C,
    K,  # programs that share the pixels of an image
    CB,
    ROWS: tl.constexpr,
    KZ: tl.constexpr,
    KX: tl.constexpr,
    CG: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_KZ: tl.constexpr,
    BLOCK_KX: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # as in apply
    c0 = pid % CB * BLOCK_C
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs = tl.arange(0, BLOCK_P)[:, None] * C + offs_c[None, :]
    p0 = k * TILES * BLOCK_P
    mask = (tl.arange(0, BLOCK_P) < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
    here = (n * HW + p0) * C
    dz = tl.load(dz_ptr + here + offs, mask=mask)  # on its way while the sums are made
    x = tl.load(x_ptr + here + offs, mask=mask)

    p_c, q_c, r_c = folded_coefficients(
        partial_ptr, input_partial_ptr, table_ptr, weight_ptr, bias_ptr, scale_ptr, rows_ptr,
        d_scale_ptr, d_shift_ptr, d_emb_ptr, stride_scale, stride_dscale, stride_dshift,
        stride_demb, n, c0, k == 0, HW, C,
        ROWS, KZ, KX, CG, BLOCK_C, BLOCK_G, BLOCK_J, BLOCK_KZ, BLOCK_KX,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for i in tl.static_range(TILES):
        if i > 0:
            here += BLOCK_P * C
            rest = HW - p0 - i * BLOCK_P
            mask = (tl.arange(0, BLOCK_P) < rest)[:, None] & mask_c[None, :] if MASKED else None
            dz = tl.load(dz_ptr + here + offs, mask=mask)
            x = tl.load(x_ptr + here + offs, mask=mask)
        dx = p_c[None, :] * dz.to(tl.float32) + (q_c[None, :] * x.to(tl.float32) + r_c[None, :])
        if add_ptr is not None:
            dx += tl.load(add_ptr + here + offs, mask=mask).to(tl.float32)
        if add_second_ptr is not None:
            dx += tl.load(add_second_ptr + here + offs, mask=mask).to(tl.float32)
        tl.store(dx_ptr + here + offs, as_operand(dx, dx_ptr.dtype.element_ty, TF32), mask=mask)
        if sums_ptr is not None:
            acc += tl.where(mask, dx, 0.0) if MASKED else dx
    if sums_ptr is not None:
        tl.store(
            sums_ptr + (n * K + k) * C + offs_c,
            sum_over_pixels(acc, dz_ptr.dtype.element_ty),
            mask=mask_c,
        )
