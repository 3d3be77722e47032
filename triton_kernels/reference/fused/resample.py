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


def fir(x, taps, up, down, start, size, border="zeros"):
    """Each channel filtered, with `up` - 1 zeros behind each pixel and `start` zeros before the
    first: one pixel of `down`, `size` in all. Instead of zeros there may be pixels mirrored around
    the image, or, `folded`, what is around the result is added where it is mirrored."""
    exact = torch.promote_types(x.dtype, torch.float32)
    if border == "zeros":
        return _filtered(x.to(exact), taps, up, down, start, size).to(x.dtype)
    sizes = x.shape[1:3] if border == "reflect" else size
    step = -up if border == "reflect" else down  # `start` is then of the wider image
    start = [before + (n - 1) * step for before, n in zip(start, sizes, strict=True)]
    rows, columns = (_mirrored(n, x.device) for n in sizes)
    if border == "reflect":
        z = x.to(exact)[:, rows][:, :, columns]
        return _filtered(z, taps, up, down, start, size).to(x.dtype)
    z = _filtered(x.to(exact), taps, up, down, start, (len(rows), len(columns)))
    (n, c), (p, q) = (x.shape[0], x.shape[3]), size
    z = z.new_zeros(n, p, len(columns), c).index_add(1, rows, z)
    return z.new_zeros(n, p, q, c).index_add(2, columns, z).to(x.dtype)


def _mirrored(n, device):
    """Of n pixels those that are seen at 1 - n, ..., 2 n - 2, mirrored around them."""
    at = torch.arange(1 - n, 2 * n - 1, device=device).abs()
    return torch.minimum(at, 2 * (n - 1) - at)


def _filtered(x, taps, up, down, start, size):
    (n, h, w, c), (p, q), (top, left) = x.shape, size, start
    z = x.new_zeros((n, c, h, up, w, up))
    z[:, :, :, 0, :, 0] = x.permute(0, 3, 1, 2)
    below = (p - 1) * down + len(taps) - top - h * up
    right = (q - 1) * down + len(taps[0]) - left - w * up
    z = F.pad(z.view(n, c, h * up, w * up), (left, right, top, below))
    filters = torch.tensor(taps, dtype=x.dtype, device=x.device).expand(c, 1, -1, -1)
    return F.conv2d(z, filters, stride=down, groups=c).permute(0, 2, 3, 1).contiguous()
