"""Means over 2x2 pixels of a tile, in the epilogue that has it in registers, with their sums.

    m[p, q] = (y[2p, 2q] + y[2p, 2q+1] + y[2p+1, 2q] + y[2p+1, 2q+1]) / 4

y is what was rounded, and the order of the sum that of `resample`: m has the same bits. Of
accumulators [64 channels, pixels] a thread has pairs of neighbours and all rows of a tile, so that
no number changes its place; and numbers go to memory one by one, a warp 16 bytes of a pixel at a
time, beside the products of other warpgroups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...hopper.pairs import round_pairs, widen_pairs


@gluon.jit
def means_of_two_rows(upper, lower):
    """[64, W / 2] of two rows [64, W]."""
    PAIRS: gl.constexpr = upper.shape[1] // 2
    left, right = widen_pairs(upper).reshape([64, PAIRS, 2]).split()
    total = left + right
    left, right = widen_pairs(lower).reshape([64, PAIRS, 2]).split()
    total += left
    total += right
    return round_pairs(total * 0.25, upper.dtype)


@gluon.jit
def store_means(
    means,  # [64, pixels], of a tile
    means_ptr,  # [pixels of all tiles, C]
    sums_ptr,  # float32 [tiles, 2, C]
    tile,
    c0,
    C,
):
    """The means, and their sum and that of squares about their mean."""
    LAYOUT: gl.constexpr = means.type.layout
    PIXELS: gl.constexpr = means.shape[1]
    channel = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    pixel = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, LAYOUT))
    to = means_ptr + tile.to(gl.int64) * PIXELS * C
    gl.store(to + pixel[None, :] * C + channel[:, None], means)
    each = widen_pairs(means)
    total = gl.sum(each, axis=1)
    d = each - (total * (1.0 / PIXELS))[:, None]
    to_sums = sums_ptr + tile.to(gl.int64) * 2 * C + channel
    gl.store(to_sums, total)
    gl.store(to_sums + C, gl.sum(d * d, axis=1))
