"""Linear attention, and its gradients."""

import math

import torch

LOG2_E = math.log2(math.e)


def linear_attention_forward(q, k, v, memory, scale, *, allow_tf32=True):
    """o of q, k and v [N, T, H, D]; the context [N, H, D, D] and, in base 2, the logarithms of the
    sums over positions of exp(k) [N, H, D]."""
    k, v = _with_memory(k, v, memory)
    lse = torch.logsumexp(k, 1)  # [N, H, D]
    context = torch.einsum("nshd,nshe->nhde", (k - lse[:, None]).exp(), v)
    o = torch.einsum("nthd,nhde->nthe", q.softmax(-1) * scale, context)
    return o, context, lse * LOG2_E


def linear_attention_backward(do, q, k, v, memory, scale, context, lse, grads, *, allow_tf32=True):
    """Writes the gradients of q, k and v, and returns those of the memory, if there is one."""
    given = [q, k, v, *(memory or ())]
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        o, _, _ = linear_attention_forward(*leaves[:3], tuple(leaves[3:]) or None, scale)
    made = torch.autograd.grad(o, leaves, do)
    for out, grad in zip(grads, made, strict=False):
        out.copy_(grad)
    return tuple(made[3:]) or None


def _with_memory(k, v, memory):
    """Keys and values, with those of the memory in front, which are of every sample."""
    if memory is None:
        return k, v
    n = k.shape[0]
    return tuple(
        torch.cat((kept.to(x.dtype).expand(n, -1, -1, -1), x), 1)
        for kept, x in zip(memory, (k, v), strict=True)
    )
