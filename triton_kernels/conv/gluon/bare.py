"""The path of `conv2d` for Hopper, in Gluon: forward and input gradient in 16 bits, a bias at most.

3x3 filters over rows of 8 to 64 pixels fetch pixels three times, not nine; 1x1 filters stay in
shared memory while the pixels pass by. Both are configurations for `choose` like any other of
`conv.tma`, taken only where they were measured to be faster.
"""

import triton
from torch import Tensor

from ...device import describe
from ...gluon.descriptors import SUPPORTED, in_boxes, takes
from ..tma_boxes import is_pointwise
from .operands import filters_in_boxes
from .tiles import WIDTHS, cut, in_rows

if SUPPORTED:
    from .bare_points import conv_bare_points_kernel
    from .bare_tiles import conv_bare_tiles_kernel

_WARPS = 12  # two warpgroups that multiply and one of which a warp loads
# (channels, pixels) of a program that does 1x1 filters; the last one spills a little
_POINTS = [(64, 128), (64, 256), (128, 128), (192, 128)]
_TILES = (256, 128, 64)  # pixels of a tile of 3x3 filters whose products are of whole tiles
_MOST_K = 1024  # channels of x, whose loop is unrolled


def serves(config: tuple) -> bool:
    """Whether a `Config` of `conv.tma` is one of this path."""
    return config.num_warps == _WARPS


def candidates(
    x: Tensor,  # what is convolved: x, or dy
    weight: Tensor,  # [CO, CI, R, S]
    y: Tensor,  # the result
    padding: tuple[int, int],
) -> list[tuple]:
    """Configurations of `conv.tma` that this path can do. 1x1 filters: x and y are one row of
    pixels."""
    if not takes(x):
        return []
    if tuple(weight.shape[2:]) == (3, 3):
        _, h, w, k = x.shape
        if tuple(padding) != (1, 1) or k % 64 or y.shape[3] % 64 or w not in WIDTHS:
            return []
        cuts = ((pixels, cut(pixels, h, w)) for pixels in _TILES)
        return [(64, p, 64, _WARPS, _rings(x, p, c[1])[0]) for p, c in cuts if c is not None]
    if not is_pointwise(weight, padding) or x.shape[3] > _MOST_K:
        return []
    wide = y.shape[3]
    return [
        (channels, pixels, 64, _WARPS, _blocks(x, channels, pixels)[0])
        for channels, pixels in _POINTS
        if (channels < wide + 64) and _blocks(x, channels, pixels)[0] > 1
    ]


def launch(
    x: Tensor,  # [N, H, W, K], what is convolved: x, or dy; 1x1 filters: [1, 1, M, K]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory
    bias: Tensor | None,  # [C]
    y: Tensor,  # [N, H, W, C] to be written
    config: tuple,  # of `candidates`
    *,
    dgrad: bool,
) -> None:
    """y = conv(x) + bias, or the input gradient."""
    if tuple(weight.shape[2:]) == (3, 3):
        _launch_tiles(x, weight, bias, y, config, dgrad)
    else:
        _launch_points(x, weight, bias, y, config, dgrad)


def _launch_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    n, h, w, k = x.shape
    c = y.shape[3]
    rows, images = cut(config[1], h, w)
    blocks, steps = _rings(x, config[1], images)
    tiles = triton.cdiv(n, images) * (h // rows) * (c // 64)
    conv_bare_tiles_kernel[(min(tiles, describe(x.device).num_sms),)](
        in_rows(x, 2, images),
        filters_in_boxes(weight),
        in_rows(y, rows, images),
        bias,
        n,
        h,
        k,
        c,
        ROWS=rows,
        IMAGES=images,
        W=w,
        DGRAD=dgrad,
        BLOCKS=blocks,
        STEPS=steps,
        num_warps=4,
        maxnreg=168,
    )


def _rings(x: Tensor, pixels: int, images: int) -> tuple[int, int]:
    """Blocks of pixels, and filters of one tap, that shared memory has room for beside two results.
    A block is needed for three filters: as many as make the shorter of the two rings longest."""
    room = describe(x.device).shared_memory - 2048 - 2 * pixels * 128
    block, tap = (pixels + 2 * images * x.shape[2]) * 128, 64 * 128

    def ahead(blocks: int) -> int:
        return min(3 * (blocks - 1), (room - blocks * block) // tap)

    blocks = max(range(2, 6), key=ahead)
    return blocks, min(9, (room - blocks * block) // tap)


def _launch_points(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    co, ci, _, _ = weight.shape
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels = config[:2]
    blocks, out = _blocks(x, channels, pixels)
    groups = triton.cdiv(c, channels)
    rounds = min(triton.cdiv(m, pixels), max(1, describe(x.device).num_sms // groups))
    conv_bare_points_kernel[(groups * rounds,)](
        in_boxes(x, [m, k], [k, 1], [pixels, 64]),
        in_boxes(weight, [co, ci], [ci, 1], [64, 64]),
        in_boxes(y, [m, c], [c, 1], [pixels, 64]),
        bias,
        m,
        c,
        PIXELS=pixels,
        K_BLOCKS=triton.cdiv(k, 64),
        C_BLOCKS=channels // 64,
        DGRAD=dgrad,
        BLOCKS=blocks,
        OUT=out,
        num_warps=4,
        maxnreg=168,
    )


def _blocks(x: Tensor, channels: int, pixels: int) -> tuple[int, int]:
    """Blocks of pixels that fit into shared memory beside the filters, and results of each of two
    warpgroups: two if that leaves room for four blocks."""
    row = 64 * x.itemsize
    filters = triton.cdiv(x.shape[3], 64) * channels * row
    room = describe(x.device).shared_memory - 2048 - filters
    for out in (2, 1):
        blocks = min(8, room // (pixels * row) - 2 * out)
        if blocks >= 4 or out == 1:
            break
    return blocks, out
