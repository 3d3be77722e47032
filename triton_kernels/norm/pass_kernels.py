"""The kernel of `norm_dx`; see `norm.passes` for the formulas.

A program has TILES tiles of BLOCK_P pixels by BLOCK_C channels of one half of the concatenation; K
programs cover the pixels of an image, CB1 blocks of channels the first half and CB both. MASKED:
some tiles reach over an edge.
"""

import triton
import triton.language as tl

from ..activations import activate_affine_grad
from ..reductions.tile_sum import sum_over_pixels
from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .coefficients import load_coefficients, load_table


@triton.jit
def store_dx(
    dx,  # float32 [BLOCK_P, BLOCK_C]
    acc,  # likewise: of the tiles before
    add_ptr,  # or None
    add_second_ptr,  # or None
    factor,  # or None
    dx_ptr,
    sums_ptr,  # or None: acc stays as it is
    first,  # where the tile is in each of them
    offs,
    mask,
    MASKED: tl.constexpr,
    TF32: tl.constexpr,
):
    """Add two tensors to a tile of dx, multiply, round and store it; acc + dx."""
    if add_ptr is not None:
        dx += tl.load(add_ptr + first + offs, mask=mask).to(tl.float32)
    if add_second_ptr is not None:
        dx += tl.load(add_second_ptr + first + offs, mask=mask).to(tl.float32)
    if factor is not None:
        dx *= factor
    tl.store(dx_ptr + first + offs, as_operand(dx, dx_ptr.dtype.element_ty, TF32), mask=mask)
    if sums_ptr is not None:
        acc += tl.where(mask, dx, 0.0) if MASKED else dx
    return acc


@triton.jit
def store_sums(sums_ptr, offs_c, acc, DTYPE: tl.constexpr, mask_c):
    """The sums over pixels of tiles that were loaded as DTYPE, unless nobody wants them."""
    if sums_ptr is not None:
        tl.store(sums_ptr + offs_c, sum_over_pixels(acc, DTYPE), mask=mask_c)


@triton.jit
def _norm_dx_half(
    dz_ptr,  # [N, HW, C]
    x_ptr,  # this half: [N, HW, CH], as the four below
    coeff_ptr,  # float32 [N, 3, C]
    table_ptr,  # float32 [N, 4, C] or None
    add_ptr,  # or None
    add_second_ptr,  # or None
    factor,  # or None
    dx_ptr,
    sums_ptr,  # float32 [N, K, CH] or None
    n,
    k,
    c0,  # first channel of the program, within the half
    border,  # first channel of the half
    HW,
    CH,
    C,
    K,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,
):
    offs_p = tl.arange(0, BLOCK_P)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CH
    if table_ptr is not None:
        rows = table_ptr + n * 4 * C + border + offs_c
        mean, rstd, gain, offset = load_table(rows, C, mask_c)
        slope = rstd * gain  # z = (x - mean) slope + offset
    p, q, r = load_coefficients(coeff_ptr + n * 3 * C + border + offs_c, C, mask_c)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for i in range(TILES):
        p0 = (k * TILES + i) * BLOCK_P
        mask = (offs_p < HW - p0)[:, None] & mask_c[None, :] if MASKED else None
        first = (n * HW + p0) * CH
        offs = offs_p[:, None] * CH + offs_c[None, :]
        offs_z = offs_p[:, None] * C + offs_c[None, :]
        dz = tl.load(dz_ptr + (n * HW + p0) * C + border + offs_z, mask=mask).to(tl.float32)
        x = tl.load(x_ptr + first + offs, mask=mask).to(tl.float32)
        if table_ptr is not None:  # dz is the gradient of act(z) as yet
            x -= mean[None, :]
            dz *= activate_affine_grad(x, slope[None, :], offset[None, :], ACT)
        dx = p[None, :] * dz + (q[None, :] * x + r[None, :])
        acc = store_dx(
            dx, acc, add_ptr, add_second_ptr, factor, dx_ptr, sums_ptr, first, offs, mask,
            MASKED, TF32,
        )  # fmt: skip
    store_sums(sums_ptr, (n * K + k) * CH + offs_c, acc, dz_ptr.dtype.element_ty, mask_c)


@triton.jit
def _sum_four(ptr, offs, W, C, mask):
    """The sum of the 2x2 pixels at `offs`, float32; rows are W C elements apart."""
    upper = tl.load(ptr + offs, mask=mask).to(tl.float32)
    upper += tl.load(ptr + offs + C, mask=mask).to(tl.float32)
    lower = tl.load(ptr + offs + W * C, mask=mask).to(tl.float32)
    return upper + (lower + tl.load(ptr + offs + W * C + C, mask=mask).to(tl.float32))


