"""The kernels of `norm.multi_pass`, where the formulas and the names of the sizes are."""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from .coefficients import affine, coefficients, normalised_and_dz


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


@triton.jit
def _chunk(pid, x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C: tl.constexpr):
    """Where a program of a pass works: its sample (int64) and chunk of pixels; the tensor that has
    its channels, the number of channels there, and which its own are in that and in the whole, with
    their mask."""
    x_ptr, CH, c0, border = _half(x1_ptr, x2_ptr, pid % CB, C1, C, CB1, BLOCK_C)
    offs_h = c0 + tl.arange(0, BLOCK_C)
    n = (pid // CB // K).to(tl.int64)
    return n, pid // CB % K, x_ptr, CH, offs_h, border + offs_h, offs_h < CH


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
    MASKED: tl.constexpr,
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
def norm_partials_kernel(
    x1_ptr,  # [N, K * pixels, C1]
    x2_ptr,  # [N, K * pixels, C - C1] or None
    partial_ptr,  # float32 [N, K, 2, C], as in `norm.tables`
    pixels,  # of a chunk
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
    await_inputs()
    n, k, x_ptr, CH, offs_h, offs_c, mask_c = _chunk(
        tl.program_id(0), x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C
    )
    offs_p = tl.arange(0, BLOCK_P)
    chunk = n * K + k
    mean, m2 = moments(
        x_ptr + chunk * pixels * CH, pixels, CH, offs_p, offs_h, mask_c,
        TILES, BLOCK_P, BLOCK_C, MASKED,
    )  # fmt: skip
    out_ptr = partial_ptr + chunk * 2 * C + offs_c
    tl.store(out_ptr, mean * pixels, mask=mask_c)
    tl.store(out_ptr + C, m2, mask=mask_c)


# --- backward ------------------------------------------------------------------------------------


@triton.jit
def group_norm_bwd_sums_kernel(
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
    n, k, x_ptr, CH, offs_h, offs_c, mask_c = _chunk(
        tl.program_id(0), x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C
    )
    offs_p = tl.arange(0, BLOCK_P)
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
            xhat, dz = normalised_and_dz(x, dy, mean, rstd, gain, offset, ACT)
            acc_d += dz
            acc_e += dz * xhat
    out_ptr = partial_ptr + (n * K + k) * 2 * C + offs_c
    tl.store(out_ptr, tl.sum(acc_d, 0), mask=mask_c)
    tl.store(out_ptr + C, tl.sum(acc_e, 0), mask=mask_c)


@triton.jit
def group_norm_bwd_finalize_kernel(
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
def group_norm_bwd_dx_kernel(
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
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # last pixels first: they are still in L2
    n, k, x_ptr, CH, offs_h, offs_c, mask_c = _chunk(
        pid, x1_ptr, x2_ptr, K, C1, C, CB1, CB, BLOCK_C
    )
    offs_p = tl.arange(0, BLOCK_P)
    offs_x = offs_p[:, None] * CH + offs_h[None, :]
    offs_y = offs_p[:, None] * C + offs_c[None, :]
    dx_ptr, _, _, _ = _half(dx1_ptr, dx2_ptr, pid % CB, C1, C, CB1, BLOCK_C)
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
        xhat, dz = normalised_and_dz(x, dy, mean, rstd, gain, offset, ACT)
        dx = slope[None, :] * dz - (m1[None, :] + xhat * m2[None, :])
        tl.store(dx_ptr + first * CH + offs_x, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_norm_bwd_params_kernel(
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
