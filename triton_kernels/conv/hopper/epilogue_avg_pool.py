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
def _means_of_rows(upper, lower, dtype: gl.constexpr):
    """Of two [64, pixels], float32, those below one another."""
    PAIRS: gl.constexpr = upper.shape[1] // 2
    left, right = upper.reshape([64, PAIRS, 2]).split()
    total = left + right
    left, right = lower.reshape([64, PAIRS, 2]).split()
    total += left
    total += right
    return round_pairs(total * 0.25, dtype)


@gluon.jit
def means_of_two_rows(upper, lower):
    """[64, W / 2] of two rows [64, W]."""
    return _means_of_rows(widen_pairs(upper), widen_pairs(lower), upper.dtype)


@gluon.jit
def means_of_piece(y, W: gl.constexpr):
    """[64, P / 4] of rows of W pixels, [64, 1, P]."""
    P: gl.constexpr = y.shape[2]
    rows = widen_pairs(y).reshape([64, P // (2 * W), 2, W]).permute((0, 1, 3, 2))
    upper, lower = rows.split()
    return _means_of_rows(upper.reshape([64, P // 2]), lower.reshape([64, P // 2]), y.dtype)


@gluon.jit
def store_means(
    means,  # COUNT of [64, pixels], one after the other in memory
    means_ptr,  # [pixels of all tiles, C]
    sums_ptr,  # float32 [tiles, 2, C]
    tile,
    c0,
    C,
    COUNT: gl.constexpr,
):
    """The means of a tile, and their sum and that of squares about their mean."""
    LAYOUT: gl.constexpr = means[0].type.layout
    PIXELS: gl.constexpr = means[0].shape[1]
    channel = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    pixel = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, LAYOUT))
    to = means_ptr + tile.to(gl.int64) * (COUNT * PIXELS) * C
    each = widen_pairs(means[0])
    for i in gl.static_range(COUNT):
        gl.store(to + (i * PIXELS + pixel)[None, :] * C + channel[:, None], means[i])
        if i > 0:
            each += widen_pairs(means[i])
    total = gl.sum(each, axis=1)
    mean = (total * (1.0 / (COUNT * PIXELS)))[:, None]
    d = widen_pairs(means[0]) - mean
    squares = d * d
    for i in gl.static_range(1, COUNT):
        d = widen_pairs(means[i]) - mean
        squares += d * d
    to_sums = sums_ptr + tile.to(gl.int64) * 2 * C + channel
    gl.store(to_sums, total)
    gl.store(to_sums + C, gl.sum(squares, axis=1))
