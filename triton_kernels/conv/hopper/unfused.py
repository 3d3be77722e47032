"""The path of `conv2d` for Hopper, in Gluon: forward and input gradient in 16 bits, a bias at most.

3x3 filters over rows of 8 to 64 pixels fetch pixels three times, not nine, in TF32 too. 1x1 filters
stay in shared memory while the pixels pass by or, where there are few tiles, are fetched with the
pixels and all at once; so they are in the input gradient in TF32. All are configurations for
`choose` like any other of `conv.plain.tma`, taken only where they were measured to be faster.
"""

from typing import NamedTuple

import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, takes
from ...registry.kernel import configures
from ...runtime.device import describe
from ..plain.tma_boxes import is_pointwise
from .operands import filters_in_boxes
from .tile_mma import WIDTHS, cut, in_rows

if SUPPORTED:
    from .unfused_pointwise import conv_bare_points_kernel
    from .unfused_ring import conv_bare_ring_kernel
    from .unfused_single_tile import conv_bare_once_kernel
    from .unfused_single_tile_tf32 import conv_bare_once_tf32_kernel
    from .unfused_tiles import conv_bare_tiles_kernel
    from .unfused_tiles_tf32 import conv_bare_tiles_tf32_kernel


@configures("unfused_tiles")
class UnfusedTiles(NamedTuple):
    """3x3 filters: pixels of a tile."""

    block_m: int


@configures("unfused_tiles_tf32")
class UnfusedTilesTf32(NamedTuple):
    """The same in TF32."""

    block_m: int


@configures("unfused_pointwise")
class UnfusedPointwise(NamedTuple):
    """1x1 filters that stay in shared memory."""

    block_c: int
    block_m: int


@configures("unfused_single_tile")
class UnfusedSingleTile(NamedTuple):
    """A tile of 1x1 filters a program, for which it asks all at once."""

    block_c: int
    block_m: int
    num_warps: int
    programs: int  # that may share a multiprocessor


@configures("unfused_single_tile_tf32")
class UnfusedSingleTileTf32(NamedTuple):
    """The same of an input gradient in TF32."""

    block_c: int
    block_m: int
    num_warps: int
    programs: int


@configures("unfused_ring")
class UnfusedRing(NamedTuple):
    """1x1 filters in a ring beside the pixels: long sums over many tiles."""

    block_c: int
    block_m: int


# (channels, pixels) of a program that does 1x1 filters; the last one spills a little
_POINTS = [(64, 128), (64, 256), (128, 128), (192, 128)]
# (channels, pixels, warps) of one that does a single tile of them
_ONCE = [
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 4),
    (192, 64, 4),
    (192, 128, 8),
    (192, 256, 8),  # spills a little
]
_RING = [(192, 128)]  # (channels, pixels) of a tile in a ring
_ONCE_TF32 = [(64, 64, 4), (64, 128, 4)]  # the same of an input gradient in TF32
_TILES_A_PROCESSOR = 64  # with more, a program for each of them is not tried
_TILES = (256, 128, 64)  # pixels of a tile of 3x3 filters whose products are of whole tiles
_MOST_K = 1024  # channels of x, whose loop is unrolled


def candidates(
    x: Tensor,  # what is convolved: x, or dy
    weight: Tensor,  # [CO, CI, R, S]
    y: Tensor,  # the result
    padding: tuple[int, int],
    *,
    dgrad: bool,
) -> list[tuple]:
    """Configurations of `conv.plain.tma` that this path can do. 1x1 filters: x and y are one row of
    pixels. float32 is in TF32, and of an input gradient the filters have been turned."""
    if x.itemsize == 4:
        return [] if dgrad else _tf32_candidates(x, weight, y, padding)
    if not takes(x):
        return []
    if tuple(weight.shape[2:]) == (3, 3):
        _, h, w, k = x.shape
        if tuple(padding) != (1, 1) or k % 64 or y.shape[3] % 64 or w not in WIDTHS:
            return []
        cuts = ((pixels, cut(pixels, h, w)) for pixels in _TILES)
        return [UnfusedTiles(p) for p, c in cuts if c is not None]
    if not is_pointwise(weight, padding) or x.shape[3] > _MOST_K:
        return []
    wide = y.shape[3]
    points = [
        UnfusedPointwise(channels, pixels)
        for channels, pixels in _POINTS
        if (channels < wide + 64) and _blocks(x, channels, pixels)[0] > 1
    ]
    most = _TILES_A_PROCESSOR * describe(x.device).num_sms
    once = [
        UnfusedSingleTile(channels, pixels, warps, programs)
        for channels, pixels, warps in _ONCE
        if channels < wide + 64
        and triton.cdiv(y.shape[2], pixels) * triton.cdiv(wide, channels) <= most
        for programs in _programs(x, channels, pixels)
    ]
    ring = [
        UnfusedRing(channels, pixels)
        for channels, pixels in _RING
        if channels < wide + 64 and x.shape[3] > 256
    ]
    return points + once + ring


