"""The kernels of `norm_whole`, where the formulas are.

A program of the first has BLOCK_G groups of CG channels of one image, all its pixels, in registers:
BLOCK_G * BLOCK_J lanes of channels by BLOCK_P pixels.
"""

import triton
import triton.language as tl

from ..activations import activate
from ..dependent_launch import await_inputs
from ..norm.stream_kernels import affine
from .norm_statistics import covering_lanes, merge_channels, moments_of_partials


@triton.jit
def _sum_parts(
    parts_ptr,  # float32 [SPLITS, N, C, HW]
    bias_ptr,  # float32 [C]
    extra_bias_ptr,  # float32 [C] or None
    emb_ptr,  # [N, C] or None
    residual_ptr,  # [N, HW, C] or None
    y_ptr,  # [N, HW, C], out
    stride_emb,
    N,
    HW,
    C,
    n,
    offs_c,  # [L]
    offs_p,  # [P]
    mask_c,
    mask_p,
    SPLITS: tl.constexpr,
):
    """A tile of a SplitConv, written to y; float32 [L, P] of what was written."""
    mask = mask_c[:, None] & mask_p[None, :]
    terms = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    if extra_bias_ptr is not None:
        terms += tl.load(extra_bias_ptr + offs_c, mask=mask_c, other=0.0)
    if emb_ptr is not None:
        terms += tl.load(emb_ptr + n * stride_emb + offs_c, mask=mask_c, other=0.0)
    offs_y = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    acc = tl.zeros([offs_c.shape[0], offs_p.shape[0]], tl.float32) + terms[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
    offs = (n * C + offs_c)[:, None] * HW + offs_p[None, :]
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + split * (N * C).to(tl.int64) * HW + offs, mask=mask, other=0.0)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_y, y, mask=mask)
    return y.to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def sum_parts_kernel(
    parts_ptr,
    bias_ptr,
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    y_ptr,
    stride_emb,
    N,
    HW,
    C,
    CB,  # blocks of channels
    PB,  # blocks of pixels
    SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = pid // CB % PB * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (pid // CB // PB).to(tl.int64)
    _sum_parts(
        parts_ptr, bias_ptr, extra_bias_ptr, emb_ptr, residual_ptr, y_ptr, stride_emb, N, HW, C,
        n, offs_c, offs_p, offs_c < C, offs_p < HW, SPLITS,
    )  # fmt: skip


@triton.jit
def _over_groups(v, G: tl.constexpr, J: tl.constexpr):
    """The sum of v [G * J, P] over each group's lanes and pixels, for every lane."""
    total = tl.sum(tl.reshape(tl.sum(v, 1), [G, J]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, [G, J]), [G * J])


@triton.jit(do_not_specialize=["N"])
def norm_whole_kernel(
    x1_ptr,  # [N, HW, C1]; with SPLITS > 0 it is written
    parts_ptr,  # float32 [SPLITS, N, C1, HW], or None: x1 is read
    conv_bias_ptr,  # of the convolution, as the next three
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    x2_ptr,  # [N, HW, C - C1] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    a_ptr,  # [N, HW, C], out
    stride_emb,
    stride_scale,
    stride_shift,
    N,
    HW,
    C1,
    C,
    GB,
    eps,
    ACT: tl.constexpr,
    SPLITS: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    lanes = tl.arange(0, BLOCK_G * BLOCK_J)
    j = lanes % BLOCK_J
    offs_c = (pid % GB * BLOCK_G + lanes // BLOCK_J) * CG + j
    offs_p = tl.arange(0, BLOCK_P)
    mask_c = (j < CG) & (offs_c < C)
    mask_p = offs_p < HW
    mask = mask_c[:, None] & mask_p[None, :]
    first = mask_c & (offs_c < C1)
    if SPLITS > 0:
        x = _sum_parts(
            parts_ptr, conv_bias_ptr, extra_bias_ptr, emb_ptr, residual_ptr, x1_ptr, stride_emb,
            N, HW, C1, n, offs_c, offs_p, first, mask_p, SPLITS,
        )  # fmt: skip
    else:
        offs = (n * HW + offs_p)[None, :] * C1 + offs_c[:, None]
        x = tl.load(x1_ptr + offs, mask=first[:, None] & mask_p[None, :], other=0.0)
        x = x.to(tl.float32)
    if x2_ptr is not None:
        second = mask_c & (offs_c >= C1)
        offs = (n * HW + offs_p)[None, :] * (C - C1) + (offs_c - C1)[:, None]
        x2 = tl.load(x2_ptr + offs, mask=second[:, None] & mask_p[None, :], other=0.0)
        x = tl.where(second[:, None], x2.to(tl.float32), x)

    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    count = HW * CG * 1.0
    x = tl.where(mask, x, 0.0)
    mean = _over_groups(x, BLOCK_G, BLOCK_J) / count
    x = tl.where(mask, x - mean[:, None], 0.0)
    rest = _over_groups(x, BLOCK_G, BLOCK_J) / count  # what the sum has rounded off the mean
    x = tl.where(mask, x - rest[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(_over_groups(x * x, BLOCK_G, BLOCK_J) / count + eps)
    a = activate(x * (rstd * g)[:, None] + b[:, None], ACT)
    offs = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    tl.store(a_ptr + offs, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_sums_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C2] or None
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    a_ptr,  # [N, HW, C1 + C2], out
    stride_scale,
    stride_shift,
    pixels1,  # that the partials describe
    pixels2,
    HW,
    C1,
    C2,
    K,  # chunks of pixels
    CB1,  # blocks of channels in the first half
    CB,  # in both
    eps,
    ACT: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,  # at least as many groups as BLOCK_C channels belong to
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    pid_c = pid % CB
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    C = C1 + C2
    c0 = pid_c * BLOCK_C
    if pid_c >= CB1:
        c0 = C1 + (pid_c - CB1) * BLOCK_C
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    if pid_c < CB1:
        mask_c = offs_c < C1

    lanes, there = covering_lanes(c0, C, CG, BLOCK_G, BLOCK_J)
    mask = there & (lanes < C1)
    half_ptr = partial1_ptr + n * (K1 * 2) * C1
    mean, var = moments_of_partials(half_ptr, pixels1, C1, lanes, mask, K1, BLOCK_K1)
    if partial2_ptr is not None:
        mask = there & (lanes >= C1)
        half_ptr = partial2_ptr + n * (K2 * 2) * C2
        mean2, var2 = moments_of_partials(half_ptr, pixels2, C2, lanes - C1, mask, K2, BLOCK_K2)
        mean = tl.where(lanes >= C1, mean2, mean)
        var = tl.where(lanes >= C1, var2, var)
    group_mean, group_rstd = merge_channels(mean, var, there, eps, CG)
    group = offs_c // CG - c0 // CG
    mean_c = tl.gather(group_mean, group, 0)
    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    slope = g * tl.gather(group_rstd, group, 0)
    if pid_c < CB1:
        _apply_tiles(
            x1_ptr + offs_c, a_ptr + offs_c, C1, C, n, k, HW, mean_c, slope, b, mask_c, ACT,
            MASKED, TILES, BLOCK_P,
        )  # fmt: skip
    elif x2_ptr is not None:
        _apply_tiles(
            x2_ptr + (offs_c - C1), a_ptr + offs_c, C2, C, n, k, HW, mean_c, slope, b, mask_c,
            ACT, MASKED, TILES, BLOCK_P,
        )  # fmt: skip


@triton.jit
def _apply_tiles(
    x_ptrs,  # [BLOCK_C]: of the channels in pixel 0 of image 0
    a_ptrs,
    stride_x,  # of a pixel
    stride_a,
    n,
    k,
    HW,
    mean,
    slope,
    b,
    mask_c,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    offs_p = tl.arange(0, BLOCK_P)
    for i in range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        pixel = (n * HW + p0 + offs_p)[:, None]
        x = tl.load(x_ptrs[None, :] + pixel * stride_x, mask=mask).to(tl.float32)
        a = activate((x - mean[None, :]) * slope[None, :] + b[None, :], ACT)
        tl.store(a_ptrs[None, :] + pixel * stride_a, a.to(a_ptrs.dtype.element_ty), mask=mask)
