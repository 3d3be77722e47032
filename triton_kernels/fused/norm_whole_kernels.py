"""The kernels of `norm_whole`, where the formulas are.

A program of the first has BLOCK_G groups of CG channels of one image, all its pixels, in registers:
BLOCK_G * BLOCK_J lanes of channels by BLOCK_P pixels.

Such a kernel is two trips to memory, there and back, if it asks for all that it reads at once. The
compiler, which spares registers, asks for some, waits, and asks for the next: up to four trips. So
loads are volatile, which keeps them in the order in which they are written down, and what is used
first is asked for last.
"""

import triton
import triton.language as tl

from ..activations import activate
from ..dependent_launch import await_inputs, begin_next
from ..norm.stream_kernels import affine, modulate
from .norm_statistics import (
    covering_lanes,
    merge_channels,
    moments_at_once,
    moments_of_partials,
)


@triton.jit
def parameters(weight_ptr, bias_ptr, offs_c, mask_c):
    """`affine` without modulation, not read any later than here."""
    g = tl.zeros(offs_c.shape, tl.float32) + 1.0
    b = tl.zeros(offs_c.shape, tl.float32)
    if weight_ptr is not None:
        g = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0, volatile=True).to(tl.float32)
    if bias_ptr is not None:
        b = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0, volatile=True).to(tl.float32)
    return g, b


@triton.jit
def _terms_of_parts(
    bias_ptr,  # float32 [C]
    extra_bias_ptr,  # float32 [C] or None
    emb_ptr,  # [N, C] or None
    stride_emb,
    n,
    offs_c,  # [L]
    mask_c,
):
    """What is added to the parts of a convolution in every pixel: [L]. Read past the cache of a
    multiprocessor, which may know an older tensor in its place if the launch in front has not
    ended."""
    terms = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    if extra_bias_ptr is not None:
        terms += tl.load(extra_bias_ptr + offs_c, mask=mask_c, other=0.0)
    if emb_ptr is not None:
        place = n * stride_emb + offs_c
        terms += tl.load(emb_ptr + place, mask=mask_c, other=0.0, cache_modifier=".cg")
    return terms


@triton.jit
def _load_parts(
    parts_ptr,  # float32 [SPLITS, N, HW, C]
    residual_ptr,  # [N, HW, C] or None
    N,
    HW,
    C,
    n,
    offs_c,
    offs_p,
    mask_c,
    mask_p,
    SPLITS: tl.constexpr,
):
    """A tile of every part, float32 [L, P], and of the residual. They are asked for in this order,
    none of it later."""
    mask = mask_c[:, None] & mask_p[None, :]
    offs = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    parts = ()
    if residual_ptr is not None:
        parts = parts + (tl.load(residual_ptr + offs, mask=mask, other=0.0, volatile=True),)
    for split in tl.static_range(SPLITS):
        ptrs = parts_ptr + split * (N * C).to(tl.int64) * HW + offs
        parts = parts + (tl.load(ptrs, mask=mask, other=0.0, volatile=True),)
    return parts


@triton.jit
def _sum_of_parts(
    terms,  # of `_terms_of_parts`
    parts,  # of `_load_parts`
):
    """A tile of a SplitConv, float32 [L, P], not rounded. The last is added first: the compiler,
    which spares registers, else asks for some of them, waits, and asks for the next."""
    acc = parts[len(parts) - 1] + terms[:, None]
    for i in tl.static_range(len(parts) - 1):
        acc += parts[i].to(tl.float32)
    return acc


@triton.jit
def _store_sums(
    partial_ptr,  # float32 [rows, 2, C]
    ys,  # tiles [L, P], of one row
    row,
    C,
    offs_c,
    mask_c,
):
    """The sum of the tiles over their pixels, which are all there, and of (y - mean)^2."""
    total = ys[0].to(tl.float32)
    for i in tl.static_range(1, len(ys)):
        total += ys[i].to(tl.float32)
    sums = tl.sum(total, 1)
    mean = sums / (len(ys) * total.shape[1])
    within = tl.zeros(total.shape, tl.float32)
    for i in tl.static_range(len(ys)):
        delta = ys[i].to(tl.float32) - mean[:, None]
        within += delta * delta
    sums_ptr = partial_ptr + row.to(tl.int64) * 2 * C + offs_c
    tl.store(sums_ptr, sums, mask=mask_c)
    tl.store(sums_ptr + C, tl.sum(within, 1), mask=mask_c)


