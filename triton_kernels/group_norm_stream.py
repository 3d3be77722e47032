"""GroupNorm of an image of any size, in passes over memory; see `group_norm` for the formulas.

    forward   stats (read x), finalize, apply (read x, write y)
    backward  sums (read x, dy), finalize, dx (read x, dy, write dx), params

The three without brackets are small. Sums of squares cancel when the mean is large. Here every lane
of a tile runs Welford's recurrence over its pixels, and lanes, chunks and channels are then merged
by Chan's formula (Chan, Golub and LeVeque 1983):

    M2 = sum M2_i + sum count_i (mean_i - mean)^2

so that no partial is ever a difference of large numbers. Partials are merged in a fixed order,
without atomics: the same input gives the same bits.

A tile is BLOCK_P pixels by BLOCK_C channels. TILES tiles make the chunk of pixels of one program,
K chunks an image, CB blocks of channels the C channels. CG = C // G.

x may be x1 beside x2 along the channels, a concatenation that is never in memory: the first CB1
blocks of channels are of x1 and its C1 channels, the others of x2. What a program shares with
others, it keeps at the channel's place in the whole.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import activate, activate_grad
from .tuning import choose

_empty = torch.empty  # tests put a function here that returns NaNs

# [N, H, W, C1] and, if the norm is over a concatenation, [N, H, W, C - C1]
Halves = tuple[Tensor, Tensor | None]
# weight and bias: [C]; scale and shift: [N, C]
Params = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Config(NamedTuple):
    tile: int  # elements of a tile
    tiles: int  # tiles of a program in a large image
    num_warps: int


# Sixteen to 32 elements a thread, so that each thread has two or more 16-byte loads in flight and
# its accumulators stay within 64 registers; the number of tiles trades the reduction at the end of
# a program against an even spread of programs over the chip.
_STATS_CONFIGS = [
    _Config(4096, 4, 4),
    _Config(2048, 4, 4),
    _Config(4096, 8, 4),
    _Config(8192, 4, 8),
    _Config(2048, 8, 4),
    _Config(2048, 16, 4),
    _Config(4096, 16, 4),
    _Config(4096, 8, 8),
]
_APPLY_CONFIGS = [
    _Config(4096, 2, 4),
    _Config(2048, 2, 4),
    _Config(4096, 1, 4),
    _Config(2048, 4, 4),
    _Config(2048, 1, 4),
    _Config(8192, 1, 8),
]
_SUMS_CONFIGS = [
    _Config(2048, 8, 4),
    _Config(2048, 4, 4),
    _Config(4096, 4, 8),
    _Config(4096, 8, 8),
    _Config(2048, 16, 4),
    _Config(1024, 16, 4),
]
_DX_CONFIGS = [
    _Config(2048, 2, 4),
    _Config(2048, 4, 4),
    _Config(4096, 2, 8),
    _Config(2048, 1, 4),
    _Config(4096, 1, 8),
    _Config(1024, 4, 4),
]

_MIN_PROGRAMS = 1024  # below this a chunk is cut down to fill the chip


@triton.jit
def affine(
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    stride_scale,
    stride_shift,
    n,
    offs_c,
    mask_c,
):
    """gain and offset of the channels of one sample, float32 (see `group_norm`)."""
    gain = tl.zeros(offs_c.shape, tl.float32) + 1.0
    offset = tl.zeros(offs_c.shape, tl.float32)
    if weight_ptr is not None:
        gain = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n * stride_scale + offs_c, mask=mask_c, other=0.0)
        gain *= 1.0 + scale.to(tl.float32)
        offset *= 1.0 + scale.to(tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * stride_shift + offs_c, mask=mask_c, other=0.0)
        offset += shift.to(tl.float32)
    return gain, offset


@triton.jit
def coefficients(
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    stride_scale,
    stride_shift,
    n,
    offs_c,
    mask_c,
    G,
    CG: tl.constexpr,
):
    """mean, rstd, gain and offset of the channels of one sample, float32."""
    offs_g = n * G + offs_c // CG
    mean = tl.load(mean_ptr + offs_g, mask=mask_c, other=0.0)
    rstd = tl.load(rstd_ptr + offs_g, mask=mask_c, other=0.0)
    gain, offset = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    return mean, rstd, gain, offset


@triton.jit
def _locate(pid, K, CB):
    """The sample (int64), the chunk of pixels and the block of channels of a program."""
    return (pid // CB // K).to(tl.int64), pid // CB % K, pid % CB


@triton.jit
def _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C: tl.constexpr):
    """The tensor that a block of channels is of: where it is, how many channels it has, and the
    first of the block among them; and where its channel 0 is in the whole."""
    if x2_ptr is None:
        return x1_ptr, C, pid_c * BLOCK_C, 0
    else:
        second = pid_c >= CB1
        first_block = tl.where(second, CB1, 0)
        return (
            tl.where(second, x2_ptr, x1_ptr),
            tl.where(second, C - C1, C1),
            (pid_c - first_block) * BLOCK_C,
            tl.where(second, C1, 0),
        )


# --- forward -------------------------------------------------------------------------------------


@triton.jit
def moments(
    x_ptr,  # [pixels, C]
    pixels,
    C,
    offs_p,
    offs_c,
    mask_c,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASKED: tl.constexpr = True,
):
    """mean and M2 over the first TILES tiles of pixels, those that there are."""
    UNROLL: tl.constexpr = TILES if TILES < 4 else 4
    offs = offs_p[:, None] * C + offs_c[None, :]  # within a tile: 32 bits
    mean = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)  # of this lane's pixels so far
    m2 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, TILES, UNROLL):
        for j in tl.static_range(UNROLL):
            i = first + j
            p0 = i * BLOCK_P
            weight = 1.0 / (i + 1)
            if MASKED:
                # only the last tile of an image has dead lanes, and no live tile follows it
                mask = (offs_p < pixels - p0)[:, None] & mask_c[None, :]
                x = tl.load(x_ptr + p0 * C + offs, mask=mask, other=0.0).to(tl.float32)
                delta = tl.where(mask, x - mean, 0.0)
            else:
                delta = tl.load(x_ptr + p0 * C + offs).to(tl.float32) - mean
            mean += delta * weight  # Welford
            m2 += delta * (delta * (1.0 - weight))

    # Chan: merge the lanes. The second sum also returns what the first has rounded off the mean.
    count = tl.minimum(tl.maximum((pixels - offs_p + BLOCK_P - 1) // BLOCK_P, 0), TILES) * 1.0
    total = tl.minimum(pixels, TILES * BLOCK_P) * 1.0
    chunk_mean = tl.sum(mean * count[:, None], 0) / total
    delta = mean - chunk_mean[None, :]
    weighted = delta * count[:, None]
    chunk_m2 = tl.sum(m2 + weighted * delta, 0)
    chunk_mean += tl.sum(weighted, 0) / total
    return chunk_mean, chunk_m2


@triton.jit
def _group_norm_stats_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    partial_ptr,  # float32 [N, K, 2, C]: mean and M2 of a chunk
    HW,
    C1,
    C,
    K,
    CB1,
    CB,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n, k, pid_c = _locate(tl.program_id(0), K, CB)
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_h < CH
    start = k * (TILES * BLOCK_P)
    chunk_ptr = x_ptr + (n * HW + start) * CH
    chunk_mean, chunk_m2 = moments(
        chunk_ptr, HW - start, CH, offs_p, offs_h, mask_c, TILES, BLOCK_P, BLOCK_C, MASKED
    )
    out_ptr = partial_ptr + (n * K + k) * 2 * C + border + offs_h
    tl.store(out_ptr, chunk_mean, mask=mask_c)
    tl.store(out_ptr + C, chunk_m2, mask=mask_c)


@triton.jit
def _group_norm_finalize_kernel(
    partial_ptr,  # float32 [N, K, 2, C]: mean and M2 of a chunk
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    HW,
    C,
    G,
    GB,  # blocks of groups
    eps,
    CHUNK: tl.constexpr,  # pixels of a chunk
    K: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_g = pid % GB * BLOCK_G + tl.arange(0, BLOCK_G)
    total = HW * 1.0 * CG

    mean = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for e0 in range(0, K * CG, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)  # (chunk, channel of the group)
        count = tl.minimum(HW - e // CG * CHUNK, CHUNK) * 1.0
        mask = (offs_g < G)[:, None] & (e < K * CG)[None, :]
        offs = (e // CG * 2 * C + e % CG)[None, :] + offs_g[:, None] * CG
        part = tl.load(partial_ptr + n * K * 2 * C + offs, mask=mask, other=0.0)
        acc += part * count[None, :]
    mean = tl.sum(acc, 1) / total

    m2 = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    rest = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for e0 in range(0, K * CG, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        count = tl.minimum(HW - e // CG * CHUNK, CHUNK) * 1.0
        mask = (offs_g < G)[:, None] & (e < K * CG)[None, :]
        offs = (e // CG * 2 * C + e % CG)[None, :] + offs_g[:, None] * CG
        part = tl.load(partial_ptr + n * K * 2 * C + offs, mask=mask, other=0.0)
        part_m2 = tl.load(partial_ptr + n * K * 2 * C + offs + C, mask=mask, other=0.0)
        delta = tl.where(mask, part - mean[:, None], 0.0)
        m2 += part_m2 + delta * delta * count[None, :]
        rest += delta * count[None, :]
    mean += tl.sum(rest, 1) / total  # what the first sum has rounded off
    rstd = 1.0 / tl.sqrt(tl.sum(m2, 1) / total + eps)
    tl.store(mean_ptr + n * G + offs_g, mean, mask=offs_g < G)
    tl.store(rstd_ptr + n * G + offs_g, rstd, mask=offs_g < G)


@triton.jit
def _group_norm_apply_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    y_ptr,  # [N, HW, C]
    stride_scale,
    stride_shift,
    HW,
    C1,
    C,
    G,
    K,
    CB1,
    CB,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # last pixels first: the stats pass has just left them in L2
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n, k, pid_c = _locate(pid, K, CB)
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    offs_c = border + offs_h
    mask_c = offs_h < CH
    offs_x = offs_p[:, None] * CH + offs_h[None, :]
    offs_y = offs_p[:, None] * C + offs_c[None, :]
    mean, rstd, gain, offset = coefficients(
        mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, n, offs_c, mask_c, G, CG,
    )  # fmt: skip
    slope = rstd * gain
    for i in tl.static_range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        first = n * HW + p0
        x = tl.load(x_ptr + first * CH + offs_x, mask=mask).to(tl.float32)
        # x - mean first: x slope + (offset - mean slope) would cancel when the mean is large
        z = (x - mean[None, :]) * slope[None, :] + offset[None, :]
        y = activate(z, ACT)
        tl.store(y_ptr + first * C + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- backward ------------------------------------------------------------------------------------


@triton.jit
def _group_norm_bwd_sums_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    dy_ptr,  # [N, HW, C]
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    partial_ptr,  # float32 [N, K, 2, C]: D and E of a chunk
    stride_scale,
    stride_shift,
    HW,
    C1,
    C,
    G,
    K,
    CB1,
    CB,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n, k, pid_c = _locate(tl.program_id(0), K, CB)
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    offs_c = border + offs_h
    mask_c = offs_h < CH
    offs_x = offs_p[:, None] * CH + offs_h[None, :]
    offs_y = offs_p[:, None] * C + offs_c[None, :]
    mean, rstd, gain, offset = coefficients(
        mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, n, offs_c, mask_c, G, CG,
    )  # fmt: skip
    acc_d = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    acc_e = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    UNROLL: tl.constexpr = TILES if TILES < 4 else 4
    zero = 0.0 if MASKED else None
    for i in range(0, TILES, UNROLL):
        for j in tl.static_range(UNROLL):
            p0 = (k * TILES + i + j) * BLOCK_P
            mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
            first = n * HW + p0
            x = tl.load(x_ptr + first * CH + offs_x, mask=mask, other=zero).to(tl.float32)
            dy = tl.load(dy_ptr + first * C + offs_y, mask=mask, other=zero).to(tl.float32)
            xhat = (x - mean[None, :]) * rstd[None, :]
            dz = dy * activate_grad(xhat * gain[None, :] + offset[None, :], ACT)
            acc_d += dz
            acc_e += dz * xhat
    out_ptr = partial_ptr + (n * K + k) * 2 * C + offs_c
    tl.store(out_ptr, tl.sum(acc_d, 0), mask=mask_c)
    tl.store(out_ptr + C, tl.sum(acc_e, 0), mask=mask_c)


@triton.jit
def _group_norm_bwd_finalize_kernel(
    partial_ptr,  # float32 [N, K, 2, C]: D and E of a chunk
    weight_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    m1_ptr,  # float32 [N, G]
    m2_ptr,  # float32 [N, G]
    stride_scale,
    HW,
    C,
    G,
    GB,
    K: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_g = pid % GB * BLOCK_G + tl.arange(0, BLOCK_G)
    m1 = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    m2 = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for e0 in range(0, K * CG, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)  # (chunk, channel of the group)
        mask = (offs_g < G)[:, None] & (e < K * CG)[None, :]
        offs_c = offs_g[:, None] * CG + (e % CG)[None, :]
        offs = n * K * 2 * C + (e // CG * 2 * C)[None, :] + offs_c
        gain, _ = affine(weight_ptr, None, scale_ptr, None, stride_scale, 0, n, offs_c, mask)
        m1 += gain * tl.load(partial_ptr + offs, mask=mask, other=0.0)
        m2 += gain * tl.load(partial_ptr + offs + C, mask=mask, other=0.0)
    total = HW * 1.0 * CG
    tl.store(m1_ptr + n * G + offs_g, tl.sum(m1, 1) / total, mask=offs_g < G)
    tl.store(m2_ptr + n * G + offs_g, tl.sum(m2, 1) / total, mask=offs_g < G)


@triton.jit
def _group_norm_bwd_dx_kernel(
    x1_ptr,  # [N, HW, C1]
    x2_ptr,  # [N, HW, C - C1] or None
    dy_ptr,  # [N, HW, C]
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    m1_ptr,  # float32 [N, G]
    m2_ptr,  # float32 [N, G]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    dx1_ptr,  # [N, HW, C1]
    dx2_ptr,  # [N, HW, C - C1] or None
    stride_scale,
    stride_shift,
    HW,
    C1,
    C,
    G,
    K,
    CB1,
    CB,
    CG: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # as in apply
    n, k, pid_c = _locate(pid, K, CB)
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid_c, C1, C, CB1, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    offs_c = border + offs_h
    mask_c = offs_h < CH
    offs_x = offs_p[:, None] * CH + offs_h[None, :]
    offs_y = offs_p[:, None] * C + offs_c[None, :]
    dx_ptr, _, _, _ = _half(dx1_ptr, dx2_ptr, pid_c, C1, C, CB1, BLOCK_C)
    mean, rstd, gain, offset = coefficients(
        mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, n, offs_c, mask_c, G, CG,
    )  # fmt: skip
    m1 = tl.load(m1_ptr + n * G + offs_c // CG, mask=mask_c, other=0.0) * rstd
    m2 = tl.load(m2_ptr + n * G + offs_c // CG, mask=mask_c, other=0.0) * rstd
    slope = rstd * gain
    for i in tl.static_range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        first = n * HW + p0
        x = tl.load(x_ptr + first * CH + offs_x, mask=mask).to(tl.float32)
        dy = tl.load(dy_ptr + first * C + offs_y, mask=mask).to(tl.float32)
        xhat = (x - mean[None, :]) * rstd[None, :]
        dz = dy * activate_grad(xhat * gain[None, :] + offset[None, :], ACT)
        dx = slope[None, :] * dz - (m1[None, :] + xhat * m2[None, :])
        tl.store(dx_ptr + first * CH + offs_x, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _group_norm_bwd_params_kernel(
    partial_ptr,  # float32 [N, K, 2, C]: D and E of a chunk
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    d_weight_ptr,  # [C] or None
    d_bias_ptr,  # [C] or None
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    stride_scale,
    N,
    C,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    d_weight = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    d_bias = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & mask_c[None, :]
        acc_d = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        acc_e = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            offs_k = k0 + tl.arange(0, BLOCK_K)
            mask_k = mask[:, None, :] & (offs_k < K)[None, :, None]
            offs = (offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]) * 2 * C
            offs = offs[:, :, None] + offs_c[None, None, :]
            acc_d += tl.load(partial_ptr + offs, mask=mask_k, other=0.0)
            acc_e += tl.load(partial_ptr + offs + C, mask=mask_k, other=0.0)
        sum_d = tl.sum(acc_d, 1)
        sum_e = tl.sum(acc_e, 1)
        offs_nc = offs_n.to(tl.int64)[:, None] * C + offs_c[None, :]
        if d_shift_ptr is not None:
            tl.store(d_shift_ptr + offs_nc, sum_d.to(d_shift_ptr.dtype.element_ty), mask=mask)
        if d_scale_ptr is not None:
            weight, bias = affine(weight_ptr, bias_ptr, None, None, 0, 0, 0, offs_c, mask_c)
            d_scale = weight[None, :] * sum_e + bias[None, :] * sum_d
            tl.store(d_scale_ptr + offs_nc, d_scale.to(d_scale_ptr.dtype.element_ty), mask=mask)
        if scale_ptr is not None:
            offs_s = offs_n.to(tl.int64)[:, None] * stride_scale + offs_c[None, :]
            one_scale = 1.0 + tl.load(scale_ptr + offs_s, mask=mask, other=0.0).to(tl.float32)
            sum_d *= one_scale
            sum_e *= one_scale
        d_weight += sum_e
        d_bias += sum_d
    if d_weight_ptr is not None:
        total = tl.sum(d_weight, 0)
        tl.store(d_weight_ptr + offs_c, total.to(d_weight_ptr.dtype.element_ty), mask=mask_c)
    if d_bias_ptr is not None:
        total = tl.sum(d_bias, 0)
        tl.store(d_bias_ptr + offs_c, total.to(d_bias_ptr.dtype.element_ty), mask=mask_c)


# --- launchers ------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """How a pass over [N, HW, C] is cut into programs."""

    programs: int
    k: int  # chunks of pixels an image
    cb1: int  # blocks of channels of the first half
    cb: int  # and of both
    masked: bool  # some tiles reach over an edge
    tiles: int
    block_p: int
    block_c: int

    @property
    def tile(self) -> tuple[bool, int, int, int]:
        """MASKED, TILES, BLOCK_P, BLOCK_C."""
        return self.masked, self.tiles, self.block_p, self.block_c


def channel_block(*channels: int) -> int:
    """A power of two that divides the channels, so that all lanes work; if that is less than 32, a
    masked block is better."""
    common = math.gcd(*channels)
    divisor = common & -common
    return min(divisor if divisor >= 32 else triton.next_power_of_2(max(channels)), 128)


def _cut(xs: Halves, config: _Config) -> _Grid:
    n, hw, c = extent(xs)
    c1 = xs[0].shape[3]
    block_c = channel_block(c1, c - c1)
    block_p = min(config.tile // block_c, triton.next_power_of_2(max(hw, 1)))
    cb1 = triton.cdiv(c1, block_c)
    cb = cb1 + triton.cdiv(c - c1, block_c)
    tiles = min(config.tiles, triton.next_power_of_2(max(triton.cdiv(hw, block_p), 1)))
    while tiles > 1 and n * cb * triton.cdiv(hw, tiles * block_p) < _MIN_PROGRAMS:
        tiles //= 2
    k = triton.cdiv(hw, tiles * block_p)
    masked = any(
        size % block > 0
        for size, block in ((hw, tiles * block_p), (c1, block_c), (c - c1, block_c))
    )
    return _Grid(n * k * cb, k, cb1, cb, masked, tiles, block_p, block_c)


def _group_blocks(g: int, elements: int) -> tuple[int, int]:
    """BLOCK_G, BLOCK_E of a finalize kernel that merges `elements` partials a group."""
    block_e = min(triton.next_power_of_2(max(elements, 1)), 512)
    return min(max(1024 // block_e, 1), triton.next_power_of_2(g)), block_e


def extent(xs: Halves) -> tuple[int, int, int]:
    """N, H W and C of the whole."""
    x, x2 = xs
    n, h, w, c1 = x.shape
    return n, h * w, c1 if x2 is None else c1 + x2.shape[3]


def row_strides(params: Params) -> tuple[int, int]:
    """Elements between the rows of scale and of shift."""
    return tuple(0 if p is None else p.stride(0) for p in params[2:])


def _choose(
    op: str, configs: list[_Config], xs: Halves, num_groups: int, run: Callable[[_Config], Tensor]
) -> _Config:
    n, hw, c = extent(xs)
    key = (n, hw, xs[0].shape[3], c, num_groups, xs[0].dtype)
    return choose(op, key, lambda: configs, lambda: configs[0], run)


def stream_stats(xs: Halves, num_groups: int, eps: float, config: _Config | None = None) -> Tensor:
    """mean and 1 / sqrt(var + eps) of every (sample, group): float32 [2, N, G]."""
    x, (n, hw, c) = xs[0], extent(xs)
    cg = c // num_groups
    if config is None:

        def run(c: _Config) -> Tensor:
            return stream_stats(xs, num_groups, eps, c)[1]

        config = _choose("group_norm_stats", _STATS_CONFIGS, xs, num_groups, run)
    grid = _cut(xs, config)
    partial = _empty((n, grid.k, 2, c), dtype=torch.float32, device=x.device)
    shape = (hw, x.shape[3], c, grid.k, grid.cb1, grid.cb)
    _group_norm_stats_kernel[(grid.programs,)](
        *xs, partial, *shape, *grid.tile, num_warps=config.num_warps
    )
    stats = _empty((2, n, num_groups), dtype=torch.float32, device=x.device)
    block_g, block_e = _group_blocks(num_groups, grid.k * cg)
    blocks = triton.cdiv(num_groups, block_g)
    chunk = grid.tiles * grid.block_p
    shape = (hw, c, num_groups, blocks, eps, chunk, grid.k, cg)
    _group_norm_finalize_kernel[(n * blocks,)](partial, *stats, *shape, block_g, block_e)
    return stats


def _shape(xs: Halves, stats: Tensor, params: Params, grid: _Grid) -> tuple[int, ...]:
    """Arguments that the kernels over x have in common."""
    _, hw, c = extent(xs)
    g = stats.shape[2]
    return *row_strides(params), hw, xs[0].shape[3], c, g, grid.k, grid.cb1, grid.cb, c // g


def stream_apply(
    xs: Halves, stats: Tensor, params: Params, activation: str, config: _Config | None = None
) -> Tensor:
    """y of x and its statistics."""
    x = xs[0]
    if config is None:

        def run(c: _Config) -> Tensor:
            return stream_apply(xs, stats, params, activation, c)

        config = _choose("group_norm_apply", _APPLY_CONFIGS, xs, stats.shape[2], run)
    grid = _cut(xs, config)
    y = _empty((*x.shape[:3], extent(xs)[2]), dtype=x.dtype, device=x.device)
    shape = _shape(xs, stats, params, grid)
    _group_norm_apply_kernel[(grid.programs,)](
        *xs, *stats, *params, y, *shape, activation, *grid.tile, num_warps=config.num_warps
    )
    return y


def stream_sums(
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    params: Params,
    activation: str,
    config: _Config | None = None,
) -> Tensor:
    """D and E of every chunk: float32 [N, K, 2, C]."""
    if config is None:

        def run(c: _Config) -> Tensor:
            sums = stream_sums(xs, dy, stats, params, activation, c)
            return sums if sums.shape[1] == 1 else sums.sum(1)

        config = _choose("group_norm_sums", _SUMS_CONFIGS, xs, stats.shape[2], run)
    grid = _cut(xs, config)
    n, _, c = extent(xs)
    sums = _empty((n, grid.k, 2, c), dtype=torch.float32, device=dy.device)
    shape = _shape(xs, stats, params, grid)
    _group_norm_bwd_sums_kernel[(grid.programs,)](
        *xs, dy, *stats, *params, sums, *shape, activation, *grid.tile, num_warps=config.num_warps
    )
    return sums


def empty_like(xs: Halves) -> Halves:
    """Where their gradients go."""
    return tuple(None if x is None else _empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)


def stream_dx(
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    sums: Tensor,  # of `stream_sums`
    params: Params,
    activation: str,
    config: _Config | None = None,
) -> Halves:
    """The gradient of x."""
    n, hw, c = extent(xs)
    g, k = stats.shape[2], sums.shape[1]
    if config is None:

        def run(c: _Config) -> Tensor:
            return stream_dx(xs, dy, stats, sums, params, activation, c)[0]

        config = _choose("group_norm_dx", _DX_CONFIGS, xs, g, run)
    weight, _, scale, _ = params
    m1_m2 = _empty((2, n, g), dtype=torch.float32, device=dy.device)
    block_g, block_e = _group_blocks(g, k * (c // g))
    blocks = triton.cdiv(g, block_g)
    shape = (row_strides(params)[0], hw, c, g, blocks, k, c // g)
    _group_norm_bwd_finalize_kernel[(n * blocks,)](
        sums, weight, scale, *m1_m2, *shape, block_g, block_e
    )
    grid = _cut(xs, config)
    dxs = empty_like(xs)
    shape = _shape(xs, stats, params, grid)
    _group_norm_bwd_dx_kernel[(grid.programs,)](
        *xs, dy, *stats, *m1_m2, *params, *dxs, *shape, activation, *grid.tile,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dxs


def params_grad(
    sums: Tensor,  # float32 [N, K, 2, C]: D and E of every chunk
    params: Params,
    needed: tuple[bool, bool, bool, bool],
) -> Params:
    """Gradients of weight, bias, scale and shift, those that are needed, each in its dtype."""
    n, k, _, c = sums.shape
    weight, bias, scale, _ = params
    grads = tuple(
        _empty(p.shape, dtype=p.dtype, device=p.device) if need else None
        for p, need in zip(params, needed, strict=True)
    )
    block_c = min(triton.next_power_of_2(c), 16)
    block_n = min(triton.next_power_of_2(max(n, 1)), 128)
    block_k = min(triton.next_power_of_2(max(k, 1)), 128 // block_n)
    shape = (row_strides(params)[0], n, c, k)
    _group_norm_bwd_params_kernel[(triton.cdiv(c, block_c),)](
        sums, weight, bias, scale, *grads, *shape, block_n, block_k, block_c
    )
    return grads
