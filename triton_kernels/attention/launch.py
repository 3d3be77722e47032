"""The two passes of attention, and of cross-attention, where keys and values are of other positions
than queries: the ops with their kernels, of which a pass chooses one with its tile, allocates, and
launches."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..reductions.row_sums import RowSums, row_place
from ..registry.choose import select
from ..registry.kernel import Op
from ..registry.spec import AttentionSpec, dtype_name
from ..runtime.device import Device, describe
from . import hopper
from .few_keys import FEW_KEYS, FEW_KEYS_GRAD
from .operands import BwdOperands, FwdOperands, constants_of
from .relayed import RELAYED
from .streamed import KEPT, STREAMED
from .tile_launch import TILES, TILES_GRAD


def _similar(spec: AttentionSpec, gpu: Device) -> bool:
    """Whether rows of other lengths count: where a head fits shared memory."""
    return hopper.refuse(spec, gpu) is None


_KEY = ("t", "d", "dtype")
ATTENTION = Op("attention", _KEY, (TILES, hopper.HEAD, KEPT, STREAMED), _similar)
ATTENTION_GRAD = Op("attention_bwd", _KEY, (TILES_GRAD, hopper.HEAD_GRAD, RELAYED), _similar)

_CROSS_KEY = ("t", "keys", "d", "dtype")
CROSS_ATTENTION = Op("cross_attention", _CROSS_KEY, (TILES, FEW_KEYS), similar=False)
CROSS_ATTENTION_GRAD = Op(
    "cross_attention_bwd", _CROSS_KEY, (TILES_GRAD, FEW_KEYS_GRAD), similar=False
)


def attention_fwd(
    qkv: Tensor,  # [N, T, 3C]
    num_heads: int,
    order: str,
    allow_tf32: bool = True,  # here and below: of float32
    config: tuple | None = None,  # of a kernel of `ATTENTION`
) -> tuple[Tensor, Tensor]:
    """o [N, T, C] and lse, float32 [N, heads, T] in base 2."""
    return _forward(ATTENTION, (qkv, None, None), num_heads, order, allow_tf32, config)


def attention_bwd(
    do: Tensor,  # [N, T, C], here and below of any strides
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: tuple | None = None,  # of a kernel of `ATTENTION_GRAD`
) -> Tensor:
    """dqkv [N, T, 3C]."""
    rest = {"allow_tf32": allow_tf32, "config": config}
    return attention_backward(do, qkv, o, lse, num_heads, order, False, **rest)[0]


def attention_backward(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    sums: RowSums | bool,  # True: rows in a tensor of their own; False: none
    *,
    allow_tf32: bool = True,
    config: tuple | None = None,  # of a kernel of `ATTENTION_GRAD`
) -> tuple[Tensor, Tensor | None]:
    """The same, and rows [rows, 3C] in a place of `sums`, whose sum is that of dqkv over samples
    and positions."""
    given = do, (qkv, None, None), o, lse, num_heads, order, allow_tf32
    (dqkv, _), rows = _backward(ATTENTION_GRAD, *given, row_place(sums, qkv), config)
    return dqkv, rows


def cross_attention_fwd(
    q: Tensor,  # [N, T, C]
    kv: Tensor,  # [N, L, 2C]
    mask: Tensor | None,  # bool [N, L]
    num_heads: int,
    allow_tf32: bool = True,
    config: tuple | None = None,  # of a kernel of `CROSS_ATTENTION`
) -> tuple[Tensor, Tensor]:
    """o [N, T, C] and lse, float32 [N, heads, T] in base 2: infinite where no key is seen."""
    given = (q, kv, mask), num_heads, "qkv_heads", allow_tf32
    return _forward(CROSS_ATTENTION, *given, config)


def cross_attention_bwd(
    do: Tensor,  # [N, T, C]
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    allow_tf32: bool = True,
    config: tuple | None = None,  # of a kernel of `CROSS_ATTENTION_GRAD`
) -> tuple[Tensor, Tensor]:
    """dq [N, T, C] and dkv [N, L, 2C]."""
    given = do, (q, kv, mask), o, lse, num_heads, "qkv_heads", allow_tf32
    return _backward(CROSS_ATTENTION_GRAD, *given, None, config)[0]


_Read = tuple[Tensor, Tensor | None, Tensor | None]  # qkv, None and None, or q, kv and the mask


def _spec(read: _Read, num_heads: int, allow_tf32: bool, do: Tensor | None = None) -> AttentionSpec:
    """Of the forward pass or, with `do`, of the backward pass."""
    q, kv, mask = read
    n, t, c = q.shape
    if kv is None:
        c //= 3
        its = {"fetchable": all(hopper.fetchable(x) for x in (q, do) if x is not None)}
    else:
        its = {"keys": kv.shape[1], "masked": mask is not None}
    dtype, grad = dtype_name(q.dtype, allow_tf32), do is not None
    # a head is a head, whichever sample it belongs to
    return AttentionSpec(n * num_heads, dtype, t, c // num_heads, grad, **its)


def check_gradient(read: _Read, num_heads: int, allow_tf32: bool) -> None:
    """Raises ValueError, before a whole forward pass is computed, if no kernel can compute the
    gradient of this attention on its GPU."""
    spec = replace(_spec(read, num_heads, allow_tf32), grad=True)
    op, of = (ATTENTION_GRAD, "") if read[1] is None else (CROSS_ATTENTION_GRAD, "cross_")
    reason = None if spec.n == 0 or spec.seen == 0 else _refusal(op, spec, describe(read[0].device))
    if reason is not None:
        raise ValueError(
            f"the gradient of {spec.dtype} heads of {spec.d} channels has no kernel ({reason}); use"
            f" bfloat16, float16, narrower heads or triton_kernels.reference.{of}attention, or"
            " torch.no_grad() if no gradient is needed"
        )


@lru_cache
def _refusal(op: Op, spec: AttentionSpec, gpu: Device) -> str | None:
    return op.refuse(spec, gpu)


def _bytes(read: _Read) -> _Read:
    """As kernels read them."""
    q, kv, mask = read
    return q, kv, None if mask is None else mask.view(torch.uint8)


def _forward(
    op: Op, read: _Read, num_heads: int, order: str, allow_tf32: bool, config: tuple | None
) -> tuple[Tensor, Tensor]:
    q, spec = read[0], _spec(read, num_heads, allow_tf32)
    of_a_sample = max(x.shape[1] * x.shape[2] for x in read[:2] if x is not None)
    assert of_a_sample < 2**31, read  # offsets within a sample are int32
    n, t, _ = q.shape
    o = q.new_empty((n, t, num_heads * spec.d))
    lse = q.new_empty((n, num_heads, t), dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    if spec.seen == 0:
        return o.zero_(), lse.fill_(math.inf)
    if config is None:

        def run(c: tuple) -> Tensor:
            return _forward(op, read, num_heads, order, allow_tf32, c)[0]

        config = select(op, spec, describe(q.device), run).config
    constants = constants_of(spec, num_heads, order, allow_tf32)
    op.kernel_of(config).launch(config, FwdOperands(*_bytes(read), o, lse, constants))
    return o, lse


def _backward(
    op: Op,
    do: Tensor,
    read: _Read,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    place: Callable[[int, int], Tensor] | None,
    config: tuple | None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """The gradients of qkv, or of q and kv; and rows, if they have a place."""
    q, spec = read[0], _spec(read, num_heads, allow_tf32, do)
    _, t, c = q.shape
    # offsets within a sample are int32
    assert t * max(c, do.stride(1)) + c * do.stride(2) < 2**31, (q.shape, do.stride())
    grads = [None if x is None else x.new_empty(x.shape) for x in read[:2]]
    if q.numel() == 0 or spec.seen == 0:
        zeros = [None if x is None else x.zero_() for x in grads]
        return zeros, None if place is None else place(0, c)
    if config is None:

        def run(config: tuple) -> Tensor:
            given = do, read, o, lse, num_heads, order, allow_tf32
            found, _ = _backward(op, *given, None, config)
            return next(x for x in reversed(found) if x is not None)

        config = select(op, spec, describe(q.device), run).config
    constants = constants_of(spec, num_heads, order, allow_tf32)
    operands = BwdOperands(do, *_bytes(read), o, lse, *grads, place, constants)
    return grads, op.kernel_of(config).launch(config, operands)
