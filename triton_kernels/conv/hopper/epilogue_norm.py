"""GroupNorm of a tile that is whole images and whole groups of channels, in registers.

    z = (y - mean) rstd g + b,   mean and rstd over a group of channels of an image

Sums are about the mean, so that nothing cancels where it is large, and the second of them also
takes what the first has rounded off.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...hopper.pairs import widen_pairs


@gluon.jit
def _over_groups(x, CG: gl.constexpr):
    """The sums of x [64, images] over each group of CG channels, for each of them."""
    LAYOUT: gl.constexpr = x.type.layout
    IMAGES: gl.constexpr = x.shape[1]
    groups = x.reshape([64 // CG, CG, IMAGES])
    GROUPS: gl.constexpr = groups.type.layout
    total = gl.sum(groups, axis=1)[:, None, :]
    each = total + gl.zeros([64 // CG, CG, IMAGES], gl.float32, GROUPS)
    return gl.convert_layout(each.reshape([64, IMAGES]), LAYOUT, assert_trivial=True)


@gluon.jit
def norm_of_tile(
    rounded,  # PIECES of [64, images, pixels]: y
    total,  # [64, images]: the sums of y over pixels
    g,  # [64, images or 1]
    b,
    eps,
    PIECES: gl.constexpr,
    CG: gl.constexpr,  # channels of a group
    PIXELS: gl.constexpr,  # of an image
):
    """mean, scale and shift, [64, images] each: z = (y - mean) scale + shift."""
    count: gl.constexpr = CG * PIXELS
    mean = _over_groups(total, CG) * (1.0 / count)
    rest = gl.zeros_like(total)
    var = gl.zeros_like(total)
    for i in gl.static_range(PIECES):
        d = widen_pairs(rounded[i]) - mean[:, :, None]
        rest += gl.sum(d, axis=2)
        var += gl.sum(d * d, axis=2)
    rest = _over_groups(rest, CG) * (1.0 / count)
    var = _over_groups(var, CG) * (1.0 / count) - rest * rest
    scale = g / gl.sqrt(var + eps)
    return mean, scale, b - rest * scale
