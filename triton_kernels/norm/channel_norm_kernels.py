"""Kernels of `channel_norm`: the norm over the channels of each pixel, and its gradients.

    xhat = (x - mean) r factor                r as in `_statistics`, the mean of LayerNorm alone
    z    = xhat gain + offset                 gain and offset as in `coefficients.affine`
    y    = act(z)

With dz = dy act'(z), D = sum over pixels of dz, E = sum over pixels of dz xhat, both per (n, c):

    dx = r factor (gain dz - m1 - xhat m2 slope / factor^2)

with m1 and m2 the means over channels of gain dz and of gain dz xhat.

A program has whole rows, [BLOCK_P, BLOCK_C] at a time with C <= BLOCK_C, so that statistics stay in
registers and nothing is stored for backward; it goes through the BLOCK_P pixels `tiles` times.
"""

import triton
import triton.language as tl

from ..activations import activate_affine, activate_affine_grad
from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .coefficients import affine


@triton.jit
def _read(ptr, offs, mask):
    return tl.load(ptr + offs) if mask is None else tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def _load(ptr, offs, mask):
    return _read(ptr, offs, mask).to(tl.float32)


@triton.jit
def _centre(x, mask, C):
    x -= (tl.sum(x, 1) / C)[:, None]
    return x if mask is None else tl.where(mask, x, 0.0)


@triton.jit
def _statistics(x, mask, C, eps, CENTRED: tl.constexpr, EPS_IN: tl.constexpr):
    """x, less its mean if it is to be centred; r, by which it is normalised; and slope, which says
    how r changes with x: dr = -slope r^2 (x r) dx / C summed over channels. [BLOCK_P, BLOCK_C] and
    [BLOCK_P]. `mask` is None, or of the elements that there are; others are zeros.

    With s = mean of x^2 over channels, r is 1 / sqrt(s + eps), 1 / max(sqrt(s), eps) or
    1 / (sqrt(s) + eps), as `EPS_IN` has it."""
    if CENTRED:  # twice, for what the sum has lost of a large mean
        x = _centre(_centre(x, mask, C), mask, C)
    square = tl.sum(x * x, 1) / C
    if EPS_IN == "root":
        r = 1.0 / tl.sqrt(square + eps)
        slope = tl.full(r.shape, 1.0, tl.float32)
    elif EPS_IN == "max":
        root = tl.sqrt(square)
        r = 1.0 / tl.maximum(root, eps)
        slope = tl.where(root >= eps, 1.0, 0.0)
    else:
        tl.static_assert(EPS_IN == "sum", "unknown place of eps")
        root = tl.sqrt(square)
        r = 1.0 / (root + eps)
        slope = tl.where(root > 0, (root + eps) / tl.where(root > 0, root, 1.0), 0.0)
    return x, r, slope


@triton.jit(do_not_specialize=["K", "tiles"])
def channel_norm_fwd_kernel(
    x_ptr,  # [N, HW, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    residual_ptr,  # [N, HW, C], of any type, or None: added to y
    y_ptr,  # [N, HW, C], of any type
    stride_scale,
    stride_shift,
    HW,
    C,
    K,  # programs an image
    tiles,
    eps,
    factor,
    CENTRED: tl.constexpr,
    EPS_IN: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # some tiles reach over an edge
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    n = (tl.program_id(0) // K).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    gain, offset = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    first = tl.program_id(0) % K * tiles * BLOCK_P
    offs_p = tl.arange(0, BLOCK_P)
    offs = offs_p[:, None] * C + offs_c[None, :]
    for i in range(tiles):
        p = first + i * BLOCK_P
        at = (n * HW + p) * C
        mask = (offs_p < HW - p)[:, None] & mask_c[None, :] if MASKED else None
        x = _load(x_ptr + at, offs, mask)
        x, r, _ = _statistics(x, mask, C, eps, CENTRED, EPS_IN)
        y = activate_affine(x * (r * factor)[:, None], gain[None, :], offset[None, :], ACT)
        if residual_ptr is not None:
            y += _load(residual_ptr + at, offs, mask)
        tl.store(y_ptr + at + offs, as_operand(y, y_ptr.dtype.element_ty, TF32), mask=mask)


@triton.jit(do_not_specialize=["K", "tiles"])
def channel_norm_bwd_kernel(
    dy_ptr,  # [N, HW, C], of any type
    x_ptr,  # [N, HW, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    add_ptr,  # [N, HW, C] or None: added to dx
    dx_ptr,  # [N, HW, C] or None
    sums_ptr,  # float32 [N, K, 2, C] or None: D and E of a program
    rows_ptr,  # float32 [N, K, C] or None: sums of dx of a program
    stride_scale,
    stride_shift,
    HW,
    C,
    K,
    tiles,
    eps,
    factor,
    CENTRED: tl.constexpr,
    EPS_IN: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,
):
    await_inputs()
    n = (tl.program_id(0) // K).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    gain, offset = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    first = tl.program_id(0) % K * tiles * BLOCK_P
    offs_p = tl.arange(0, BLOCK_P)
    offs = offs_p[:, None] * C + offs_c[None, :]
    sum_d = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_e = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_dx = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    mask_first = (offs_p < HW - first)[:, None] & mask_c[None, :] if MASKED else None
    x_next = _read(x_ptr + (n * HW + first) * C, offs, mask_first)
    dy_next = _read(dy_ptr + (n * HW + first) * C, offs, mask_first)
    for i in range(tiles):
        p = first + i * BLOCK_P
        at = (n * HW + p) * C
        x, dz = x_next.to(tl.float32), dy_next.to(tl.float32)
        # the next tile is asked for before work on this one; the last one again
        p_next = first + tl.minimum(i + 1, tiles - 1) * BLOCK_P
        mask_next = (offs_p < HW - p_next)[:, None] & mask_c[None, :] if MASKED else None
        x_next = _read(x_ptr + (n * HW + p_next) * C, offs, mask_next)
        dy_next = _read(dy_ptr + (n * HW + p_next) * C, offs, mask_next)
        mask = (offs_p < HW - p)[:, None] & mask_c[None, :] if MASKED else None
        x, r, slope = _statistics(x, mask, C, eps, CENTRED, EPS_IN)
        r *= factor
        x *= r[:, None]  # xhat
        if MASKED:  # outside of the image r may be infinite
            x = tl.where(mask, x, 0.0)
        dz *= activate_affine_grad(x, gain[None, :], offset[None, :], ACT)
        if sums_ptr is not None:
            sum_d += dz
            sum_e += dz * x
        if dx_ptr is not None:
            dz *= gain[None, :]
            m2 = tl.sum(dz * x, 1) * (slope / (C * factor * factor))
            if CENTRED:
                dz -= (tl.sum(dz, 1) / C)[:, None]
            dx = r[:, None] * (dz - x * m2[:, None])
            if add_ptr is not None:
                dx += _load(add_ptr + at, offs, mask)
            tl.store(dx_ptr + at + offs, as_operand(dx, dx_ptr.dtype.element_ty, TF32), mask=mask)
            if rows_ptr is not None:
                sum_dx += tl.where(mask, dx, 0.0) if MASKED else dx
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * 2 * C
        tl.store(sums_ptr + offs_c, tl.sum(sum_d, 0), mask=mask_c)
        tl.store(sums_ptr + C + offs_c, tl.sum(sum_e, 0), mask=mask_c)
    if rows_ptr is not None:
        rows_ptr += tl.program_id(0).to(tl.int64) * C
        tl.store(rows_ptr + offs_c, tl.sum(sum_dx, 0), mask=mask_c)
