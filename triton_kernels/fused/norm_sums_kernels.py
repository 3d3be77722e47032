"""The kernel of `norm_of_sums`: mean and variance from partial sums, and act(norm(x)) by them."""

import triton
import triton.language as tl

from ..activations import activate
from ..dependent_launch import await_inputs
from ..norm.stream_kernels import affine, modulate
from .norm_statistics import (
    covering_lanes,
    each_lane,
    merge_channels,
    moments_at_once,
    moments_of_partials,
)


@triton.jit
def _moments(
    partial_ptr,
    pixels,
    C,
    offs_c,  # [L]
    mask_c,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """mean and variance of each channel, [L], from float32 [K, 2, C]"""
    if K <= BLOCK_K:
        return moments_at_once(partial_ptr, pixels, C, offs_c, mask_c, K, BLOCK_K)
    else:
        mean, var = moments_of_partials(
            partial_ptr, pixels, C, offs_c[None, :], mask_c[None, :], K, BLOCK_K
        )
        return tl.reshape(mean, offs_c.shape), tl.reshape(var, offs_c.shape)


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
    g, b = affine(weight_ptr, bias_ptr, None, None, 0, 0, n, offs_c, mask_c)  # parameters
    await_inputs()
    # a single tile is asked for before the sums
    if TILES == 1:
        if x2_ptr is None:
            x = _load_tile(x1_ptr + offs_c, C1, n, k, HW, mask_c, MASKED, BLOCK_P)
        elif pid_c < CB1:
            x = _load_tile(x1_ptr + offs_c, C1, n, k, HW, mask_c, MASKED, BLOCK_P)
        else:
            x = _load_tile(x2_ptr + (offs_c - C1), C2, n, k, HW, mask_c, MASKED, BLOCK_P)
    g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)

    if BLOCK_G * BLOCK_J == BLOCK_C:  # of whole groups, in one of the halves
        there = tl.full([BLOCK_G, BLOCK_J], True, tl.int1)
        if partial2_ptr is None:
            mean, var = _moments(
                partial1_ptr + n * (K1 * 2) * C1, pixels1, C1, offs_c, mask_c, K1, BLOCK_K1
            )
        elif pid_c < CB1:
            mean, var = _moments(
                partial1_ptr + n * (K1 * 2) * C1, pixels1, C1, offs_c, mask_c, K1, BLOCK_K1
            )
        else:
            mean, var = _moments(
                partial2_ptr + n * (K2 * 2) * C2, pixels2, C2, offs_c - C1, mask_c, K2, BLOCK_K2
            )
    else:
        lanes, there = covering_lanes(c0, C, CG, BLOCK_G, BLOCK_J)
        lanes = tl.reshape(lanes, [BLOCK_G * BLOCK_J])
        inside = tl.reshape(there, [BLOCK_G * BLOCK_J])
        mask = inside & (lanes < C1)
        mean, var = _moments(
            partial1_ptr + n * (K1 * 2) * C1, pixels1, C1, lanes, mask, K1, BLOCK_K1
        )
        if partial2_ptr is not None:
            mask = inside & (lanes >= C1)
            mean2, var2 = _moments(
                partial2_ptr + n * (K2 * 2) * C2, pixels2, C2, lanes - C1, mask, K2, BLOCK_K2
            )
            mean = tl.where(lanes >= C1, mean2, mean)
            var = tl.where(lanes >= C1, var2, var)
    mean, var = tl.reshape(mean, [BLOCK_G, BLOCK_J]), tl.reshape(var, [BLOCK_G, BLOCK_J])
    group_mean, group_rstd = merge_channels(mean, var, there, eps, CG)
    if BLOCK_G * BLOCK_J == BLOCK_C:
        mean_c = each_lane(group_mean, BLOCK_G, BLOCK_J)
        slope = g * each_lane(group_rstd, BLOCK_G, BLOCK_J)
    else:
        group = offs_c // CG - c0 // CG
        mean_c = tl.gather(group_mean, group, 0)
        slope = g * tl.gather(group_rstd, group, 0)
    if TILES == 1:
        _store_tile(x, a_ptr + offs_c, C, n, k, HW, mean_c, slope, b, mask_c, ACT, MASKED, BLOCK_P)
    elif pid_c < CB1:
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
def _load_tile(
    x_ptrs,  # [BLOCK_C]: of the channels in pixel 0 of image 0
    stride,  # of a pixel
    n,
    i,
    HW,
    mask_c,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Tile i of an image."""
    offs_p = i * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = (offs_p < HW)[:, None] & mask_c[None, :] if MASKED else None
    return tl.load(x_ptrs[None, :] + (n * HW + offs_p)[:, None] * stride, mask=mask)


@triton.jit
def _store_tile(
    x,
    a_ptrs,  # [BLOCK_C]: of the channels in pixel 0 of image 0
    stride,  # of a pixel
    n,
    i,
    HW,
    mean,
    slope,
    b,
    mask_c,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """act(norm(x)) of tile i."""
    offs_p = i * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = (offs_p < HW)[:, None] & mask_c[None, :] if MASKED else None
    x = x.to(tl.float32)
    a = activate((x - mean[None, :]) * slope[None, :] + b[None, :], ACT)
    ptrs = a_ptrs[None, :] + (n * HW + offs_p)[:, None] * stride
    tl.store(ptrs, a.to(a_ptrs.dtype.element_ty), mask=mask)


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
    for i in range(TILES):
        tile = k * TILES + i
        x = _load_tile(x_ptrs, stride_x, n, tile, HW, mask_c, MASKED, BLOCK_P)
        _store_tile(x, a_ptrs, stride_a, n, tile, HW, mean, slope, b, mask_c, ACT, MASKED, BLOCK_P)
