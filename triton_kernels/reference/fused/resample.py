"""2x2 means and 2x2 blocks, and their gradients."""

from ... import reference
from .norms import tensor_partials


def avg_pool(x):
    """2x2 means."""
    return reference.avg_pool2d(x)


def avg_pool_partials(x):
    """The same, and their partials."""
    y = avg_pool(x)
    return y, tensor_partials(y)


def avg_pool_grad(dy, add=None, sums=None):
    """(its input gradient for even sizes, plus `add`; rows whose sum is its sum over pixels, or
    None)"""
    dx = reference.upsample_nearest2d(dy) / 4
    dx = dx if add is None else dx + add
    return dx, None if sums is None else dx.sum((1, 2))


def upsample(x):
    """Each pixel becomes a 2x2 block."""
    return reference.upsample_nearest2d(x)


def upsample_grad(dy):
    """Its input gradient."""
    return reference.avg_pool2d(dy) * 4