@triton.jit
def _norm_dx_upsampled(
    dz_ptr,  # [N, HW, C]
    x_ptr,  # this half, not upsampled: [N, H/2, W/2, CH]
    coeff_ptr,  # float32 [N, 3, C]
    add_ptr,  # [N, HW, CH] or None
    add_second_ptr,  # [N, HW, CH] or None
    factor,  # or None
    dx_ptr,  # [N, H/2, W/2, CH]: sums over 2x2 pixels
    sums_ptr,  # float32 [N, K, CH] or None
    n,
    k,
    c0,
    HW,
    W,
    CH,
    C,
    K,
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # pixels of x
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,
):
    offs_q = tl.arange(0, BLOCK_Q)
    offs_c = c0 + tl.arange(0, BLOCK_C)
    mask_c = offs_c < CH
    p, q, r = load_coefficients(coeff_ptr + n * 3 * C + offs_c, C, mask_c)
    acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)
    for i in range(TILES):
        q0 = (k * TILES + i) * BLOCK_Q
        mask = (offs_q < HW // 4 - q0)[:, None] & mask_c[None, :] if MASKED else None
        pixel = q0 + offs_q
        corner = pixel // (W // 2) * (2 * W) + pixel % (W // 2) * 2  # of its 2x2 pixels
        offs = (n * (HW // 4) + q0) * CH + (offs_q[:, None] * CH + offs_c[None, :])
        dz = _sum_four(dz_ptr + n * HW * C, corner[:, None] * C + offs_c[None, :], W, C, mask)
        x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
        dx = p[None, :] * dz + 4.0 * (q[None, :] * x + r[None, :])
        offs_fine = corner[:, None] * CH + offs_c[None, :]
        if add_ptr is not None:
            dx += _sum_four(add_ptr + n * HW * CH, offs_fine, W, CH, mask)
        if add_second_ptr is not None:
            dx += _sum_four(add_second_ptr + n * HW * CH, offs_fine, W, CH, mask)
        acc = store_dx(dx, acc, None, None, factor, dx_ptr, sums_ptr, 0, offs, mask, MASKED, TF32)
    store_sums(sums_ptr, (n * K + k) * CH + offs_c, acc, dz_ptr.dtype.element_ty, mask_c)


@triton.jit
def norm_dx_kernel(
    dz_ptr,  # [N, HW, C]
    x1_ptr,  # [N, HW, C1], or [N, H/2, W/2, C1] with UPSAMPLE
    x2_ptr,  # [N, HW, C2] or None
    coeff_ptr,  # float32 [N, 3, C]
    table_ptr,  # float32 [N, 4, C], or None. If it is there, dz is the gradient of act(z), which is
    # taken through the activation first, and dx = p dz + q (x - mean) + r
    add1_ptr,  # [N, HW, C1] or None
    add1_second_ptr,  # [N, HW, C1] or None
    add2_ptr,  # [N, HW, C2] or None
    dx1_ptr,  # as x1
    dx2_ptr,  # [N, HW, C2] or None
    sums_ptr,  # float32 [N, K, C1] or None
    HW,
    W,
    C1,
    C2,
    K,
    CB1,
    CB,
    factor,  # multiplies dx1; or None
    UPSAMPLE: tl.constexpr,
    ACT: tl.constexpr,  # with a table
    MASKED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # as in apply
    pid_c = pid % CB
    k = pid // CB % K
    n = (pid // CB // K).to(tl.int64)
    C = C1 + C2
    if pid_c < CB1:
        c0 = pid_c * BLOCK_C
        if UPSAMPLE:
            _norm_dx_upsampled(
                dz_ptr, x1_ptr, coeff_ptr, add1_ptr, add1_second_ptr, factor, dx1_ptr, sums_ptr,
                n, k, c0, HW, W, C1, C, K, MASKED, TILES, BLOCK_P // 4, BLOCK_C, TF32,
            )  # fmt: skip
        else:
            _norm_dx_half(
                dz_ptr, x1_ptr, coeff_ptr, table_ptr, add1_ptr, add1_second_ptr, factor, dx1_ptr,
                sums_ptr, n, k, c0, 0, HW, C1, C, K, ACT, MASKED, TILES, BLOCK_P, BLOCK_C, TF32,
            )  # fmt: skip
    elif x2_ptr is not None:
        c0 = (pid_c - CB1) * BLOCK_C
        _norm_dx_half(
            dz_ptr, x2_ptr, coeff_ptr, table_ptr, add2_ptr, None, None, dx2_ptr, None,
            n, k, c0, C1, HW, C2, C, K, ACT, MASKED, TILES, BLOCK_P, BLOCK_C, TF32,
        )  # fmt: skip
