"""The kernels of `norm.inline_statistics`, where the formulas are.

A program has TILES tiles of BLOCK_P pixels by BLOCK_C channels of one half of the concatenation, as
in `norm.pass_kernels`, and makes of the partial sums what it needs of `norm.tables`: the statistics
of the BLOCK_G groups that its channels belong to, of up to BLOCK_J channels each.
"""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from .coefficients import affine
from .pass_kernels import store_dx, store_sums
from .statistics import covering_lanes, store_affine_grads, sum_tiles


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
        acc = store_dx(
            dx, acc, add_ptr, add_second_ptr, None, dx_ptr, sums_ptr, here, offs, mask, MASKED,
            TF32,
        )  # fmt: skip
    store_sums(sums_ptr, (n * K + k) * C + offs_c, acc, dz_ptr.dtype.element_ty, mask_c)
