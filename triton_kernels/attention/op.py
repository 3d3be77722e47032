"""`attention` and `cross_attention`, as PyTorch sees them: an op, its derivative, and the function
that validates."""

import torch
from torch import Tensor

from ..runtime.layout import autocast, check_nhwc
from ..runtime.library import derivative, is_traced, once_differentiable, op
from .launch import (
    attention_bwd,
    attention_fwd,
    check_gradient,
    cross_attention_bwd,
    cross_attention_fwd,
)
from .tiles import MAX_HEAD_DIM

ORDERS = ("qkv_heads", "heads_qkv")


def _fake_attention(qkv, num_heads, order, allow_tf32):
    n, t, c3 = qkv.shape
    lse = qkv.new_empty((n, num_heads, t), dtype=torch.float32)
    return qkv.new_empty((n, t, c3 // 3)), lse


@op("attention", _fake_attention, differentiable=True)
def _attention(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> tuple[Tensor, Tensor]:
    return attention_fwd(qkv, num_heads, order, allow_tf32)


@op("attention_backward", lambda do, qkv, *_: qkv.new_empty(qkv.shape))
def _attention_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, num_heads: int, order: str, allow_tf32: bool
) -> Tensor:
    return attention_bwd(do, qkv, o, lse, num_heads, order, allow_tf32)


@derivative(of=_attention)
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, num_heads, order, allow_tf32):
        o, lse = _attention.below_autograd(qkv, num_heads, order, allow_tf32)
        ctx.save_for_backward(qkv, o, lse)
        ctx.options = num_heads, order, allow_tf32
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        return _attention_backward(do, *ctx.saved_tensors, *ctx.options), None, None, None


def attention(
    qkv: Tensor,  # [N, T, 3C]
    num_heads: int,
    *,
    order: str = "qkv_heads",
    allow_tf32: bool = False,
) -> Tensor:  # [N, T, C], heads outermost in C
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads, at most 512.

    `order` is the packing of the 3C channels: "qkv_heads" is [3, heads, d] (guided-diffusion's new
    order, unet.cu), "heads_qkv" is [heads, 3, d] (its legacy order). `allow_tf32` affects float32
    only. Under torch.autocast qkv is first cast to autocast's dtype.

    Raises ValueError for an unsupported shape, dtype, stride or order, and where a gradient will be
    needed of heads that are too wide for the GPU: of more than 256 channels in float32, on compute
    capability 8.6, 8.9 and 12.
    """
    check_nhwc("qkv", qkv, ndim=3)
    c3 = qkv.shape[2]
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; choose one of {', '.join(ORDERS)}")
    if c3 == 0 or c3 % 3:
        raise ValueError(f"qkv has {c3} channels; expected a positive multiple of 3 (q, k and v)")
    _check_heads(c3 // 3, num_heads)
    qkv = autocast(qkv)
    if _needs_gradient(qkv):
        check_gradient((qkv, None, None), num_heads, allow_tf32)
    o, _ = _attention(qkv, num_heads, order, allow_tf32)
    return o


def _check_heads(c: int, num_heads: int) -> None:
    """Raises ValueError unless so many channels are so many heads that kernels have."""
    if num_heads < 1 or c == 0 or c % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide C={c}")
    if (d := c // num_heads) > MAX_HEAD_DIM:
        raise ValueError(f"a head has {d} channels; at most {MAX_HEAD_DIM} are supported")


def _needs_gradient(*tensors: Tensor) -> bool:
    """Whether backward may follow, in a call that runs; one that is traced may be for another
    GPU."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return needed and not is_traced(tensors)


def _fake_cross_attention(q, kv, mask, num_heads, allow_tf32):
    n, t, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((n, num_heads, t), dtype=torch.float32)


@op("cross_attention", _fake_cross_attention, differentiable=True)
def _cross_attention(
    q: Tensor, kv: Tensor, mask: Tensor | None, num_heads: int, allow_tf32: bool
) -> tuple[Tensor, Tensor]:
    return cross_attention_fwd(q, kv, mask, num_heads, allow_tf32)


@op(
    "cross_attention_backward",
    lambda do, q, kv, *_: (q.new_empty(q.shape), kv.new_empty(kv.shape)),
)
def _cross_attention_backward(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    allow_tf32: bool,
) -> tuple[Tensor, Tensor]:
    return cross_attention_bwd(do, q, kv, mask, o, lse, num_heads, allow_tf32)


@derivative(of=_cross_attention)
class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, mask, num_heads, allow_tf32):
        o, lse = _cross_attention.below_autograd(q, kv, mask, num_heads, allow_tf32)
        ctx.save_for_backward(q, kv, mask, o, lse)
        ctx.options = num_heads, allow_tf32
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        dq, dkv = _cross_attention_backward(do, *ctx.saved_tensors, *ctx.options)
        return dq, dkv, None, None, None


def cross_attention(
    q: Tensor,  # [N, T, C]
    kv: Tensor,  # [N, L, 2C]: k and v, packed [2, heads, d]
    num_heads: int,
    *,
    mask: Tensor | None = None,  # bool [N, L]: the keys that a sample has; None: all
    allow_tf32: bool = False,
) -> Tensor:  # [N, T, C], heads outermost in C
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads, at most 512, over the keys that the
    mask selects; zeros for a sample without keys.

    k and v must be finite where the mask is False too. `allow_tf32` affects float32 only. Under
    torch.autocast q and kv are first cast to autocast's dtype.

    Raises ValueError for an unsupported shape, dtype or stride, and for a gradient as `attention`.
    """
    check_nhwc("q", q, ndim=3), check_nhwc("kv", kv, ndim=3)
    n, _, c = q.shape
    if kv.shape[0] != n or kv.shape[2] != 2 * c:
        raise ValueError(
            f"kv has shape {list(kv.shape)}; expected [{n}, L, {2 * c}], twice q's channels"
        )
    _check_heads(c, num_heads)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != kv.shape[:2]):
        raise ValueError(
            f"mask is {mask.dtype} of shape {list(mask.shape)}; expected bool {list(kv.shape[:2])}"
        )
    if mask is not None and not mask.is_contiguous():
        raise ValueError(f"mask has strides {mask.stride()}; expected contiguous")
    q, kv = autocast(q), autocast(kv)
    if q.dtype != kv.dtype:
        raise ValueError(f"kv is {kv.dtype}; expected {q.dtype}, which q is")
    if _needs_gradient(q, kv):
        check_gradient((q, kv, mask), num_heads, allow_tf32)
    o, _ = _cross_attention(q, kv, mask, num_heads, allow_tf32)
    return o