def _tf32_candidates(x: Tensor, weight: Tensor, y: Tensor, padding: tuple[int, int]) -> list[tuple]:
    _, h, w, k = x.shape
    fits = tuple(weight.shape[2:]) == (3, 3) and tuple(padding) == (1, 1) and w in WIDTHS
    if not (SUPPORTED and describe(x.device).hopper and fits) or k % 32 or y.shape[3] % 64:
        return []
    cuts = ((pixels, cut(pixels, h, w)) for pixels in _TILES)
    return [UnfusedTilesTf32(p) for p, c in cuts if c is not None]


def turning_candidates(
    dy: Tensor,  # float32 [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S]
    dx: Tensor,  # [N, H, W, CI]
    padding: tuple[int, int],
) -> list[tuple]:
    """Configurations with which an input gradient in TF32 turns its filters by itself."""
    co, ci, _, _ = weight.shape
    if not (SUPPORTED and describe(dy.device).hopper) or not is_pointwise(weight, padding):
        return []
    most = _TILES_A_PROCESSOR * describe(dy.device).num_sms
    return [
        UnfusedSingleTileTf32(channels, pixels, warps, programs)
        for channels, pixels, warps in _ONCE_TF32
        if triton.cdiv(dx.numel() // ci, pixels) * triton.cdiv(ci, channels) <= most
        and co <= _MOST_K
        for programs in _programs(dy, channels, pixels)
    ]


def launch_turning(dy: Tensor, weight: Tensor, dx: Tensor, config: tuple) -> None:
    """The input gradient of 1x1 filters in TF32, with one of `turning_candidates`."""
    k, c, _, _ = weight.shape
    m = dy.numel() // k
    channels, pixels, warps, programs = config
    conv_bare_once_tf32_kernel[(triton.cdiv(m, pixels) * triton.cdiv(c, channels),)](
        in_boxes(dy, [m, k], [k, 1], [pixels, 32]),
        in_boxes(weight, [k, c], [c, 1], [32, channels]),
        in_boxes(dx, [m, c], [c, 1], [pixels, channels]),
        c,
        PIXELS=pixels,
        K_BLOCKS=triton.cdiv(k, 32),
        BLOCKS=_blocks_at_once(dy, channels, pixels, programs),
        num_warps=warps,
    )


def launch(
    x: Tensor,  # [N, H, W, K], what is convolved: x, or dy; 1x1 filters: [1, 1, M, K]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory
    bias: Tensor | None,  # [C]
    y: Tensor,  # [N, H, W, C] to be written
    config: tuple,  # of `candidates`
    *,
    dgrad: bool,
    following: dict[str, bool],  # the launch option behind a launch that has turned the filters
) -> None:
    """y = conv(x) + bias, or the input gradient."""
    if isinstance(config, UnfusedTilesTf32):
        _launch_tiles_tf32(x, weight, bias, y, config, following)
        return
    launchers = {
        UnfusedTiles: _launch_tiles,
        UnfusedSingleTile: _launch_once,
        UnfusedRing: _launch_ring,
        UnfusedPointwise: _launch_points,
    }
    launchers[type(config)](x, weight, bias, y, config, dgrad)


def _launch_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    n, h, w, k = x.shape
    c = y.shape[3]
    rows, images = cut(config.block_m, h, w)
    blocks, steps = _rings(x, config.block_m, images)
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


def _launch_tiles_tf32(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    config: tuple,
    following: dict[str, bool],
) -> None:
    n, h, w, k = x.shape
    c = y.shape[3]
    rows, images = cut(config.block_m, h, w)
    tiles = triton.cdiv(n, images) * (h // rows) * (c // 64)
    conv_bare_tiles_tf32_kernel[(min(tiles, describe(x.device).num_sms),)](
        in_rows(x, 2, images, 32),
        filters_in_boxes(weight, 64, 32),
        y,
        bias,
        n,
        h,
        k,
        c,
        ROWS=rows,
        IMAGES=images,
        W=w,
        BLOCKS=_ring_tf32(x, config.block_m, images),
        num_warps=4,
        maxnreg=168,
        **following,
    )


def _ring_tf32(x: Tensor, pixels: int, images: int) -> int:
    """Blocks of pixels, each with three filters, that shared memory has room for."""
    room = describe(x.device).shared_memory - 2048
    return min(6, room // ((pixels + 2 * images * x.shape[2] + 3 * 64) * 128))


def _matrices(x: Tensor, weight: Tensor, y: Tensor, pixels: int) -> list:
    """x, the filters and y of a 1x1 convolution, in boxes of 64 channels."""
    (co, ci), (m, k), c = weight.shape[:2], x.shape[2:], y.shape[3]
    return [
        in_boxes(x, [m, k], [k, 1], [pixels, 64]),
        in_boxes(weight, [co, ci], [ci, 1], [64, 64]),
        in_boxes(y, [m, c], [c, 1], [pixels, 64]),
    ]


def _launch_points(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels = config
    blocks, out = _blocks(x, channels, pixels)
    groups = triton.cdiv(c, channels)
    rounds = min(triton.cdiv(m, pixels), max(1, describe(x.device).num_sms // groups))
    conv_bare_points_kernel[(groups * rounds,)](
        *_matrices(x, weight, y, pixels),
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


def _launch_ring(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels = config
    blocks = _blocks_in_ring(x, channels, pixels)
    tiles = triton.cdiv(m, pixels) * triton.cdiv(c, channels)
    conv_bare_ring_kernel[(min(tiles, describe(x.device).num_sms),)](
        *_matrices(x, weight, y, pixels),
        bias,
        m,
        c,
        PIXELS=pixels,
        K_BLOCKS=triton.cdiv(k, 64),
        C_BLOCKS=channels // 64,
        DGRAD=dgrad,
        BLOCKS=blocks,
        num_warps=4,
        maxnreg=128,
    )


def _blocks_in_ring(x: Tensor, channels: int, pixels: int) -> int:
    """Of pixels and filters, as many as fit beside a tile's results."""
    room = describe(x.device).shared_memory - 2048 - channels * pixels * x.itemsize
    return room // ((channels + pixels) * 64 * x.itemsize)


def _launch_once(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: tuple, dgrad: bool
) -> None:
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels, warps, programs = config
    tiles = triton.cdiv(m, pixels) * triton.cdiv(c, channels)
    conv_bare_once_kernel[(tiles,)](
        *_matrices(x, weight, y, pixels),
        bias,
        c,
        PIXELS=pixels,
        K_BLOCKS=triton.cdiv(k, 64),
        C_BLOCKS=channels // 64,
        DGRAD=dgrad,
        BLOCKS=_blocks_at_once(x, channels, pixels, programs),
        num_warps=warps,
    )


def _blocks_at_once(x: Tensor, channels: int, pixels: int, programs: int) -> int:
    """Of pixels and filters, as many as fit where so many programs share a multiprocessor. A row of
    a block has 128 bytes."""
    room = describe(x.device).shared_memory // programs - 2048
    wanted = triton.cdiv(x.shape[3] * x.itemsize, 128)
    return min(wanted, room // ((channels + pixels) * 128))


def _programs(x: Tensor, channels: int, pixels: int) -> list[int]:
    """How many may share a multiprocessor: two, or one if that gives it more blocks."""
    alone, beside = (_blocks_at_once(x, channels, pixels, programs) for programs in (1, 2))
    few = min(2, triton.cdiv(x.shape[3] * x.itemsize, 128))
    return [1] * (alone > beside and alone >= few) + [2] * (beside >= few)
