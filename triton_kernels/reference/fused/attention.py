"""Attention and its gradient; for sampling with the projection and the norm in front of it."""

import torch

from ... import reference
from .norms import apply, norm_table


def attention_forward(qkv, num_heads, order):
    """(o, what backward needs) of `reference.fused.attention`."""
    return reference.attention(qkv, num_heads, order=order), None


def attention_backward(do, qkv, o, state, num_heads, order, sums):
    """(dqkv, rows [rows, 3C] whose sum is that of it over samples and positions)"""
    with torch.enable_grad():
        qkv = qkv.detach().requires_grad_()
        o = reference.attention(qkv, num_heads, order=order)
    dqkv = torch.autograd.grad(o, qkv, do)[0]
    return dqkv, dqkv.sum(1)


def cross_attention_forward(q, kv, mask, num_heads):
    """(o, what backward needs) of `reference.cross_attention`."""
    return reference.cross_attention(q, kv, num_heads, mask=mask), None


def cross_attention_backward(do, q, kv, mask, o, state, num_heads):
    """(dq, dkv)"""
    with torch.enable_grad():
        q, kv = (x.detach().requires_grad_() for x in (q, kv))
        o = reference.cross_attention(q, kv, num_heads, mask=mask)
    return torch.autograd.grad(o, (q, kv), do)


def projected_attention(x, norm, weight, bias, num_heads, order):
    """`attention` of norm(x) weight^T + bias, or of x weight^T + bias"""
    if norm is not None:
        x = apply(x[:, None], None, norm_table(*norm), "identity")[:, 0]
    return reference.attention(x @ weight.T + bias, num_heads, order=order)
