"""The norm over the channels of each pixel, and its gradients."""

import torch

from ... import reference
from .norms import operand


def channel_norm_forward(
    x, params=(None,) * 4, *, factor=1.0, residual=None, dtype=None, tf32=False, **how
):
    """`reference.channel_norm` of x [N, ..., C], times `factor` before the weight, plus a tensor of
    its shape."""
    y = _formula(x, params, factor, how)
    y = y if residual is None else y + residual
    return operand(y, tf32).to(dtype or x.dtype)


def channel_norm_backward(
    dy, x, params=(None,) * 4, needed=(True,) * 5, *, factor=1.0, add=None, rows=False, sums=False,
    tf32=False, **how
):  # fmt: skip
    """The gradients of x, plus `add`, and of weight, bias, scale and shift, those that are needed;
    rows whose sum is that of the first over all pixels, or None; and, without scale and shift, rows
    whose sum is the gradients of bias and weight side by side, or None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, *params)]
    with torch.enable_grad():
        y = _formula(leaves[0], leaves[1:], factor, how)
    asked = [t for t, need in zip(leaves, needed, strict=True) if need and t is not None]
    made = iter(torch.autograd.grad(y, asked, dy.to(y.dtype)) if asked else ())
    grads = [
        next(made) if need and t is not None else None
        for t, need in zip(leaves, needed, strict=True)
    ]
    dx = grads[0]
    dx = dx if add is None or dx is None else dx + add
    rows = dx.flatten(0, -2).sum(0, keepdim=True) if rows else None
    if sums:
        c = x.shape[-1]
        affine = [x.new_full((c,), 1 - i) if p is None else p for i, p in enumerate(params[:2])]
        alone = (False, True, True, False, False)
        _, weight, bias, *_ = channel_norm_backward(
            dy, x, (*affine, None, None), alone, factor=factor, **how
        )
    both = torch.cat((bias, weight))[None] if sums else None
    return operand(dx, tf32 and dx is not None), *grads[1:], rows, both


def _formula(x, params, factor, how):
    weight, bias, scale, shift = params
    if factor != 1:
        gain = torch.full((), factor, dtype=x.dtype, device=x.device)
        weight = gain.expand(x.shape[-1]) if weight is None else weight * gain
    return reference.channel_norm(x, weight, bias, scale=scale, shift=shift, **how)
