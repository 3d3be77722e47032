"""What a norm multiplies and adds, of channels: jit functions that all its kernels use.

    z = (x - mean) rstd gain + offset     gain   = weight (1 + scale)
                                          offset = bias (1 + scale) + shift

offs_c are channels, of any shape, and mask_c says which of them there are. A table has four rows a
sample, float32 [N, 4, C]: mean, rstd, gain, offset. What backward makes of it has three, [N, 3, C]:
p, q, r.
"""

import triton
import triton.language as tl

from ..activations import activate_grad


@triton.jit
def parameters(weight_ptr, bias_ptr, offs_c, mask_c):
    """weight and bias, float32, those of [C] that are there, or 1 and 0."""
    gain = tl.zeros(offs_c.shape, tl.float32) + 1.0
    offset = tl.zeros(offs_c.shape, tl.float32)
    if weight_ptr is not None:
        gain = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    return gain, offset


@triton.jit
def modulate(gain, offset, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c):
    """gain and offset of sample n from weight and bias; scale and shift are [N, C] or None."""
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n * stride_scale + offs_c, mask=mask_c, other=0.0)
        gain *= 1.0 + scale.to(tl.float32)
        offset *= 1.0 + scale.to(tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * stride_shift + offs_c, mask=mask_c, other=0.0)
        offset += shift.to(tl.float32)
    return gain, offset


@triton.jit
def affine(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
):
    """gain and offset of sample n, float32."""
    gain, offset = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
    return modulate(
        gain, offset, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )


@triton.jit
def coefficients(
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
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
    """mean, rstd, gain and offset of sample n, float32."""
    offs_g = n * G + offs_c // CG
    mean = tl.load(mean_ptr + offs_g, mask=mask_c, other=0.0)
    rstd = tl.load(rstd_ptr + offs_g, mask=mask_c, other=0.0)
    gain, offset = affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c
    )
    return mean, rstd, gain, offset


@triton.jit
def load_table(row_ptrs, C, mask_c):
    """mean, rstd, gain and offset of the channels whose mean is there."""
    mean = tl.load(row_ptrs, mask=mask_c, other=0.0)
    rstd = tl.load(row_ptrs + C, mask=mask_c, other=0.0)
    gain = tl.load(row_ptrs + 2 * C, mask=mask_c, other=0.0)
    offset = tl.load(row_ptrs + 3 * C, mask=mask_c, other=0.0)
    return mean, rstd, gain, offset


@triton.jit
def load_coefficients(row_ptrs, C, mask_c):
    """p, q and r of the channels whose p is there: dx = p dz + q x + r."""
    p = tl.load(row_ptrs, mask=mask_c, other=0.0)
    q = tl.load(row_ptrs + C, mask=mask_c, other=0.0)
    r = tl.load(row_ptrs + 2 * C, mask=mask_c, other=0.0)
    return p, q, r


@triton.jit
def store_table(row_ptrs, C, mean, rstd, gain, offset, mask_c):
    """To where `load_table` finds them."""
    tl.store(row_ptrs, mean, mask=mask_c)
    tl.store(row_ptrs + C, rstd, mask=mask_c)
    tl.store(row_ptrs + 2 * C, gain, mask=mask_c)
    tl.store(row_ptrs + 3 * C, offset, mask=mask_c)


@triton.jit
def normalised_and_dz(x, dy, mean, rstd, gain, offset, ACT: tl.constexpr):
    """xhat = (x - mean) rstd and dz = dy act'(xhat gain + offset), [pixels, channels]."""
    xhat = (x - mean[None, :]) * rstd[None, :]
    return xhat, dy * activate_grad(xhat * gain[None, :] + offset[None, :], ACT)
