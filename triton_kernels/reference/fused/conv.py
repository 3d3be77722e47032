"""Convolutions with what is added to them, of stride 2 too, and their gradients."""

import torch
import torch.nn.functional as F

from ... import reference
from .. import ACTIVATION_FUNCTIONS
from .inputs import pad_channels
from .norms import drop, grad_partials, operand, over_pixels, put, tensor_partials


def conv_forward(
    x,
    weight,
    bias=None,
    *,
    emb=None,
    residual=None,
    extra=(),
    extra_bias=None,
    factor=None,
    stats=False,
    width=None,
    tf32=False,
):
    """(factor (conv(x) + bias + emb[n, c] + residual + extra), partials or None), where `extra` are
    1x1 convolutions of other tensors: pairs of [N, H, W, C] and [CO, C], and a bias. Zeros follow
    up to `width` channels. With `tf32` the first is rounded to TF32."""
    y = reference.conv2d(x, weight, bias)
    y = y if emb is None else y + over_pixels(emb)
    y = y if residual is None else y + residual
    for other, columns in extra:
        y = y + other @ columns.T
    y = y if extra_bias is None else y + extra_bias
    y = y if factor is None else factor * y
    y = operand(y if width is None else pad_channels(y, width, y.dtype), tf32)
    return y, tensor_partials(y) if stats else None


def conv_few(x, weight, bias=None, **options):
    return conv_forward(x, weight, bias, **options)


def conv2d_input_grad(dy, weight, size, stride, padding):
    """The gradient of x, of this size, in y = conv(x), as `convolve` has it."""
    with torch.enable_grad():
        x = dy.new_zeros((dy.shape[0], *size, weight.shape[1])).requires_grad_()
        y = convolve(x, weight.detach(), None, stride, padding)
    return torch.autograd.grad(y, x, dy)[0].contiguous()


def conv_plain_input_grad(dy, weight):
    """The gradient of x in y = conv(x). Channels of dy behind those of y do not count."""
    return conv2d_input_grad(dy[..., : weight.shape[0]], weight, dy.shape[1:3], 1, None)


def conv_input_grad(dy, weight, *, inputs, table, activation, mask=None):
    """(dz, partials) of z in y = conv(dropout(act(z))), where z is the norm of the concatenated
    inputs, and there is dropout if there is a mask."""
    x = torch.cat(inputs, dim=3)
    mean, rstd, g, b = table.unbind(1)
    xhat = (x - over_pixels(mean)) * over_pixels(rstd)
    with torch.enable_grad():
        z = (xhat * over_pixels(g) + over_pixels(b)).detach().requires_grad_()
        a = drop(ACTIVATION_FUNCTIONS[activation](z), mask)
    (dz,) = torch.autograd.grad(a, z, conv_plain_input_grad(dy, weight))
    return dz, grad_partials(dz, xhat)


def conv_weight_grad(x, dy, out, *, accumulate=False, stride=1, padding=None):
    """The gradient of weight in y = conv(x), into or added to `out` [CO, CI, R, S]. Channels of x
    and dy behind those of the filters do not count, and the image ends where dy wants it to."""
    co, ci, r, s = out.shape
    x = x[..., :ci].contiguous()
    with torch.enable_grad():
        weight = torch.zeros_like(out).requires_grad_()
        y = convolve(x, weight, None, stride, (r // 2, s // 2) if padding is None else padding)
    put(out, torch.autograd.grad(y, weight, dy[..., :co])[0], accumulate)


def conv_weight_grads(*gradients, accumulate=False, share=1.0):
    """Of several (x, dy, out)."""
    for gradient in gradients:
        conv_weight_grad(*gradient, accumulate=accumulate)


def convolve(x, weight, bias, stride, padding):
    """conv(x) + bias; of stride 2 without padding there are zeros behind the image."""
    if stride == 2 and padding == 0:
        x = F.pad(x, (0, 0, 0, 1, 0, 1))
    return reference.conv2d(x, weight, bias, stride=stride, padding=padding)


def conv_down(x, weight, bias, padding):
    """The 3x3 convolution of stride 2 that halves the image. With padding 0 there is one row and
    one column of zeros, behind the image."""
    return convolve(x, weight, bias, 2, padding)


def conv_down_input_grad(dy, weight, padding, add=None):
    """The gradient of its x, plus `add`."""
    _, p, q, _ = dy.shape
    dx = conv2d_input_grad(dy, weight, (2 * p, 2 * q), 2, padding)
    return dx if add is None else dx + add
