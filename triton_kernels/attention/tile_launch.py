"""Launches of the kernels in plain Triton, of attention and of cross-attention."""

import math

import torch
import triton
from torch import Tensor

from ..registry.cost import AMPERE
from ..registry.kernel import Kernel
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device
from . import relayed
from .hopper import is_long
from .kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel
from .operands import BwdOperands, FwdOperands
from .tiles import BwdConfig, Tile, block_d, bwd_tiles, fwd_tiles, is_wide, refuse, work


def tiles_grad_cost(spec: AttentionSpec, gpu: Device, config: BwdConfig) -> float:
    """Microseconds of the default tile where `relayed` can run; elsewhere no other kernel is
    compared with it. Several of its small programs fit a multiprocessor, so waves are not
    counted; of wide heads one does, so that nothing runs beside its exponentials."""
    if relayed.refuse(spec, gpu) is not None or config != bwd_tiles(spec, gpu)[0]:
        return math.inf
    blocks, d = math.ceil(spec.t / 64), block_d(spec.d)
    alone = 2 if is_wide(spec.d) else 1
    program = 0.06 * d - 0.3 + blocks * alone * (0.32 + 0.0125 * d)  # us of both kernels
    us = max(1.0, spec.n * blocks / gpu.num_sms) * program
    return us if is_long(spec, gpu) else math.inf


def _forward(config: Tile, operands: FwdOperands) -> None:
    """o and lse."""
    *tensors, constants = operands
    n, heads, t = operands.lse.shape
    attention_fwd_kernel[(n * heads * triton.cdiv(t, config.keep),)](
        *tensors,
        **constants, BLOCK_M=config.keep, BLOCK_N=config.step, num_warps=config.num_warps,
        num_stages=config.num_stages, **overlapping(operands.q.device, n * t),
    )  # fmt: skip


def _backward(config: BwdConfig, operands: BwdOperands) -> Tensor | None:
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


TILES = Kernel("tiles", Tile, refuse, fwd_tiles, launch=_forward, work=work, borrows=AMPERE)
TILES_GRAD = Kernel(
    "tiles",
    BwdConfig,
    refuse,
    bwd_tiles,
    tiles_grad_cost,
    launch=_backward,
    work=work,
    fitted_by=("one_pass",),
    borrows=AMPERE,
)
