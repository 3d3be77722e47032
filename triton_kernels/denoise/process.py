"""The forward process in registers: x_0 of a data set, the noise, and how much of both."""

import triton
import triton.language as tl

from ..noise.philox import NOISE, normals

_NOISE = tl.constexpr(NOISE)


@triton.jit
def clean(
    images_ptr, index_ptr, flip_ptr, n, offs, mask, elements, W: tl.constexpr, C: tl.constexpr
):
    """Elements `offs` of x_0 of sample n, float32."""
    if index_ptr is not None:
        image = tl.load(index_ptr + n)
    else:
        image = n
    if flip_ptr is not None:
        w = (offs // C) % W
        mirrored = offs + (W - 1 - 2 * w) * C
        offs = tl.where(tl.load(flip_ptr + n), mirrored, offs)
    x0 = tl.load(images_ptr + image * elements + offs, mask=mask, other=0)
    if images_ptr.dtype.element_ty == tl.uint8:
        return tl.div_rn(x0.to(tl.float32), 127.5) - 1.0
    else:
        return x0


@triton.jit
def noise(seed, step, first, n, start, BLOCK: tl.constexpr):
    """epsilon of elements 4 * start and up of sample n: float32 [4 * BLOCK]."""
    return normals(seed, step, first + n, start + tl.arange(0, BLOCK), _NOISE)


@triton.jit
def coefficients(t_ptr, table_ptr, n):
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at the timestep of sample n."""
    t = tl.load(t_ptr + n)
    return tl.load(table_ptr + 2 * t), tl.load(table_ptr + 2 * t + 1)
