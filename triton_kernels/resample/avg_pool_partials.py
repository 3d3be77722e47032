"""Means over 2x2 pixels, with the sums that the norm behind them wants: one pass instead of two.

    y[p, q] = (x[2p, 2q] + x[2p, 2q+1] + x[2p+1, 2q] + x[2p+1, 2q+1]) / 4

A program makes one tile of y, for which there is one row of partials as `norm_tables` has them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norm.pass_grid import channel_block
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_nhwc

_empty = torch.empty  # tests put a function here that returns NaNs

_TILE, _NUM_WARPS = 4096, 8  # elements of y: 16 a thread, four loads each of 16 bytes


@triton.jit
def _pool_partials_kernel(
    x_ptr,  # [N, H, W, C]
    y_ptr,  # [N, K * pixels, C]
    partial_ptr,  # float32 [N, K, 2, C]
    pixels,  # of a tile
    H,
    W,
    C,
    K,
    CB,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    mask_c = offs_c < C
    mask = (offs_p < pixels)[:, None] & mask_c[None, :]
    pixel = pid // CB % K * pixels + offs_p
    row = pixel // (W // 2)
    offs = (2 * row * W + (pixel - row * (W // 2)) * 2)[:, None] * C + offs_c[None, :]
    tile = (pid // CB).to(tl.int64)
    x_ptr += (pid // CB // K).to(tl.int64) * H * W * C
    y = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(x_ptr + offs + C, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(x_ptr + offs + W * C, mask=mask, other=0.0).to(tl.float32)
    y += tl.load(x_ptr + offs + W * C + C, mask=mask, other=0.0).to(tl.float32)
    y = (y * 0.25).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (tile * pixels + offs_p)[:, None] * C + offs_c[None, :], y, mask=mask)
    y = y.to(tl.float32)  # as its readers see it
    total = tl.sum(y, 0)
    d = tl.where(mask, y - (total / pixels)[None, :], 0.0)
    tl.store(partial_ptr + tile * 2 * C + offs_c, total, mask=mask_c)
    tl.store(partial_ptr + tile * 2 * C + C + offs_c, tl.sum(d * d, 0), mask=mask_c)


def avg_pool_partials(
    x: Tensor,  # [N, H, W, C]
) -> tuple[Tensor, Tensor]:  # [N, H // 2, W // 2, C]; float32 [N, K, 2, C]
    """Means over 2x2 pixels, and over each of K tiles of them, of H // 2 * (W // 2) / K pixels, the
    sum and that of (y - mean)^2, with y as it was rounded."""
    check_nhwc("x", x)
    n, h, w, c = x.shape
    size = h // 2 * (w // 2)
    block_c = channel_block(c)
    most = max(_TILE // block_c, 1)
    pixels = max(p for p in range(1, min(most, size) + 1) if size % p == 0)  # all of one size
    k, cb = size // pixels, triton.cdiv(c, block_c)
    y = _empty((n, h // 2, w // 2, c), dtype=x.dtype, device=x.device)
    partials = _empty((n, k, 2, c), dtype=torch.float32, device=x.device)
    if n:
        _pool_partials_kernel[(n * k * cb,)](
            x, y, partials, pixels, h, w, c, k, cb, triton.next_power_of_2(pixels), block_c,
            num_warps=_NUM_WARPS, **overlapping(x.device, n * h * w),
        )  # fmt: skip
    return y, partials
