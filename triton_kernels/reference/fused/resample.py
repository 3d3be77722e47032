"""2x2 means and 2x2 blocks, and their gradients; FIR filters."""

import torch
import torch.nn.functional as F

from ... import reference
from .norms import operand, tensor_partials


def avg_pool(x, sums=False, tf32=False):
    """(2x2 means; with `sums` their partials, or None)"""
    y = operand(reference.avg_pool2d(x), tf32)
    return y, tensor_partials(y) if sums else None


def avg_pool_grad(dy, add=None, sums=False, tf32=False):
    """(its input gradient for even sizes, plus `add`; rows whose sum is its sum over pixels, or
    None)"""
    dx = reference.upsample_nearest2d(dy) / 4
    dx = dx if add is None else dx + add
    return operand(dx, tf32), dx.sum((1, 2)) if sums else None


def upsample(x, tf32=False):
    """Each pixel becomes a 2x2 block."""
    return operand(reference.upsample_nearest2d(x), tf32)


def upsample_grad(dy, tf32=False):
    """Its input gradient."""
    return operand(reference.avg_pool2d(dy) * 4, tf32)


def fir(x, taps, up, down, start, size):
    """Each channel filtered, with `up` - 1 zeros behind each pixel and `start` zeros before the
    first: one pixel of `down`, `size` in all."""
    (n, h, w, c), (p, q), (top, left) = x.shape, size, start
    z = x.new_zeros((n, c, h, up, w, up))
    z[:, :, :, 0, :, 0] = x.permute(0, 3, 1, 2)
    below = (p - 1) * down + len(taps) - top - h * up
    right = (q - 1) * down + len(taps[0]) - left - w * up
    z = F.pad(z.view(n, c, h * up, w * up), (left, right, top, below))
    exact = torch.promote_types(x.dtype, torch.float32)
    filters = torch.tensor(taps, dtype=exact, device=x.device).expand(c, 1, -1, -1)
    y = F.conv2d(z.to(exact), filters, stride=down, groups=c)
    return y.permute(0, 2, 3, 1).to(x.dtype).contiguous()
