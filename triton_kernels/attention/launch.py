"""The two passes of attention: they choose a tile, allocate, and launch."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..registry.choose import select
from ..registry.spec import AttentionSpec, dtype_name
from ..runtime.device import describe
from . import hopper as head
from . import relayed, streamed, tile_launch
from .configs import (
    ATTENTION,
    ATTENTION_GRAD,
    HeadGrad,
    HeadTile,
    KeptTile,
    RelayedTile,
    StreamedTile,
)
from .tiles import BwdConfig, Tile


def _constants(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> dict:
    t, d = qkv.shape[1], qkv.shape[2] // 3 // num_heads
    return tile_launch.constants_of(t, t, d, num_heads, order, allow_tf32)


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
    tile_launch.forward(qkv, None, None, o, lse, constants, config)
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
    rows = None if place is None else place(n * triton.cdiv(t, config.keep), c3)
    tile_launch.backward(do, qkv, None, None, o, lse, dqkv, None, rows, constants, config)
    return dqkv, rows
