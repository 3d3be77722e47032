"""Convolutions behind upsampling, which multiply on the small image, and their gradients."""

import torch
import torch.nn.functional as F

from ... import reference
from .norms import activation_grad, over_pixels, tensor_partials

_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))  # of 3 that are one of 2, by parity of the row or column


def upsampled_filters(weight, channels, dtype):
    """(filters [16, CO, C1] of 2x2 taps, by parity of rows, of columns, tap of rows, of columns,
    with which the first channels of [CO, C1 + C2, 3, 3] are a convolution of what was upsampled to
    them; the others [CO, C2, 3, 3])"""
    first = weight[:, :channels]
    summed = [
        sum(first[:, :, r, s] for r in rows for s in columns)
        for p in _TAPS
        for q in _TAPS
        for rows in p
        for columns in q
    ]
    return torch.stack(summed).to(dtype), weight[:, channels:].to(dtype)


def conv_of_upsampled(x, filters, bias):
    """(conv(upsample(x)) + bias, partials)"""
    summed, _ = filters
    kinds = []
    for p in range(2):
        for q in range(2):
            first = 4 * (2 * p + q)
            taps = summed[first : first + 4].permute(1, 2, 0).unflatten(2, (2, 2))
            padded = F.pad(x.permute(0, 3, 1, 2), (1 - q, q, 1 - p, p))
            kinds.append(F.conv2d(padded, taps).permute(0, 2, 3, 1))
    n, h, w, co = kinds[0].shape
    y = torch.stack(kinds, 3).view(n, h, w, 2, 2, co).permute(0, 1, 3, 2, 4, 5)
    y = y.reshape(n, 2 * h, 2 * w, co) + bias
    return y, tensor_partials(y)


def conv_of_upsampled_input_grad(dy, filters):
    """The gradient of x."""
    n, h, w, _ = dy.shape
    with torch.enable_grad():
        x = dy.new_zeros((n, h // 2, w // 2, filters[0].shape[2])).requires_grad_()
        y, _ = conv_of_upsampled(x, [f.detach() for f in filters], 0)
    return torch.autograd.grad(y, x, dy)[0].contiguous()


def conv_upsampled(a, filters, bias, *, emb=None):
    """(conv(a) + bias + emb[n, c], partials), where the first channels of a were upsampled."""
    c1 = filters[0].shape[2]
    y, _ = conv_of_upsampled(a[:, ::2, ::2, :c1], filters, bias)
    y = y + reference.conv2d(a[..., c1:].contiguous(), filters[1])
    y = y if emb is None else y + over_pixels(emb)
    return y, tensor_partials(y)


def conv_upsampled_input_grad(dy, filters, *, inputs, tables, activation):
    """(dz1, dz2, partials) as those of `conv_input_grad`, but of the small image that was upsampled
    to the first of two inputs: dz1 is the sum over 2x2 pixels."""
    x1, x2 = inputs
    with torch.enable_grad():
        a1, a2 = (torch.zeros_like(x).requires_grad_() for x in inputs)
        y, _ = conv_of_upsampled(a1, filters, 0)
        y = y + reference.conv2d(a2, filters[1])
    halves = zip(torch.autograd.grad(y, (a1, a2), dy), inputs, strict=True)
    tables = tables[0][..., : x1.shape[3]], tables[1]
    grads = [
        activation_grad(da, x, None, rows, activation)
        for (da, x), rows in zip(halves, tables, strict=True)
    ]
    (dz1, partials1, _), (dz2, partials2, _) = grads
    return dz1, dz2, torch.cat((partials1, partials2), 3)