@triton.jit(do_not_specialize=["N"])
def sum_parts_kernel(
    parts_ptr,
    bias_ptr,
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,  # float32 [N, PB, 2, C], out, or None: the sums of y over the pixels of a program
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
    begin_next()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = pid // CB % PB * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (pid // CB // PB).to(tl.int64)
    mask_c, mask_p = offs_c < C, offs_p < HW
    await_inputs()
    terms = _terms_of_parts(bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs_c, mask_c)
    parts = _load_parts(
        parts_ptr, residual_ptr, N, HW, C, n, offs_c, offs_p, mask_c, mask_p, SPLITS
    )
    acc = _sum_of_parts(terms, parts)
    offs_y = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_y, y, mask=mask_c[:, None] & mask_p[None, :])
    if partial_ptr is not None:
        _store_sums(partial_ptr, (y,), pid // CB, C, offs_c, mask_c)


@triton.jit(do_not_specialize=["N"])
def resample_parts_kernel(
    parts_ptr,
    bias_ptr,
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    y_ptr,  # [N, HW, C], out
    resampled_ptr,  # [N, H / 2, W / 2, C], or [N, 2H, 2W, C] with UP; out
    partial_ptr,  # float32 [N, PB, 2, C], out, or None: the sums of y over the pixels of a program
    stride_emb,
    N,
    HW,
    W,
    C,
    CB,  # blocks of channels
    PB,  # blocks of pixels, or of 2x2 pixels
    SPLITS: tl.constexpr,
    UP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The sum of a SplitConv, and its 2x2 means or itself upsampled."""
    FROM: tl.constexpr = 1 if UP else 4  # pixels of y to a result, or
    TO: tl.constexpr = 4 if UP else 1  # results to a pixel
    begin_next()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = pid // CB % PB * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (pid // CB // PB).to(tl.int64)
    mask_c, mask_p = offs_c < C, offs_p < HW // FROM
    mask = mask_c[:, None] & mask_p[None, :]
    width = W if UP else W // 2
    h, w = offs_p // width, offs_p % width
    await_inputs()
    terms = _terms_of_parts(bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs_c, mask_c)
    parts = ()
    for i in tl.static_range(FROM):
        pixel = offs_p if UP else (2 * h + i // 2) * W + 2 * w + i % 2
        parts = parts + (
            _load_parts(
                parts_ptr, residual_ptr, N, HW, C, n, offs_c, pixel, mask_c, mask_p, SPLITS
            ),
        )
    total = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    ys = ()
    for i in tl.static_range(FROM):
        ys = ys + (_sum_of_parts(terms, parts[i]).to(y_ptr.dtype.element_ty),)
        total += ys[i].to(tl.float32)
    for i in tl.static_range(FROM):
        pixel = offs_p if UP else (2 * h + i // 2) * W + 2 * w + i % 2
        tl.store(y_ptr + (n * HW + pixel)[None, :] * C + offs_c[:, None], ys[i], mask=mask)
    result = (total * (1.0 / FROM)).to(y_ptr.dtype.element_ty)
    for i in tl.static_range(TO):
        pixel = (2 * h + i // 2) * (2 * W) + 2 * w + i % 2 if UP else offs_p
        place = (n * (HW * TO // FROM) + pixel)[None, :] * C + offs_c[:, None]
        tl.store(resampled_ptr + place, result, mask=mask)
    if partial_ptr is not None:
        _store_sums(partial_ptr, ys, pid // CB, C, offs_c, mask_c)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def each_lane(v, G: tl.constexpr, J: tl.constexpr):
    """The sums over groups of J lanes of v [G * J], for every lane."""
    total = tl.sum(tl.reshape(v, [G, J]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, [G, J]), [G * J])


@triton.jit
def _over_groups(v, G: tl.constexpr, J: tl.constexpr):
    """The sum of v [G * J, P] over each group's lanes and pixels, for every lane."""
    if G == 1:  # threads meet once
        return tl.sum(v) + tl.zeros([J], tl.float32)
    else:
        # not a sum over [G, J * P]: of such a reshaped tensor Triton 3.6 adds the wrong lanes
        return each_lane(tl.sum(v, 1), G, J)


@triton.jit
def _two_over_groups(v, w, G: tl.constexpr, J: tl.constexpr):
    """`_over_groups` of both, in which threads meet once."""
    if G == 1:
        v, w = tl.ravel(v, can_reorder=True), tl.ravel(w, can_reorder=True)
        v, w = tl.reduce((v, w), 0, add_pairs)
        return v + tl.zeros([J], tl.float32), w + tl.zeros([J], tl.float32)
    else:
        v, w = tl.reduce((v, w), 1, add_pairs)
        return each_lane(v, G, J), each_lane(w, G, J)


@triton.jit(do_not_specialize=["N"])
def norm_whole_kernel(
    x1_ptr,  # [N, HW, C1]; with SPLITS > 0 it is written, if it is not None
    parts_ptr,  # float32 [SPLITS, N, HW, C1], or None: x1 is read
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
    LATE: tl.constexpr,  # the convolution's terms are read when the launch in front has ended;
    # else they are older than that launch
):
    begin_next()
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
    g, b = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
    if LATE:
        await_inputs()
    if SPLITS > 0:
        terms = _terms_of_parts(
            conv_bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs_c, first
        )
    if not LATE:
        await_inputs()
    here = first[:, None] & mask_p[None, :]
    offs1 = (n * HW + offs_p)[None, :] * C1 + offs_c[:, None]
    if SPLITS > 0:
        parts = _load_parts(
            parts_ptr, residual_ptr, N, HW, C1, n, offs_c, offs_p, first, mask_p, SPLITS
        )
    else:
        x = tl.load(x1_ptr + offs1, mask=here, other=0.0).to(tl.float32)
    if x2_ptr is not None:
        second = mask_c & (offs_c >= C1)
        offs = (n * HW + offs_p)[None, :] * (C - C1) + (offs_c - C1)[:, None]
        x2 = tl.load(x2_ptr + offs, mask=second[:, None] & mask_p[None, :], other=0.0)
    g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)
    if SPLITS > 0:  # rounded, as its other readers see it
        x = _sum_of_parts(terms, parts)
        y = x.to(a_ptr.dtype.element_ty)
        if x1_ptr is not None:
            tl.store(x1_ptr + offs1, y, mask=here)
        x = y.to(tl.float32)
    if x2_ptr is not None:
        x = tl.where(second[:, None], x2.to(tl.float32), x)

    count = HW * CG * 1.0
    x = tl.where(mask, x, 0.0)
    mean = _over_groups(x, BLOCK_G, BLOCK_J) / count
    x = tl.where(mask, x - mean[:, None], 0.0)
    rest, var = _two_over_groups(x, x * x, BLOCK_G, BLOCK_J)
    rest /= count  # what the sum has rounded off the mean
    var = var / count - rest * rest
    rstd = 1.0 / tl.sqrt(var + eps)
    a = activate((x - rest[:, None]) * (rstd * g)[:, None] + b[:, None], ACT)
    offs = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    tl.store(a_ptr + offs, a.to(a_ptr.dtype.element_ty), mask=mask)


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
def _each_channel(v, G: tl.constexpr, J: tl.constexpr):
    """[G], of groups, to [G * J], of their channels"""
    return tl.reshape(tl.broadcast_to(v[:, None], [G, J]), [G * J])


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
        mean_c = _each_channel(group_mean, BLOCK_G, BLOCK_J)
        slope = g * _each_channel(group_rstd, BLOCK_G, BLOCK_J)
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
