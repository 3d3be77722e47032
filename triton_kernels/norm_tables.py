"""Statistics of a GroupNorm, from per-tile sums to one row of coefficients a channel:

    forward    partials of x           -> table (mean, rstd, g, b):  z  = (x - mean) rstd g + b
    backward   partials of dz, table   -> coeff (p, q, r):           dx = p dz + q x + r

`norm_passes` applies them. A fused convolution writes the partials in its epilogue, so that no pass
over memory computes a statistic. With partials float32 [N, K, 2, C], tile k of an image has exactly
H W / K pixels, and for each of its channels

    forward    sum of x,    sum of (x - mean of the tile)^2
    backward   sum of dz,   sum of dz xhat                       xhat = (x - mean) rstd

x may be the concatenation of two tensors, each with partials of its own; a group may lie across the
border. Means and squares are merged by Chan's formula (Chan, Golub and LeVeque 1983), so that
nothing is ever a difference of large numbers:

    M2 = sum M2_i + sum count_i (mean_i - mean)^2

With D, E = sum over pixels of dz, dz xhat, both per (n, c), and

    m1, m2 = sum over the group of g D, g E / (H W C/G)

    p = rstd g,   q = -rstd^2 m2,   r = -rstd m1 + rstd^2 m2 mean
    d_weight = sum_n (1 + scale) E,             d_scale = weight E + bias D
    d_bias   = sum_n (1 + scale) D,             d_shift = D
    sum over pixels of dx = p D + q (sum of x) + r H W

A program has BLOCK_G groups of CG = C/G channels in BLOCK_J >= CG lanes each; GB programs make a
sample. What is kept of a channel is [BLOCK_G, BLOCK_J], so that the sum over a group is a sum over
rows. These kernels are latency and nothing else: few lanes a program, all loads at its beginning.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_sum import sum_partials
from .group_norm_stream import affine

_empty = torch.empty  # tests put a function here that returns NaNs

# Lanes times tiles that a warp loads at once: 32 numbers a thread of each of two statistics. One
# warp a program, if that will do: warps would meet at a barrier for every sum.
_WARP_TILE = 1024


# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _lanes(pid, C, GB, CG: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr):
    """The channels of a program and which of them there are, both [BLOCK_G, BLOCK_J]."""
    offs_j = tl.arange(0, BLOCK_J)[None, :]
    offs_c = (pid % GB * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]) * CG + offs_j
    return offs_c, (offs_j < CG) & (offs_c < C)


@triton.jit
def _moments(
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
def _norm_table_kernel(
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C - C1] or None
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    table_ptr,  # float32 [N, 4, C]
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
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_c, mask_c = _lanes(pid, C, GB, CG, BLOCK_G, BLOCK_J)
    g, b = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )

    half_ptr = partial1_ptr + n * (K1 * 2) * C1
    mask = mask_c & (offs_c < C1)
    mean, var = _moments(half_ptr, pixels1, C1, offs_c, mask, K1, BLOCK_K1)
    if partial2_ptr is not None:
        second = offs_c >= C1
        C2 = C - C1
        half_ptr = partial2_ptr + n * (K2 * 2) * C2
        mask = mask_c & second
        mean2, var2 = _moments(half_ptr, pixels2, C2, offs_c - C1, mask, K2, BLOCK_K2)
        mean = tl.where(second, mean2, mean)
        var = tl.where(second, var2, var)

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


@triton.jit
def _norm_grad_table_kernel(
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
    K: tl.constexpr,
    KX: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_KX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // GB).to(tl.int64)
    offs_c, mask_c = _lanes(pid, C, GB, CG, BLOCK_G, BLOCK_J)
    row_ptr = table_ptr + n * 4 * C + offs_c
    mean = tl.load(row_ptr, mask=mask_c, other=0.0)
    rstd = tl.load(row_ptr + C, mask=mask_c, other=0.0)
    g = tl.load(row_ptr + 2 * C, mask=mask_c, other=0.0)
    one_scale, _ = affine(None, None, scale_ptr, None, stride_scale, 0, n, offs_c, mask_c)

    d = _sum_tiles(partial_ptr + n * (K * 2) * C, C, None, offs_c, mask_c, K, BLOCK_K)
    e = _sum_tiles(partial_ptr + n * (K * 2) * C + C, C, None, offs_c, mask_c, K, BLOCK_K)
    if input_partial_ptr is not None:
        # of x - mean: q (sum of x) and r H W would cancel when the mean is large
        per_tile = (pixels // KX) * 1.0 * mean
        sum_x = _sum_tiles(
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
    tl.store(out_ptr + 2 * C, -rstd * m1 - q * mean, mask=mask_c)

    out_ptr = rows_ptr + n * (ROWS * C) + offs_c
    tl.store(out_ptr, one_scale * e, mask=mask_c)
    tl.store(out_ptr + C, one_scale * d, mask=mask_c)
    if d_shift_ptr is not None:
        d_shift = d.to(d_shift_ptr.dtype.element_ty)
        tl.store(d_shift_ptr + n * stride_dshift + offs_c, d_shift, mask=mask_c)
    if d_scale_ptr is not None:
        weight, bias = affine(weight_ptr, bias_ptr, None, None, 0, 0, 0, offs_c, mask_c)
        d_scale = (weight * e + bias * d).to(d_scale_ptr.dtype.element_ty)
        tl.store(d_scale_ptr + n * stride_dscale + offs_c, d_scale, mask=mask_c)
    if input_partial_ptr is not None:
        dx_sum = p * d + q * sum_x - rstd * m1 * pixels
        tl.store(out_ptr + 2 * C, dx_sum, mask=mask_c)
        if d_emb_ptr is not None:
            d_emb = dx_sum.to(d_emb_ptr.dtype.element_ty)
            tl.store(d_emb_ptr + n * stride_demb + offs_c, d_emb, mask=mask_c)


@triton.jit
def _sum_tiles(
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
def _row_sums_kernel(
    rows_ptr,  # float32 [N, ROWS, C]
    out0_ptr,  # float32 [C] or None: where the sum over n of the first row goes
    out1_ptr,  # ... of the second
    out2_ptr,  # ... of the third
    N,
    C,
    ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & mask_c[None, :]
        offs = (offs_n.to(tl.int64) * ROWS + row)[:, None] * C + offs_c[None, :]
        acc += tl.load(rows_ptr + offs, mask=mask, other=0.0)
    total = tl.sum(acc, 0)
    if row == 0:
        _put(out0_ptr, total, offs_c, mask_c, ACCUMULATE)
    elif row == 1:
        _put(out1_ptr, total, offs_c, mask_c, ACCUMULATE)
    else:
        _put(out2_ptr, total, offs_c, mask_c, ACCUMULATE)


@triton.jit
def _put(out_ptr, total, offs_c, mask_c, ACCUMULATE: tl.constexpr):
    if out_ptr is not None:
        if ACCUMULATE:
            total += tl.load(out_ptr + offs_c, mask=mask_c, other=0.0)
        tl.store(out_ptr + offs_c, total, mask=mask_c)


# --- launchers ------------------------------------------------------------------------------------


class _Lanes(NamedTuple):
    """How the groups of a sample are dealt to programs, and the tiles of an image to rounds."""

    programs: int  # GB
    cg: int
    blocks: tuple[int, int, int, int]  # BLOCK_K of two tensors, BLOCK_G, BLOCK_J
    num_warps: int


def _lanes_of(c: int, num_groups: int, *ks: int) -> _Lanes:
    cg = c // num_groups
    block_j = triton.next_power_of_2(cg)
    wanted = max(16, min(_WARP_TILE // 2 // triton.next_power_of_2(max(ks)), 128))
    block_g = min(max(wanted // block_j, 1), triton.next_power_of_2(num_groups))
    lanes = block_g * block_j
    blocks = [min(triton.next_power_of_2(k), max(4 * _WARP_TILE // lanes, 1)) for k in ks]
    num_warps = max(1, min(4, lanes * max(blocks) // _WARP_TILE))
    return _Lanes(triton.cdiv(num_groups, block_g), cg, (*blocks, block_g, block_j), num_warps)


def _row_stride(x: Tensor | None) -> int:
    assert x is None or x.stride(-1) == 1, f"strides {x.stride()}; expected channels side by side"
    return 0 if x is None else x.stride(0)


def _check_partials(partials: Tensor, pixels: int) -> None:
    assert partials.dtype == torch.float32 and partials.is_contiguous() and partials.ndim == 4
    k = partials.shape[1]
    assert k > 0 and pixels % k == 0, f"{pixels} pixels are not {k} tiles of one size"


def norm_table(
    partials: tuple[Tensor, ...],  # of one or two tensors: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
) -> Tensor:  # float32 [N, 4, C1 + C2]
    """mean, rstd, g = weight (1 + scale) and b = bias (1 + scale) + shift of every channel.

    For a nearest-upsampled tensor pass the partials and the pixels of its source: mean and variance
    are the same.
    """
    for part, count in zip(partials, pixels, strict=True):
        _check_partials(part, count)
    first, second = partials[0], partials[1] if len(partials) == 2 else None
    n, k1, _, c1 = first.shape
    k2, c = (1, c1) if second is None else (second.shape[1], c1 + second.shape[3])
    assert c % num_groups == 0 and (second is None or second.shape[0] == n)
    lanes = _lanes_of(c, num_groups, k1, k2)
    table = _empty((n, 4, c), dtype=torch.float32, device=first.device)
    film = (scale, shift)
    shape = (pixels[0], pixels[-1], c1, c, lanes.programs, eps, k1, k2, lanes.cg)
    _norm_table_kernel[(n * lanes.programs,)](
        first,
        second,
        weight,
        bias,
        *film,
        table,
        *map(_row_stride, film),
        *shape,
        *lanes.blocks,
        num_warps=lanes.num_warps,
    )
    return table


def norm_grad_table(
    partials: Tensor,  # float32 [N, K, 2, C]: of dz, over the whole concatenation
    table: Tensor,  # float32 [N, 4, C], of `norm_table`
    pixels: int,  # H W of dz
    num_groups: int,
    grad_weight_out: Tensor | None,  # float32 [C]
    grad_bias_out: Tensor | None,  # float32 [C]
    *,
    accumulate: bool = False,  # add to the three gradients float32 [C] rather than overwrite them
    input_partials: Tensor | None = None,  # float32 [N, KX, 2, C]: of x, which is one tensor
    emb_grad_out: Tensor | None = None,  # [N, C], rows may be strided: the sum of dx over pixels
    bias_grad_out: Tensor | None = None,  # float32 [C]: the same, summed over n too
    weight: Tensor | None = None,  # [C], for grad_scale_out
    bias: Tensor | None = None,  # [C], for grad_scale_out
    scale: Tensor | None = None,  # [N, C]; the one that `norm_table` had
    grad_scale_out: Tensor | None = None,  # [N, C], rows may be strided
    grad_shift_out: Tensor | None = None,  # [N, C], rows may be strided
) -> Tensor:  # float32 [N, 3, C]
    """p, q and r of every channel, with dx = p dz + q x + r, and the gradients of the parameters.

    `emb_grad_out` and `bias_grad_out`, which need `input_partials`, are the gradients of what was
    added to every pixel of x: an embedding per (n, c), and the bias of the convolution before.
    """
    _check_partials(partials, pixels)
    n, k, _, c = partials.shape
    assert table.shape == (n, 4, c) and table.is_contiguous()
    sums_dx = emb_grad_out is not None or bias_grad_out is not None
    assert sums_dx == (input_partials is not None), "input_partials are for sums of dx"
    kx = 1
    if input_partials is not None:
        kx = input_partials.shape[1]
        _check_partials(input_partials, pixels)
        assert input_partials.shape == (n, kx, 2, c)
    lanes = _lanes_of(c, num_groups, k, kx)
    rows = 3 if sums_dx else 2
    coeff = _empty((n, 3, c), dtype=torch.float32, device=table.device)
    work = _empty((n, rows, c), dtype=torch.float32, device=table.device)
    strided = (scale, grad_scale_out, grad_shift_out, emb_grad_out)
    shape = (pixels, c, lanes.programs, rows, k, kx, lanes.cg)
    _norm_grad_table_kernel[(n * lanes.programs,)](
        partials,
        input_partials,
        table,
        weight,
        bias,
        scale,
        coeff,
        work,
        *strided[1:],
        *map(_row_stride, strided),
        *shape,
        *lanes.blocks,
        num_warps=lanes.num_warps,
    )
    outs = (grad_weight_out, grad_bias_out, bias_grad_out)
    if any(out is not None for out in outs):
        _row_sums(work, outs, accumulate)
    return coeff


def _row_sums(rows: Tensor, outs: tuple[Tensor | None, ...], accumulate: bool) -> None:
    """outs[i] = (or +=) the sum over n of rows[n, i]."""
    n, count, c = rows.shape
    for out in outs:
        assert out is None or (out.shape == (c,) and out.is_contiguous())
    block_n = min(triton.next_power_of_2(max(n, 1)), 128)
    block_c = min(triton.next_power_of_2(c), 16)
    _row_sums_kernel[(triton.cdiv(c, block_c), count)](
        rows, *outs, n, c, count, accumulate, block_n, block_c
    )


def bias_grad(
    rows: Tensor,  # float32 [rows, C], as `norm_dx` returns them
    out: Tensor,  # float32 [C]
    accumulate: bool = False,
) -> None:
    """out = (or +=) the sum of the rows."""
    count, c = rows.shape
    parts = min(count & -count, 64)
    if count > 256 and parts > 1:  # more than one program should add up
        part = _empty((parts, c), dtype=torch.float32, device=rows.device)
        sum_partials(rows.view(count // parts, parts * c), part.view(-1))
        rows = part
    if count:
        sum_partials(rows, out, accumulate=accumulate)
    elif not accumulate:
        out.zero_()
