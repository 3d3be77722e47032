"""Launches of the kernels in plain Triton, of attention and of cross-attention."""

import torch
import triton
from torch import Tensor

from ..runtime.dependent_launch import overlapping
from .kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel
from .operands import BwdOperands, FwdOperands
from .tiles import BwdConfig, Tile


def forward(config: Tile, operands: FwdOperands) -> None:
    """o and lse."""
    *tensors, constants = operands
    n, heads, t = operands.lse.shape
    attention_fwd_kernel[(n * heads * triton.cdiv(t, config.keep),)](
        *tensors,
        **constants, BLOCK_M=config.keep, BLOCK_N=config.step, num_warps=config.num_warps,
        num_stages=config.num_stages, **overlapping(operands.q.device, n * t),
    )  # fmt: skip


def backward(config: BwdConfig, operands: BwdOperands) -> Tensor | None:
    """The gradients, in one launch or in two; and rows of `BwdOperands`."""
    one_pass, keep, step, num_warps, num_stages = config
    *read, dq, dkv, _, constants = operands
    do, lse, keys = operands.do, operands.lse, constants["L"]
    n, heads, t = lse.shape
    rows = operands.rows(keep)
    shared = dict(
        **constants,
        rows_ptr=rows,
        stride_don=do.stride(0),
        stride_dot=do.stride(1),
        stride_doc=do.stride(2),
        num_warps=num_warps,
        num_stages=num_stages,
        **overlapping(do.device),
    )
    delta = None
    if one_pass:
        assert keep >= keys, f"one pass over {keys} keys with tiles of {keep}"
    else:
        delta = do.new_empty((n, heads, t), dtype=torch.float32)
        attention_bwd_dq_kernel[(n * heads * triton.cdiv(t, keep),)](
            *read, delta, dq, **shared, BLOCK_M=keep, BLOCK_N=step
        )
    attention_bwd_dkdv_kernel[(n * heads * triton.cdiv(keys, keep),)](
        *read, delta, dq, dkv, **shared, BLOCK_M=step, BLOCK_N=keep, ONE_PASS=one_pass
    )
    return rows
