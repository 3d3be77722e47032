"""What sampling has in one launch with a convolution: the norm in front of it, perhaps with 2x2
means behind it, or the norm behind it."""

import torch

from ... import reference
from .conv import conv_forward
from .norms import apply, norm_table
from .resample import upsample


def conv_norm(x, weight, bias, norm, *, x2=None, **terms):
    """(what `conv_forward` returns, or None if it is not kept; its partials if they are wanted;
    act(norm(.)) of it beside x2)"""
    y, partials = conv_forward(x, weight, bias, **terms, stats=True)
    weight, bias, num_groups, eps, activation, keep, stats = norm
    both = y if x2 is None else torch.cat((y, x2), dim=3)
    a = reference.group_norm(both, num_groups, weight, bias, eps=eps, activation=activation)
    return y if keep else None, partials if stats else None, a


def norm_conv(x, norm, activation, weight, bias, **terms):
    """`conv_forward` of act(norm(x)), with partials. Tensors in `extra` may be half as large: then
    they are upsampled."""
    if "extra" in terms:
        whole = [upsample(t) if t.shape[1] < x.shape[1] else t for t, _ in terms["extra"]]
        terms["extra"] = [(t, w) for t, (_, w) in zip(whole, terms["extra"], strict=True)]
    a = apply(x, None, norm_table(*norm), activation)
    return conv_forward(a, weight, bias, stats=True, **terms)
