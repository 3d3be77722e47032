"""Statistics of a norm from the partial sums of tiles, as `norm.tables` says what these are: jit
functions of the kernels of `norm`.

What is kept of a channel is [BLOCK_G, BLOCK_J], groups by their channels, so that the sum over a
group is a sum over rows.
"""

import triton
import triton.language as tl

from .coefficients import affine


@triton.jit
def covering_lanes(c0, C, CG: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr):
    """The channels of the groups from that of channel c0 on, and which of them there are, both
    [BLOCK_G, BLOCK_J]."""
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    lanes = (c0 // CG + tl.arange(0, BLOCK_G)[:, None]) * CG + offs_j
    return lanes, (offs_j < CG) & (lanes < C)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def each_lane(v, G: tl.constexpr, J: tl.constexpr):
    """[G], of groups, to [G * J], of their channels."""
    return tl.reshape(tl.broadcast_to(v[:, None], [G, J]), [G * J])


@triton.jit
def moments_of_partials(
    partial_ptr,  # float32 [K, 2, C]
    pixels,
    C,
    offs_c,
    mask_c,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """mean and variance of each channel of an image of so many pixels."""
    offs_k = tl.arange(0, BLOCK_K)[:, None, None]
    offs = offs_k * (2 * C) + offs_c[None, :, :]
    per_tile = (pixels // K) * 1.0
    inverse = 1.0 / per_tile
    mean = tl.zeros([BLOCK_K, offs_c.shape[0], offs_c.shape[1]], tl.float32)  # of a lane's tiles
    between = tl.zeros(mean.shape, tl.float32)  # M2 of the means of a lane's tiles
    within = tl.zeros(mean.shape, tl.float32)  # the sum of their M2
    for i in range((K + BLOCK_K - 1) // BLOCK_K):
        k0 = i * BLOCK_K
        mask = (offs_k < K - k0) & mask_c[None, :, :]
        tile_sum = tl.load(partial_ptr + k0 * 2 * C + offs, mask=mask, other=0.0)
        within += tl.load(partial_ptr + (k0 * 2 + 1) * C + offs, mask=mask, other=0.0)
        # Welford: only the last round has dead lanes
        delta = tl.where(mask, tile_sum * inverse - mean, 0.0)
        step = delta * (1.0 / (i + 1))
        mean += step
        between += delta * (delta - step)

    # Chan: merge the lanes. The second sum also returns what the first has rounded off the mean.
    count = (K - offs_k + BLOCK_K - 1) // BLOCK_K * 1.0
    total_mean = tl.sum(mean * count, 0) * (1.0 / K)
    delta = mean - total_mean[None, :, :]
    weighted = delta * count
    m2 = tl.sum(within + (between + weighted * delta) * per_tile, 0)
    return total_mean + tl.sum(weighted, 0) * (1.0 / K), m2 / pixels


@triton.jit
def group_moments(
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    pixels1,
    pixels2,
    n,  # int64
    g0,
    C1,
    C2,
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K1 and K2
):
    """mean and variance of BLOCK_G groups from number g0 on, both [BLOCK_G], of sums that are all
    loaded at once, and in one sum over them: about the mean of one of the group's tiles.

    With d_i = mean_i - that one, mean = that one + (mean of d), and var = (mean of var_i) + (mean
    of d^2) - (mean of d)^2. Of N tiles neither of the last two is larger than N times their
    difference, since that one is of the N: so rounding costs N ulp of it at most.
    """
    k = tl.arange(0, BLOCK_K)[:, None, None]
    j = tl.arange(0, BLOCK_J)[None, None, :]
    c0 = (g0 + tl.arange(0, BLOCK_G)[None, :, None]) * CG
    c = c0 + j
    partial1_ptr += n * (K1 * 2) * C1
    there = (j < CG) & (c < C1 + C2)
    if partial2_ptr is None:
        ptrs, stride, origin = partial1_ptr + k * (2 * C1) + c, C1, partial1_ptr + c0
        there &= k < K1
        per_tile = K1 / pixels1
        weight = 1.0 / (K1 * CG)
        within = 1.0 / (pixels1 * CG)
    else:
        partial2_ptr += n * (K2 * 2) * C2 - C1
        second = c >= C1
        ptrs = tl.where(second, partial2_ptr, partial1_ptr)
        stride = tl.where(second, C2, C1)
        ptrs += k * (2 * stride) + c
        origin = tl.where(c0 >= C1, partial2_ptr, partial1_ptr) + c0
        there &= k < tl.where(second, K2, K1)
        per_tile = tl.where(second, K2 / pixels2, K1 / pixels1)
        weight = tl.where(second, 1.0 / (K2 * CG), 1.0 / (K1 * CG))
        within = tl.where(second, 1.0 / (pixels2 * CG), 1.0 / (pixels1 * CG))
    one = tl.load(origin, mask=c0 < C1 + C2, other=0.0)
    tile_sum = tl.load(ptrs, mask=there, other=0.0)
    m2 = tl.load(ptrs + stride, mask=there, other=0.0)
    if partial2_ptr is None:
        one *= per_tile
    else:
        one *= tl.where(c0 >= C1, K2 / pixels2, K1 / pixels1)
    delta = tl.where(there, tile_sum * per_tile - one, 0.0)
    sums = tl.reduce((delta * weight, delta * delta * weight + m2 * within), 0, add_pairs)
    mean, square = tl.reduce(sums, 1, add_pairs)
    var = tl.maximum(square - mean * mean, 0.0)
    return tl.reshape(one, [BLOCK_G]) + mean, var


@triton.jit
def sum_tiles(
    partial_ptr,  # float32 [K, 2, C]
    C,
    less,  # subtracted from each, or None
    offs_c,
    mask_c,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum over tiles of the first of their two numbers."""
    offs_k = tl.arange(0, BLOCK_K)[:, None, None]
    offs = offs_k * (2 * C) + offs_c[None, :, :]
    acc = tl.zeros([BLOCK_K, offs_c.shape[0], offs_c.shape[1]], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        mask = (offs_k < K - k0) & mask_c[None, :, :]
        value = tl.load(partial_ptr + k0 * 2 * C + offs, mask=mask, other=0.0)
        if less is not None:
            value = tl.where(mask, value - less[None, :, :], 0.0)
        acc += value
    return tl.sum(acc, 0)


@triton.jit
def store_affine_grads(
    d,  # the sum over an image's pixels of dz,
    e,  # and of dz (x - mean) rstd
    one_scale,  # 1 + scale
    row_ptrs,  # float32: of these channels, in the first row of the sample
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    stride_dscale,
    stride_dshift,
    n,
    offs_c,
    mask_c,
    C,
):
    """What a sample adds to the gradients of weight and bias, and those of its scale and shift."""
    tl.store(row_ptrs, one_scale * e, mask=mask_c)
    tl.store(row_ptrs + C, one_scale * d, mask=mask_c)
    if d_shift_ptr is not None:
        d_shift = d.to(d_shift_ptr.dtype.element_ty)
        tl.store(d_shift_ptr + n * stride_dshift + offs_c, d_shift, mask=mask_c)
    if d_scale_ptr is not None:
        weight, bias = affine(weight_ptr, bias_ptr, None, None, 0, 0, 0, offs_c, mask_c)
        d_scale = (weight * e + bias * d).to(d_scale_ptr.dtype.element_ty)
        tl.store(d_scale_ptr + n * stride_dscale + offs_c, d_scale, mask=mask_c)
