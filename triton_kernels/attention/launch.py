"""The two passes of attention: they choose a tile, allocate, and launch."""

import math
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..registry.choose import select
from ..registry.spec import AttentionSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import describe
from . import hopper as head
from . import relayed, streamed
from .configs import (
    ATTENTION,
    ATTENTION_GRAD,
    HeadGrad,
    HeadTile,
    KeptTile,
    RelayedTile,
    StreamedTile,
)
from .kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel
from .tiles import (
    BwdConfig,
    Tile,
    block_d,
)


def _constants(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> dict:
    """The arguments that every kernel has, by name."""
    d = qkv.shape[2] // 3 // num_heads
    return dict(
        num_heads=num_heads,
        scale=1 / math.sqrt(d),
        T=qkv.shape[1],
        L=qkv.shape[1],
        D=d,
        HEADS_QKV=order == "heads_qkv",
        PRECISION="tf32" if allow_tf32 else "ieee",
        BLOCK_D=block_d(d),
    )


def _spec(qkv: Tensor, num_heads: int, allow_tf32: bool, do: Tensor | None = None) -> AttentionSpec:
    """Of the forward pass or, with `do`, of the backward pass."""
    n, t, c3 = qkv.shape
    return AttentionSpec(
        n=n * num_heads,  # a head is a head, whichever sample it belongs to
        dtype=dtype_name(qkv.dtype, allow_tf32),
        t=t,
        d=c3 // 3 // num_heads,
        grad=do is not None,
        fetchable=all(head.fetchable(x) for x in (qkv, do) if x is not None),
    )


def attention_fwd(
    qkv: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: Tile | HeadTile | KeptTile | StreamedTile | None = None,
) -> tuple[Tensor, Tensor]:
    """o [N, T, C] and lse, float32 [N, heads, T] in base 2."""
    n, t, c3 = qkv.shape
    assert t * c3 < 2**31, qkv.shape  # offsets within a sample are int32
    constants = _constants(qkv, num_heads, order, allow_tf32)
    o = torch.empty((n, t, c3 // 3), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((n, num_heads, t), dtype=torch.float32, device=qkv.device)
    if o.numel() == 0:
        return o, lse
    if config is None:

        def run(c: tuple) -> Tensor:
            return attention_fwd(qkv, num_heads, order, allow_tf32, c)[0]

        spec = _spec(qkv, num_heads, allow_tf32)
        config = select(ATTENTION, spec, describe(qkv.device), run).config
    if isinstance(config, HeadTile):
        head.forward(qkv, o, lse, constants, *config)
        return o, lse
    if isinstance(config, KeptTile):
        streamed.forward_kept(qkv, o, lse, constants, *config)
        return o, lse
    if isinstance(config, StreamedTile):
        streamed.forward_streamed(qkv, o, lse, constants, *config)
        return o, lse
    attention_fwd_kernel[(n * num_heads * triton.cdiv(t, config.keep),)](
        qkv,
        None,
        None,
        o,
        lse,
        **constants,
        BLOCK_M=config.keep,
        BLOCK_N=config.step,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(qkv.device, n * t),
    )
    return o, lse


def attention_bwd(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: BwdConfig | HeadGrad | RelayedTile | None = None,
) -> Tensor:
    """dqkv [N, T, 3C]; `do` may have any strides."""
    return attention_bwd_rows(do, qkv, o, lse, num_heads, order, allow_tf32, None, config)[0]


def attention_bwd_rows(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    place: Callable[[int, int], Tensor] | None,  # (rows, columns) -> where they go, float32
    config: BwdConfig | HeadGrad | RelayedTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same, and if they have a place, rows [rows, 3C] whose sum is that of dqkv over samples
    and positions."""
    n, t, c3 = qkv.shape
    # offsets within a sample are int32
    assert t * max(c3, do.stride(1)) + c3 * do.stride(2) < 2**31, (qkv.shape, do.stride())
    constants = _constants(qkv, num_heads, order, allow_tf32)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if dqkv.numel() == 0:
        return dqkv, None if place is None else place(0, c3)
    if config is None:

        def run(c: tuple) -> Tensor:
            return attention_bwd(do, qkv, o, lse, num_heads, order, allow_tf32, c)

        spec = _spec(qkv, num_heads, allow_tf32, do)
        config = select(ATTENTION_GRAD, spec, describe(qkv.device), run).config
    if isinstance(config, HeadGrad):
        rows = None if place is None else place(n, c3)
        head.backward(do, qkv, o, lse, dqkv, rows, constants)
        return dqkv, rows
    if isinstance(config, RelayedTile):
        rows = None if place is None else place(n * triton.cdiv(t, relayed.KEEP), c3)
        relayed.backward(do, qkv, o, lse, dqkv, rows, constants, *config)
        return dqkv, rows
    _, keep, step, num_warps, num_stages = config
    grid = (n * num_heads * triton.cdiv(t, keep),)
    rows = None if place is None else place(n * triton.cdiv(t, keep), c3)
    shared = dict(
        **constants,
        rows_ptr=rows,
        stride_don=do.stride(0),
        stride_dot=do.stride(1),
        stride_doc=do.stride(2),
        num_warps=num_warps,
        num_stages=num_stages,
        **overlapping(qkv.device),
    )
    if config.one_pass:
        assert keep >= t, f"one pass over {t} positions with tiles of {keep}"
        delta = None
    else:
        delta = torch.empty((n, num_heads, t), dtype=torch.float32, device=qkv.device)
        attention_bwd_dq_kernel[grid](
            do, qkv, None, None, o, lse, delta, dqkv, **shared, BLOCK_M=keep, BLOCK_N=step
        )
    attention_bwd_dkdv_kernel[grid](
        do,
        qkv,
        None,
        None,
        o,
        lse,
        delta,
        dqkv,
        None,
        **shared,
        BLOCK_M=step,
        BLOCK_N=keep,
        ONE_PASS=config.one_pass,
    )
    return dqkv, rows
