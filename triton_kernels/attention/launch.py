"""The two passes of attention: they choose a tile, allocate, and launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..registry.choose import select
from ..registry.spec import AttentionSpec, dtype_name
from ..runtime.device import describe
from .configs import ATTENTION, ATTENTION_GRAD
from .hopper import fetchable
from .operands import BwdOperands, FwdOperands, constants_of


def _constants(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> dict:
    t, d = qkv.shape[1], qkv.shape[2] // 3 // num_heads
    return constants_of(t, t, d, num_heads, order, allow_tf32)


def _spec(qkv: Tensor, num_heads: int, allow_tf32: bool, do: Tensor | None = None) -> AttentionSpec:
    """Of the forward pass or, with `do`, of the backward pass."""
    n, t, c3 = qkv.shape
    return AttentionSpec(
        n=n * num_heads,  # a head is a head, whichever sample it belongs to
        dtype=dtype_name(qkv.dtype, allow_tf32),
        t=t,
        d=c3 // 3 // num_heads,
        grad=do is not None,
        fetchable=all(fetchable(x) for x in (qkv, do) if x is not None),
    )


def attention_fwd(
    qkv: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool = True,  # of float32
    config: tuple | None = None,  # of a kernel of `ATTENTION`
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
    operands = FwdOperands(qkv, None, None, o, lse, constants)
    ATTENTION.kernel_of(config).launch(config, operands)
    return o, lse


def attention_bwd(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: tuple | None = None,  # of a kernel of `ATTENTION_GRAD`
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
    config: tuple | None = None,  # of a kernel of `ATTENTION_GRAD`
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
    operands = BwdOperands(do, qkv, None, None, o, lse, dqkv, None, place, constants)
    return dqkv, ATTENTION_GRAD.kernel_of(config).launch(config, operands)
