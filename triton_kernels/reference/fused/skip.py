"""Gradients of norms with that of a 1x1 skip."""

import torch

from .conv import conv_plain_input_grad
from .norms import norm_dx, norm_grad_table
from .resample import upsample


def skip_dx(
    dy,
    weight,
    dz,
    x1,
    x2,
    coeff,
    *,
    add1=None,
    dz2=None,
    sums=None,
    upsample1=False,
    factor=None,
):
    """`norm_dx` of a block whose skip is a 1x1 convolution, with its input gradient added. With dz2
    dz is that of x1 alone, added up over the 2x2 pixels that are one."""
    if dz2 is not None:
        dz = torch.cat((upsample(dz) / 4, dz2), 3)
    c1 = x1.shape[3]
    skip = conv_plain_input_grad(dy, weight)
    d1, d2 = skip[..., :c1], skip[..., c1:]
    adds = {"add1": d1, "add1_second": add1, "add2": None if x2 is None else d2}
    options = {"sums": sums, "upsample1": upsample1, "factor": factor}
    return norm_dx(dz, x1, x2, coeff, **adds, **options)


def skip_backward(
    dy,
    skip_weight,
    dz,
    x1,
    x2,
    partials,
    table,
    num_groups,
    into,
    *,
    sums,
    rows=True,
    add1=None,
    dz2=None,
    upsample1=False,
):
    """`skip_dx` with the coefficients of `norm_grad_table`; the gradients are added to."""
    pixels = dy.shape[1] * dy.shape[2]
    coeff = norm_grad_table(partials, table, pixels, num_groups, into, sums=sums)
    options = {"add1": add1, "dz2": dz2, "sums": rows or None, "upsample1": upsample1}
    return skip_dx(dy, skip_weight, dz, x1, x2, coeff, **options)
