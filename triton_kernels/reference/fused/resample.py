"""2x2 means and 2x2 blocks, and their gradients."""

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
