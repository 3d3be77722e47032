"""The two passes of cross-attention, where keys and values are of other positions than queries: the
kernels of `attention`, with other pointers."""

import math

import torch
from torch import Tensor

from ..registry.choose import select
from ..registry.spec import AttentionSpec, dtype_name
from ..runtime.device import describe
from .configs import CROSS_ATTENTION, CROSS_ATTENTION_GRAD
from .operands import BwdOperands, FwdOperands, constants_of
from .tiles import BwdConfig, Tile


def _constants(q: Tensor, kv: Tensor, num_heads: int, allow_tf32: bool) -> dict:
    t, keys, d = q.shape[1], kv.shape[1], q.shape[2] // num_heads
    return constants_of(t, keys, d, num_heads, "qkv_heads", allow_tf32)


def cross_spec(
    q: Tensor, kv: Tensor, mask: Tensor | None, num_heads: int, allow_tf32: bool, grad: bool
) -> AttentionSpec:
    """Of the forward or the backward pass."""
    n, t, c = q.shape
    return AttentionSpec(
        n=n * num_heads,
        dtype=dtype_name(q.dtype, allow_tf32),
        t=t,
        d=c // num_heads,
        grad=grad,
        keys=kv.shape[1],
        masked=mask is not None,
    )


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def cross_attention_fwd(
    q: Tensor,  # [N, T, C]
    kv: Tensor,  # [N, L, 2C]
    mask: Tensor | None,  # bool [N, L]
    num_heads: int,
    allow_tf32: bool = True,  # of float32
    config: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """o [N, T, C] and lse, float32 [N, heads, T] in base 2: infinite where no key is seen."""
    n, t, c = q.shape
    keys = kv.shape[1]
    assert max(t * c, keys * 2 * c) < 2**31, (q.shape, kv.shape)  # int32 within a sample
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((n, num_heads, t), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if keys == 0:
        return o.zero_(), lse.fill_(math.inf)
    if config is None:

        def run(c: tuple) -> Tensor:
            return cross_attention_fwd(q, kv, mask, num_heads, allow_tf32, c)[0]

        spec = cross_spec(q, kv, mask, num_heads, allow_tf32, grad=False)
        config = select(CROSS_ATTENTION, spec, describe(q.device), run).config
    constants = _constants(q, kv, num_heads, allow_tf32)
    operands = FwdOperands(q, kv, _bytes(mask), o, lse, constants)
    CROSS_ATTENTION.kernel_of(config).launch(config, operands)
    return o, lse


def cross_attention_bwd(
    do: Tensor,  # [N, T, C], of any strides
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    allow_tf32: bool = True,  # of float32
    config: BwdConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """dq [N, T, C] and dkv [N, L, 2C]."""
    n, t, c = q.shape
    keys = kv.shape[1]
    assert t * do.stride(1) + c * do.stride(2) < 2**31, (q.shape, do.stride())
    dq, dkv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, kv))
    if dq.numel() == 0 or keys == 0:
        return dq.zero_(), dkv.zero_()
    if config is None:

        def run(c: tuple) -> Tensor:
            return cross_attention_bwd(do, q, kv, mask, o, lse, num_heads, allow_tf32, c)[1]

        spec = cross_spec(q, kv, mask, num_heads, allow_tf32, grad=True)
        config = select(CROSS_ATTENTION_GRAD, spec, describe(q.device), run).config
    constants = _constants(q, kv, num_heads, allow_tf32)
    operands = BwdOperands(do, q, kv, _bytes(mask), o, lse, dq, dkv, None, constants)
    CROSS_ATTENTION_GRAD.kernel_of(config).launch(config, operands)
    return dq, dkv
