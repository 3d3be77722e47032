"""Norms of sampling that are one launch, statistics and all."""

import torch

from ... import reference
from ...reductions.conv_parts import SplitConv
from .norms import apply, apply_upsampled, norm_table, operand
from .parts import sum_parts
from .resample import avg_pool


def norm_single_cta(
    x1,
    x2,
    num_groups,
    weight,
    bias,
    eps,
    activation,
    scale=None,
    shift=None,
    keep=True,
    pool=False,
    tf32=False,
):
    """(act(norm(x)) of x1 beside x2, x1), where x1 may be a convolution in parts, and only kept if
    somebody else reads it; with `pool` the 2x2 means of x1 stand for it. With `tf32`, here and
    below, norms and means are rounded to TF32."""
    keep |= not isinstance(x1, SplitConv)
    x1 = sum_parts(x1)[0] if isinstance(x1, SplitConv) else x1
    x1 = avg_pool(x1, tf32=tf32)[0] if pool else x1
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    a = reference.group_norm(
        x, num_groups, weight, bias, eps=eps, activation=activation, scale=scale, shift=shift
    )
    return operand(a, tf32), x1 if keep else None


def norm_of_sums(x1, x2, norm, activation, *, up=False, corners=False, keep=False, tf32=False):
    """(`apply` of the table of `norm_table`, None), or with `up` `apply_upsampled`, of all pixels:
    those beside `corners` may be what they like."""
    table = norm_table(*norm)
    if not up:
        return apply(x1, x2, table, activation, tf32=tf32), None
    return apply_upsampled(x1, x2, table, activation, keep=keep, tf32=tf32)
