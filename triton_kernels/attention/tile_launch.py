"""Launches of the kernels in plain Triton, of attention and of cross-attention."""

import math

import torch
import triton
from torch import Tensor

from ..runtime.dependent_launch import overlapping
from .kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel
from .tiles import BwdConfig, Tile, block_d


def constants_of(
    t: int,  # queries
    keys: int,
    d: int,  # channels of a head
    num_heads: int,
    order: str,
    allow_tf32: bool,
) -> dict:
    """The arguments that every kernel has, by name."""
    return dict(
        num_heads=num_heads,
        scale=1 / math.sqrt(d),
        T=t,
        L=keys,
        D=d,
        HEADS_QKV=order == "heads_qkv",
        PRECISION="tf32" if allow_tf32 else "ieee",
        BLOCK_D=block_d(d),
    )


def forward(
    q: Tensor,  # qkv [N, T, 3C], or q [N, T, C]
    kv: Tensor | None,  # None, or [N, L, 2C]
    mask: Tensor | None,  # uint8 [N, L]
    o: Tensor,  # [N, T, C], to be written, as is float32 [N, heads, T]:
    lse: Tensor,
    constants: dict,
    config: Tile,
) -> None:
    """o and lse."""
    n, heads, t = lse.shape
    attention_fwd_kernel[(n * heads * triton.cdiv(t, config.keep),)](
        q, kv, mask, o, lse,
        **constants, BLOCK_M=config.keep, BLOCK_N=config.step, num_warps=config.num_warps,
        num_stages=config.num_stages, **overlapping(q.device, n * t),
    )  # fmt: skip


def backward(
    do: Tensor,  # [N, T, C], of any strides
    q: Tensor,  # these and lse as those of `forward`
    kv: Tensor | None,
    mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,  # as q, to be written
    dkv: Tensor | None,  # as kv, likewise
    rows: Tensor | None,  # float32 [N, blocks of T, 3C] of qkv, likewise: sums over blocks
    constants: dict,
    config: BwdConfig,
) -> None:
    """The gradients, in one launch or in two."""
    one_pass, keep, step, num_warps, num_stages = config
    n, heads, t = lse.shape
    keys = constants["L"]
    shared = dict(
        **constants,
        rows_ptr=rows,
        stride_don=do.stride(0),
        stride_dot=do.stride(1),
        stride_doc=do.stride(2),
        num_warps=num_warps,
        num_stages=num_stages,
        **overlapping(q.device),
    )
    delta = None
    if one_pass:
        assert keep >= keys, f"one pass over {keys} keys with tiles of {keep}"
    else:
        delta = torch.empty((n, heads, t), dtype=torch.float32, device=q.device)
        attention_bwd_dq_kernel[(n * heads * triton.cdiv(t, keep),)](
            do, q, kv, mask, o, lse, delta, dq, **shared, BLOCK_M=keep, BLOCK_N=step
        )
    attention_bwd_dkdv_kernel[(n * heads * triton.cdiv(keys, keep),)](
        do, q, kv, mask, o, lse, delta, dq, dkv,
        **shared, BLOCK_M=step, BLOCK_N=keep, ONE_PASS=one_pass,
    )  # fmt: skip
