"""Every gradient of a linear layer over a handful of samples, y = x W^T + b, in one launch:

    dW += dy^T x        db += sum_n dy        dx = dy W

The embedding's layers are the last of a backward pass, and nothing runs beside them: their time is
the number of launches, and the length of the sum over output channels that one program does. So a
program takes a block of W once for dW and for dx, whose parts are added up in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reductions.column_sum import partials, sum_partials
from ..runtime.dependent_launch import await_inputs, overlapping
from ..tf32 import dot_of_split

# Of channels of either kind, and of samples at a time, at most: in TF32, and in float32, which has
# two parts of every number in registers
_BLOCKS = {True: 64, False: 32}

# A handful of samples are one round, or few: to load the next one meanwhile takes registers, with
# which half as many programs fit a multiprocessor
_STAGES = 1


@triton.jit(do_not_specialize=["N"])
def _linear_grads_kernel(
    x_ptr,  # float32 [N, CI]
    dy_ptr,  # float32 [N, CO]
    weight_ptr,  # float32 [CO, CI]
    grad_weight_ptr,  # float32 [CO, CI], added to
    grad_bias_ptr,  # float32 [CO], added to
    part_ptr,  # float32 [blocks of CO, N, CI]: parts of dx, or None
    N,
    CI,
    CO,
    BLOCK_N: tl.constexpr,
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
    TF32: tl.constexpr,  # products are in it
):
    await_inputs()
    ci_blocks = tl.cdiv(CI, BLOCK_CI)
    block = tl.program_id(0) // ci_blocks
    first = tl.program_id(0) % ci_blocks == 0
    offs_co = block * BLOCK_CO + tl.arange(0, BLOCK_CO)
    offs_ci = tl.program_id(0) % ci_blocks * BLOCK_CI + tl.arange(0, BLOCK_CI)
    mask_co, mask_ci = offs_co < CO, offs_ci < CI
    mask_w = mask_co[:, None] & mask_ci[None, :]
    offs_w = offs_co.to(tl.int64)[:, None] * CI + offs_ci[None, :]
    if part_ptr is not None:
        w = tl.load(weight_ptr + offs_w, mask=mask_w, other=0.0)
    dw = tl.load(grad_weight_ptr + offs_w, mask=mask_w, other=0.0)
    db = tl.load(grad_bias_ptr + offs_co, mask=mask_co & first, other=0.0)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        mask_n = (offs_n < N)[:, None]
        row = offs_n.to(tl.int64)[:, None]
        dy = tl.load(
            dy_ptr + row * CO + offs_co[None, :], mask=mask_n & mask_co[None, :], other=0.0
        )
        x = tl.load(x_ptr + row * CI + offs_ci[None, :], mask=mask_n & mask_ci[None, :], other=0.0)
        if TF32:
            dw = tl.dot(tl.trans(dy), x, dw, input_precision="tf32")
        else:
            dw += dot_of_split(tl.trans(dy), x)
        db += tl.sum(dy, 0)
        if part_ptr is not None:
            dx = tl.dot(dy, w, input_precision="tf32") if TF32 else dot_of_split(dy, w)
            out = part_ptr + (block.to(tl.int64) * N + row) * CI + offs_ci[None, :]
            tl.store(out, dx, mask=mask_n & mask_ci[None, :])
    tl.store(grad_weight_ptr + offs_w, dw, mask=mask_w)
    tl.store(grad_bias_ptr + offs_co, db, mask=mask_co & first)


def linear_grads(
    x: Tensor,  # float32 [N, CI]
    dy: Tensor,  # float32 [N, CO]
    weight: Tensor,  # float32 [CO, CI]
    grad_weight: Tensor,  # float32 [CO, CI], added to
    grad_bias: Tensor,  # float32 [CO], added to
    need_dx: bool = True,
    *,
    allow_tf32: bool = True,
) -> Tensor | None:  # float32 [N, CI]
    """Add the gradients of weight and bias; return that of x, or None."""
    (n, ci), co = x.shape, dy.shape[1]
    for tensor, shape in (
        (x, (n, ci)),
        (dy, (n, co)),
        (weight, (co, ci)),
        (grad_weight, (co, ci)),
        (grad_bias, (co,)),
    ):
        assert tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
    dx = x.new_empty((n, ci), dtype=torch.float32) if need_dx else None
    if n == 0:
        return dx
    block = _BLOCKS[allow_tf32]
    blocks = triton.cdiv(co, block)
    parts = partials(dx, blocks) if need_dx else None
    block_n = max(16, min(triton.next_power_of_2(n), block))
    _linear_grads_kernel[(blocks * triton.cdiv(ci, block),)](
        x, dy, weight, grad_weight, grad_bias, parts, n, ci, co, block_n, block, block,
        allow_tf32, num_warps=4, num_stages=_STAGES, **overlapping(x.device),
    )  # fmt: skip
    if need_dx:
        sum_partials(parts, dx)
    return dx
