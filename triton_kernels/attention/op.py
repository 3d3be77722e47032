"""`attention`, as PyTorch sees it: an op, its derivative, and the function that validates."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..runtime.layout import autocast, check_nhwc
from ..runtime.library import derivative, op
from .launch import attention_bwd, attention_fwd

ORDERS = ("qkv_heads", "heads_qkv")
MAX_HEAD_DIM = 256


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
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads, at most 256.

    `order` says how the 3C channels are packed: "qkv_heads" is [3, heads, d] (guided-diffusion's
    new order, unet.cu), "heads_qkv" is [heads, 3, d] (its legacy order). `allow_tf32` concerns
    float32 alone. Under torch.autocast qkv is first cast to its dtype.

    Raises ValueError for a shape, dtype, stride or order that does not fit.
    """
    check_nhwc("qkv", qkv, ndim=3)
    c3 = qkv.shape[2]
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; choose one of {', '.join(ORDERS)}")
    if c3 == 0 or c3 % 3:
        raise ValueError(f"qkv has {c3} channels; expected a positive multiple of 3 (q, k and v)")
    if num_heads < 1 or c3 // 3 % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide C={c3 // 3}")
    if c3 // 3 // num_heads > MAX_HEAD_DIM:
        d = c3 // 3 // num_heads
        raise ValueError(f"a head has {d} channels; at most {MAX_HEAD_DIM} are supported")
    o, _ = _attention(autocast(qkv), num_heads, order, allow_tf32)
    return o
