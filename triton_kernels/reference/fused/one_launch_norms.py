"""Norms of sampling that are one launch, statistics and all."""

import torch

from ... import reference
from ...reductions.conv_parts import SplitConv
from .norms import apply, norm_table, operand
from .parts import sum_parts
from .resample import avg_pool, upsample


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
    x1 = avg_pool(x1, tf32) if pool else x1
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    a = reference.group_norm(
        x, num_groups, weight, bias, eps=eps, activation=activation, scale=scale, shift=shift
    )
    return operand(a, tf32), x1 if keep else None


def norm_of_sums(
    x1,
    x2,
    partials,
    pixels,
    num_groups,
    weight,
    bias,
    eps,
    activation,
    scale=None,
    shift=None,
    *,
    tf32=False,
):
    """`apply` of the table of `norm_table`."""
    table = norm_table(partials, pixels, num_groups, weight, bias, eps, scale, shift)
    return apply(x1, x2, table, activation, tf32=tf32)


def norm_of_sums_upsampled(x1, x2, *arguments, corners=False, keep=True, **options):
    """`norm_of_sums` of x1 with 2x2 blocks for its pixels; and these, or None."""
    large = upsample(x1)
    return norm_of_sums(large, x2, *arguments, **options), large if keep else None
