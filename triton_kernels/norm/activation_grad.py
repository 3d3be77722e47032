"""The gradient through an activation behind a norm, where no convolution can take it along:

    dz = da act'(z),   z = xhat g + b,   xhat = (x - mean) rstd;   sums of dz and of dz xhat

`conv.fused.conv_input_grad` has this in its epilogue. Here da comes from something else, such as
the resampling between the activation and the convolution of a block that changes the resolution.
Sums are per (image, channel) over each of K runs of pixels, by plain stores: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import check_activation
from ..reductions.tile_sum import sum_over_pixels
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_shape
from .coefficients import load_table, normalised_and_dz
from .pass_grid import channel_block

_TILE = 4096  # elements that a program has in registers: 16 a thread
_NUM_WARPS = 8
_PIXELS = 256  # of a program, about, in a large batch
_FEW_RUNS = 8  # of an image, up to which its readers add up the partials themselves
_MIN_PIXELS = 16

_empty = torch.empty  # tests put a function here that returns NaNs


@triton.jit
def _activation_grad_kernel(
    da_ptr,  # [N K, PIXELS, C]
    x_ptr,  # [N K, PIXELS, C]
    table_ptr,  # float32 [N, 4, C]
    dz_ptr,  # [N K, PIXELS, C]
    partial_ptr,  # float32 [N K, 2, C]
    PIXELS,
    C,
    K,
    CB,
    ACT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    run = (pid // CB).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    row_ptrs = table_ptr + run // K * 4 * C + offs_c
    mean, rstd, gain, offset = load_table(row_ptrs, C, mask_c)
    sum_d = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sum_e = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for i in range(TILES):
        p = i * BLOCK_P + offs_p
        mask = (p < PIXELS)[:, None] & mask_c[None, :]
        offs = (run * PIXELS + p)[:, None] * C + offs_c[None, :]
        da = tl.load(da_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        xhat, dz = normalised_and_dz(x, da, mean, rstd, gain, offset, ACT)  # 0 outside, as da
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        sum_d += dz
        sum_e += dz * xhat
    out_ptr = partial_ptr + run * 2 * C + offs_c
    tl.store(out_ptr, sum_over_pixels(sum_d, da_ptr.dtype.element_ty), mask=mask_c)
    tl.store(out_ptr + C, sum_over_pixels(sum_e, da_ptr.dtype.element_ty), mask=mask_c)


def _runs(hw: int, blocks: int, gpu: Device) -> int:
    """How many, all of one size, the pixels of an image are cut into if each is for so many
    programs. A program waits for its tiles one after the other, so there should not be few; those
    of eight warps are half as many."""
    least = triton.cdiv(hw, _PIXELS)
    wanted = triton.next_power_of_2(triton.cdiv(gpu.busy // 2, max(blocks, 1)))
    few = min(wanted, _FEW_RUNS, hw // _MIN_PIXELS)
    return max(k for k in range(1, max(least, few) + 1) if hw % k == 0)


def activation_grad(
    da: Tensor,  # [N, H, W, C]
    x: Tensor,  # [N, H, W, C]
    table: Tensor,  # float32 [N, 4, C]: mean, rstd, g, b
    activation: str,
) -> tuple[Tensor, Tensor]:  # [N, H, W, C]; float32 [N, K, 2, C]
    """dz of a = act(z), z = (x - mean) rstd g + b, from the gradient da; and its partials: of each
    tile of H W / K pixels, the sums of dz and of dz (x - mean) rstd, before dz is rounded."""
    check_activation(activation)
    check_nhwc("da", da)
    n, h, w, c = da.shape
    check_nhwc("x", x)
    check_shape("x", x, n, h, w, c)
    check_shape("table", table, n, 4, c)
    block_c = channel_block(c)
    cb = triton.cdiv(c, block_c)
    k = _runs(h * w, n * cb, describe(da.device))
    pixels = h * w // k
    block_p = max(1, min(_TILE // block_c, triton.next_power_of_2(pixels)))
    dz = _empty(da.shape, dtype=da.dtype, device=da.device)
    partials = _empty((n, k, 2, c), dtype=torch.float32, device=da.device)
    _activation_grad_kernel[(n * k * cb,)](
        da, x, table, dz, partials, pixels, c, k, cb,
        activation, triton.cdiv(pixels, block_p), block_p, block_c, num_warps=_NUM_WARPS,
        **overlapping(da.device),
    )  # fmt: skip
    return dz, partials
